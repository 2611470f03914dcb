"""The watchdog ends a run that hangs, so that it can be started again: the stacks of all threads
are in the logs, and the ranks that do not answer are named.

Every rank has a thread of its own for this. It sees a beat at every step; when none has come within
the limit it writes down where its process is, tells rank 0 through the rendezvous store, and ends
the process. A frozen or unreachable rank tells nothing: that is how it is found. Each rank sends
one request, whatever the world's size; rank 0 alone reads what all of them said.

While a run starts no step comes, and how long a checkpoint takes to read is not known. Then it is a
beat when some rank has read or written much since the last look: the others may wait for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from kempner.jobs.ranks import process_group

if TYPE_CHECKING:
    from kempner.train.recording.run_directory import Run
    from kempner.train.sections import RunConfig

FLOOR_S = 120.0  # no derived limit is shorter
STEPS = 20  # the derived limit in median step times
HANG_PATIENCE_S = 1800.0  # for a save or a validation
HANG_ANSWER_S = 5.0  # that rank 0 waits for the others' answers, and they for its verdict
ANSWERS_PER_S = 2000  # that the store takes; rank 0 waits longer in a large world
WRITE_S = 5.0  # for the logs of a hang: the file system may be what hangs
EXIT_CODE = 70
HANG_ANSWERS, HANG_VERDICT, HANG_MOVES = "hang/answers", "hang/verdict", "hang/moves"
START_CHECKS = 10  # within the limit, while the run starts
MUCH = 1 << 20  # bytes between two looks; a lock and a log take fewer
NAMED_HUNG_RANKS = 16  # ranks in a message

_T = TypeVar("_T")


class Watchdog:
    """A thread that ends a hung run. Call beat() at every step. The limit is [resilience]
    hang_timeout, or follows from the step times."""

    def __init__(
        self,
        hang_timeout: float | None,
        first_limit: float,
        log: IO[str],
        on_hang: Callable[[str, list[int]], None],
        on_limit: Callable[[float, Sequence[dist.ProcessGroup]], None],
    ) -> None:
        """`first_limit`: seconds without a beat while the run starts, and for the first step (which
        may compile for minutes).
        `on_hang(reason, ranks that do not answer)` records the hang, on one rank.
        `on_limit(seconds, groups)` hears the longest time that this watchdog waits, whenever it
        grows; `groups`: of begin()."""
        self.hang_timeout, self._log, self._on_hang = hang_timeout, log, on_hang
        self._on_limit, self._longest = on_limit, 0.0
        self._groups: Sequence[dist.ProcessGroup] = ()
        self._limit = max(first_limit, hang_timeout or 0.0)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._durations: deque[float] = deque(maxlen=50)
        self._beat, self._step, self._starting = time.monotonic(), 0, True
        self._main = threading.get_ident()
        self._off = threading.Event()
        self._own_store: Any = None
        self._tell_limit(max(self._limit, HANG_PATIENCE_S))
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def begin(self, step: int, groups: Sequence[dist.ProcessGroup]) -> None:
        """End the start: the step after `step` comes next. `groups`: those made in the start."""
        self._beat, self._step, self._starting = time.monotonic(), step, False
        self._groups = groups
        self._on_limit(self._longest, groups)

    def beat(self, step: int) -> None:
        """Record that a step is done."""
        now = time.monotonic()
        self._durations.append(now - self._beat)
        self._beat, self._step = now, step
        if self.hang_timeout is not None:
            self._limit = self.hang_timeout
        else:
            self._limit = max(FLOOR_S, STEPS * self.step_time)
        self._tell_limit(self._limit)

    @property
    def step_time(self) -> float:
        """Seconds of a step, the median of the last ones; 0 before the first."""
        return statistics.median(self._durations) if self._durations else 0.0

    @property
    def _patience(self) -> float:
        """Seconds for the answers of all ranks to reach the store."""
        return HANG_ANSWER_S + self._world_size / ANSWERS_PER_S

    @property
    def _store(self) -> Any:
        """Return the store over a connection of its own: the default one may be busy in the very
        call that hangs. Connecting may take as long, if the process that has the store is
        frozen."""
        if self._own_store is None:
            store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            store.set_timeout(timedelta(seconds=2 * self._patience))
            self._own_store = store
        return self._own_store

    def _tell_limit(self, seconds: float) -> None:
        if seconds > self._longest:
            self._longest = 1.5 * seconds  # a limit that grows slowly is not told at every step
            self._on_limit(self._longest, self._groups)

    @contextlib.contextmanager
    def patient(self, seconds: float = HANG_PATIENCE_S) -> Iterator[None]:
        """Suspend the step's limit for sections that may outlast a step without a beat: a save, a
        validation, a load, the wait for another replica. They do not count into the time of their
        step, and may take `seconds`, where that is longer than a step may."""
        began, limit = time.monotonic(), self._limit
        self._limit = max(limit, seconds)
        try:
            yield
        finally:
            now = time.monotonic()
            # The section is taken out of the step's time: the beat moves by as much.
            self._beat, self._limit = min(now, self._beat + now - began), limit

    def stop(self) -> None:
        self._off.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        moved = self._look(0, 0)  # connects to the store, too
        awake = looked = time.monotonic()
        while not self._off.wait(min(1.0, self._limit / START_CHECKS)):
            # A timer in C, in case something holds the GIL: then this loop would not run.
            faulthandler.dump_traceback_later(self._limit + 30, exit=True, file=self._log)
            before, awake = awake, time.monotonic()
            if awake - before > self._limit / 2:
                # This process was suspended (SIGSTOP, scontrol suspend): no other rank is to
                # blame, and all of them may continue.
                print(f"watchdog: stopped for {awake - before:.0f} s", file=self._log)
                self._beat = awake
            if self._starting and awake - looked >= self._limit / START_CHECKS:
                looks, moved = moved[1], self._look(*moved)
                if moved[1] != looks and self._starting:
                    self._beat = time.monotonic()
                looked = awake = time.monotonic()  # the store may have taken its time
            if time.monotonic() - self._beat > self._limit:
                self._end()

    def _look(self, moved: int, looks: int) -> tuple[int, int]:
        """Return the bytes that this rank has moved, and the number of looks, of all ranks, that
        have found one to move much; the old numbers if the store does not respond."""
        now = _bytes_moved()
        much = int(now - moved > MUCH)
        found = self._within(self._patience, lambda: self._store.add(HANG_MOVES, much))
        return now, looks if found is None else found

    def _end(self) -> None:
        """Write the stacks, collect the answers, record the hang, exit. Each part that may block (a
        store in a frozen process, a file system that hangs) gets a bounded time."""
        place = self._place()
        what = f"no step for {self._limit:.0f} s after step {self._step}"
        if self._starting:
            what = f"the start has stood still for {self._limit:.0f} s"
        # The stacks first: what follows needs the store, which may be what hangs.
        self._within(WRITE_S, lambda: self._write_stacks(what))
        answers = self._within(2 * self._patience + 1, lambda: self._ask(place))
        self._within(WRITE_S, lambda: self._record(what, answers))
        os._exit(EXIT_CODE)

    @staticmethod
    def _within(seconds: float, act: Callable[[], _T]) -> _T | None:
        """Return the result of `act`, None if it takes longer or fails."""
        results: list[_T] = []

        def run() -> None:
            with contextlib.suppress(Exception):
                results.append(act())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        return results[0] if results else None

    def _write_stacks(self, what: str) -> None:
        print(f"watchdog: {what}", file=self._log)
        faulthandler.dump_traceback(file=self._log, all_threads=True)
        self._dump_nccl()
        self._log.flush()

    def _ask(self, place: str) -> dict[int, str]:
        """Return every answer that came, by rank, on rank 0. The others answer, and wait until rank
        0 has recorded the hang: their exit would make srun end it. Raises if the store does not
        respond."""
        answers = {self._rank: place}
        if self._rank:
            self._store.append(HANG_ANSWERS, f"{self._rank} {place}\n")
            with contextlib.suppress(RuntimeError):
                self._store.wait([HANG_VERDICT])
            return answers
        self._store.append(HANG_ANSWERS, "")
        deadline = time.monotonic() + self._patience
        while len(answers) < self._world_size and time.monotonic() < deadline:
            time.sleep(0.2)
            for line in self._store.get(HANG_ANSWERS).decode().splitlines():
                rank, _, answer = line.partition(" ")
                answers[int(rank)] = answer
        return answers

    def _record(self, what: str, answers: dict[int, str] | None) -> None:
        """Record the hang on rank 0; on rank 1 if nothing is heard of rank 0 and its store."""
        if answers is None:
            silent = [0]
        elif self._rank:
            return
        else:
            silent = [rank for rank in range(self._world_size) if rank not in answers]
        for line in self._lines(answers or {self._rank: self._place()}, silent):
            print(f"watchdog: {line}", file=self._log)
        if self._rank == 0 or (answers is None and self._rank == 1):
            who = f"; ranks that do not answer: {_named(silent)}" if silent else ""
            self._on_hang(f"{what}{who}", silent)
        if self._rank == 0:
            self._store.set(HANG_VERDICT, "")

    def _lines(self, answers: dict[int, str], silent: list[int]) -> list[str]:
        """Describe where the ranks are: one line for each place in the code, so that a world of
        thousands fits a screen."""
        at: dict[str, list[int]] = {}
        for rank, answer in sorted(answers.items()):
            at.setdefault(answer, []).append(rank)
        lines = [f"{_ranks(ranks)} {place}" for place, ranks in at.items()]
        return lines + ([f"{_ranks(silent)} does not answer"] if silent else [])

    def _place(self) -> str:
        """Return where the main thread stands: its innermost frame outside of torch, and the
        innermost."""
        frame = sys._current_frames().get(self._main)
        inner = own = None
        while frame is not None:
            name = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            inner = inner or name
            if "torch" not in frame.f_code.co_filename:
                own = name
                break
            frame = frame.f_back
        when = "at the start" if self._starting else f"after step {self._step}"
        return f"{when} in {own or inner}" + (f" > {inner}" if inner != own else "")

    def _dump_nccl(self) -> None:
        """Dump NCCL's flight recorder, if there is one."""
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
        if dump is None or not torch.cuda.is_available():
            return
        with contextlib.suppress(Exception):  # a broken driver must not keep the process alive
            path = Path(self._log.name).with_name(f"nccl-trace-{self._rank}")
            path.write_bytes(dump())
            print(f"watchdog: NCCL's flight recorder is in {path}", file=self._log)


def start_watchdog(cfg: RunConfig, run: Run) -> Watchdog:
    """Start the watchdog of a run, once its ranks have met. No group's own timeout may strike
    before it does."""
    return Watchdog(
        cfg.resilience.hang_timeout,
        cfg.distributed.start_timeout,
        run.log_file,
        on_hang=run.hangs,
        on_limit=process_group.set_timeout,
    )


def _bytes_moved() -> int:
    """Return the bytes that this process has read and written so far, also by mapped files; 0 if
    unknown."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/io").read_text().splitlines()
        counts = {name: int(n) for name, n in (line.split(": ") for line in lines)}
        return counts["rchar"] + counts["wchar"] + counts["read_bytes"]
    return 0


def _named(ranks: list[int]) -> str:
    return (
        f"{ranks}"
        if len(ranks) <= NAMED_HUNG_RANKS
        else f"{ranks[:NAMED_HUNG_RANKS]} and {len(ranks) - NAMED_HUNG_RANKS} more"
    )


def _ranks(ranks: list[int]) -> str:
    """`rank 3`, or `ranks [0, 1, 2]`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_named(ranks)}"
