"""The coordinator in rank 0's supervisor: run directory and records, the order of start and end,
and the verdict on the end of the attempt. No torch."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import sys
import time
from typing import Any

from kempner.config.option import ConfigError
from kempner.jobs import this_job
from kempner.jobs.lock import LOST_LOCK_EXIT
from kempner.jobs.program.book import Book
from kempner.jobs.program.channel import Channel, ChannelMessage
from kempner.jobs.program.deadline import Deadline, last_warning
from kempner.jobs.program.options import Options
from kempner.jobs.program.output import OutputSteps
from kempner.jobs.program.verdict import (
    SLOW_S,
    USAGE_ERROR_EXIT,
    Ending,
    Outcome,
    crash_faults,
    first_failure,
    hang_fault,
    judge_endings,
)
from kempner.jobs.program.watch import CHECKPOINT_POLL_S, CheckpointWatch
from kempner.jobs.ranks.peers import Entrance
from kempner.jobs.ranks.port_range import ReservedPort
from kempner.jobs.ranks.startup import forget_rendezvous
from kempner.jobs.system.front_door import BadPortRange, NoFreePort

RANKS_START_S = 600.0  # for all ranks to connect
REQUEST_SIGNALS = {
    "TERM": "interrupt",
    "USR1": "interrupt",
    "INT": "stop",
    "STOP file": "stop",
    "USR2": "save",
}
COORDINATOR_LEAVE_S = 3.0  # for all ranks to learn that they may leave
RANK_ANSWER_S = 5.0  # for the ranks' reports of a hang
ENDED_S = 15.0  # for the other ranks to end after a crash
CROWD_S = 0.3  # after a crash: for ranks that crash at the same moment
RANK_POLL_S = 2.0  # for the ranks to report whether they have failed, too
DEAF_S = 2.0  # for a program that has not installed its signal handler yet


def log_line(text: str) -> None:
    with contextlib.suppress(OSError):  # the reader is gone: the program goes on
        # The command may have bytes that are not UTF-8.
        os.write(1, f"[{time.strftime('%F %T')}] kempner: {text}\n".encode(errors="replace"))


class Coordinator:
    """A thread of rank 0's process. `code` is the exit code of every rank."""

    def __init__(self, options: Options, size: int, entrance: Entrance, address: str) -> None:
        self.options, self.size, self.entrance, self.address = options, size, entrance, address
        self.code = 1
        self._peers: dict[int, Channel] = {}
        self._new: list[Channel] = []
        self._hosts: dict[int, str] = {}
        self._endings: dict[int, Ending] = {}
        self._ending: set[int] = set()  # ranks that end their program on request
        self._hung: dict[int, ChannelMessage] = {}  # the ranks' reports of a hang
        self._failing: dict[int, bool] = {}  # ranks still there after a crash: failing, too?
        self._asked, self._completed_before = "", 0
        self._deadline: Deadline | None = None
        self._deaf: set[int] = set()  # ranks whose program handles no request
        self._asked_at = 0.0
        self._began, self._finishing, self._hang_at = time.monotonic(), 0.0, 0.0
        self._bad_at = 0.0  # time of the first crash
        self._started = self._over = False
        self._sent_end = ""  # why the ranks were told to end their programs
        self._alive = False
        self._told_end: float | None = None  # end of the job, as sent to the ranks

    def run(self) -> None:
        """Run an attempt, from the lock to the last record."""
        try:
            self._port = ReservedPort()  # for the program
            self._book = Book(self.options, self._lose)
        except ConfigError as error:
            self._refuse(str(error))
        except (BadPortRange, NoFreePort) as error:
            self._refuse(error.strerror, USAGE_ERROR_EXIT if isinstance(error, BadPortRange) else 1)
        except OSError as error:
            self._refuse(
                f"--run-dir={self.options.run_dir}: cannot be written: {error.strerror} "
                f"({error.filename}); make room, or give another one"
            )
        else:
            self._watch = CheckpointWatch(self.options.run_dir, self.options.checkpoints)
            try:
                while not self._over:
                    self._turn()
            finally:
                self._book.close()
        finally:
            self._dismiss()

    def _refuse(self, problem: str, code: int = USAGE_ERROR_EXIT) -> None:
        """End before the start: no rank starts, and the records stay unchanged."""
        print(f"kempner: error: {problem}", file=sys.stderr, flush=True)
        self.code = code
        # Wait until all ranks know this exit code: a rank that finds nobody uses another.
        end = time.monotonic() + RANKS_START_S
        while not self._started and len(self._peers) < self.size and time.monotonic() < end:
            self._receive(0.2)

    def _lose(self, why: str) -> None:
        """End the programs of all ranks and record nothing more. Runs in the lock's thread, which
        then exits this process."""
        print(f"kempner: error: {why}", file=sys.stderr, flush=True)
        self.code = LOST_LOCK_EXIT
        for channel in list(self._peers.values()):
            channel.send(do="leave", code=LOST_LOCK_EXIT)
        # Time for the ranks to end their programs before this process is gone.
        time.sleep(COORDINATOR_LEAVE_S)

    def _dismiss(self) -> None:
        for channel in self._peers.values():
            channel.send(do="leave", code=self.code)
        end = time.monotonic() + COORDINATOR_LEAVE_S
        while any(c.open for c in self._peers.values()) and time.monotonic() < end:
            self._receive(0.1)

    # --- the ranks ---

    def _turn(self) -> None:
        self._receive(0.2)
        if not self._started:
            self._await_ranks()
            return
        self._look()
        if self._hang_at:
            self._end_hang()
        elif bad := [e for e in self._endings.values() if e.code != 0]:
            self._after_bad(bad)
        self._end_in_time()
        late = self._finishing and time.monotonic() > self._finishing + ENDED_S
        if len(self._endings) == self.size or late:
            self._finish()

    def _receive(self, seconds: float) -> None:
        channels = [c for c in (*self._peers.values(), *self._new) if c.open]
        # Not select(), which is limited to descriptors up to 1023: there is one per rank.
        ready = select.poll()
        of = {c.socket.fileno(): c for c in channels}
        for fd in (*of, self.entrance.fileno()):
            ready.register(fd, select.POLLIN)
        for fd, _ in ready.poll(seconds * 1000):
            if fd == self.entrance.fileno():
                self._new += map(Channel, self.entrance.take())
            else:
                self._hear(of[fd])

    def _hear(self, channel: Channel) -> None:
        rank = next((r for r, c in self._peers.items() if c is channel), None)
        for message in channel.receive():
            with contextlib.suppress(KeyError, TypeError, ValueError):  # malformed
                if rank is None:
                    rank = self._meet(channel, message)
                else:
                    self._answer(rank, message)
        # Without a rank: refused, or a stranger. A rank that has not ended: its supervisor is gone.
        if not channel.open and rank is None:
            self._new = [c for c in self._new if c is not channel]
            channel.close()  # so that the peer learns at once
        elif not channel.open and rank is not None and rank not in self._endings:
            self._endings[rank] = Ending(rank, self._hosts[rank], 1, "", gone=True)

    def _meet(self, channel: Channel, message: ChannelMessage) -> int | None:
        rank, name = int(message.get("rank", -1)), message.get("attempt_id")
        ours = name == os.environ.get("KEMPNER_ATTEMPT_ID")
        if not ours or rank not in range(self.size) or rank in self._peers:
            channel.open = False  # of another attempt
            return None
        self._new = [c for c in self._new if c is not channel]
        self._peers[rank], self._hosts[rank] = channel, str(message.get("host"))
        return rank

    def _answer(self, rank: int, message: ChannelMessage) -> None:
        match message.get("say"):
            case "asked":
                self._ask(message["kind"], message["why"])
            case "told":
                (self._deaf.discard if message["heard"] else self._deaf.add)(rank)
            case "alive":
                self._alive = True
                if message["steps"] is not None:
                    self._book.at_steps(OutputSteps(*message["steps"]))
            case "hung":
                self._hung[rank] = message
                if not self._hang_at:
                    self._hang_at = time.monotonic()
                    self._tell(do="report")
            case "condition":
                self._hung.setdefault(rank, message)
            case "looked":
                self._failing[rank] = message["failing"]
            case "ending":
                self._ending.add(rank)
            case "ended":
                self._endings[rank] = Ending(
                    rank,
                    self._hosts[rank],
                    message["code"],
                    message["words"],
                    lost_peer=message["lost_peer"],
                    torn=message["torn"],
                    failed_at=time.monotonic() - message["ago"],
                )

    def _tell(self, **message: Any) -> None:
        for rank, channel in self._peers.items():
            if rank not in self._endings:
                channel.send(**message)

    def _await_ranks(self) -> None:
        if self._asked:
            self._close(judge_endings((), self._asked, unheard=False, hung=False, progressed=False))
        elif self._endings:
            self._give_up(f"ranks {[*self._endings][:32]} of {self.size} exited before the start")
        elif len(self._peers) == self.size:
            self._start()
        elif time.monotonic() > self._began + RANKS_START_S:
            missing = [rank for rank in range(self.size) if rank not in self._peers][:32]
            self._give_up(
                f"ranks {missing} of {self.size} did not arrive within {RANKS_START_S:.0f} s"
            )

    def _give_up(self, why: str) -> None:
        print(f"kempner: error: {why}: see srun's messages", file=sys.stderr, flush=True)
        self._over = True

    def _start(self) -> None:
        self._started = True
        hosts = [self._hosts[rank] for rank in range(self.size)]
        # All ranks have met: a later start must not find this address.
        forget_rendezvous(self.options.run_dir)
        changed = self._book.start(hosts, self._watch.number)
        log_line(
            f"attempt {self._book.attempt} in {self.options.run_dir}: "
            f"{shlex.join(self.options.command)}: {self.size} process(es) on "
            f"{', '.join(dict.fromkeys(hosts))}"
        )
        for text in changed:
            log_line(f"changed since the last attempt: {text}")
        # Before the ranks start, so that their first checkpoint counts.
        self._watch.start()
        port = self._port.port
        self._tell(do="start", attempt=self._book.attempt, address=self.address, port=port)

    # --- requests to leave ---

    def _ask(self, kind: str, why: str) -> None:
        """Ask the ranks to save or leave. `kind`: save (and go on), interrupt (leave, to continue
        later), or stop (leave for good), which takes precedence."""
        if kind == "save":
            log_line(f"{why}: the program is asked to save")
            self._tell(do="save")
            return
        # A repeated request, or one that a stop overrules.
        if self._asked in (kind, "stop"):
            return
        self._asked, self._asked_at = kind, time.monotonic()
        self._completed_before = self._watch.completed
        if kind == "interrupt":
            self._book.at_warning()
        log_line(f"{why}: the program is asked to exit")
        self._tell(do="ask", kind=kind)
        self._deadline = Deadline()

    def _end_in_time(self) -> None:
        if self._deadline is None or self._sent_end:
            return
        now = time.monotonic()
        if now > (self._deadline.of_deaf if self._deaf else self._deadline.of_listening):
            self._end("the time is up")
        elif self._deaf and now > self._asked_at + DEAF_S and not self._may_go_on():
            self._end("it handles no signal")
        elif self._deaf and self._saved_since():
            self._end(f"its next checkpoint is complete: {self._watch.complete.path}")

    def _saved_since(self) -> bool:
        """Return whether a checkpoint was completed after the request: others may be far behind."""
        saved = self._watch.completed > self._completed_before
        return saved and self._watch.written > self._asked_at + CHECKPOINT_POLL_S

    def _may_go_on(self) -> bool:
        """Return whether a program that ignores the request may train on until it has saved: only
        in a Slurm job, whose end is known."""
        return self._asked == "interrupt" and this_job.job_name() is not None

    def _end(self, why: str) -> None:
        self._sent_end = why
        # From now on the ranks have ENDED_S seconds.
        self._finishing = time.monotonic()
        log_line(f"the program is ended: {why}")
        self._tell(do="end")

    # --- faults ---

    def _after_bad(self, bad: list[Ending]) -> None:
        """End the other ranks after a failure, unless a request to leave gives each rank its time.
        Wait first: the rank that failed may take longer to exit than those that lost it."""
        if self._asked or self._sent_end:
            return
        now = time.monotonic()
        if not self._bad_at:
            self._bad_at = now
            self._tell(do="look")
        there = [failing for rank, failing in self._failing.items() if rank not in self._endings]
        wait = CROWD_S if len(self._endings) + len(there) == self.size else RANK_POLL_S
        if any(there) or (there and first_failure(bad).lost):
            wait = SLOW_S
        if now > self._bad_at + wait:
            self._sent_end, self._finishing = "crash", now
            self._tell(do="end")

    def _end_hang(self) -> None:
        # A rank may have reported a hang and then ended.
        answered = len(self._hung.keys() | self._endings.keys()) >= self.size
        if not self._sent_end and (answered or time.monotonic() > self._hang_at + RANK_ANSWER_S):
            fault = hang_fault(self._hung, self._hosts, self._endings, self._book.head())
            self._book.event(fault)
            self._sent_end, self._finishing = "hang", time.monotonic()
            log_line(fault.reason)
            self._tell(do="end", stacks=True)

    # --- what the watching thread has found ---

    def _look(self) -> None:
        watch = self._watch
        while watch.asked:
            why = watch.asked.pop(0)
            self._ask(REQUEST_SIGNALS.get(why, "interrupt"), why if " " in why else f"SIG{why}")
        end = watch.end
        if end is not None and time.time() > end - last_warning() and not self._asked:
            self._ask("interrupt", f"the job ends in {end - time.time():.0f} s")
        if end != self._told_end:
            self._told_end = end
            self._tell(do="job_end", time=end)  # None: its limit was removed
        self._book.at_checkpoint(watch)
        if self._book.write_line(self._alive):
            self._alive = False

    # --- the end ---

    def _finish(self) -> None:
        for rank in range(self.size):
            if rank not in self._endings and rank not in self._ending:  # its host does not answer
                self._endings[rank] = Ending(rank, self._hosts[rank], 1, "", gone=True)
        endings = list(self._endings.values())  # in the order in which they ended
        # Only a program that left in order has certainly completed its last checkpoint.
        by_itself = not self._sent_end and (self._asked or all(e.code == 0 for e in endings))
        # A checkpoint saved after the first crash may be partial: see look_at_last().
        over = self._bad_at or self._finishing or time.monotonic()
        self._watch.look_at_last(bool(by_itself), over)
        self._book.at_checkpoint(self._watch)
        hung = self._sent_end == "hang"
        # A rank that was told to end did not end by itself, even with exit code 0.
        unheard = bool(self._deaf) and not self._sent_end
        outcome = judge_endings(endings, self._asked, unheard, hung, self._book.progressed)
        for fault in crash_faults(endings, outcome, self._asked, self._book.head()):
            self._book.event(fault)
        self._close(outcome)

    def _close(self, outcome: Outcome) -> None:
        self._over, self.code = True, outcome.code
        log_line(f"{outcome.state or 'the attempt has ended'}: {outcome.reason}")
        self._book.end(outcome.state, outcome.reason)
