"""The run directory as one rank sees it: its lock, log, console, and records.

config.toml      the configuration of the last start
status.json      state and step; attempts.jsonl: one line an event (jobs/records/events.py), those
                 of other ranks in attempts/HOST.jsonl
metrics.jsonl    one line a logged step (recorder.py)
audit.json       what each rank has computed after a checkpoint (integrity/first_steps.py)
recompute.json   what train.recompute = auto has come to (resilience/room.py)
logs/            attempt-K/rank-R.log; `latest` names the newest attempt
lock             held by the run while it lives
.reserve         some KiB, given up on a full disk so that the end can be recorded
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from kempner.checkpoint.ranks import PeerFailed
from kempner.config.loading import to_toml
from kempner.config.option import ConfigError
from kempner.data.config import FAKE
from kempner.jobs.code import current_code
from kempner.jobs.lock import RunLock
from kempner.jobs.ranks import startup
from kempner.jobs.ranks.hosts import all_hosts, ask_hosts
from kempner.jobs.ranks.placement import World
from kempner.jobs.ranks.startup import forget_rendezvous
from kempner.jobs.records.events import End, FaultEvent, FirstStep, GoBack, StartEvent
from kempner.jobs.records.run_log import Console, RankLog
from kempner.jobs.records.run_records import RunRecords, count_attempts
from kempner.jobs.system import process
from kempner.jobs.system.files import write_atomic
from kempner.jobs.system.front_door import explain_os_error
from kempner.jobs.this_job import host_name
from kempner.train.progress import Progress
from kempner.train.resilience.requests import Verdict
from kempner.train.sections import RunConfig

if TYPE_CHECKING:
    from kempner.jobs.gpu.watch import GpuWatch
    from kempner.jobs.trackers.start import Trackers

# Errors of a rank that lost a peer: the peer is to blame.
LOST_PEER_ERRORS = ("Connection closed by peer", "Connection reset", "Connection refused", "remote")
RUN_FLUSH_S = 30.0  # for the last writes of an attempt
LAST_WORDS_S = 5.0  # the same, for one that crashed or hangs
LAST_POINTS_S = 15.0  # for the trackers


def memory_is_ours() -> bool:
    """Return whether this process has at least 90% of its GPU's memory to itself;
    True if unknown."""
    if not torch.cuda.is_available():
        return True
    with contextlib.suppress(RuntimeError):  # after some errors no CUDA call works
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved() < total / 10
    return True


class Opened(NamedTuple):
    """Results of opening the run directory on rank 0."""

    attempt: int = -1
    problems: tuple[str, ...] = ()


class Run:
    """One attempt of the run, as this rank sees it."""

    def __init__(self, cfg: RunConfig, world: World) -> None:
        """Open the directory as a new attempt. All ranks call it, after the process group
        is set up.

        Raises ConfigError on all ranks if another live job uses it or it is not writable.
        """
        self.cfg, self.world = cfg, world
        self.dir = Path(cfg.run.dir)
        self.step = 0
        self._begun = self._stepped = False
        self._began_at = 0
        self.lock: RunLock | None = None
        self._trackers: Trackers | None = None
        self._gpus: GpuWatch | None = None
        # Send problems instead of raising: the other ranks wait for rank 0 here.
        answer = [self._open() if world.rank == 0 else Opened()]
        dist.broadcast_object_list(answer, src=0)
        if answer[0].problems:
            raise ConfigError(answer[0].problems)
        self.attempt = answer[0].attempt
        try:
            self._log = RankLog(self.dir, self.attempt, world)
        except OSError as error:
            raise ConfigError(self._not_writable(error)) from None
        self.background = self._log.background
        self._console = Console(self.background)
        self._records = RunRecords(self.dir, self.attempt, self.background, first=world.rank == 0)
        self.hosts = all_hosts(world)

    def _open(self) -> Opened:
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            self.lock = RunLock(self.dir, on_lost=self._lost)
            return Opened(count_attempts(self.dir))
        except ConfigError as error:
            return Opened(problems=tuple(error.problems))
        except OSError as error:
            return Opened(problems=(self._not_writable(error),))

    def _not_writable(self, error: OSError) -> str:
        error.filename = error.filename or str(self.dir)
        why = explain_os_error(error)
        return f"run.dir = {self.dir}: cannot be written: {why}: --run.dir=runs/NAME"

    def begin(self, progress: Progress) -> None:
        """Record the start: the state is loaded and the first step follows."""
        self.step = self._began_at = step = progress.step
        lineage = tuple(parent["from"] for parent in progress.lineage)
        changed = self._record_start(lineage) if self.world.rank == 0 else []
        self._begun = True
        source = f"continues after step {step}" if step else "starts"
        replica = ""
        if self.world.replicas > 1:
            replica = f"of replica {self.world.replica} of {self.world.replicas} "
        self.announce(
            f"run {self.dir} {source}: attempt {self.attempt}, world size {self.world.size} "
            f"{replica}on {', '.join(dict.fromkeys(self.hosts))}, "
            f"{self.cfg.model.count_parameters():,} parameters"
        )
        for text in changed:
            self.announce(f"changed since the last attempt: {text}")
        last = self.cfg.train.max_steps
        if step >= last:
            self.announce(
                f"the run is complete: {step} of {last} steps; raise train.max_steps to continue"
            )
        elif self.world.leads:
            self._console.begin(step, last)
        if self.world.rank == 0 and (names := self.cfg.trackers.names):
            from kempner.jobs.trackers.start import Trackers

            self._trackers = Trackers(names, self.dir, self._log.path.parent, self.announce)
        interval = self.cfg.resilience.gpu_interval
        there = shutil.which("nvidia-smi") or importlib.util.find_spec("pynvml")
        if self.world.local_rank == 0 and interval and there:
            from kempner.jobs.gpu.watch import start_watch

            self._gpus = start_watch(self.dir, self.attempt, interval, self._log.stderr)

    def _record_start(self, lineage: tuple[str, ...]) -> list[str]:
        """Record the start; returns the changes since the last attempt."""
        forget_rendezvous(self.dir)
        startup.mark_start("checkpoint")
        code = current_code()
        changed: list[str] = []
        if self.step:
            from kempner.train.recording.changes import what_changed

            changed = what_changed(self.dir / "config.toml", self.cfg, self.step)
            changed += self._records.other_code(code)
        try:
            write_atomic(self.dir / "config.toml", to_toml(self.cfg))
            # The first stands for all: opening.one_vocabulary() has ensured it.
            for source in self.cfg.data.mixed[:1]:
                if source.path != FAKE:
                    from kempner.data.sidecar import copy_tokenizer

                    copy_tokenizer(source.path, self.dir)  # generate.py needs the run alone
            self._records.hold_reserve()
        except OSError as error:
            raise ConfigError(self._not_writable(error)) from None
        began = float(os.environ.get("KEMPNER_BATCH_BEGAN") or 0) or None
        self._records.event(
            StartEvent(
                **self._records.head(self.step),
                nodes=tuple(dict.fromkeys(self.hosts)),
                world_size=self.world.size,
                process_began=process.start_time(),
                batch_began=began,
                lineage=lineage,
                spares=tuple(os.environ.get("KEMPNER_IDLE", "").split()),
                code=code.hash,
                commit=code.commit,
                versions=code.versions,
                command=os.environ.get("KEMPNER_COMMAND", ""),
                changed=tuple(changed),
                parts=startup.start_seconds(),
            )
        )
        self._status("running", "")
        return changed

    # --- while it trains ---

    @property
    def log_file(self) -> IO[str]:
        return self._log.file

    def log(self, text: str) -> None:
        """Write a line to this rank's log."""
        self._log.log(text)

    def announce(self, text: str) -> None:
        """Write a line to this rank's log and, on the run's first rank, to the console."""
        self.log(text)
        if self.world.leads:
            self._console.emit(text)

    def progress(self, step: int) -> None:
        """Record that the numbers of a step have arrived."""
        if self.world.rank == 0 and not self._stepped:
            self._stepped = True
            self._records.event(FirstStep(**self._records.head(step)))
        self._console.update(step)

    def went_back(self, to: int, skip: list[int], reason: str) -> None:
        """Record that the run continues after step `to`, without the samples skip[0] to
        skip[1] - 1."""
        self.announce(
            f"{reason}: back to step {to}, without the samples {skip[0]} to {skip[1] - 1}"
        )
        if self.world.rank == 0:
            head = self._records.head(self.step)
            self._records.event(GoBack(**head, to=to, skip=tuple(skip), reason=reason))

    # --- the end ---

    def end(self, verdict: Verdict) -> None:
        """Record how the attempt ends, in status.json for the batch script."""
        self._console.close()
        if self._gpus is not None:
            self._gpus.end()
        if self.world.rank == 0:
            self.announce(f"{verdict.state} after step {self.step}: {verdict.reason}")
            head = self._records.head(self.step)
            self._status(verdict.state, verdict.reason)
            end = End(**head, state=verdict.state, reason=verdict.reason)  # type: ignore[arg-type]
            self._records.event(end)
            self._records.release_reserve()
        if self._trackers is not None:
            self.background.flush(RUN_FLUSH_S)  # the trackers read the files
            self._trackers.end(LAST_WORDS_S if verdict.state == "interrupted" else LAST_POINTS_S)
        self._leave(RUN_FLUSH_S)

    def crashed(
        self, error: BaseException, advise: Callable[[RunConfig, World], str] | None = None
    ) -> int:
        """Record an exception that ends this rank; returns the exit code: 2 for bad input, else 1.
        `advise`: returns advice for a run that has run out of memory.

        Bad input found before the run has begun is only reported: the run's records stay unchanged.
        """
        bad_input = isinstance(error, ConfigError)
        of_file = isinstance(error, OSError) and error.filename is not None  # not of a connection
        where = f"rank {self.world.rank} on {host_name()}"
        detail = f"{error}" if bad_input else f"{type(error).__name__}: {error}"
        self.log("".join(traceback.format_exception(error)).rstrip())
        reason = f"{where}: {detail.splitlines()[0]}"
        if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
            from kempner.parallel.compiled import forget_compiled

            forget_compiled(self.dir)
        no_memory = isinstance(error, torch.OutOfMemoryError)
        final = bad_input
        self._log.to_stderr(f"{where}: {detail}\n  (traceback in {self._log.path})")
        if self._begun or not bad_input:
            # The next start would need as much memory, unless steps have fit before or others hold
            # it. Two steps, because the optimizer creates its state in the first update.
            early = self.step - self._began_at < 2
            final = bad_input or (no_memory and early and memory_is_ours())
            self._records.event(
                FaultEvent(
                    **self._records.head(self.step),
                    kind="oom" if no_memory else "crash",
                    ranks=(self.world.rank,),
                    hosts=(host_name(),),
                    lost_peer=isinstance(error, PeerFailed)
                    or (not of_file and any(w in detail for w in LOST_PEER_ERRORS)),
                    final=final,
                    reason=reason,
                )
            )
            if final:
                self._status("failed", reason)
        if no_memory and advise is not None:
            self._advise(advise, reason, final)
        if self._gpus is not None:
            self._gpus.look_once_more()
        self._leave(LAST_WORDS_S)
        return 2 if bad_input else 1

    def _advise(self, advise: Callable[[RunConfig, World], str], reason: str, final: bool) -> None:
        """Advise how the run would need less memory, once the fault is on disk: this takes seconds,
        in which the launcher may end this rank, and a failing planner must not hide the fault."""
        self.background.flush(LAST_WORDS_S)
        try:
            fix = advise(self.cfg, self.world)
        except Exception as error:
            self.log("".join(traceback.format_exception(error)).rstrip())
            return
        self._log.to_stderr(f"rank {self.world.rank} on {host_name()}: {fix}")
        if final:
            self._status("failed", f"{reason}; {fix}")

    def hangs(self, reason: str, ranks: list[int], blame: bool) -> None:
        """Record a hang before the watchdog ends this process: the ranks that hang, and their hosts
        if these are to blame."""
        self.log(reason)
        self._log.to_stderr(f"{reason} (stacks in {self._log.path})")
        hosts_by_rank = dict(enumerate(self.hosts))
        guilty = ranks if blame else []
        hosts = {hosts_by_rank[rank] for rank in guilty if rank in hosts_by_rank}
        # Only rank 0 knows all hosts: see all_hosts().
        if unknown := [rank for rank in guilty if rank not in hosts_by_rank]:
            with contextlib.suppress(RuntimeError):
                hosts.update(ask_hosts(unknown, LAST_WORDS_S))
        head = self._records.head(self.step)
        fault = FaultEvent(
            **head, kind="hang", ranks=tuple(ranks), hosts=tuple(sorted(hosts)), reason=reason
        )
        self._records.event(fault)
        if self._gpus is not None:
            self._gpus.look_once_more()
        self.background.flush(LAST_WORDS_S)

    def wrong_numbers(self, reason: str, ranks: tuple[int, ...], hosts: tuple[str, ...]) -> None:
        """Record that a device of these ranks computes wrong numbers: the next attempt
        excludes their hosts."""
        self.announce(f"ERROR: {reason}")
        if self.world.rank == 0:
            head = self._records.head(self.step)
            fault = FaultEvent(**head, kind="corruption", ranks=ranks, hosts=hosts, reason=reason)
            self._records.event(fault)
            self.background.flush(LAST_WORDS_S)

    def _lost(self, reason: str) -> None:
        """Record that the run now belongs to another process, before this one ends. No host
        is to blame."""
        records = getattr(self, "_records", None)  # it may not have begun
        if records is None:
            print(f"error: {reason}", file=sys.stderr, flush=True)
            return
        self._log.to_stderr(reason)
        fault = FaultEvent(
            **records.head(self.step),
            kind="crash",
            ranks=(self.world.rank,),
            hosts=(host_name(),),
            lost_peer=True,
            reason=reason,
        )
        records.last_event(fault)

    def _status(self, state: str, reason: str) -> None:
        self._records.status(state, reason, self.step, self.cfg.train.max_steps)

    def _leave(self, seconds: float) -> None:
        if not self.background.flush(seconds):
            self._log.to_stderr(f"{self.dir}: the last lines and records could not be written")
        elif self.lock is not None:
            with contextlib.suppress(OSError):
                self.lock.release()
