"""Set-up for all tests: eight CPU devices, strict promotion, light compilation, fresh keys and no plot windows."""

import itertools
import os
import sys
import tempfile
import time

from jattn._core import deferred

os.environ.setdefault("MPLBACKEND", "agg")  # before matplotlib; also for the commands that tests start

import hypothesis
import jax
import pytest

# An option and not XLA_FLAGS, so that commands started by tests see the same devices as a user's.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tests spend far longer compiling than running, so LLVM optimises little. With JAX_DISABLE_MOST_OPTIMIZATIONS=0 in the
# environment, everything is compiled as it is for users; CI runs the tests marked `bits` that way.
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    jax.config.update("jax_disable_most_optimizations", True)

# No deadline, because the first call of a jitted function compiles it. The examples are the same in every run, so that
# a passing suite keeps passing; `pytest --hypothesis-profile=search` looks for new ones.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")

COMPILED = pytest.StashKey[str]()


def pytest_addoption(parser):
    parser.addoption("--without-native", action="store_true", help="as if jattn-native were not installed")
    parser.addoption("--until", type=float, metavar="TIME", help="skip what has not begun at this time (`date +%%s`)")


def pytest_configure(config):
    """Caches compiled programs in a folder that all workers of this run share, and deletes it at the end."""
    if config.getoption("--without-native"):
        sys.modules["jattn_native"] = None  # type: ignore
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


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name):
    """Marks the cases of a test as slow, except those that its mark ``slow_except`` names by their ids."""
    items = yield
    cases = items if isinstance(items, list) else []
    ids = [case.callspec.id for case in cases if hasattr(case, "callspec")]
    for case in cases:
        fast = case.get_closest_marker("slow_except")
        if fast and not set(ids) >= set(fast.args):
            raise collector.CollectError(f"{name}: slow_except names {fast.args}, but the cases are {ids}")
        if fast and case.callspec.id not in fast.args:
            case.add_marker(pytest.mark.slow)
    return items


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    until = item.config.getoption("--until")
    if until is not None and time.time() >= until:
        pytest.skip("no time was left")


@pytest.fixture
def getkey():
    """A function that returns a new PRNG key at each call; every test gets the same sequence of keys."""
    root, count = jax.random.key(0), itertools.count()
    return lambda: jax.random.fold_in(root, next(count))


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_let_go():
    """Frees what one file compiled. Other files cannot use it, and the garbage collector would scan gigabytes."""
    yield
    jax.clear_caches()
    deferred._compiled.cache_clear()
    deferred._jitted.cache_clear()


@pytest.fixture(scope="module")
def as_experiments_run():
    """Standard dtype promotion, because Optax mixes dtypes; jattn's own tests run under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield
