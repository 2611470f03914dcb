"""The times of steps on a GPU, by its own events."""

from __future__ import annotations

import torch

from kempner.train.recording.metrics import Clock


class GpuClock(Clock):
    """A clock for which a step ends when the GPU has done it. The host queues steps ahead, is held
    up when the queue is full, and reads the numbers of a step at different times before a save and
    elsewhere: its own time says little about one step."""

    _newest: torch.Event  # that was reached, `_reached` seconds after `began`
    _reached: float

    def begin(self) -> dict[str, float]:
        """Wait for the GPU, whose events tell the time from here on."""
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
        # From mark to mark: a long time in milliseconds has few digits left in CUDA's fp32.
        self._reached += self._newest.elapsed_time(mark) / 1e3
        self._newest = mark
        return self._reached
