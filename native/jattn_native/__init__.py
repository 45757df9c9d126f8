"""The compiled kernels of jattn's ``implementation="native"``; ``jattn.kernels.native`` tells what they compute."""

import ctypes
import functools
from pathlib import Path


@functools.cache
def library() -> ctypes.CDLL:
    """``jattn_forward``, ``jattn_backward`` and ``jattn_decode``, for XLA's foreign function interface, and ``widest``.

    Raises:
        FileNotFoundError: the package was not built.
    """
    found = sorted(Path(__file__).parent.glob("_attention*.so"))
    if not found:
        raise FileNotFoundError(f"no compiled kernels in {Path(__file__).parent}; install the package from its folder")
    return ctypes.CDLL(str(found[-1]))
