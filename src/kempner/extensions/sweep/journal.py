"""Journal of a sweep, RUNS/NAME/sweep/journal.jsonl: the points proposed and submitted, with their
arrays. No torch.

It gets a line before each sbatch and one after it: if this process ends in between, the next one
finds the array by its unique name before it submits anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kempner.jobs.system.directories import Kind, mark_directory
from kempner.jobs.system.files import end_torn_line
from kempner.jobs.system.reading import read_jsonl


@dataclass(frozen=True)
class Submission:
    """An array. `job`: its number; "" while only the intent is known."""

    name: str
    points: tuple[str, ...]  # by index
    time: float
    pack: int = 1  # points per task
    job: str = ""


class Journal:
    """Reads the existing journal; append() writes through to disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.submissions: dict[str, Submission] = {}  # by name, without refused ones
        # Includes refused ones: Slurm may register them late (withdraw_late in submit.py).
        self.names: set[str] = set()  # of all submissions that were tried
        self.cancelled: dict[str, float] = {}  # point -> time
        self.proposed: dict[str, dict[str, Any]] = {}  # point -> its values of [propose]
        for line in read_jsonl(folder / "journal.jsonl"):
            self._take(line)

    @property
    def open(self) -> list[Submission]:
        """Submissions for which it is unknown whether sbatch accepted them."""
        return [submission for submission in self.submissions.values() if not submission.job]

    def of(self, point: str) -> list[Submission]:
        """Return the submissions of one point, in order."""
        return [
            submission for submission in self.submissions.values() if point in submission.points
        ]

    def task(self, point: str) -> str | None:
        """Return the newest job of a point, as users name it: 12_3."""
        submissions = [submission for submission in self.of(point) if submission.job]
        if not submissions:
            return None
        return (
            f"{submissions[-1].job}_{submissions[-1].points.index(point) // submissions[-1].pack}"
        )

    def was_cancelled(self, point: str) -> bool:
        """Return whether a point was cancelled after its newest submission."""
        times = [submission.time for submission in self.of(point)]
        return self.cancelled.get(point, 0.0) > max(times, default=0.0)

    def intend(self, sweep: str, points: Sequence[str], pack: int = 1) -> Submission:
        name = f"{sweep}.{uuid.uuid4().hex[:8]}"
        self.append(event="intent", name=name, points=list(points), pack=pack)
        return self.submissions[name]

    def append(self, **values: Any) -> None:
        path = self.folder / "journal.jsonl"
        line = {**values, "time": time.time()}
        # A line torn by a killed process would swallow this one.
        end_torn_line(path)
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            # An intent must be durable before sbatch is called.
            os.fsync(file.fileno())
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        event, name, when = line.get("event"), line.get("name", ""), line.get("time", 0.0)
        if event == "intent":
            points, pack = tuple(line["points"]), line.get("pack", 1)
            self.submissions[name] = Submission(name, points, when, pack)
            self.names.add(name)
        elif event == "submitted" and name in self.submissions:
            self.submissions[name] = replace(self.submissions[name], job=line["job"])
        elif event == "refused":
            self.submissions.pop(name, None)
        elif event == "cancelled":
            self.cancelled |= dict.fromkeys(line["points"], when)
        elif event == "proposed":
            self.proposed[line["point"]] = line["values"]


@contextlib.contextmanager
def locked_journal(folder: Path, patience: float = 0.0) -> Iterator[Journal]:
    """Open the journal for one process at a time; raises BlockingIOError if another one holds it
    for `patience` seconds."""
    mark_directory(folder, Kind.SWEEP)
    end = time.monotonic() + patience
    # The lock ends with the open file, so a killed process leaves none behind.
    with open(folder / ".lock", "a") as file:
        while True:
            try:
                # flock() has no timeout.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.2)
        # Read under the lock: its previous holder may have submitted points.
        yield Journal(folder)
