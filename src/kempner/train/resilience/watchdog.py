"""The watchdog ends a run that hangs, so that it can be started again: the stacks of all threads
are in the logs, and the ranks that do not answer are named.

Every rank has a watchdog thread, which gets a beat at every step. If one is late, the ranks ask
each other who lags (inquiry.py, loaded then). If none comes within the limit, the watchdog records
where its process is, tells rank 0 through the rendezvous store, and ends the process. A frozen or
unreachable rank tells nothing, and is identified by that.

While a run starts there are no steps, and the time to read a checkpoint is unknown. Then it counts
as a beat if any rank has read or written much since the last look: the others may wait for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any

import torch.distributed as dist

from kempner.jobs.ranks import process_group
from kempner.train.resilience.hanging import (
    EXIT_CODE,
    HANG_AT,
    HANG_ORDER,
    STACKS_SIGNAL,
    WRITE_S,
    bytes_moved,
    own_process,
    within,
)

if TYPE_CHECKING:
    from kempner.train.recording.run_directory import Run
    from kempner.train.resilience.inquiry import Inquiry
    from kempner.train.sections import RunConfig

FLOOR_S = 120.0  # no derived limit is shorter
STEPS = 20  # the derived limit in median step times
HANG_PATIENCE_S = 1800.0  # for a save, or the first batch of a validation
TOLD_S = 60.0  # then such a wait is reported, and each time that it has doubled
HANG_ANSWER_S = 5.0  # rank 0 waits for answers, the others for its verdict
ANSWERS_PER_S = 2000  # that the store can serve; rank 0 waits longer in a large world
HANG_MOVES = "hang/moves"
LATE_STEPS, LATE_S = 3, 4.0  # a step is late after so many median steps and seconds
SURE_STEPS = 5  # to know a step's usual time
LOADED_S = 60.0  # of training; later the file system may go away
START_CHECKS = 10  # within the limit, while the run starts
MUCH = 1 << 20  # bytes between two looks; a lock and a log take fewer


class Watchdog:
    """A thread that ends a hung run. Call beat() at every step. The limit is [resilience]
    hang_timeout, or follows from the step times."""

    def __init__(
        self,
        hang_timeout: float | None,
        first_limit: float,
        log: IO[str],
        say: Callable[[str], None],
        on_hang: Callable[[str, list[int], bool], None],
        on_limit: Callable[[float, Sequence[dist.ProcessGroup]], None],
        per_node: int,
    ) -> None:
        """`first_limit`: seconds without a beat while the run starts, and for the first step (which
        may compile for minutes).
        `say(line)` reaches the user. `on_hang(reason, ranks that hang, their hosts are to blame)`
        records the hang, on one rank.
        `on_limit(seconds, groups)` hears the longest time that this watchdog waits, whenever it
        grows; `groups`: of begin(). `per_node`: ranks."""
        self.hang_timeout, self.log, self.say, self.on_hang = hang_timeout, log, say, on_hang
        self._on_limit, self._longest = on_limit, 0.0
        self._groups: Sequence[dist.ProcessGroup] = ()
        self._step_limit = max(first_limit, hang_timeout or 0.0)
        self._patience, self._told = 0.0, TOLD_S  # seconds of a patient() section; 0: outside
        self.is_saving = False
        self._parts = set[str]()  # that have been done once
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        first = self.rank - self.rank % per_node
        size = min(per_node, self.world_size - first)
        # Another rank of this node, which this one can look at; ranks are distributed in blocks.
        self.beside = first + (self.rank - first - 1) % size if size > 1 else -1
        self.process_beside = ""
        self._durations: deque[float] = deque(maxlen=50)
        self.step_time = 0.0  # seconds, the median of the last ones; 0 before the first
        self._beat, self.step, self.starting = time.monotonic(), 0, True
        self._began = self._beat
        self.main = threading.get_ident()
        self._off = threading.Event()
        self._own_store: Any = None
        self._inquiry: Inquiry | None = None
        self._tell_limit(max(self._step_limit, HANG_PATIENCE_S))
        # Its handler is in C and works while the GIL is held.
        faulthandler.register(STACKS_SIGNAL, file=log)
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def begin(self, step: int, groups: Sequence[dist.ProcessGroup]) -> None:
        """End the start-up: the step after `step` comes next. `groups`: those
        created at start-up."""
        self._beat, self.step, self.starting = time.monotonic(), step, False
        self._began, self._groups = self._beat, groups
        self._on_limit(self._longest, groups)

    def beat(self, step: int) -> None:
        """Record that a step is done."""
        now = time.monotonic()
        self._durations.append(now - self._beat)
        self.step_time = statistics.median(self._durations)
        self._beat, self.step = now, step
        if self.hang_timeout is not None:
            self._step_limit = self.hang_timeout
        else:
            self._step_limit = max(FLOOR_S, STEPS * self.step_time)
        self._tell_limit(self._step_limit)

    @property
    def is_patient(self) -> bool:
        """True while something may take longer than a step."""
        return self._patience > 0.0

    @property
    def step_limit(self) -> float:
        """Seconds that a step may take."""
        return self._step_limit

    @property
    def limit(self) -> float:
        """Seconds without a beat after which the run is ended."""
        return max(self._step_limit, self._patience)

    @property
    def age(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self._beat

    @property
    def patience(self) -> float:
        """Seconds for the answers of all ranks to reach the store."""
        return HANG_ANSWER_S + self.world_size / ANSWERS_PER_S

    @property
    def store(self) -> Any:
        """Return the store over a separate connection: the default one may be busy in the very call
        that hangs. Connecting may hang, too, if the process that hosts the store is frozen."""
        if self._own_store is None:
            store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            store.set_timeout(timedelta(seconds=2 * self.patience))
            self._own_store = store
        return self._own_store

    def _tell_limit(self, seconds: float) -> None:
        if seconds > self._longest:
            self._longest = 1.5 * seconds  # do not report a slowly growing limit at every step
            self._on_limit(self._longest, self._groups)

    @contextlib.contextmanager
    def patient(self, seconds: float = HANG_PATIENCE_S, save: bool = False) -> Iterator[None]:
        """Suspend the step's limit for sections that may outlast a step without a beat: a save, a
        validation, a load, the wait for another replica. They do not count in the time of their
        step, and may take `seconds` (0: no longer than a step, but without an inquiry). `save`: all
        ranks save at the same step; one that waits for the others there waits as in a step."""
        began, beat, before = time.monotonic(), self._beat, self._patience
        self._patience = max(before, seconds, self._step_limit)
        self.is_saving = save
        try:
            yield
        finally:
            now = time.monotonic()
            self.is_saving = False
            # Exclude the section from the step's time: move the beat by its length.
            self._beat, self._patience = min(now, beat + now - began), before

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Judge a part of a patient() section as a step, such as a batch of a validation, which
        takes no longer than one. Exempts the first part of each name, which may compile."""
        patience = self._patience
        self._beat = time.monotonic()
        if name in self._parts:
            self._patience = 0.0
        try:
            yield
        finally:
            self._parts.add(name)
            self._beat, self._patience = time.monotonic(), patience

    def stop(self) -> None:
        self._off.set()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(STACKS_SIGNAL)

    def _watch(self) -> None:
        moved = self._look(0, 0)  # connects to the store, too
        within(self.patience, self._meet)
        awake = looked = time.monotonic()
        # Often enough for START_CHECKS looks within a limit of a few seconds.
        while not self._off.wait(min(1.0, self.limit / START_CHECKS)):
            # A timer in C, in case something holds the GIL and stops this loop. It also fires when
            # a suspended job is continued, so it ends the process only if it is the only rank:
            # among several, another rank ends the run.
            alone = self.world_size == 1
            faulthandler.dump_traceback_later(self.limit + 30, exit=alone, file=self.log)
            before, awake = awake, time.monotonic()
            if awake - before > self.limit / 2:
                # This process was suspended (SIGSTOP, scontrol suspend): no other rank is to
                # blame, and all of them may continue.
                print(f"watchdog: stopped for {awake - before:.0f} s", file=self.log)
                self._beat = awake
            if self.starting and awake - looked >= self.limit / START_CHECKS:
                looks, moved = moved[1], self._look(*moved)
                if moved[1] != looks and self.starting:
                    self._beat = time.monotonic()
                looked = awake = time.monotonic()  # the store may have been slow
            if reason := self._inquire():
                self._end(reason)
            if self.age > (limit := self.limit):
                what = f"no step for {limit:.0f} s after step {self.step}"
                if self.starting:
                    what = f"the start has stood still for {limit:.0f} s"
                self._end(what)
            self._tell_wait()

    def _meet(self) -> None:
        """Publish this process and learn its neighbour: later there may be no store."""
        if self.world_size > 1:
            self.store.set(f"{HANG_AT}{self.rank}", json.dumps({"process": own_process()}))
            if self.rank == 0:
                self.store.set(HANG_ORDER, "")
            if self.beside >= 0:
                found = json.loads(self.store.get(f"{HANG_AT}{self.beside}"))
                self.process_beside = found["process"]

    def _look(self, moved: int, looks: int) -> tuple[int, int]:
        """Return the bytes that this rank has moved, and the number of looks of all ranks that
        found much movement; the old numbers if the store does not respond."""
        now = bytes_moved()
        much = int(now - moved > MUCH)
        # add() of 0 only reads: one request both reports this rank and reads all.
        found = within(self.patience, lambda: self.store.add(HANG_MOVES, much))
        return now, looks if found is None else found

    def _inquire(self) -> str:
        """Ask the other ranks if a step is late; returns the reason to end the run now, or ""."""
        late = len(self._durations) >= SURE_STEPS and self.world_size > 1 and not self.starting
        late = late and self.age > LATE_STEPS * self.step_time + LATE_S
        # Also before it is needed: when a step is late, the file system may hang.
        if late or (not self.starting and time.monotonic() - self._began > LOADED_S):
            self._open_inquiry()
        if self._inquiry is None:
            return ""
        if late:
            return self._inquiry.turn()
        self._inquiry.over()
        return ""

    def _tell_wait(self) -> None:
        """Report where the ranks are if a save or a validation takes long: nothing else does."""
        if not self.is_patient or self.starting:
            self._told = TOLD_S
        elif self.rank == 0 and self.age > self._told:
            self._told *= 2
            self._open_inquiry()
            if self._inquiry is not None:
                within(WRITE_S, self._inquiry.tell_wait)

    def _open_inquiry(self) -> None:
        """Load the inquiry within some seconds: the main thread may hang in an import."""

        def load() -> Inquiry:
            from kempner.train.resilience.inquiry import Inquiry

            return Inquiry(self)

        if self._inquiry is None:
            self._inquiry = within(WRITE_S, load)

    def _end(self, what: str) -> None:
        # Stacks first: the rest needs the store and the code, which may hang.
        within(WRITE_S, lambda: self._write_stacks(what))
        self._open_inquiry()
        if self._inquiry is not None:
            self._inquiry.end(what)
        within(WRITE_S, lambda: self.on_hang(what, [], False))
        # Not sys.exit(): the thread that would unwind is the one that hangs.
        os._exit(EXIT_CODE)

    def _write_stacks(self, what: str) -> None:
        print(f"watchdog: {what}", file=self.log)
        faulthandler.dump_traceback(file=self.log, all_threads=True)
        self.log.flush()


def start_watchdog(cfg: RunConfig, run: Run) -> Watchdog:
    """Start the watchdog of a run, once its ranks have met. No group's own timeout may
    fire before it."""
    return Watchdog(
        cfg.resilience.hang_timeout,
        cfg.distributed.start_timeout,
        run.log_file,
        run.announce,
        on_hang=run.hangs,
        on_limit=process_group.set_timeout,
        per_node=run.world.per_node,
    )
