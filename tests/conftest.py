"""What every test runs under: eight CPU devices, strict promotion, light compilation, fresh keys, no window for plots."""

import itertools
import os

os.environ.setdefault("MPLBACKEND", "agg")  # before matplotlib; also for the commands that tests start

import hypothesis
import jax
import pytest

# An option and not XLA_FLAGS, so that a command started by a test sees the machine as a user's command would.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A test compiles for far longer than it runs, so LLVM optimises little. With JAX_DISABLE_MOST_OPTIMIZATIONS=0 in the
# environment everything is compiled as users have it; the suite then takes half as long again.
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    jax.config.update("jax_disable_most_optimizations", True)

# The first call of a jitted function takes as long as its compilation, so no deadline. The same examples on every
# run, so that a green suite stays green; `pytest --hypothesis-profile=search` looks for new ones.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")


@pytest.fixture
def getkey():
    """A function whose every call returns a fresh PRNG key; each test gets the same sequence of them."""
    root, count = jax.random.key(0), itertools.count()
    return lambda: jax.random.fold_in(root, next(count))


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_let_go():
    """What one file's tests have compiled serves no other; kept, it comes to gigabytes that Python's collector walks."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def as_experiments_run():
    """Optax mixes dtypes, where jattn's own tests run under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield
