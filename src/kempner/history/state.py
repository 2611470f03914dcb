"""What a run directory tells of its run: its steps, its attempts, and where its wall time went. No
torch.

A run that still goes, was killed in the middle of a line, or never got to its first step has a
history too: what is missing is None, and nothing here raises because of it.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from kempner.files import read_jsonl
from kempner.history.attempts import (
    Attempt,
    Record,
    attempts_of,
    is_known,
    newest_checkpoint,
)
from kempner.history.wall_time import Life, life_of


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

    @cached_property
    def life(self) -> Life:
        return life_of(self.attempts, self.lines, newest_checkpoint(self.path / "checkpoints"))

    @property
    def step(self) -> int:
        """Steps done, as far as the records tell: status.json of a running attempt is older."""
        newest = self.attempts[-1].last_step if self.attempts else 0
        last = self.losses[-1]["step"] if self.losses else 0
        return max(newest, last)

    @property
    def state(self) -> str:
        """As in status.json, or what no status tells: the last attempt has crashed, hung, or was
        killed, and the run may be started again."""
        state = str(self.status.get("state", "unknown"))
        last = self.attempts[-1].state if self.attempts else ""
        newer = last in ("crashed", "hung") and state != "failed"
        return last if newer or (last, state) == ("killed", "running") else state


def load_history(path: Path) -> History:
    """Read a run directory; files that are not there count as empty."""
    status = {}
    with contextlib.suppress(OSError, ValueError):
        status = json.loads((path / "status.json").read_text())
    lines = [line for line in read_jsonl(path / "metrics.jsonl") if is_known(line, "step", "time")]
    events = [e for e in read_jsonl(path / "attempts.jsonl") if is_known(e, "time")]
    return History(path, status, lines, attempts_of(events, lines, status))


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
