"""Metrics of a run: one JSON line per logged step, and a console line (or a bar) made from the same
record."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SHARE_SHOWN = 0.05  # of a step


@dataclass
class Clock:
    """A clock that splits the wall time of a run into named parts of the host; the remainder is
    compute. A step ends when the device has done it: the host queues steps ahead of a GPU, is held
    up when the queue is full, and reads the numbers of a step at different times before a save and
    elsewhere, so that its own time says little about one step."""

    parts: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)  # newest time of each part
    began: float = field(default_factory=time.perf_counter)
    _newest: torch.Event | None = None  # that was reached, `_reached` seconds after `began`
    _reached: float = 0.0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.last[name] = time.perf_counter() - began
            self.parts[name] = self.parts.get(name, 0.0) + self.last[name]

    def spent(self) -> dict[str, float]:
        """Seconds so far: `total` and the parts."""
        return {"total": time.perf_counter() - self.began, **self.parts}

    def begin(self, device: torch.device) -> dict[str, float]:
        """Wait for the device, from whose next mark on its events tell the time; returns the
        seconds so far."""
        if device.type == "cuda":
            self._newest = self.mark()
            self._newest.synchronize()
            self._reached = time.perf_counter() - self.began
        return self.spent()

    @staticmethod
    def mark() -> torch.Event:
        """Return an event of the GPU that marks all work so far."""
        import torch  # here: --check and reports use this module without it

        event = torch.Event("cuda", enable_timing=True)
        event.record()
        return event

    def reach(self, event: torch.Event) -> float:
        """Wait for the next mark; returns the seconds from `began` until the device reached it."""
        assert self._newest is not None, "begin() comes first"
        event.synchronize()
        # From mark to mark: a long time in milliseconds has few digits left in CUDA's fp32.
        self._reached += self._newest.elapsed_time(event) / 1e3
        self._newest = event
        return self._reached


def console_line(record: dict[str, Any], max_steps: int) -> str:
    """Format a step's record as a console line of at most 80 columns. The shares of the step spent
    waiting for data or a checkpoint are shown when they matter."""
    total = max(record["step_time"], 1e-9)
    shares = {name: record[f"{name}_time"] / total for name in ("data", "checkpoint")}
    parts = [
        f"step {record['step']:>{len(str(max_steps))}}/{max_steps}",
        f"loss {record['loss']:.4f}",
        f"lr {record['lr']:.2e}",
        f"|g| {record['grad_norm']:.2f}",
        f"{short_number(record['tokens_per_s'])} tok/s",
        f"{record['step_time']:.3g}s",
        *([f"mfu {record['mfu']:.1%}"] if record["mfu"] is not None else []),
        *(f"{name} {share:.0%}" for name, share in shares.items() if share >= SHARE_SHOWN),
        *([f"skipped {record['skipped']}"] if record["skipped"] else []),
    ]
    return " ".join(parts)


def short_number(number: float) -> str:
    """Format a number: 12345.6 -> 12.3k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
