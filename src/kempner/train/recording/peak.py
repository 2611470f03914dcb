"""Peak speeds of GPUs, for MFU."""

from __future__ import annotations

import re

from kempner.train.recording.config import MetricsConfig

# Dense bf16 operations per second by the driver's name (NVIDIA's data sheets, halved if those count
# sparsity: HGX B200 and B300 36 PFLOP/s for eight GPUs, GB200 and GB300 NVL72 360 PFLOP/s for 72).
# The first entry contained in the name as whole words (an A4000 is not an A40) counts: PCIe and NVL
# cards precede the SXM ones, whose names are shorter.
PEAK_BF16 = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A10": 125e12,
    "L40S": 362e12,
    "V100": 125e12,
}


def peak_flops(cfg: MetricsConfig, device_name: str) -> float | None:
    """Return the peak of one device in operations per second; None if unknown (a CPU)."""
    if cfg.peak_tflops is not None:
        return cfg.peak_tflops * 1e12
    return next(
        (peak for name, peak in PEAK_BF16.items() if re.search(rf"\b{name}\b", device_name)), None
    )
