"""Peak figures of devices, and the shares of them that a step reaches."""

from __future__ import annotations

import dataclasses

from dta_compile.errors import OptionError

# Shares of the peaks in one profile: Qwen3-1.7B on an H100 with chunks of 8,192 tokens (benchmarks/GPU.md), a step of
# which spent 0.47 s in matrix products, 0.40 s in attention and about 0.16 s in other kernels.
MATMUL_SHARE, ATTENTION_SHARE, BANDWIDTH_SHARE = 0.70, 0.30, 0.60
# Uncertainty, as a factor either way: for an H100, other devices, and rates fitted to runs of the model. Steps measured
# on the H100 took 0.80 to 1.02 of the prediction; no other device was measured; fitted rates may miss other batches.
ON_THE_SAME, ON_ANOTHER, CALIBRATED = 1.35, 2.0, 1.2


@dataclasses.dataclass(frozen=True)
class Device:
    """Peak figures of a device from its data sheet, without sparsity.

    Attributes:
        name: product name.
        tflops: peak of 16-bit matrix products with float32 accumulation, in 1e12 operations per second.
        bandwidth: memory bandwidth in bytes per second.
        memory: memory in bytes.
    """

    name: str
    tflops: float
    bandwidth: float
    memory: float

    @property
    def uncertainty(self) -> float:
        """Factor by which the time of a step may be off, either way, if predicted from these figures."""
        return ON_THE_SAME if self == DEVICES["h100"] else ON_ANOTHER


DEVICES = {
    "h100": Device("NVIDIA H100 SXM 80 GB", 989, 3.35e12, 80e9),
    "h100-pcie": Device("NVIDIA H100 PCIe 80 GB", 756, 2.0e12, 80e9),
    "h200": Device("NVIDIA H200 SXM 141 GB", 989, 4.8e12, 141e9),
    "h20": Device("NVIDIA H20 96 GB", 148, 4.0e12, 96e9),
    "b200": Device("NVIDIA B200 180 GB", 2250, 7.7e12, 180e9),
    "a100": Device("NVIDIA A100 SXM 80 GB", 312, 2.04e12, 80e9),
    "a100-40gb": Device("NVIDIA A100 SXM 40 GB", 312, 1.55e12, 40e9),
    "l40s": Device("NVIDIA L40S 48 GB", 362, 0.864e12, 48e9),
    "rtx4090": Device("NVIDIA GeForce RTX 4090 24 GB", 165, 1.01e12, 24e9),
}


def device_named(
    name: str, tflops: float | None = None, bandwidth: float | None = None, memory: float | None = None
) -> Device:
    """Return a device of `DEVICES`, or any other device given all its peak figures.

    Args:
        name: key of `DEVICES`, or any name.
        tflops, bandwidth, memory: as in `Device`, above 0; they override the figures of the table.

    Raises:
        OptionError: the device is not in the table and a figure is missing.
    """
    known = DEVICES.get(name.lower())
    if known is None:
        if tflops is None or bandwidth is None or memory is None:
            raise OptionError(
                "a device without peak figures",
                expected=f"{', '.join(DEVICES)}; or --tflops, --bandwidth and --memory",
                got=repr(name),
            )
        return Device(name, tflops, bandwidth, memory)
    return Device(known.name, tflops or known.tflops, bandwidth or known.bandwidth, memory or known.memory)
