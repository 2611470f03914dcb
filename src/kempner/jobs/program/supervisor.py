"""Supervisor of one rank of a program: starts it, forwards requests, watches its heartbeat and
reports to the coordinator. No torch."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time

from kempner.config.option import ConfigError
from kempner.jobs.program.channel import Channel, ChannelMessage
from kempner.jobs.program.child import Child, RankPlace, rank_variables
from kempner.jobs.program.options import Options
from kempner.jobs.program.output import OutputReader, OutputSteps, steps_after
from kempner.jobs.program.verdict import SLOW_S
from kempner.jobs.ranks.placement import World
from kempner.jobs.records.run_log import log_path
from kempner.jobs.system.files import swap_link
from kempner.jobs.this_job import host_name

SIGNAL_REQUESTS = {
    signal.SIGTERM: "interrupt",
    signal.SIGUSR1: "interrupt",
    signal.SIGINT: "stop",
    signal.SIGURG: "interrupt",  # sbatch --signal=URG@120: programs ignore it
}
# SIGCHLD wakes poll() at the program's end; SIGHUP is handled so that it does not end this process.
HANDLED = (*SIGNAL_REQUESTS, signal.SIGUSR2, signal.SIGHUP, signal.SIGCHLD)
SUPERVISOR_TICK_S = 0.5
SUPERVISOR_HEARTBEAT_S = 2.0  # between two signs of life
OUTPUT_S = 2.0  # for the last output of a program that has ended
# Time for rank 0's first heartbeat: it may compile or load data.
FIRST_BEAT_S = 1800.0
TORN_DOWN = 1


class Signals:
    """The signals of this process, in order of arrival."""

    def __init__(self) -> None:
        # Python resumes poll() after a signal (PEP 475); the byte of set_wakeup_fd() wakes it.
        self.read, self._write = socket.socketpair()
        self.read.setblocking(False)
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in HANDLED:
            # The byte is the message; this only replaces the signal's default action.
            signal.signal(number, lambda *_: None)
        # task.sh starts with these blocked, so that none is lost before the handlers are installed.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def take(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return self.read.recv(64)
        return b""


class Supervisor:
    """The supervisor of a rank. `main` returns the exit code, which is the same on all ranks."""

    def __init__(self, options: Options, world: World, signals: Signals) -> None:
        self.options, self.world, self._signals = options, world, signals
        self._place = RankPlace(world.rank)
        self._child: Child | None = None
        self._output: OutputReader | None = None
        self._code: int | None = None  # exit code, once this rank may leave
        self._reported = self._hung = self._torn = False
        self._unheard = ""  # a request that the program has not handled
        self._told, self._lines = 0.0, 0
        # The last heartbeat seen, the time of the last look, and the time of the last change: by
        # this host's clock, as the clocks of the file server and the program may differ.
        self._beat: float | None = None
        self._awake = self._since = time.monotonic()
        self._beats: OutputSteps | None = None  # the steps of its heartbeats

    def main(self, channel: Channel) -> int:
        self._channel = channel
        channel.send(
            rank=self.world.rank,
            host=host_name(),
            attempt_id=os.environ.get("KEMPNER_ATTEMPT_ID"),
        )
        try:
            while self._code is None:
                self._turn()
        finally:
            if self._child is not None:
                self._child.end()
            self._place.remove()
            channel.close()
            # srun ends the other ranks once one exits with an error: that must not change the exit
            # code, which tells bad input from other errors.
            for number in SIGNAL_REQUESTS:
                signal.signal(number, signal.SIG_IGN)
        return self._code

    def _turn(self) -> None:
        ready = select.poll()
        ready.register(self._channel.socket, select.POLLIN)
        ready.register(self._signals.read, select.POLLIN)
        found = {fd for fd, _ in ready.poll(SUPERVISOR_TICK_S * 1000)}
        for number in self._signals.take():
            self._on_signal(number)
        if self._channel.socket.fileno() in found:
            for message in self._channel.receive():
                self._do(message)
        if not self._channel.open and self._code is None:
            self._code = TORN_DOWN  # rank 0's supervisor is gone
        if self._child is not None and not self._reported and self._child.poll() is not None:
            self._report_end(self._child)
        elif self._child is not None and not self._reported:
            if self._unheard:
                self._warn(self._unheard)
            self._look_after(self._child)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGUSR2:
            self._save()
        elif number in SIGNAL_REQUESTS:
            name = signal.Signals(number).name
            self._channel.send(say="asked", kind=SIGNAL_REQUESTS[signal.Signals(number)], why=name)

    def _do(self, message: ChannelMessage) -> None:
        match message.get("do"):
            case "start":
                self._start(message)
            case "ask":
                self._warn(str(message["kind"]))
            case "save":
                self._save()
            case "job_end":
                self._place.write(self._place.end, str(message["time"]))
            case "look":
                self._channel.send(say="looked", failing=self._failing())
            case "report":
                self._channel.send(say="condition", **self._condition())
            case "end":
                self._end_child(bool(message.get("stacks")))
            case "leave":
                self._code = int(message["code"])

    def _start(self, message: ChannelMessage) -> None:
        run_dir, attempt = self.options.run_dir, message["attempt"]
        path = log_path(run_dir, attempt, self.world)
        if self.world.rank == 0:
            with contextlib.suppress(OSError):
                swap_link(run_dir / "logs" / "latest", f"attempt-{attempt}")
        source, target = os.pipe()
        self._output = OutputReader(source, self.world.rank, path, self.options)
        try:
            environment = rank_variables(self.world, message, self.options, self._place)
            self._child = Child(self.options, environment, target)
        except ConfigError as error:
            self._output.say(f"error: {error}")
            self._reported = True
            self._tell_end(127, str(error), False, time.monotonic())
        finally:
            # Only the program may hold this end, so that the output ends with the program.
            os.close(target)
        self._output.start()

    def _warn(self, kind: str) -> None:
        """Ask the program to leave: by the file if it checks for it, else by a signal. A program
        that is still importing, and handles none yet, is asked again."""
        self._place.write(self._place.stop, kind)
        self._unheard = ""
        if self._child is None or self._reported:
            return
        # A program that checks for the file needs no signal, and may not handle one.
        has_heard = self._place.asks.exists() or self._child.warn()
        if kind == "stop" and not has_heard:
            has_heard = self._child.tell(signal.SIGINT)  # Python: KeyboardInterrupt
        self._unheard = "" if has_heard else kind
        self._channel.send(say="told", heard=has_heard)

    def _failing(self) -> bool:
        """Return whether it may be exiting: its last output is a traceback, not of a lost peer."""
        out = self._output
        return bool(out and time.monotonic() < out.error_at + SLOW_S and not out.lost_peer())

    def _save(self) -> None:
        if self._child is not None:
            self._child.tell(signal.SIGUSR2)  # save and go on, if it handles it

    def _end_child(self, stacks: bool) -> None:
        self._channel.send(say="ending")
        if self._child is not None:
            self._torn = self._child.poll() is None
            if stacks:
                self._child.write_stacks()
            self._child.end()

    # --- while it runs ---

    def _look_after(self, child: Child) -> None:
        now = time.monotonic()
        if self.options.heartbeat is not None and not self._hung:
            silence = self._silence()
            if silence is not None:
                self._hung = True
                self._channel.send(say="hung", **self._condition())
        if self.world.rank == 0 and now - self._told > SUPERVISOR_HEARTBEAT_S:
            self._told = now
            self._tell_progress()

    def _tell_progress(self) -> None:
        """Report progress to the coordinator, for all ranks."""
        at, step = self._place.beat()
        assert self._output is not None
        if self.options.steps is not None:
            steps = self._output.printed
        elif step is not None:
            self._beats = steps_after(self._beats, step)._replace(every=1, beats=True)
            steps = self._beats
        else:
            steps = None
        lines, self._lines = self._lines, self._output.lines
        if steps is not None or lines != self._lines or at is not None:
            self._channel.send(say="alive", steps=steps)

    def _silence(self) -> float | None:
        """Return the seconds since the last heartbeat if they exceed the limit, else None. A rank
        without any heartbeat is not watched, except rank 0."""
        limit, now = self.options.heartbeat or 0.0, time.monotonic()
        at, _ = self._place.beat()
        absent, self._awake = now - self._awake, now
        # Only a change of the timestamp counts, measured by this host's clock.
        if at != self._beat:
            self._beat, self._since = at, now
        elif absent > limit / 2:  # suspended with the program (SIGSTOP, scontrol suspend)
            self._since += absent
        silence = now - self._since
        if at is None:
            if self.world.rank != 0:
                return None
            limit = max(limit, FIRST_BEAT_S)
        return silence if silence > limit else None

    def _condition(self) -> ChannelMessage:
        _, step = self._place.beat()
        return {
            "condition": self._child.condition() if self._child is not None else "",
            "step": step,
            "silence": time.monotonic() - self._since,
        }

    def _report_end(self, child: Child) -> None:
        self._reported = True
        assert self._output is not None and child.code is not None
        # With a limit: a process left behind by the program may keep its output open.
        self._output.join(OUTPUT_S)
        if not self._torn and (processes := child.left_behind()):
            self._output.say(f"ending what the program has left behind: {', '.join(processes)}")
        child.end()
        # All processes are gone, so the reader reaches the end of the output.
        self._output.join(OUTPUT_S)
        if self.world.rank == 0:
            self._tell_progress()
        if self._unheard and self._place.asks.exists():  # it checks by now
            self._channel.send(say="told", heard=True)
        words = self._output.last_words(killed=child.code < 0)
        error_at, at = self._output.error_at, child.ended_at
        failed_at = error_at if at - SLOW_S < error_at < at else at
        self._tell_end(child.code, words, self._output.lost_peer(), failed_at)

    def _tell_end(self, code: int, words: str, lost_peer: bool, failed_at: float) -> None:
        self._channel.send(
            say="ended",
            code=code,
            words=words,
            lost_peer=lost_peer,
            torn=self._torn,
            ago=time.monotonic() - failed_at,
        )
