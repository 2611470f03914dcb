"""Compatibility of the installed torch's CUDA with this host's driver. No torch.

A driver runs programs built with its own major version of CUDA or an older one:
docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html. torch 2.13 has builds
with CUDA 12.6 and 13.0: github.com/pytorch/pytorch/blob/main/RELEASE.md.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

BRANCHES = {"13": 580, "12": 525}  # first driver branch, by CUDA's major version
INDEXES = {580: "cu130", 525: "cu126"}  # of torch's builds, by the first driver branch
WHEEL_INDEX = "https://download.pytorch.org/whl/"


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver on this host, such as 580.65.06; None without one."""
    root = os.environ.get("KEMPNER_PROC", "/proc")  # set by tests
    try:
        text = Path(root, "driver/nvidia/version").read_text()
    except OSError:
        return None
    # The open driver writes "Open Kernel Module for x86_64  580.65.06", the proprietary one
    # "x86_64 Kernel Module  535.104.05".
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", text)
    return found[1] if found else None


def cuda_of_torch() -> str | None:
    """Return the CUDA version of the installed torch, such as 13.0; None without CUDA or torch."""
    # `import torch` for torch.version takes seconds, so read its file as text.
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = Path(found.origin).with_name("version.py").read_text()
    except OSError:
        return None
    # A build without CUDA has `cuda: Optional[str] = None`.
    cuda = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return cuda[1] if cuda else None


def branch_for(cuda: str) -> int | None:
    """Return the first driver branch that runs this version of CUDA; None if unknown."""
    return BRANCHES.get(cuda.partition(".")[0])


def driver_problem(driver: str | None, cuda: str | None) -> str | None:
    """Return why torch built with `cuda` cannot use the GPUs of a host with this driver, and the
    fix; None if it can or if that is unknown."""
    if driver is None:
        return None
    if cuda is None:
        return f"torch is built without CUDA, and the driver is {driver}: {driver_remedy(driver)}"
    least = branch_for(cuda)
    if least is None or int(driver.partition(".")[0]) >= least:
        return None
    return (
        f"torch is built with CUDA {cuda}, which needs driver {least} or later, and the driver is "
        f"{driver}: {driver_remedy(driver)}"
    )


def driver_remedy(driver: str | None) -> str:
    """Return how to get a compatible torch."""
    branch = int(driver.partition(".")[0]) if driver else 0
    fits = [name for least, name in INDEXES.items() if branch >= least]
    if driver and not fits:
        return f"no build of torch 2.13 runs on it: ask for driver {min(INDEXES)} or later"
    index = fits[0] if fits else "cu126"
    return (
        f"make .venv/train TORCH_INDEX={WHEEL_INDEX}{index} (docs/reference/slurm.md has a table)"
    )


def driver_and_cuda() -> str | None:
    """Describe the versions of driver and CUDA; None if torch has no CUDA."""
    cuda, version = cuda_of_torch(), driver_version()
    if cuda is None:
        return None
    if version is not None:
        return f"driver {version}, torch built with CUDA {cuda}"
    least = branch_for(cuda)
    needs = f", which needs driver {least} or later on the nodes" if least else ""
    return f"torch is built with CUDA {cuda}{needs}; this host has no driver to compare"


def compare_with_torch() -> None:
    """Print the versions of driver and CUDA. A mismatch is only a warning: the job's nodes may fit,
    and a newer libcuda (NVIDIA's cuda-compat) makes up for it."""
    if text := driver_and_cuda():
        print(text, file=sys.stderr)
    if text := driver_problem(driver_version(), cuda_of_torch()):
        print(f"warning: {text}", file=sys.stderr)
