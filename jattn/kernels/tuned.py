"""Block sizes that were measured on a chip, by the kernels that read them: ``block_sizes.json``.

``jattn bench --suite chip`` writes such a file beside its results. Each of its entries is of one kind of chip, kernel,
head_dim and length, in bfloat16, causal, forward and backward. As long as nobody has measured, the file is empty.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jax

from jattn._core import deferred
from jattn._core.arguments import AttentionArgs
from jattn.kernels.pallas_tpu.schedule import block_sizes

Table = Sequence[Mapping[str, Any]]


@functools.cache
def table() -> Table:
    """The entries of ``block_sizes.json``: ``chip``, ``kernel``, ``head_dim``, ``length``, ``sizes``, ``gain``."""
    return json.loads(resources.files("jattn.kernels").joinpath("block_sizes.json").read_text())


def largest(table: Table, kernel: str, chip: str, head_dim: int, length: int) -> tuple[int, int] | None:
    """Queries and keys of a block for a call: the entry of the next larger head_dim and the nearest length, or None."""
    entries = [one for one in table if (one["kernel"], one["chip"]) == (kernel, chip) and one["head_dim"] >= head_dim]
    if not entries:
        return None
    nearest = min(entries, key=lambda one: (one["head_dim"], max(one["length"], length) / min(one["length"], length)))
    rows, columns = nearest["sizes"]
    return rows, columns


def measured_sizes(kernel: str, args: AttentionArgs) -> tuple[int, int] | None:
    """What was measured on the program's chip for calls like this one; None if nothing was.

    In 16 bits, without a bias, mask array or score function: these need memory that the measured calls did not.
    """
    plain = args.bias is None and args.score_mod is None and not args.has_mask_array
    if not plain or args.query.dtype.itemsize != 2 or all(one["kernel"] != kernel for one in table()):
        return None
    (_, T, _, H), S = args.query.shape, args.key.shape[1]
    D = H if args.value is None else args.value.shape[3]
    chip = deferred.device() or jax.devices()[0]  # that of the program, where it is being lowered
    found = largest(table(), kernel, chip.device_kind, max(H, D), max(T, S))
    return None if found is None else (block_sizes(T, S, found[0])[0], block_sizes(T, S, found[1])[1])
