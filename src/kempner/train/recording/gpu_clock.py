"""Step times on a GPU, measured by CUDA events."""

from __future__ import annotations

import torch

from kempner.train.recording.metrics import Clock


class GpuClock(Clock):
    """A clock for which a step ends when the GPU has finished it. The host's time says little about
    one step: it queues steps ahead, blocks when the queue is full, and reads a step's numbers at
    varying times, such as before a save."""

    _newest: torch.Event  # reached `_reached` seconds after `began`
    _reached: float

    def begin(self) -> dict[str, float]:
        """Wait for the GPU; its events measure the time from here on."""
        self._newest = self.mark()
        self._newest.synchronize()
        spent = self.spent()
        self._reached = spent["total"]
        return spent

    def mark(self) -> torch.Event:
        event = torch.Event("cuda", enable_timing=True)
        event.record()
        return event

    def reach(self, mark: torch.Event) -> float:
        mark.synchronize()
        # From mark to mark: CUDA's fp32 milliseconds lose precision over a long time.
        self._reached += self._newest.elapsed_time(mark) / 1e3
        self._newest = mark
        return self._reached
