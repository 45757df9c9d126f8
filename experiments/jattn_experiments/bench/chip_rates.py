"""The rates that the makers of chips publish: matrix products in bfloat16, and memory bandwidth."""

from typing import NamedTuple


class Rates(NamedTuple):
    """Operations (dense, bfloat16) and bytes per second of one chip, and the source."""

    flops: float
    bandwidth: float
    source: str


_CLOUD = "cloud.google.com/tpu/docs/{}"
_NVIDIA = "NVIDIA's data sheet of the {}"
# The keys are parts of a device's ``device_kind``, the longest first. A v4, v5p and TPU7x have two cores per chip. JAX
# shows the cores of a v4 or v5p as one device and those of a TPU7x as two, so the TPU7x's rates are halved here.
RATES = {
    "TPU v4": Rates(275e12, 1228e9, _CLOUD.format("v4")),
    "TPU v5 lite": Rates(197e12, 819e9, _CLOUD.format("v5e")),
    "TPU v5e": Rates(197e12, 819e9, _CLOUD.format("v5e")),
    "TPU v5p": Rates(459e12, 2765e9, _CLOUD.format("v5p")),
    "TPU v5": Rates(459e12, 2765e9, _CLOUD.format("v5p")),
    "TPU v6 lite": Rates(918e12, 1640e9, _CLOUD.format("v6e")),
    "TPU v6e": Rates(918e12, 1640e9, _CLOUD.format("v6e")),
    "TPU7x": Rates(2307e12 / 2, 7380e9 / 2, _CLOUD.format("tpu7x")),
    "A100-SXM4-40GB": Rates(312e12, 1555e9, _NVIDIA.format("A100")),
    "A100": Rates(312e12, 2039e9, _NVIDIA.format("A100 80GB SXM")),
    "H100 PCIe": Rates(756e12, 2000e9, _NVIDIA.format("H100 PCIe")),
    "H100 NVL": Rates(835e12, 3900e9, _NVIDIA.format("H100 NVL")),
    "H100": Rates(989e12, 3350e9, _NVIDIA.format("H100 SXM")),
    "H200": Rates(989e12, 4800e9, _NVIDIA.format("H200 SXM")),
    "GH200": Rates(989e12, 4000e9, _NVIDIA.format("GH200 96GB")),
    "B200": Rates(2250e12, 8000e9, _NVIDIA.format("HGX B200")),
    "L4": Rates(121e12, 300e9, _NVIDIA.format("L4")),
}


def rates_of(device_kind: str) -> Rates | None:
    """The rates of that kind of chip, or None if the table has none."""
    matches = [name for name in RATES if name in device_kind]
    return RATES[max(matches, key=len)] if matches else None
