"""Reads a run directory: its steps, its attempts, its state, and where its wall time went. No
torch.

A run that still trains, was killed in the middle of a line, or never came to its first step has a
history too: what is missing is None, and nothing here raises because of it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from kempner.files import read_jsonl, step_of
from kempner.history import events
from kempner.history.attempts import Attempt, Record, attempts_of, is_known
from kempner.history.results import PREFIX
from kempner.history.state import State, job_of, judge, read_lock
from kempner.history.wall_time import WallTime, wall_time_of
from kempner.slurm import Job

RECORDS = ("status.json", "attempts.jsonl", "metrics.jsonl", "lock")


@dataclass(frozen=True)
class History:
    """`losses` and `validations` are the lines of metrics.jsonl that count, by step; `lines` also
    has those of steps that a later attempt has done again."""

    path: Path
    status: Record
    lines: list[Record] = field(repr=False)
    results: list[Record] = field(repr=False)  # of eval.py, one a step, in order
    attempts: list[Attempt]
    state: State
    job: Job | None  # as Slurm shows it; None where that is not known

    @cached_property
    def losses(self) -> list[Record]:
        return counting([line for line in self.lines if "loss" in line], self.attempts)

    @cached_property
    def validations(self) -> list[Record]:
        return counting([line for line in self.lines if "val_loss" in line], self.attempts)

    @cached_property
    def rounds(self) -> list[Record]:
        """Of a run whose replicas meet once a round (lowcomm/)."""
        return counting([line for line in self.lines if "round_loss" in line], self.attempts)

    @cached_property
    def wall_time(self) -> WallTime:
        newest = newest_checkpoint(self.path / "checkpoints")
        return wall_time_of(self.attempts, self.lines, newest)

    @property
    def lineage(self) -> tuple[str, ...]:
        """RUN@STEP that the run is a fork of, then what that one is a fork of."""
        return next((a.lineage for a in reversed(self.attempts) if a.began), ())

    @property
    def step(self) -> int:
        """Steps done, as far as is known: status.json of a running attempt is older."""
        newest = self.attempts[-1].last_step if self.attempts else 0
        last = self.losses[-1]["step"] if self.losses else 0
        return max(newest, last)


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in RECORDS)


def load_history(
    path: Path, jobs: dict[str, Job] | None = None, tail: int | None = None
) -> History:
    """Read a run directory; files that are not there count as empty. `jobs`: slurm.my_jobs();
    `tail`: read only so many bytes at the end of metrics.jsonl."""
    status: Record = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        file = path / "status.json"
        status = {"time": file.stat().st_mtime, **json.loads(file.read_text())}
    found = read_jsonl(path / "metrics.jsonl", tail)
    known = [line for line in found if is_known(line, "step", "time")]
    lines = [line for line in known if not is_result(line)]
    attempts = attempts_of(events.read(path / "attempts.jsonl"), lines, status)
    name = next((a.job for a in reversed(attempts) if a.job), None) or status.get("job")
    job = job_of(path, name, jobs)
    state = judge(attempts, lines, read_lock(path, time.time()), job)
    if state.word in ("running", "silent") and attempts:
        attempts[-1] = replace(attempts[-1], state="running")
    return History(path, status, lines, results_of(known), attempts, state, job)


def is_result(line: Record) -> bool:
    """Results come from another process, at any time: they are no sign of life of an attempt."""
    return any(key.startswith(PREFIX) for key in line)


def results_of(lines: Sequence[Record]) -> list[Record]:
    """The newest figures of each step."""
    found: dict[int, Record] = {}
    for line in filter(is_result, lines):
        found[line["step"]] = found.get(line["step"], {}) | line
    return [found[step] for step in sorted(found)]


def newest_checkpoint(checkpoints: Path) -> int | None:
    with contextlib.suppress(OSError):
        return step_of((checkpoints / "latest").readlink().name)
    return None


def counting(lines: Sequence[Record], attempts: Sequence[Attempt]) -> list[Record]:
    """The lines that count, by step. A line undoes those of its step and of later ones before it:
    the run has gone back. The start of an attempt does so before it has a line."""
    limits: dict[int, float] = {}
    limit = float("inf")
    for attempt in sorted(attempts, key=lambda attempt: -attempt.number):
        limits[attempt.number] = limit
        if attempt.began:
            limit = min(limit, attempt.first_step)
    count: list[Record] = []
    for line in lines:
        if line["step"] > limits.get(line.get("attempt", -1), float("inf")):
            continue
        while count and count[-1]["step"] >= line["step"]:
            count.pop()
        count.append(line)
    return count
