"""What a run directory tells of its run: the records of its steps and of its attempts. No torch.

A run that still goes, was killed in the middle of a line, or never got to its first step has a
history too: what is missing is None, and nothing here raises because of it.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Attempt:
    """One start of the run. Times are unix seconds."""

    number: int
    job: str | None
    hosts: tuple[str, ...]
    world_size: int
    began: float | None  # the state was loaded and the first step came; None: it never got there
    first_step: int  # steps done when it began
    ended: float | None  # its last sign of life
    last_step: int
    state: str  # how it ended: running, done, interrupted, stopped, failed, crashed, lost
    reason: str


@dataclass(frozen=True)
class History:
    """`losses` and `validations` are the lines of metrics.jsonl that stand, by step; `lines` has
    those too that a later attempt has done again."""

    path: Path
    status: Record
    lines: list[Record] = field(repr=False)
    attempts: list[Attempt]

    @cached_property
    def losses(self) -> list[Record]:
        return standing([line for line in self.lines if "loss" in line], self.attempts)

    @cached_property
    def validations(self) -> list[Record]:
        return standing([line for line in self.lines if "val_loss" in line], self.attempts)

    @property
    def step(self) -> int:
        """Steps done, as far as the records tell: status.json of a running attempt is older."""
        newest = self.attempts[-1].last_step if self.attempts else 0
        last = self.losses[-1]["step"] if self.losses else 0
        return max(newest, last)

    @property
    def state(self) -> str:
        """As in status.json, or "crashed", which no status tells: the run may be started again."""
        state = str(self.status.get("state", "unknown"))
        crashed = self.attempts and self.attempts[-1].state == "crashed"
        return "crashed" if crashed and state != "failed" else state


def load(path: Path) -> History:
    """Read a run directory; files that are not there count as empty."""
    status = {}
    with contextlib.suppress(OSError, ValueError):
        status = json.loads((path / "status.json").read_text())
    lines = [line for line in read_lines(path / "metrics.jsonl") if "step" in line]
    return History(
        path, status, lines, _attempts(read_lines(path / "attempts.jsonl"), lines, status)
    )


def read_lines(path: Path) -> list[Record]:
    """The objects of a JSONL file in order, without the lines that a crash has torn."""
    found = []
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                found.append(record)
    return found


def standing(lines: list[Record], attempts: list[Attempt]) -> list[Record]:
    """The lines that count, by step. A line undoes those of its step and of later ones before it:
    the run has gone back. The start of an attempt does so before it has a line."""
    limits = {
        attempt.number: min(
            (
                later.first_step
                for later in attempts
                if later.number > attempt.number and later.began
            ),
            default=None,
        )
        for attempt in attempts
    }
    stand: list[Record] = []
    for line in lines:
        limit = limits.get(line.get("attempt", -1))
        if limit is not None and line["step"] > limit:
            continue
        while stand and stand[-1]["step"] >= line["step"]:
            stand.pop()
        stand.append(line)
    return stand


def _attempts(events: list[Record], lines: list[Record], status: Record) -> list[Attempt]:
    """The attempts by number, from attempts.jsonl and, for one that was killed without a word, from
    the lines it has written."""
    found: dict[int, Attempt] = {}
    for event in events:
        number = event.get("attempt", 0)
        at = found.get(number) or _unknown(event)
        if event.get("event") == "start":
            found[number] = replace(
                at,
                hosts=tuple(event.get("nodes", ())),
                world_size=event.get("world_size", 0),
                began=event.get("time"),
                first_step=event.get("step", 0),
                last_step=event.get("step", 0),
            )
        elif at.state == "lost":  # when several ranks crash, the first has the cause
            found[number] = replace(
                at,
                ended=event.get("time"),
                last_step=event.get("step", 0),
                state=event.get("state", "?"),
                reason=event.get("reason", ""),
            )
    for line in lines:
        last = found.get(line.get("attempt", -1))
        if last is not None and last.state == "lost":
            step = max(last.last_step, line["step"])
            found[last.number] = replace(last, last_step=step, ended=line.get("time"))
    running = status.get("attempt") if status.get("state") == "running" else None
    if running in found and found[running].state == "lost":
        found[running] = replace(found[running], state="running")
    return [found[number] for number in sorted(found)]


def _unknown(event: Record) -> Attempt:
    job, step = event.get("job"), event.get("step", 0)
    return Attempt(event.get("attempt", 0), job, (), 0, None, step, None, step, "lost", "")
