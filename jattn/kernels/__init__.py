"""Implementations of attention, one per file or folder, behind one interface.

``kernel.py`` defines the base class and describes how to write one; ``dispatch.py`` lists their names and selects one.
"""

from jattn._core.call import Call
from jattn.kernels.interface import Implementation, OverDevices, ReducesWeights, Unsupported
from jattn.kernels.kernel import OPTIONS, PLATFORMS, Kernel, PlainKernel, ReducingKernel, Reduction, Results

__all__ = [
    "Call",
    "OPTIONS",
    "PLATFORMS",
    "Implementation",
    "Kernel",
    "OverDevices",
    "PlainKernel",
    "ReducesWeights",
    "ReducingKernel",
    "Reduction",
    "Results",
    "Unsupported",
]
