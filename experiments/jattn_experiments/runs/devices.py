"""The devices of a run: its mesh, what each device holds, and the processes that share the work.

The mesh has the axes of ``config.Mesh``. Batches are split over "data" and tokens over "sequence"; the parameters of
attention and their optimizer moments over "heads". Everything else is replicated. Attention defines its own
communication (``jattn.sharding``); XLA inserts the rest. Random numbers depend only on their key
(``jax_threefry_partitionable``, JAX's default).
"""

import contextlib
import itertools
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from jattn.sharding import HeadParallel, Ring, to_zigzag
from jattn_experiments import config

AXES = ("data", "heads", "sequence")
# The axis of heads in each attention parameter, from the end; ["out"]["bias"] has none.
_HEADS = {"kernel": {"query": -2, "key": -2, "value": -2, "out": -3}, "bias": {"query": -2, "key": -2, "value": -2}}
# Seconds after which a silent process counts as lost.
_HEARTBEAT = 20


def start(settings: config.Config, processes: config.Processes | None) -> None:
    """Makes JAX provide the devices of the mesh; call it before JAX initializes its devices.

    By default JAX treats a CPU as one device. This does not affect GPUs and TPUs. Raises ``ValueError`` if the other
    processes were not found.
    """
    size = max(one.mesh.size for one in (settings, *config.variants(settings).values()))
    local = size
    if processes is not None:
        local = processes.local_devices or size // (processes.num_processes or 1)
        _join(processes)
    if local > 1:
        with contextlib.suppress(RuntimeError):  # too late: use the existing devices
            jax.config.update("jax_num_cpu_devices", local)


def _join(processes: config.Processes) -> None:
    """Waits for the other processes."""
    named = processes.coordinator, processes.num_processes, processes.process_id
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM, which ``stopping`` handles
    try:
        jax.distributed.initialize(*named, heartbeat_timeout_seconds=_HEARTBEAT)
    except (RuntimeError, ValueError) as error:
        hint = "try --coordinator, --num_processes and --process_id" if named[0] is None else f"got {named}"
        raise ValueError(f"--distributed: {str(error).splitlines()[0]} ({hint})") from None


def check(settings: config.Config) -> None:
    """Raises ``ValueError`` if the devices do not fit the meshes of a config and its controls."""
    for one in (settings, *config.variants(settings).values()):
        mesh, there = one.mesh, len(jax.devices()) if one.mesh.size > 1 or jax.process_count() > 1 else 1
        shape = f"data={mesh.data} x heads={mesh.heads} x sequence={mesh.sequence}"
        where = f"{there} {jax.default_backend()} devices"
        if mesh.size > there:
            raise ValueError(f"mesh: expected at most {where}, got {shape} for {one.name}")
        if mesh.size < there and jax.process_count() > 1:
            processes = f"{jax.process_count()} processes"
            raise ValueError(f"mesh: expected all {where} of the {processes}, got {shape} for {one.name}")


def make(options: config.Mesh) -> Mesh:
    """The mesh of a config, on the first devices."""
    shape = (options.data, options.heads, options.sequence)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[: options.size])


def meet(mesh: Mesh) -> None:
    """Connects the processes in every group of devices along the axes. Each process calls it before a long compilation.

    On CPUs, Gloo fails if the processes of a new group start to communicate more than 30 seconds apart.
    """
    if jax.process_count() == 1:
        return
    axes = [name for name in AXES if mesh.shape[name] > 1]
    groups = [group for size in range(1, len(axes) + 1) for group in itertools.combinations(axes, size)]

    def sums() -> jax.Array:
        return sum((jax.lax.psum(jax.lax.axis_index(AXES), group) for group in groups), jnp.zeros(1, int))

    jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=(), out_specs=P(AXES)))().block_until_ready()


def whole(mesh: Mesh) -> NamedSharding:
    """The sharding of a replicated array."""
    return NamedSharding(mesh, P())


def of_state(mesh: Mesh, state: Any) -> Any:
    """The sharding of each leaf (array or shape) of a state: heads over "heads", the rest replicated."""

    def of_leaf(path: Any, leaf: Any) -> NamedSharding:
        names = [getattr(key, "key", None) for key in path]
        axis = _HEADS.get(names[-1], {}).get(names[-2]) if "attention" in names else None
        if axis is None or leaf.shape[axis] % mesh.shape["heads"]:  # fewer key/value heads than devices
            return whole(mesh)
        spec = [None] * leaf.ndim
        spec[axis] = "heads"
        return NamedSharding(mesh, P(*spec))

    return jax.tree_util.tree_map_with_path(of_leaf, state)


def attention(mesh: Mesh) -> Ring | HeadParallel | None:
    """The ``implementation=`` of attention on a mesh."""
    if mesh.shape["sequence"] > 1:
        return Ring(mesh, "sequence", batch_axis="data", head_axis="heads", layout="zigzag")
    return HeadParallel(mesh, "heads", batch_axis="data") if mesh.size > 1 else None


def split(mesh: Mesh, batch: Any) -> Any:
    """Splits leaves ``[B,T,...]``: sequences over "data", tokens over "sequence"; within ``jax.jit``.

    Split tokens are in zigzag order, which balances a causal mask's work across devices.
    """
    if mesh.shape["sequence"] > 1:
        batch = jax.tree.map(lambda leaf: to_zigzag(leaf, mesh.shape["sequence"]), batch)
    return jax.lax.with_sharding_constraint(batch, NamedSharding(mesh, P("data", "sequence")))


def over_seeds(mesh: Mesh, function: Callable[..., Any], *arrays: Any) -> Any:
    """Applies ``function`` to each seed's part of ``arrays``; leaves have a leading axis of seeds.

    On a single CPU device the seeds run one after another, because its caches hold the work of one seed but not of all.
    On other devices they run in parallel.
    """
    if mesh.size == 1 and mesh.devices.item().platform == "cpu":
        return jax.lax.map(lambda one: function(*one), arrays)
    return jax.vmap(function)(*arrays)


def on_one(mesh: Mesh, tree: Any) -> Any:
    """Copies arrays of the mesh to this process's first device, for single-device work."""
    if mesh.size == 1:
        return tree
    here = jax.tree.map(lambda leaf: leaf.addressable_data(0), jax.device_put(tree, whole(mesh)))
    return jax.device_put(here, jax.local_devices()[0])


def is_first() -> bool:
    """Whether this process writes the run's files."""
    return jax.process_index() == 0


def agreed(array: Any) -> np.ndarray:
    """The first process's value of ``array``; every process must call this."""
    return np.asarray(multihost_utils.broadcast_one_to_all(array))


def everywhere(good: bool) -> bool:
    """Whether ``good`` is true on every process; every process must call this."""
    return bool(np.all(multihost_utils.process_allgather(np.asarray(good))))


def environment(seconds: float) -> dict[str, str | None]:
    """The versions and device of a run, and how long it took."""
    device = jax.devices()[0]
    return {
        "jattn": jattn.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "device": f"{jax.device_count()} x {device.device_kind}",
        "seconds": f"{seconds:.0f}",
    }


def commit() -> str | None:
    """The commit of the checkout that jattn is imported from, with "-dirty" if files differ; None if there is none."""
    root = Path(jattn.__file__).parents[1]
    if not (root / ".git").exists():  # for an installed jattn, git would name the commit of some surrounding repository
        return None
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # git is missing, or does not trust the folder
        return None
