"""A run that stands still is ended, so that it can go on: the stacks of all threads are in the
logs, and the ranks that do not answer are named.

Every rank has a thread of its own for this. It sees a beat at every step; when none has come within
the limit it writes down where its process stands, tells the others through the rendezvous store,
reads what they tell, and ends the process. A frozen or unreachable rank tells nothing: that is how
it is found.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

FLOOR_S = 120.0  # no derived limit is shorter
STEPS = 20  # the derived limit in median step times
PATIENCE_S = 1800.0  # for a save or a validation
ANSWER_S = 5.0  # that the ranks wait for each other's word
EXIT_CODE = 70


class Watchdog:
    """Call beat() at every step. The limit is [resilience] hang_timeout, or comes from the step
    times."""

    def __init__(
        self,
        hang_timeout: float | None,
        first_limit: float,
        log: IO[str],
        on_hang: Callable[[str, list[int]], None],
    ) -> None:
        """`first_limit`: seconds until the first beat (a first step may compile for minutes).
        `on_hang(reason, ranks that do not answer)` records the hang."""
        self.hang_timeout, self._log, self._on_hang = hang_timeout, log, on_hang
        self._limit = max(first_limit, hang_timeout or 0.0)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._durations: deque[float] = deque(maxlen=50)
        self._beat, self._step = time.monotonic(), 0
        self._main = threading.get_ident()
        self._off = threading.Event()
        # A connection of its own: the default one may be busy in the very call that hangs.
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=ANSWER_S))
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def beat(self, step: int) -> None:
        """A step is done."""
        now = time.monotonic()
        self._durations.append(now - self._beat)
        self._beat, self._step = now, step
        if self.hang_timeout is not None:
            self._limit = self.hang_timeout
        else:
            self._limit = max(FLOOR_S, STEPS * statistics.median(self._durations))

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Around what may take longer than a step and sees no beat: a save, a validation."""
        limit, self._limit = self._limit, max(self._limit, PATIENCE_S)
        try:
            yield
        finally:
            self._beat, self._limit = time.monotonic(), limit

    def stop(self) -> None:
        self._off.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        awake = time.monotonic()
        while not self._off.wait(min(1.0, self._limit / 10)):
            # In C, for an interpreter that is locked: this loop would not run then.
            faulthandler.dump_traceback_later(self._limit + 30, exit=True, file=self._log)
            before, awake = awake, time.monotonic()
            if awake - before > self._limit / 2:
                # It is this process that was away (SIGSTOP, a suspended job): nobody else is to
                # blame, and all may go on.
                print(f"watchdog: stopped for {awake - before:.0f} s", file=self._log)
                self._beat = awake
            if time.monotonic() - self._beat > self._limit:
                self._end()

    def _end(self) -> None:
        limit = self._limit
        print(f"watchdog: no step for {limit:.0f} s after step {self._step}", file=self._log)
        faulthandler.dump_traceback(file=self._log, all_threads=True)
        self._dump_nccl()
        answers: dict[int, str | None] = dict.fromkeys(range(self._world_size))
        answers[self._rank] = f"on {socket.gethostname()} after step {self._step}: {self._place()}"
        # In a thread: the store is in rank 0, and waits for ever when that one is frozen.
        asking = threading.Thread(target=self._ask_all, args=(answers,), daemon=True)
        asking.start()
        asking.join(2 * ANSWER_S)
        silent = [rank for rank, answer in answers.items() if answer is None]
        for rank, answer in answers.items():
            print(f"watchdog: rank {rank} {answer or 'does not answer'}", file=self._log)
        self._log.flush()
        # Nobody's word at all: then it is the store's own process, rank 0, that is away.
        silent = [0] if len(silent) == self._world_size - 1 and self._rank else silent
        who = f"; ranks that do not answer: {silent}" if silent else ""
        if self._rank == min(rank for rank in answers if rank not in silent):
            self._on_hang(f"no step for {limit:.0f} s after step {self._step}{who}", silent)
        os._exit(EXIT_CODE)

    def _place(self) -> str:
        """Where the main thread stands: its innermost frame outside of torch, and the innermost."""
        frame = sys._current_frames().get(self._main)
        inner = own = None
        while frame is not None:
            name = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            inner = inner or name
            if "torch" not in frame.f_code.co_filename:
                own = name
                break
            frame = frame.f_back
        return f"in {own or inner}" + (f" > {inner}" if inner != own else "")

    def _ask_all(self, answers: dict[int, str | None]) -> None:
        """Tell the others, and fill in what they tell; None stays for a rank that says nothing."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"hang/{self._rank}", answers[self._rank])
            deadline = time.monotonic() + ANSWER_S
            while None in answers.values() and time.monotonic() < deadline:
                for rank in [rank for rank, answer in answers.items() if answer is None]:
                    if self._store.check([f"hang/{rank}"]):
                        answers[rank] = self._store.get(f"hang/{rank}").decode()
                time.sleep(0.2)

    def _dump_nccl(self) -> None:
        """NCCL's flight recorder, where there is one."""
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
        if dump is None or not torch.cuda.is_available():
            return
        with contextlib.suppress(Exception):  # a broken driver must not keep the process alive
            path = Path(self._log.name).with_name(f"nccl-trace-{self._rank}")
            path.write_bytes(dump())
            print(f"watchdog: NCCL's flight recorder is in {path}", file=self._log)
