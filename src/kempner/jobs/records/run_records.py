"""Records of a run by rank 0, and of its end by any rank: status.json and attempts.jsonl."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kempner.jobs.code import REPOSITORY, CodeVersion
from kempner.jobs.records import events
from kempner.jobs.records.events import Event, StartEvent
from kempner.jobs.system.background import Background
from kempner.jobs.system.files import FULL, write_atomic
from kempner.jobs.this_job import job_name

RESERVE = 1 << 16  # bytes; status.json and a few events need far less


class RunRecords:
    """Records of a run, written through `background`. On a full disk the reserve, a file written at
    the start, makes room: without a record of its end, a failed run would be requeued."""

    def __init__(
        self, run_dir: Path, attempt: int, background: Background, first: bool = True
    ) -> None:
        """`first`: these are rank 0's records."""
        self.attempt, self._background = attempt, background
        self._status, self._all = run_dir / "status.json", run_dir / "attempts.jsonl"
        self._events = self._all if first else events.own_file(self._all)
        self._reserve = run_dir / ".reserve"

    def hold_reserve(self) -> None:
        """Write the reserve. Raises OSError."""
        write_atomic(self._reserve, os.urandom(RESERVE))

    def release_reserve(self) -> None:
        self._background.put(lambda: self._reserve.unlink(missing_ok=True), self._reserve)

    def head(self, step: int | None) -> dict[str, Any]:
        """Return the fields that all events have."""
        return {
            "attempt": self.attempt,
            "time": round(time.time(), 3),
            "job": job_name(),
            "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            "attempt_id": os.environ.get("KEMPNER_ATTEMPT_ID"),
            "step": step,
        }

    def other_code(self, now: CodeVersion, root: Path = REPOSITORY) -> list[str]:
        """Describe any differences from the code of the last start. `root`: the current code."""
        from kempner.jobs.records import event_reader

        for last in event_reader.read_kind(self._all, StartEvent)[-1:]:
            from kempner.jobs.code_changes import code_differences

            before = CodeVersion(last.code, last.commit, last.versions)
            return [text] if (text := code_differences(before, now, root)) else []
        return []

    def event(self, event: Event) -> None:
        self._put(lambda: events.append_event(self._events, event), self._events)

    def last_event(self, event: Event) -> None:
        """Append the event of a process that has lost the run: ahead of pending writes, and to a
        file that another rank 0 does not write. Raises OSError."""
        # Not through the background: this process exits without waiting for its queue.
        events.append_event(events.own_file(self._all), event)

    def status(self, state: str, reason: str, step: int | None, max_steps: int | None) -> None:
        """Write status.json, which the batch script and run_history.py read. `step`,
        `max_steps`: None if unknown."""
        head = self.head(step)
        del head["restart"]
        limit = {} if max_steps is None else {"max_steps": max_steps}
        record = {"state": state, **limit, "reason": reason, **head}
        self._put(lambda: write_atomic(self._status, json.dumps(record) + "\n"), self._status)

    def _put(self, write: Callable[[], None], path: Path) -> None:
        def with_reserve() -> None:
            try:
                write()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                # The freed blocks make room for the second try.
                self._reserve.unlink(missing_ok=True)
                write()

        self._background.put(with_reserve, path)


def count_attempts(run_dir: Path) -> int:
    """Count the attempts of this run so far by its logs, even those that died before a step."""
    numbers = []
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(run_dir / "logs")
        numbers = [int(n[8:]) for n in names if n.startswith("attempt-") and n[8:].isdigit()]
    return max(numbers, default=-1) + 1
