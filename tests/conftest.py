"""What every test runs under: eight CPU devices, strict promotion, light compilation, fresh keys, no window for plots."""

import itertools
import os
import tempfile
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "agg")  # before matplotlib; also for the commands that tests start

import hypothesis
import jax
import pytest

from jattn import staged

# An option and not XLA_FLAGS, so that a command started by a test sees the machine as a user's command would.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A test compiles for far longer than it runs, so LLVM optimises little. With JAX_DISABLE_MOST_OPTIMIZATIONS=0 in the
# environment everything is compiled as users have it; CI runs what is marked `bits` so.
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    jax.config.update("jax_disable_most_optimizations", True)

# The first call of a jitted function takes as long as its compilation, so no deadline. The same examples on every
# run, so that a green suite stays green; `pytest --hypothesis-profile=search` looks for new ones.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")

COMPILED = pytest.StashKey[str]()


def pytest_configure(config):
    """Compiled programs go to a folder that all workers of this run share and that is gone when it ends."""
    if hasattr(config, "workerinput"):
        folder = config.workerinput["compiled"]
    else:
        kept = tempfile.TemporaryDirectory(prefix="jattn-tests-", ignore_cleanup_errors=True)
        config.add_cleanup(kept.cleanup)
        folder = config.stash[COMPILED] = kept.name
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["compiled"] = node.config.stash[COMPILED]


def pytest_collection_modifyitems(config, items):
    """Beside those that are marked in their files, slow are the cases that slow.txt lists."""
    lines = (Path(__file__).parent / "slow.txt").read_text(encoding="utf-8").splitlines()
    listed = {line for line in lines if not line.startswith("#")}
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)
    if not config.getoption("lf") and not any("::" in arg for arg in config.args):  # whole files were collected
        files = {item.nodeid.partition("::")[0] for item in items}
        gone = sorted(name for name in listed - {item.nodeid for item in items} if name.partition("::")[0] in files)
        if gone:
            raise pytest.UsageError(f"tests/slow.txt lists tests that there are not: {gone}")


@pytest.fixture
def getkey():
    """A function whose every call returns a fresh PRNG key; each test gets the same sequence of them."""
    root, count = jax.random.key(0), itertools.count()
    return lambda: jax.random.fold_in(root, next(count))


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_let_go():
    """What one file's tests hold in memory serves no other; kept, it comes to gigabytes that Python's collector walks."""
    yield
    jax.clear_caches()
    staged._compiled.cache_clear()
    staged._jitted.cache_clear()


@pytest.fixture(scope="module")
def as_experiments_run():
    """Optax mixes dtypes, where jattn's own tests run under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield
