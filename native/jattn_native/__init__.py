"""Loads the compiled kernels of jattn's ``implementation="native"``; ``jattn.kernels.native`` describes them."""

import ctypes
import functools
from pathlib import Path

import jax
import jaxlib

# jattn requires exactly this version, because it depends on the kernels' operands.
__version__ = "0.2.0"


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library, with ``jattn_forward``, ``jattn_backward`` and ``jattn_decode``, registered with XLA.

    Raises:
        ImportError: the package was not built, or not for this machine or this jaxlib.
    """
    file = Path(__file__).parent / "_attention.so"
    try:
        kernels = ctypes.CDLL(str(file))
    except OSError as error:
        raise ImportError(f"jattn-native cannot be loaded; reinstall it ({error})") from error
    for name in ("jattn_forward", "jattn_backward", "jattn_decode"):
        try:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(kernels, name)), platform="cpu")
        except jax.errors.JaxRuntimeError as error:
            raise ImportError(
                f"jattn-native was not compiled for jaxlib {jaxlib.__version__}: pip install -U jattn-native jax, "
                "or compile it: pip install --no-build-isolation --no-binary jattn-native jattn-native"
            ) from error
    return kernels
