"""Stop requests: turns signals and files into one verdict that all ranks act on at the same step.

A request sets a flag on the rank that receives it. The flag travels in the step's all-reduce and is
read one step later, so that no rank enters a save alone, and the host does not wait for the device.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from kempner.jobs import this_job
from kempner.jobs.system.signals import on_signals

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kempner.checkpoint.checkpointer import Checkpointer
    from kempner.jobs.ranks.placement import World
    from kempner.train.progress import Progress


class RunView(Protocol):
    """The attributes of a run_directory.Run that requests need."""

    @property
    def dir(self) -> Path: ...
    @property
    def world(self) -> World: ...
    def announce(self, text: str) -> None: ...


class Verdict(NamedTuple):
    """A decision on what the run does next, and why. `state`: final state of a run that leaves now
    ("": it stays). `save_due`: a save is due by the clock; unlike `save` it waits until the
    weights are good."""

    save: bool = False
    state: str = ""
    reason: str = ""
    go_back: bool = False  # to the last checkpoint
    save_due: bool = False
    repeat: bool = False  # with go_back: only to before the step; its samples are repeated

    @property
    def final(self) -> bool:
        """True if no later step can change it."""
        return self.go_back or self.state == "failed"


GO_ON = Verdict()
DONE = Verdict(state="done", reason="the last step is done")
SAVE_DUE = Verdict(save_due=True, reason="the next save is due")
# In the order of the flags in the step's all-reduce; the last one set wins.
REQUESTS = (
    Verdict(save=True, reason="a save was requested"),
    Verdict(save=True, state="interrupted", reason="asked to make room"),
    Verdict(save=True, state="stopped", reason="stopped by the user"),
)
SAVE_REQUEST, INTERRUPT_REQUEST, STOP_REQUEST = range(len(REQUESTS))
REQUEST_FLAGS = ("asks_save", "asks_interrupt", "asks_stop")  # their names in the step's all-reduce
ASKS_TIMED_SAVE = "asks_timed_save"  # of rank 0, if checkpoint.interval is no number of steps
ASKS_PROFILE = "asks_profile"  # no verdict: the run continues, profiling.py does the rest
# No verdict either: integrity/replay.py compares the next step. 2 + R: a spare disagrees
# with rank R.
ASKS_REPLAY = "asks_replay"

OF_SIGNAL = {
    signal.SIGUSR2: SAVE_REQUEST,
    signal.SIGTERM: INTERRUPT_REQUEST,
    signal.SIGUSR1: INTERRUPT_REQUEST,
    signal.SIGINT: STOP_REQUEST,
}
FILE_POLL_S = 1.0
LEAVE_MARGIN_S = 2.0  # of the time left after a request, for an orderly exit
JOB_END_POLL_S = 60.0
# A longer step is abandoned between two micro-batches: see Meanwhile.
LONG_STEP_S = 5.0


class StopRequests:
    """Collects this process's requests. Create it before anything else: a signal during the imports
    must not kill Python.

    A thread sets the flags; repeated signals of a kind change nothing.
    """

    def __init__(self) -> None:
        self.flags = [0.0] * len(REQUESTS)
        self._unsaid: list[str] = []  # messages from before there was a log
        self._say: Callable[[str], None] = self._unsaid.append
        self._job_end: float | None = None
        self._once = dict.fromkeys((ASKS_PROFILE, ASKS_REPLAY), 0.0)
        on_signals(OF_SIGNAL, lambda number: self.request(OF_SIGNAL[number], number.name))

    @staticmethod
    def _start_thread(name: str, target: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=target, args=args, daemon=True, name=name).start()

    def begin(self, run: RunView, reserve: Callable[[], float]) -> None:
        """Log requests from now on. Rank 0 also watches for the files STOP, SAVE, PROFILE and
        REPLAY in the run directory, and for the end of the SLURM job, `reserve()` seconds
        ahead. Each has a thread, because an unresponsive file system or controller must not
        hold up the steps."""
        self._say = run.announce
        for text in self._unsaid:
            run.announce(text)
        if run.world.rank:
            return
        first = run.dir.parents[1] if run.world.replica else run.dir
        self._start_thread("stop files", self._watch_files, run.dir, first, run.world.size)
        if (job := this_job.job_name()) is not None:
            self._start_thread("job end", self._watch_end, job, reserve)

    def _watch_end(self, job: str, reserve: Callable[[], float]) -> None:
        from kempner.jobs import slurm

        ask_again = 0.0
        while not self.flags[INTERRUPT_REQUEST]:
            if time.monotonic() >= ask_again:
                # The end time can change. If SLURM does not answer, its last answer counts.
                self._job_end = slurm.end_of(slurm.job_fields(job)) or self._job_end
                ask_again = time.monotonic() + JOB_END_POLL_S
            if self._job_end is not None and time.time() + reserve() > self._job_end:
                self.request(
                    INTERRUPT_REQUEST, f"the job ends in {self._job_end - time.time():.0f} s"
                )
            time.sleep(1.0)

    def _watch_files(self, run_dir: Path, first: Path, ranks: int) -> None:
        """Watch the files. A file is one request and is removed; one that cannot be removed
        counts once. Every replica also watches the directory of the first one, which may
        not be running."""
        paths = [path / name for path in {run_dir, first} for name in ("STOP", "SAVE")]
        while True:
            time.sleep(FILE_POLL_S)
            for path in paths:
                with contextlib.suppress(OSError):  # also EIO and ESTALE of a shared file system
                    # Removal is atomic: only one of several watchers gets the request.
                    path.unlink()
                    self.request(
                        STOP_REQUEST if path.name == "STOP" else SAVE_REQUEST, f"{path.name} file"
                    )
            for flag, what in ((ASKS_PROFILE, "a profile"), (ASKS_REPLAY, "a comparison")):
                path = run_dir / flag.removeprefix("asks_").upper()
                with contextlib.suppress(OSError):
                    rank = named_rank(path, ranks)
                    path.unlink()
                    self._once[flag] = 2.0 + rank
                    self._say(f"{path.name} file: {what} was requested")

    def request(self, kind: int, name: str) -> None:
        self.flags[kind] = 1.0
        self._say(f"{name}: {REQUESTS[kind].reason}")

    def take_flags(self) -> dict[str, float]:
        """Return the flags for this step's all-reduce. A request to leave persists; others are
        handed over once."""
        flags = {**dict(zip(REQUEST_FLAGS, self.flags, strict=True)), **self._once}
        # Reset only what is handed over: another request may come at any time.
        if flags[REQUEST_FLAGS[SAVE_REQUEST]]:
            self.flags[SAVE_REQUEST] = 0.0
        self._once |= {name: 0.0 for name in self._once if flags[name]}
        return flags

    def ask_again(self, values: Mapping[str, float], only_save: bool = False) -> None:
        """Take back the requests in the sums of a step that nobody has acted on; those to leave
        are in the next step's flags anyway. Call it on one rank."""
        if values[REQUEST_FLAGS[SAVE_REQUEST]] > 0:
            self.flags[SAVE_REQUEST] = 1.0
        if not only_save:
            self._once |= {name: values[name] for name in self._once if values[name]}

    def wants_to_leave(self) -> float:
        """Return 1 if this rank has been asked to leave, else 0."""
        return max(self.flags[INTERRUPT_REQUEST:])

    def seconds_left(self, rank: int) -> float | None:
        """Return the seconds that the last save may take. Rank 0 asks SLURM; None: unknown."""
        if rank or not self.flags[INTERRUPT_REQUEST] or (job := this_job.job_name()) is None:
            return None
        from kempner.jobs import slurm

        seconds = slurm.seconds_to_live(job)
        return seconds and max(seconds - LEAVE_MARGIN_S, 0.0)


def named_rank(path: Path, ranks: int) -> int:
    """Return the rank that a spare names in REPLAY, with the attempt that it has audited; -1 in all
    other files. Raises OSError if the file is missing."""
    if not stat.S_ISREG(path.stat().st_mode):  # opening a FIFO would block for ever
        return -1
    with open(path, errors="replace") as file:
        number, _, attempt = file.read(256).strip().partition(" ")
    is_ours = attempt == os.environ.get("KEMPNER_ATTEMPT_ID", "0")
    named = int(number) if is_ours and re.fullmatch("[0-9]{1,9}", number) else -1
    return named if named < ranks else -1


def requested_verdict(values: Mapping[str, float], before: Verdict = GO_ON) -> Verdict:
    """Return the verdict on the requests in the sums of a step; equal on all ranks. `before`: the
    verdict so far; a request to leave is in every step after it."""
    verdicts = [
        request for name, request in zip(REQUEST_FLAGS, REQUESTS, strict=True) if values[name] > 0
    ]
    if values.get(ASKS_TIMED_SAVE, 0.0) > 0 and not before.save:
        before = SAVE_DUE
    return verdicts[-1] if verdicts else before


def leaving_verdict(flags: Sequence[float]) -> Verdict:
    """Return the verdict on the sums over ranks of the flags from INTERRUPT_REQUEST on."""
    return requested_verdict(dict(zip(REQUEST_FLAGS, (0.0, *flags), strict=True)))


class Meanwhile:
    """A check between two micro-batches of a long step: if any rank has been asked to leave, all
    ranks abandon the step, to be repeated, because the rest of a one-minute step may exceed the
    time left. A GPU answers one micro-batch later, through pinned memory, so that the host never
    waits for the current one."""

    def __init__(self, stop: StopRequests, device: torch.device, late: bool | None = None) -> None:
        """`late`: answer at the next call; None: on a GPU."""
        self._stop, self._device = stop, device
        self._late = device.type == "cuda" if late is None else late
        self._coming: tuple[Tensor, torch.cuda.Event | None] | None = None

    def __call__(self) -> Verdict | None:
        """Return a verdict, or None. All ranks must call it equally often."""
        import torch
        import torch.distributed as dist

        gpu = self._device.type == "cuda"
        ours = torch.tensor(self._stop.flags[INTERRUPT_REQUEST:], pin_memory=gpu)
        flags = ours.to(self._device, non_blocking=True)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        there = torch.empty_like(ours, pin_memory=gpu).copy_(flags, non_blocking=True)
        event = torch.cuda.Event() if gpu else None  # type: ignore[no-untyped-call]
        if event is not None:
            event.record()
        before, self._coming = self._coming, (there, event)
        answer = before if self._late else self._coming
        if answer is None:
            return None
        values, arrived = answer
        if arrived is not None:
            arrived.synchronize()  # of the previous micro-batch: already done
        verdict = leaving_verdict(values.tolist())
        return verdict if verdict.state else None


def final_verdict(
    verdict: Verdict,
    progress: Progress,
    checkpointer: Checkpointer,
    seconds: Callable[[], float | None],
) -> Verdict:
    """Save, wait and return how the run ends: an end is orderly only if its last step is durable.
    `seconds()`: the limit of the wait, None: no limit. It is called once the save has begun,
    because Slurm may take long to answer."""
    if verdict.save:  # nothing new, unless a step was abandoned: then the previous one
        checkpointer.save(progress.step, progress.record())
    # An interrupted job has no time to delete old checkpoints; its next start does.
    checkpointer.close(seconds(), prune=verdict.state != "interrupted")
    step = progress.step
    if verdict.state == "failed" or checkpointer.saved_step == step:
        return verdict if verdict.state else DONE
    if checkpointer.in_flight is None and checkpointer.failed_saves:
        return Verdict(state="failed", reason="the last checkpoint was not written")
    raise TimeoutError(f"the checkpoint of step {step} was not durable in time")


def end_process(code: int) -> NoReturn:
    """Exit without finalisers: daemon threads and NCCL have hung more jobs at exit
    than they helped."""
    os._exit(code)
