#!/bin/sh
# One expects: orbax's CheckpointManager(max_to_keep=1, best_fn=loss, best_mode="min") keeps the checkpoint of the lowest loss;
#   a step whose loss is NaN is no best one.
# What happens: every comparison with NaN is false, so the checkpoints are sorted wrongly. The first NaN replaces the best
#   checkpoint, which is deleted, and best_step() names the NaN. The next step replaces it in turn, though worse than the one
#   that was deleted.
# Version: orbax-checkpoint 0.12.8, jax 0.12.0.1; needs Python 3.12. Source: orbax/checkpoint/checkpoint_manager.py,
#   _sort_checkpoints_by_metrics, and the preservation policies.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q orbax-checkpoint==0.12.8 jax==0.12.0.1 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - "$folder" 2>/dev/null <<'PY'
import sys
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp


def kept(name, losses):
    options = ocp.CheckpointManagerOptions(max_to_keep=1, best_fn=lambda metrics: metrics["loss"], best_mode="min")
    manager = ocp.CheckpointManager(Path(sys.argv[1]) / name, options=options)
    seen = []
    for step, loss in enumerate(losses):
        manager.save(step, args=ocp.args.StandardSave({"weight": jnp.ones(1)}), metrics={"loss": loss})
        manager.wait_until_finished()
        seen.append((list(manager.all_steps()), manager.best_step()))
        print(f"{name}: step {step}, loss {loss}: kept {seen[-1][0]}, best {seen[-1][1]}")
    manager.close()
    return seen


numbers = kept("numbers", [0.5, 0.9, 0.8])
assert numbers == [([0], 0)] * 3, "this has changed"
with_nan = kept("nan", [0.5, float("nan"), 0.8])
assert with_nan == [([0], 0), ([1], 1), ([2], 2)], "this has changed"
PY
