"""Stop requests: signals and files become one verdict that all ranks act on at the same step.

A request sets a flag on the rank that it reached. The flag travels in the all-reduce that the step
does anyway and is read one step later, so no rank enters a save that the others do not, and the
host does not wait for the device.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple


class Verdict(NamedTuple):
    """What the run does next, and why. `state` is that of a run that leaves now (empty: it does not
    leave)."""

    save: bool
    state: str
    reason: str


GO_ON = Verdict(False, "", "")
DONE = Verdict(False, "done", "the last step is done")
# In the order of the flags in the step's all-reduce; the last one that is set wins.
REQUESTS = (
    Verdict(True, "", "a save was requested"),
    Verdict(True, "interrupted", "asked to make room"),
    Verdict(True, "stopped", "stopped by the user"),
)
SAVE, INTERRUPT, STOP = range(len(REQUESTS))

OF_SIGNAL = {
    signal.SIGUSR2: SAVE,
    signal.SIGTERM: INTERRUPT,
    signal.SIGUSR1: INTERRUPT,
    signal.SIGINT: STOP,
}
FILE_POLL_S = 1.0


class StopRequests:
    """Collects this process's requests. Make it first of all: a signal during the imports must not
    kill Python.

    The flags are set by a thread on the signal wake-up socket, because a Python handler does not
    run while the main thread waits in a collective. Handlers stay until the process exits; more
    signals of a kind change nothing.
    """

    def __init__(self) -> None:
        self.flags = [0.0] * len(REQUESTS)
        self.since: float | None = None  # monotonic time of the first request to leave
        self.seen: list[str] = []  # names of what came, for the log
        self._sockets = (
            socket.socketpair()
        )  # both ends must live: a collected one ends the wake-ups
        self._sockets[1].setblocking(False)
        self._next_poll = 0.0
        self.skipped_in_a_row = 0
        signal.set_wakeup_fd(self._sockets[1].fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True, name="signals").start()
        for number in OF_SIGNAL:
            signal.signal(number, _leave_it_to_the_thread)

    def _listen(self) -> None:
        while received := self._sockets[0].recv(64):
            for number in received:
                if number in OF_SIGNAL:
                    self.request(OF_SIGNAL[signal.Signals(number)], signal.Signals(number).name)

    def request(self, kind: int, name: str) -> None:
        self.flags[kind] = 1.0
        self.seen.append(name)
        if kind != SAVE and self.since is None:
            self.since = time.monotonic()

    def take_flags(self, run_dir: Path | None) -> list[float]:
        """The flags for this step's all-reduce. One to save is handed over once, one to leave
        stays.

        `run_dir` is where a rank looks for the files STOP and SAVE (None: it does not look).
        """
        if run_dir is not None:
            self._poll_files(run_dir)
        flags = list(self.flags)
        self.flags[SAVE] = 0.0
        return flags

    def _poll_files(self, run_dir: Path) -> None:
        """At most once a second; the file is removed: it is one request."""
        if time.monotonic() < self._next_poll:
            return
        self._next_poll = time.monotonic() + FILE_POLL_S
        for name, kind in (("STOP", STOP), ("SAVE", SAVE)):
            path = run_dir / name
            if path.exists():
                path.unlink(missing_ok=True)
                self.request(kind, f"{name} file")

    def decide(self, bad: bool, sums: list[float], max_skipped: int) -> Verdict:
        """From the numbers of a step, equal on all ranks, to what all ranks do next.

        `sums` are the flags of all ranks added up; `bad` says that the step's update was skipped.
        """
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if bad else 0
        if self.skipped_in_a_row >= max_skipped:
            reason = f"{max_skipped} steps in a row were not finite (train.max_skipped)"
            return Verdict(False, "failed", reason)
        decided = [request for request, count in zip(REQUESTS, sums, strict=True) if count > 0]
        return decided[-1] if decided else GO_ON


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> Any:
    """A handler in Python, so that the signal neither kills the process nor is ignored by the
    wake-up socket."""


def end_process(code: int) -> None:
    """Leave without finalisers: daemon threads and NCCL at exit have hung more jobs than they have
    helped."""
    os._exit(code)
