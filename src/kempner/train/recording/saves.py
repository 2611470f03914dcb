"""Saves as seen by the training loop: when the clock requests one, and what each costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from kempner.checkpoint.checkpointer import Checkpointer
from kempner.train.progress import Progress
from kempner.train.recording.recorder import Recorder
from kempner.train.recording.run_directory import Run
from kempner.train.resilience.requests import ASKS_TIMED_SAVE

if TYPE_CHECKING:
    from kempner.checkpoint.timer import SaveTimer

SLOW_WRITE = 2.0  # times the mean write of the other ranks, plus WAIT_S
WAIT_S = 1.0  # a shorter wait for the previous save is not reported


class _Begun(NamedTuple):
    step: int
    stall: float  # seconds that the loop stood still, including the wait
    wait: float  # of these, for the previous save
    quiet: float  # seconds of a step without a save


class Saves:
    """A run's saves and their lines in metrics.jsonl."""

    def __init__(
        self,
        run: Run,
        checkpointer: Checkpointer,
        recorder: Recorder,
        patient: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`patient`: suspends the watchdog."""
        self.checkpointer, self._recorder, self._patient = checkpointer, recorder, patient
        self._clock, self._say, self._step = recorder.clock, run.announce, 0
        self._run = run
        self._timer: SaveTimer | None = None
        if isinstance(run.cfg.checkpoint.interval, str):
            from kempner.checkpoint.timer import open_timer

            seconds, size = run.cfg.checkpoint.seconds, run.world.size
            first = run.world.rank == 0
            self._timer = open_timer(seconds, first, run.dir, run.attempt, size, run.announce)
        self._before = self._clock.spent()
        self._begun: _Begun | None = None
        self._flight: list[float] = []  # seconds of each step that ran while this save was written
        self._quiet, self._said = 0.0, WAIT_S

    def flags(self) -> dict[str, float]:
        """Return the flag for the step's all-reduce, if saves go by the clock. No save is due while
        one is in flight."""
        if self._timer is None:
            return {}
        due = self.checkpointer.in_flight is None and self._timer.is_due()
        return {ASKS_TIMED_SAVE: float(due)}

    def save(self, progress: Progress) -> None:
        """Save now, unless this step is already saved. Waits for a save in flight: there are never
        two at once, so `latest` only moves forward."""
        step = self._step = progress.step
        if step in (self.checkpointer.saved_step, self.checkpointer.in_flight):
            return
        if self._timer is not None:
            self._timer.restart()
        with self._clock.part("checkpoint"), self._patient():
            began = time.perf_counter()
            self.checkpointer.wait()
            wait = time.perf_counter() - began
            self.see()
            self.checkpointer.save(step, progress.record())
        if wait > self._said:
            # Repeat the message only if waits become clearly longer.
            self._said = 1.2 * wait
            self._say(
                f"WARNING: the save of step {step} waited {wait:.1f} s for the previous one: saves "
                "take longer than checkpoint.interval; give a longer one, or a time, or auto"
            )
        self._begun = _Begun(step, self._clock.last["checkpoint"], wait, self._quiet)

    def after_step(self, step: int, step_time: float) -> None:
        """Check after each step whether the save in flight has ended. `step_time`: the usual
        seconds of a step."""
        self._step, self._quiet, before = step, step_time, self._before
        self._before = now = self._clock.spent()
        # Only time in steps shows how much the write slows them down.
        apart = ("checkpoint", "eval")
        spent = {key: now.get(key, 0.0) - before.get(key, 0.0) for key in ("total", *apart)}
        self.checkpointer.poll(step_time)
        if self._begun is not None:
            self._flight.append(spent["total"] - sum(spent[key] for key in apart))
            self.see()

    def see(self) -> None:
        """Record the save in flight, if it has ended."""
        if self._begun is None or self.checkpointer.in_flight is not None:
            return
        begun, self._begun, flight, self._flight = self._begun, None, self._flight, []
        seconds = self.checkpointer.seconds
        if seconds is None or self.checkpointer.saved_step != begun.step:  # it has failed
            return
        self._name_slow_rank(begun.step)
        stall = max(begun.stall - begun.wait, self.checkpointer.stall)  # of the slowest rank
        self._recorder.write({
            "step": self._step,
            "saved_step": begun.step,
            "save_stall": begun.wait + stall,
            "save_wait": begun.wait,
            "save_drain": max(0.0, seconds - stall),
            "save_steps": len(flight),
            "save_step_mean": math.fsum(flight) / len(flight) if flight else None,
            "save_step_max": max(flight, default=None),
            "quiet_step_time": begun.quiet,
        })  # fmt: skip
        if self._timer is not None:
            # Step by step: a fast step does not make up for the cost of a slow one.
            slower = math.fsum(max(0.0, seconds - begun.quiet) for seconds in flight)
            self._timer.learn(begun.stall - begun.wait + slower)

    def _name_slow_rank(self, step: int) -> None:
        """Name the rank whose part of a save took much longer than the others'."""
        if self._run.world.rank:
            return  # only rank 0 knows all hosts
        rank, seconds, others = self.checkpointer.slowest_write or (0, 0.0, 0.0)
        if seconds > max(SLOW_WRITE * others, others + WAIT_S):
            from kempner.train.resilience.straggler_report import describe_slow_save

            self._say(describe_slow_save(step, self._run.hosts[rank], rank, seconds, others))
