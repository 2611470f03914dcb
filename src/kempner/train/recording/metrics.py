"""Metrics of a run: one JSON line per logged step, and a console line (or bar) from
the same record."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SHARE_SHOWN = 0.05  # of a step


@dataclass
class Clock:
    """A clock that splits the host's wall time into named parts; the remainder is compute."""

    parts: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)  # newest time of each part
    began: float = field(default_factory=time.perf_counter)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.last[name] = time.perf_counter() - began
            self.parts[name] = self.parts.get(name, 0.0) + self.last[name]

    def spent(self) -> dict[str, float]:
        """Return the seconds so far: `total` and the parts."""
        return {"total": time.perf_counter() - self.began, **self.parts}

    def begin(self) -> dict[str, float]:
        """Return spent(), before the first step."""
        return self.spent()

    def mark(self) -> Any:
        """Mark the end of a step."""
        return time.perf_counter() - self.began

    def reach(self, mark: Any) -> float:
        """Wait for a mark, in order; returns its `total`."""
        return float(mark)


def console_line(record: dict[str, Any], max_steps: int) -> str:
    """Format a step's record as a console line of at most 80 columns. Shows the shares of the step
    spent waiting for data or a checkpoint if they matter."""
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
