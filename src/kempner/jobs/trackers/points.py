"""metrics.jsonl as a series of points, read as the file grows. No torch.

The series depends only on the file, which is append-only. So a point's number in the series
identifies it: a tracker that knows how many points it has also knows which comes next.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kempner.jobs.records.results import PREFIX

POINT_HEAD = ("step", "time", "attempt")


@dataclass(frozen=True)
class MetricsPoint:
    """One line of metrics.jsonl. `undoes`: the run has rolled back, and earlier points from this
    step on no longer count."""

    step: int
    time: float  # unix seconds
    values: dict[str, float]  # by name: train/loss, val/loss, ...
    undoes: bool


class MetricsReader:
    """A reader of metrics.jsonl that remembers where it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0  # bytes
        self._newest: dict[str, int] = {}  # step by name of a value

    def more(self) -> Iterator[MetricsPoint]:
        """Yield the points since the last call; an incomplete line follows in the next call."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._at)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._at += len(line)
                    if (point := self._point(line)) is not None:
                        yield point
        except FileNotFoundError:  # no step yet
            return

    def _point(self, line: bytes) -> MetricsPoint | None:
        try:
            record = json.loads(line)
            step, time = int(record["step"]), float(record["time"])
        except (ValueError, KeyError, TypeError):  # torn by a crash
            return None
        values = dict(_values(record))
        if not values:
            return None
        # Evaluations may come out of order: of a checkpoint before the last evaluated one.
        of_steps = [name for name in values if not name.startswith(PREFIX)]
        undoes = any(self._newest.get(name, -1) >= step for name in of_steps)
        if undoes:
            # For all names: those missing in this line are also undone from its step on.
            self._newest = {name: min(at, step - 1) for name, at in self._newest.items()}
        self._newest.update(dict.fromkeys(values, step))
        return MetricsPoint(step, time, values, undoes)


def _values(record: dict[str, Any], group: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line by name: val_loss -> val/loss, eval/task as it is, {"a": {"b":
    1}} -> a/b, and all others below train/. Non-finite numbers, null in the file, are skipped."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _values(value, f"{group}{key}/")
        elif (
            isinstance(value, int | float) and not isinstance(value, bool) and key not in POINT_HEAD
        ):
            if not math.isfinite(value):
                continue
            if group or key.startswith(PREFIX):
                yield f"{group}{key}", float(value)
            else:
                name = f"val/{key[4:]}" if key.startswith("val_") else f"train/{key}"
                yield name, float(value)
