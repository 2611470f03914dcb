"""The device of this process."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from kempner.config.option import ConfigError

if TYPE_CHECKING:
    import torch


PCI_GPUS = {"0x10de": "NVIDIA"}


def pick_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of this process. `kind`: auto, cuda or cpu. The index is the local rank, or
    0 if one GPU is visible. Of several MIG instances, hides all but this process's own.

    Raises ConfigError if there are fewer GPUs than tasks on this host, or if the job has GPUs here
    that torch cannot use: the run would train on the CPU for days.
    """
    import torch

    host = socket.gethostname()
    if kind != "cpu" and (own := own_instance(local_rank)):
        os.environ["CUDA_VISIBLE_DEVICES"] = own  # CUDA reads it at its first call
    if kind != "cpu" and not torch.cuda.is_available() and (gpu := gpu_on_the_bus()):
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        from kempner.jobs.gpu import driver as gpu_driver

        version = gpu_driver.driver_version()
        raise ConfigError(
            f"distributed.device = {kind!r}: {host} has {gpu} GPUs and the job was given some, but "
            f"torch {torch.__version__} (built with {build}) cannot use them with driver "
            f"{version or 'unknown'}; look at nvidia-smi there and install a torch that fits the "
            f"driver: {gpu_driver.driver_remedy(version)}; or set distributed.device=cpu"
        )
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError(
            f"distributed.device = {kind!r}: no GPU is visible on {host}; request one "
            "(--gpus-per-node), or set distributed.device=cpu"
        )
    if count > 1 and local_rank >= count:
        raise ConfigError(f"local rank {local_rank} on {host} has no GPU: {_why_too_few(count)}")
    device = torch.device("cuda", local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


def own_instance(local_rank: int) -> str | None:
    """Return the name of this rank's MIG instance if several are visible, else None. A process uses
    only the first visible instance, so all ranks would use the same one. Raises ConfigError if
    there are fewer instances than ranks."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(names) < 2 or not all(name.startswith("MIG-") for name in names):
        return None
    if local_rank >= len(names):
        raise ConfigError(
            f"local rank {local_rank} on {socket.gethostname()} has no MIG instance: "
            f"{_why_too_few(len(names))}"
        )
    return names[local_rank]


def _why_too_few(count: int) -> str:
    """Return the fix for a task that sees several GPUs, `count`, but none for itself."""
    job_gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if job_gpus.isdecimal() and int(job_gpus) > count:
        return (
            f"it sees {count} of the {job_gpus} that Slurm gave the job there; --gpu-bind=closest "
            "(KEMPNER_SRUN) shows each task only those of its socket: leave --gpu-bind out, and "
            "each rank takes one of its own"
        )
    return f"{count} are visible; --ntasks-per-node must be {count}, the GPUs per node"


def gpu_on_the_bus() -> str | None:
    """Return the vendor of the GPUs on this host's PCI bus if SLURM gave some to the job. SLURM's
    word is not enough: a test cluster counts GPUs that do not exist."""
    numbers, count = os.environ.get("SLURM_STEP_GPUS"), os.environ.get("SLURM_GPUS_ON_NODE")
    if not numbers and (count or "0") == "0":  # numbers = "0" is the first GPU
        return None
    root = Path(os.environ.get("KEMPNER_SYS", "/sys"))  # set by tests
    for device in root.glob("bus/pci/devices/*"):
        with contextlib.suppress(OSError):
            maker = PCI_GPUS.get((device / "vendor").read_text().strip())
            if maker and (device / "class").read_text().startswith("0x03"):  # a display controller
                return maker
    return None
