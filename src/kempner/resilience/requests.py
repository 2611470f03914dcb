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
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from kempner import slurm
from kempner.process_group import job_name

if TYPE_CHECKING:
    from kempner.checkpoint.dcp import Checkpointer
    from kempner.step import Numbers


class Verdict(NamedTuple):
    """What the run does next, and why. `state`: that of a run that leaves now (empty: it stays)."""

    save: bool = False
    state: str = ""
    reason: str = ""
    go_back: bool = False  # to the last checkpoint


GO_ON = Verdict()
DONE = Verdict(state="done", reason="the last step is done")
# In the order of the flags in the step's all-reduce; the last one that is set wins.
REQUESTS = (
    Verdict(save=True, reason="a save was requested"),
    Verdict(save=True, state="interrupted", reason="asked to make room"),
    Verdict(save=True, state="stopped", reason="stopped by the user"),
)
SAVE, INTERRUPT, STOP = range(len(REQUESTS))

OF_SIGNAL = {
    signal.SIGUSR2: SAVE,
    signal.SIGTERM: INTERRUPT,
    signal.SIGUSR1: INTERRUPT,
    signal.SIGINT: STOP,
}
FILE_POLL_S = 1.0
MARGIN_S = 2.0  # of the time left after a request, to leave in order
END_POLL_S = 60.0


class StopRequests:
    """Collects this process's requests. Make it first of all: a signal during the imports must not
    kill Python.

    The flags are set by a thread on the signal wake-up socket, because a Python handler does not
    run while the main thread waits in a collective. Handlers stay until the process exits; more
    signals of a kind change nothing.
    """

    def __init__(self) -> None:
        self.flags = [0.0] * len(REQUESTS)
        self._unsaid: list[str] = []  # what came before there was a log
        self._say: Callable[[str], None] = self._unsaid.append
        self.skipped_in_a_row = 0
        self.bad_since = 0  # samples consumed after the first of them
        self._sockets = (
            socket.socketpair()
        )  # both ends must live: a collected one ends the wake-ups
        self._sockets[1].setblocking(False)
        self._next_poll = 0.0
        self._job_end: float | None = None
        signal.set_wakeup_fd(self._sockets[1].fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True, name="signals").start()
        for number in OF_SIGNAL:
            signal.signal(number, _leave_it_to_the_thread)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_SIGNAL)  # task.sh lets them wait until here

    def begin(self, rank: int, say: Callable[[str], None], reserve: Callable[[], float]) -> None:
        """From now on requests are logged, and the nearing end of the SLURM job is one too:
        `reserve()` seconds before it. Rank 0 sees to that; its thread asks SLURM again now and
        then, for the end can move."""
        self._say = say
        for text in self._unsaid:
            say(text)
        job = job_name()
        if rank == 0 and job is not None:
            threading.Thread(
                target=self._watch_end, args=(job, reserve), daemon=True, name="job end"
            ).start()

    def _watch_end(self, job: str, reserve: Callable[[], float]) -> None:
        ask_again = 0.0
        while not self.flags[INTERRUPT]:
            if time.monotonic() >= ask_again:
                self._job_end = slurm.end_of(slurm.job_fields(job))
                ask_again = time.monotonic() + END_POLL_S
            if self._job_end is not None and time.time() + reserve() > self._job_end:
                self.request(INTERRUPT, f"the job ends in {self._job_end - time.time():.0f} s")
            time.sleep(1.0)

    def _listen(self) -> None:
        while received := self._sockets[0].recv(64):
            for number in received:
                if number in OF_SIGNAL:
                    self.request(OF_SIGNAL[signal.Signals(number)], signal.Signals(number).name)

    def request(self, kind: int, name: str) -> None:
        self.flags[kind] = 1.0
        self._say(f"{name}: {REQUESTS[kind].reason}")

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

    def wants_to_leave(self) -> float:
        """1 when this rank has been asked to, else 0."""
        return max(self.flags[INTERRUPT:])

    def seconds_left(self, rank: int) -> float | None:
        """For the last save: how long it may take. Rank 0 asks SLURM; None: nobody says."""
        if rank or not self.flags[INTERRUPT] or (job := job_name()) is None:
            return None
        seconds = slurm.seconds_to_live(job)
        return seconds and max(seconds - MARGIN_S, 0.0)

    def decide(self, numbers: Numbers, max_skipped: int, may_go_back: bool) -> Verdict:
        """From the numbers of a step, equal on all ranks, to what all ranks do next.

        A step that was not finite is skipped; after `max_skipped` in a row the run goes back to its
        last checkpoint or, where it may not (it has done so before), fails.
        """
        if numbers.bad and not self.skipped_in_a_row:
            self.bad_since = numbers.samples
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if numbers.bad else 0
        if self.skipped_in_a_row >= max_skipped:
            self.skipped_in_a_row = 0
            reason = f"{max_skipped} steps in a row were not finite (resilience.max_skipped)"
            if may_go_back:
                return Verdict(go_back=True, reason=reason)
            return Verdict(state="failed", reason=f"{reason}, again after going back once")
        asked = [r for r, count in zip(REQUESTS, numbers.flags, strict=True) if count > 0]
        return asked[-1] if asked else GO_ON


def final_verdict(verdict: Verdict, step: int, checkpointer: Checkpointer) -> Verdict:
    """How the run ends: an end is orderly only when its last step is durable."""
    if verdict.state == "failed" or checkpointer.saved_step == step:
        return verdict if verdict.state else DONE
    if checkpointer.failed_saves:
        return Verdict(state="failed", reason="the last checkpoint was not written")
    raise TimeoutError(f"the checkpoint of step {step} was not durable in time")


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> Any:
    """A handler in Python, so that the signal neither kills the process nor is ignored by the
    wake-up socket."""


def end_process(code: int) -> None:
    """Leave without finalisers: daemon threads and NCCL at exit have hung more jobs than they have
    helped."""
    os._exit(code)
