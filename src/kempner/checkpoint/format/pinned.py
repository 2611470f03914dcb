"""Pinned host memory that a GPU copies into at full speed. Loaded only on GPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def pin_memory(memory: Tensor, device: torch.device, warn: Callable[[str], None]) -> bool:
    """Pin memory for a GPU; returns False, after a warning, if the driver refuses."""
    # The current device is per thread: by default GPU 0, where a context would be created.
    torch.cuda.set_device(device)
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    # Not torch's pinned memory: this is pages of mmap(), which O_DIRECT writes from.
    code = int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        warn(
            f"WARNING: the memory for checkpoints cannot be pinned (CUDA error {code} for "
            f"{memory.nbytes / 1e9:.1f} GB): saves copy more slowly; see `ulimit -l`"
        )
    return code == 0


def unpin_memory(memory: Tensor) -> None:
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cuda.cudaHostUnregister(memory.data_ptr())
