"""The run directory of a program: its lock, its records, and how far it has come. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

from kempner import process
from kempner.background import Background
from kempner.code import Code
from kempner.files import LineFile, write_atomic
from kempner.history.events import End, Event, FirstStep, Start
from kempner.program.copy import Copy
from kempner.program.options import Options
from kempner.program.verdict import State
from kempner.program.watch import Watch, is_numbered, number_in
from kempner.resilience.lock import RunLock
from kempner.run_records import RunRecords, count_attempts

LINE_S = 10.0  # between two lines of metrics.jsonl
ALIVE_S = 60.0  # the same, where the step is not known
FLUSH_S = 30.0  # for the last writes


class Book:
    """What rank 0 records of an attempt, as the trainer does (run_directory.py), so that all that
    reads a run directory reads this one, too."""

    def __init__(self, options: Options) -> None:
        """Raises ConfigError when another job works there, or the copy of the code is gone, OSError
        when it cannot be written."""
        self._copy = Copy.given()
        self._options, run_dir = options, options.run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(run_dir, "--run-dir=runs/NAME")
        self._background = Background(lambda text: print(f"kempner: {text}", file=sys.stderr))
        self.attempt = count_attempts(run_dir)
        (run_dir / "logs" / f"attempt-{self.attempt}").mkdir(parents=True)
        self._records = RunRecords(run_dir, self.attempt, self._background)
        self._records.hold_reserve()
        self._metrics = LineFile(run_dir / "metrics.jsonl")
        self._file = run_dir / "progress"
        self._progress = -1
        with contextlib.suppress(OSError, ValueError):
            self._progress = int(self._file.read_text())
        self._first = self._progress
        self.step = max(self._progress, 0) if is_numbered(options.checkpoints) else 0
        self._line = (time.time(), self.step)  # the last one: when, and its step
        self._stepped = False

    def start(self, hosts: list[str]) -> list[str]:
        """Returns what has changed in the program's code since the last attempt."""
        batch_began = float(os.environ.get("KEMPNER_BATCH_BEGAN") or 0) or None
        copy = self._copy
        code = copy.code() if copy else Code("", "", ())
        changed = self._records.other_code(code, copy.root) if copy else []
        self.event(
            Start(
                **self.head(),
                nodes=tuple(dict.fromkeys(hosts)),
                world_size=len(hosts),
                process_began=process.began(),
                batch_began=batch_began,
                code=code.hash,
                commit=code.commit,
                changed=tuple(changed),
            )
        )
        self._records.status("running", "", self.step, None)
        return changed

    def head(self) -> dict[str, Any]:
        return self._records.head(self.step)

    def event(self, event: Event) -> None:
        self._records.event(event)

    # --- progress ---

    @property
    def progressed(self) -> bool:
        """In this attempt."""
        return self._stepped or self._progress > self._first

    def commit(self, value: int) -> None:
        """Progress that a resume does not undo; the batch script reads it."""
        if value > self._progress:
            self._progress = value
            self._background.put(lambda: write_atomic(self._file, f"{value}\n"), self._file)

    def at_checkpoint(self, watch: Watch) -> None:
        """The newest one is complete, or there is none yet."""
        if watch.count:
            number = number_in(watch.complete.path, self._options.checkpoints)
            self.commit(self._first + watch.count if number is None else number)
            if number is not None and self._options.steps is None:
                self.at_step(number)

    def at_step(self, step: int | None) -> None:
        if step is None or step == self.step:
            return
        self.step = step
        if not self._stepped:
            self._stepped = True
            self.event(FirstStep(**self.head()))
        if not self._options.checkpoints:
            self.commit(step)

    def at_warning(self) -> None:
        """Where neither steps nor checkpoints are known, that it ran so far is progress."""
        if not (self._options.checkpoints or self._stepped):
            self.commit(self._progress + 1)

    def write_line(self, alive: bool) -> bool:
        """A sign of life in metrics.jsonl, for status.sh and report.py, when it is time for one."""
        now, (at, step) = time.time(), self._line
        moved = self.step != step
        if now - at < (LINE_S if moved else ALIVE_S) or not (moved or alive):
            return False
        record: dict[str, Any] = {"step": self.step, "time": now, "attempt": self.attempt}
        if self.step > step:
            record["step_time"] = (now - at) / (self.step - step)
        self._line = (now, self.step)
        text = json.dumps(record)
        self._background.put(lambda: self._metrics.write(text), self._options.run_dir)
        return True

    # --- the end ---

    def end(self, state: State, reason: str) -> None:
        """`state` is empty after a crash or a hang: the batch script decides."""
        if state:
            self._records.status(state, reason, self.step, None)
            self.event(End(**self.head(), state=state, reason=reason))
        self._records.release_reserve()

    def close(self) -> None:
        """Wait for the last writes."""
        if self._background.flush(FLUSH_S):
            self._lock.release()
