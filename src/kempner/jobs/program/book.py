"""The run directory of a program: its lock, its records, and its progress. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from kempner.jobs import this_job
from kempner.jobs.code import CodeVersion
from kempner.jobs.lock import RunLock
from kempner.jobs.program.copy import CodeCopy
from kempner.jobs.program.options import Options, check_run_dir
from kempner.jobs.program.output import OutputSteps
from kempner.jobs.program.verdict import EndState
from kempner.jobs.program.watch import CheckpointWatch
from kempner.jobs.records.event_reader import of_kind, read_events
from kempner.jobs.records.events import End, Event, FirstStep, StartEvent
from kempner.jobs.records.run_records import RunRecords, count_attempts
from kempner.jobs.system import process
from kempner.jobs.system.background import Background
from kempner.jobs.system.directories import Kind, mark_directory
from kempner.jobs.system.files import LineFile, write_atomic

METRICS_LINE_S = 10.0  # between two lines of metrics.jsonl
ALIVE_S = 60.0  # the same while the step does not change
BOOK_FLUSH_S = 30.0  # for the last writes


def command_has_trained(events: Sequence[Event], command: str) -> bool:
    """Return whether an attempt with this command, given by its hash, has done a step, saved, or
    run until it was asked to leave."""
    own = {start.attempt_id for start in of_kind(events, StartEvent) if start.command == command}
    exits = (end for end in of_kind(events, End) if end.state == "interrupted")
    return any(event.attempt_id in own for event in (*of_kind(events, FirstStep), *exits))


def is_done(options: Options) -> bool:
    """Return whether an earlier start of this job has completed this command: a user's script may
    have several, and all of them run again after a requeue."""
    events = read_events(options.run_dir / "attempts.jsonl")
    mine = hash_of(options.command)
    own = {start.attempt_id for start in of_kind(events, StartEvent) if start.command == mine}
    job, now = this_job.job_name(), int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    return any(
        end.state == "done" and end.attempt_id in own and end.job == job and end.restart < now
        for end in of_kind(events, End)
    )


def hash_of(command: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(command).encode(errors="replace")).hexdigest()[:12]


class Book:
    """Rank 0's records of an attempt, in the trainer's format (run_directory.py), so that all
    readers of run directories can read them."""

    def __init__(self, options: Options, on_lost: Callable[[str], None] | None = None) -> None:
        """`on_lost(why)`: called if another process has taken the run directory, before this one
        exits. Raises ConfigError if another job works there or the copy of the code is gone, and
        OSError if the directory cannot be written."""
        # Checks that may refuse, then the mark, then the lock: never write to others' directories.
        self._copy = CodeCopy.given()
        self._options, run_dir = options, options.run_dir
        check_run_dir(run_dir)
        mark_directory(run_dir, Kind.PROGRAM)
        self._lock = RunLock(run_dir, "--run-dir=runs/NAME", on_lost)
        self._background = Background(lambda text: print(f"kempner: {text}", file=sys.stderr))
        self.attempt = count_attempts(run_dir)
        (run_dir / "logs" / f"attempt-{self.attempt}").mkdir(parents=True)
        self._records = RunRecords(run_dir, self.attempt, self._background)
        self._records.hold_reserve()
        self._metrics = LineFile(run_dir / "metrics.jsonl")
        self._file = run_dir / "progress"
        self._progress = -1  # grows with each new checkpoint or, without checkpoints, each step
        with contextlib.suppress(OSError, ValueError, IndexError):
            self._progress = int(self._file.read_text().split()[0])
        self._first = self._progress
        self.step: int | None = None
        self._resumes: int | None = None  # step of the newest checkpoint at the start
        before = read_events(run_dir / "attempts.jsonl")
        self._counts_from_0 = any(event.printed == 0 for event in of_kind(before, FirstStep))
        self._command = hash_of(options.command)
        self._has_trained = command_has_trained(before, self._command)
        self._line = (time.time(), 0)  # time and step of the last line, or of the first step
        self._first_step: FirstStep | None = None
        self._printed: OutputSteps | None = None  # the first steps, until FirstStep is recorded

    def start(self, hosts: list[str], newest: int | None) -> list[str]:
        """Record the start. Returns the changes in the program's code since the last attempt.
        `newest`: the number in the name of the newest checkpoint. The step from which the program
        continues is known only once it prints a step."""
        self._resumes = newest
        self.step = newest if self._options.steps is None else None
        # The first metrics line measures its step time from here.
        self._line = (time.time(), newest or 0)
        batch_began = float(os.environ.get("KEMPNER_BATCH_BEGAN") or 0) or None
        copy = self._copy
        code = copy.code() if copy else CodeVersion("", "", ())
        changed = self._records.other_code(code, copy.root) if copy else []
        self.event(
            StartEvent(
                **self.head() | {"step": None},
                nodes=tuple(dict.fromkeys(hosts)),
                world_size=len(hosts),
                process_began=process.start_time(),
                batch_began=batch_began,
                code=code.hash,
                command=self._command,
                commit=code.commit,
                changed=tuple(changed),
            )
        )
        self._records.status("running", "", self.step, None)
        return changed

    def head(self) -> dict[str, Any]:
        return self._records.head(self.step)

    def event(self, event: Event) -> None:
        self._end_first_step()
        self._records.event(event)

    # --- progress ---

    @property
    def progressed(self) -> bool:
        """True after progress in this attempt, or in an earlier one with the same command."""
        here = self._first_step or self._printed or self._progress > self._first
        return bool(here) or self._has_trained

    def commit(self, value: int, step: int | None) -> None:
        """Record progress that a resume does not undo. `step`: of the newest checkpoint."""
        if value > self._progress:
            self._progress = value
            text = f"{value}\n" if step is None else f"{value} {step}\n"
            # Replaced atomically: the batch script counts attempts without progress by it.
            self._background.put(lambda: write_atomic(self._file, text), self._file)

    def at_checkpoint(self, watch: CheckpointWatch) -> None:
        """Record the completion of a checkpoint as progress, whatever the number in its name."""
        if watch.count:
            self.commit(self._first + watch.count, watch.number)
            if self._printed is None:
                self.step = watch.number
                if self._first_step is None:
                    self._record_first_step(time.time(), None, None)

    def at_steps(self, steps: OutputSteps) -> None:
        """Record the steps that the program prints or writes to its heartbeat."""
        self.step = steps.last
        if self._printed is None:
            self._printed = steps
        if self._printed.every is None and steps.every is not None:
            self._printed = self._printed._replace(every=steps.every)
        if self._printed.every is not None:
            self._end_first_step()
        if not self._options.checkpoints:
            self.commit(steps.last, None)

    def _end_first_step(self) -> None:
        """Record the first step that the program has printed. The step at which it resumed follows
        from the distance to the second printed step: `step 45, step 50` means 40, unless it counts
        from 0. One step alone is not enough, unless it is step 1."""
        steps = self._printed
        if steps is None or (self._first_step and self._first_step.printed is not None):
            return
        every = 0 if self._counts_from_0 or steps.first == 0 else steps.every
        if every is None and steps.first > 1:
            self._record_first_step(steps.at, None, steps.first)
            return
        began = max(0, steps.first - (1 if every is None else every))
        newest = self._resumes
        # The checkpoint's number is more reliable than the distance between two printed steps.
        if newest is not None and (began <= newest or steps.beats) and newest <= steps.first:
            began = newest
        self._record_first_step(steps.at, began, steps.first)

    def _record_first_step(self, at: float, began: int | None, printed: int | None) -> None:
        head = self.head() | {"time": round(at, 3)}
        self._line = (at, (self.step if printed is None else printed) or 0)
        self._first_step = FirstStep(**head, began=began, printed=printed)
        self._records.event(self._first_step)

    def at_warning(self) -> None:
        """Record progress if neither steps nor checkpoints are known: the program ran this far."""
        if not (self._options.checkpoints or self._printed):
            self.commit(self._progress + 1, None)

    def write_line(self, alive: bool) -> bool:
        """Write a line to metrics.jsonl if one is due, as a sign of life for status.sh and
        report.py. Returns whether it did."""
        now, (at, step), here = time.time(), self._line, self.step or 0
        moved = here != step
        # A hung program must get no line: status.sh treats each as a sign of life.
        if now - at < (METRICS_LINE_S if moved else ALIVE_S) or not (moved or alive):
            return False
        record: dict[str, Any] = {"step": here, "time": now, "attempt": self.attempt}
        if here > step:
            record["step_time"] = (now - at) / (here - step)
        self._line = (now, here)
        text = json.dumps(record)
        self._background.put(lambda: self._metrics.write(text), self._options.run_dir)
        return True

    # --- the end ---

    def end(self, state: EndState, reason: str) -> None:
        """Record the end. `state`: "" after a crash or a hang, when the batch script decides."""
        self._end_first_step()
        if state:
            self._records.status(state, reason, self.step, None)
            self.event(End(**self.head(), state=state, reason=reason))
        self._records.release_reserve()

    def close(self) -> None:
        """Wait for the last writes."""
        # Pending writes may still happen: then keep the lock, which missed beats free later.
        if self._background.flush(BOOK_FLUSH_S):
            self._lock.release()
