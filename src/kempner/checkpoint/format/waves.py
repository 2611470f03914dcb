"""The image of a file that does not fit into memory: made and written in waves, while the steps
wait. Loaded only if memory is too small for the whole image."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kempner.checkpoint.format.pinned import pin_memory
from kempner.checkpoint.format.plan import local_part
from kempner.checkpoint.format.writer import (
    PAGE,
    WRITE,
    FilePlan,
    Image,
    Slot,
    allocate_pages,
    image_bytes,
    torch_save_frame,
)


class WavedImage(Image):
    """A rank's file with `room` bytes in memory at a time. The resulting file is the same."""

    def __init__(
        self,
        plan: FilePlan,
        device: torch.device | None,
        warn: Callable[[str], None],
        room: int,
    ) -> None:
        self._plan, self._size = plan, -(-image_bytes(plan) // PAGE) * PAGE
        # Whole writes, so that checksums and writes equal those of a single image.
        self._window = max(room // WRITE, 1) * WRITE
        self.waves = -(-self._size // self._window)
        self._memory = torch.frombuffer(allocate_pages(self._window), dtype=torch.uint8)
        self.entries = {slot.name: slot.entry() for slot in plan}
        self._state: dict[str, Tensor] = {}
        pinned = device is not None and pin_memory(self._memory, device, warn)
        self._pinned = self._memory if pinned else None
        warn(
            f"WARNING: the checkpoint of this rank, {self._size / 1e9:.1f} GB, does not fit into "
            f"the memory left for it on this host: it is saved in {self.waves} waves of "
            f"{self._window / 1e9:.2f} GB, and the steps wait for the whole save"
        )

    def stage(self, state: dict[str, Tensor]) -> None:
        """Take the tensors, which must not change until pieces() has ended."""
        self._state = {slot.key: local_part(state[slot.key]) for slot in self._plan}
        if any(tensor.is_cuda for tensor in self._state.values()):
            # Another thread copies, on a stream that does not wait for this one.
            torch.cuda.current_stream().synchronize()

    @torch.no_grad()
    def pieces(self) -> Iterator[memoryview]:
        """Yield the file's bytes, each piece valid until the next one."""
        waiting = list(self._plan)
        for start in range(0, self._size, self._window):
            end = min(start + self._window, self._size)
            piece = self._memory[: end - start]
            # The image has zeros between tensors, where the previous wave left its bytes.
            piece.zero_()
            for slot in [slot for slot in waiting if slot.offset < end]:
                self._copy(slot, piece, start, end)
            # A tensor that extends beyond this wave continues in the next one.
            waiting = [slot for slot in waiting if slot.offset + slot.length > end]
            yield piece.numpy().data
        self._state = {}

    def _copy(self, slot: Slot, piece: Tensor, start: int, end: int) -> None:
        """Copy the slot's bytes between `start` and `end` of the file."""
        before, after = torch_save_frame(slot.local_shape, slot.dtype)
        behind = slot.data + slot.size
        for text, at in ((before, slot.offset), (after, behind)):
            low, high = max(start, at), min(end, at + len(text))
            if low < high:
                part = torch.frombuffer(bytearray(text[low - at : high - at]), dtype=torch.uint8)
                piece[low - start : high - start] = part
        low, high = max(start, slot.data), min(end, behind)
        if low < high:
            # No element is cut: waves are multiples of WRITE, and data begin at multiples of ALIGN.
            width = slot.dtype.itemsize
            first, last = ((at - slot.data) // width for at in (low, high))
            source = self._state[slot.key].reshape(-1)[first:last]
            piece[low - start : high - start].view(slot.dtype).copy_(source)


def warning_of_waves(waves: int) -> str:
    """Return rank 0's warning; its own file may fit."""
    return (
        "WARNING: on some ranks the memory is too small for the checkpoint, which is saved in up "
        f"to {waves} waves: the steps wait for the whole save; see the logs of these ranks"
    )
