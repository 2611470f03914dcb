"""Memory of the host that a GPU copies into at full speed. Loaded on GPUs alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def pin_memory(memory: Tensor, device: torch.device, warn: Callable[[str], None]) -> bool:
    """Lock memory in place for a GPU; False, after a warning, when the driver refuses."""
    # The device is a thread's own: by default it is GPU 0, and a context would be opened there.
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
