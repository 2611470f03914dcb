"""GPUs and the networks between them: data-sheet rates, and the shares of them that training
reaches. No torch.

A share is fitted to published throughput (benchmarks/published.toml) unless a comment
names its source.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kempner.extensions.planner.memory import GIB
from kempner.train.recording.peak import PEAK_BF16

RESERVE_GIB = 4.0  # CUDA context, NCCL's buffers, and memory the allocator cannot use
# All-gathers of 2 to 128 MiB among 8 H100 take 14 us and their bytes at 0.7 of NVLink's rate
# (NVIDIA/Megatron-LM, pull request 5596: 20.2, 43.4, 118.9 and 385.3 us).
NVLINK_SHARE, NVLINK_START = 0.70, 14e-6


class GpuSpec(NamedTuple):
    """One GPU, its memory and its links; rates of links are bytes per second in one direction."""

    name: str
    gib: float
    memory: float
    link: float  # NVLink, from one GPU to the others of its node
    fabric: str = "ib-400"  # of FABRICS, between its node and others
    bus: float = 25e9  # from one GPU to its host
    products: float = 0.70  # of the bf16 peak, approached as the sides of a product grow
    attention: float = 0.55  # of the peak, as sequences grow: cuDNN, or the fastest kernel
    flash: float = 0.22  # same for FlashAttention 2, which uses the A100's instructions
    fp8: bool = True  # multiplies 8-bit floats at twice the bf16 peak (NVIDIA's data sheets)
    clock: float = 1.0  # of products under a power limit, if below the data sheet's

    @property
    def flops(self) -> float:
        return PEAK_BF16[self.name]

    @property
    def usable(self) -> float:
        """Bytes for tensors."""
        return (self.gib - RESERVE_GIB) * GIB


GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuSpec("A100", 79.2, 2.04e12, 300e9, "ib-200",
                products=0.82, attention=0.58, flash=0.58, fp8=False),
        GpuSpec("H100", 79.1, 3.35e12, 450e9),
        GpuSpec("H200", 139.8, 4.8e12, 450e9, products=0.81),
        GpuSpec("GH200", 94.5, 4.0e12, 450e9),
        # FlashAttention 2 is assumed as fast as on an H100, and on an L40S as on an A100.
        GpuSpec("B200", 178.4, 7.7e12, 900e9, products=0.70, flash=0.10),
        GpuSpec("GB200", 184.0, 8.0e12, 900e9, products=0.70, flash=0.09),
        GpuSpec("B300", 267.0, 7.7e12, 900e9, "ib-800", products=0.70, flash=0.10),
        GpuSpec("GB300", 276.0, 8.0e12, 900e9, "ib-800", products=0.70, flash=0.09),
        GpuSpec("L40S", 44.4, 0.864e12, 32e9, "ethernet-100", attention=0.58, flash=0.58),
    )
}  # fmt: skip


def gpu_of_device(name: str) -> GpuSpec | None:
    """Return the GPU for the name that the driver reports; None if GPUS has no such card."""
    # A PCIe or NVL card, whose name extends the SXM card's, matches first, and has no row here.
    found = next((card for card in PEAK_BF16 if re.search(rf"\b{card}\b", name)), "")
    return GPUS.get(found)


class Fabric(NamedTuple):
    """A network between nodes, per GPU and direction."""

    rate: float  # bytes per second
    share: float  # of the rate that long messages reach
    hop: float  # seconds from one node to the next


FABRICS = {
    "ib-200": Fabric(25e9, 0.8, 5e-6),
    "ib-400": Fabric(50e9, 0.8, 5e-6),
    "ib-800": Fabric(100e9, 0.8, 5e-6),
    "roce-200": Fabric(25e9, 0.75, 7e-6),
    "roce-400": Fabric(50e9, 0.75, 7e-6),
    "ethernet-25": Fabric(3.125e9, 0.6, 30e-6),
    "ethernet-100": Fabric(12.5e9, 0.6, 30e-6),
    "ethernet-400": Fabric(50e9, 0.6, 30e-6),
}


def near_seconds(gpu: GpuSpec, size: float, messages: float) -> float:
    """Seconds of collectives among the GPUs of a node, each of which sends `size` bytes in all."""
    return messages * NVLINK_START + size / (NVLINK_SHARE * gpu.link)


def far_seconds(
    gpu: GpuSpec, fabric: Fabric, size: float, messages: float, nodes: float, ways: float
) -> float:
    """Seconds of collectives over `nodes` nodes, each with `ways` ranks of the group: data enter a
    node over the links of all its ranks, and NVLink distributes them."""
    rate = min(ways * fabric.share * fabric.rate, NVLINK_SHARE * gpu.link)
    return messages * (NVLINK_START + (nodes - 1) * fabric.hop) + size / rate
