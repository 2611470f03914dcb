"""Output of a program: to the batch log, each line behind its rank, and unchanged to the log of its
rank. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import threading
import time
from pathlib import Path
from typing import NamedTuple

from kempner.jobs.program.options import Options

LONGEST_OUTPUT_LINE = 1 << 16  # bytes; a longer line is cut
PARTIAL_S = 10.0  # a line that does not end (a progress bar) is shown after so many seconds
CRASH_TAIL_BYTES = 1 << 14  # bytes that are looked through for the cause of a crash
BATCH_LOG = 100 << 20  # bytes of an attempt that a rank writes to the batch log; its own has all
# A Python exception at the left edge, as of "[rank3]:", or a word that says so.
EXCEPTION = re.compile(r"(?:\[rank\d+\]: ?)?[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b")
ERROR = re.compile(
    r".*\b(?:[Ee]rror|ERROR|[Ff]atal|FATAL|panic(?:ked)?|Segmentation fault|Killed|Aborted)\b"
)
# It counts the errors of its processes, and has none of its own.
TORCHRUN_ERROR = "ChildFailedError"
ROOT_CAUSE = "Root Cause (first observed failure)"  # torchrun says it last
ROOT_EXIT = re.compile(r" *exitcode *: (-?\d+)", re.M)
ROOT_RANK = re.compile(r" *rank *: (\d+)", re.M)
# Not SIGTERM, by which torchrun ends the others.
TORCHRUN_SAW = re.compile(r" *traceback *: (Signal (?!15 )\d+ \(\w+\) received by PID)", re.M)
SIGTERMED = "Signal 15 (SIGTERM) received by PID"
# Python prints it before the handlers of its exit run.
TRACEBACK, IGNORED = b"Traceback (most recent call last)", b"Exception ignored in"
# Last lines of a program that has only lost another rank.
LOST_PEER_OUTPUT = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "remote process exited",
    "Socket Timeout",
    "Connection was likely closed",
    "Timed out waiting",
    "pair closure",
    "ncclRemoteError",
)
LOST_PEER_TAIL = 4096  # bytes
# The batch log stays a text that grep reads: no control bytes but tab, line feed and escape.
CONTROL_BYTES = bytes(byte for byte in range(32) if byte not in b"\t\n\r\x1b") + b"\x7f"


RESUMES = re.compile(rb"resum|restor|continu|load", re.I)  # "resuming at step 40"


class OutputSteps(NamedTuple):
    """Steps that a program has reported: the first one and when, in unix seconds; the distance from
    one to the next, None before the second one, 0 if the first line says that it resumes there; the
    last one."""

    first: int
    at: float
    every: int | None
    last: int
    beats: bool = False  # with its heartbeat: there may have been others before the first


def steps_after(steps: OutputSteps | None, step: int, line: bytes = b"") -> OutputSteps:
    """Update the steps with another one, in this line."""
    if steps is None:
        return OutputSteps(step, time.time(), 0 if RESUMES.search(line) else None, step)
    every = steps.every
    if every is None and step > steps.first:
        every = step - steps.first
    return steps._replace(every=every, last=step)


class OutputReader(threading.Thread):
    """A thread that reads until the program and all that have inherited its output have closed it.
    A thread, so that a log that cannot be written for a while does not hold up signals and
    heartbeats."""

    def __init__(self, source: int, rank: int, path: Path, options: Options) -> None:
        super().__init__(daemon=True, name="output")
        self._source, self._path = source, path
        self._prefix = f"[{rank}] ".encode()
        self._steps = options.steps
        self._partial, self._since = b"", 0.0
        self._failed = False
        self.printed: OutputSteps | None = None
        self.lines = 0  # pieces that have come so far
        self.error_at = 0.0  # when the last traceback came, monotonic
        self.tail = b""
        self._room = BATCH_LOG
        self._log = -1
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def run(self) -> None:
        # Not select(), which takes no descriptor above 1023: rank 0 has one for each rank.
        ready = select.poll()
        ready.register(self._source, select.POLLIN)
        while True:
            if not ready.poll(PARTIAL_S * 1000 if self._partial else None):
                self._flush()
                continue
            try:
                data = os.read(self._source, 1 << 16)
            except OSError:
                break
            if not data:
                break
            self._write_log(data)
            # Before the prefix and the cuts: the cause of a crash is in what the program wrote.
            self.tail = (self.tail + data)[-CRASH_TAIL_BYTES:]
            self.lines += 1
            if TRACEBACK in data and IGNORED not in data:
                self.error_at = time.monotonic()
            self._take(data)
        self._flush()

    def _write_log(self, data: bytes) -> None:
        """Write to the rank's log. A full disk loses lines of this file alone; the batch log has
        them."""
        try:
            # Without a buffer: after SIGKILL the last lines are what one looks for.
            written = os.write(self._log, data)
            failed = os.strerror(errno.ENOSPC) if written < len(data) else ""
        except OSError as error:
            failed = error.strerror or str(error)
        if failed and not self._failed:
            self._failed = True
            self.say(f"{self._path}: {failed}; what is missing there is in the batch log")

    def _take(self, data: bytes) -> None:
        data = self._partial + data
        # Whole lines only: srun mixes the output of the ranks, and each line needs its prefix.
        cut = data.rfind(b"\n") + 1
        if cut or not self._partial:
            self._since = time.monotonic()
        lines, self._partial = data[:cut], data[cut:]
        if b"\r" in self._partial:  # a progress bar: what it shows now
            self._partial = self._partial[self._partial.rstrip(b"\r").rfind(b"\r") + 1 :]
        if lines:
            self._show(lines[:-1])
        if self._partial and (
            len(self._partial) > LONGEST_OUTPUT_LINE or time.monotonic() - self._since > PARTIAL_S
        ):
            self._flush()

    def _flush(self) -> None:
        if self._partial:
            text, self._partial = self._partial, b""
            self._show(text)
        self._since = time.monotonic()

    def _show(self, lines: bytes) -> None:
        if self._steps is not None:
            for found in self._steps.finditer(lines):
                with contextlib.suppress(ValueError, TypeError):
                    step = int(found[1].replace(b",", b""))
                    began = lines.rfind(b"\n", 0, found.start()) + 1
                    self.printed = steps_after(self.printed, step, lines[began : found.end()])
        if b"\r" in lines:
            lines = b"\n".join(
                line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines.split(b"\n")
            )
        if self._room <= 0:
            return
        self._room -= len(lines)
        lines = lines.decode(errors="replace").encode().translate(None, CONTROL_BYTES)
        self._print(self._prefix + lines.replace(b"\n", b"\n" + self._prefix) + b"\n")
        if self._room <= 0:
            self.say(f"more than {BATCH_LOG >> 20} MiB: what follows is in {self._path} alone")

    def say(self, text: str) -> None:
        """Print a line of the supervisor's own."""
        self._print(self._prefix + f"kempner: {text}\n".encode(errors="replace"))

    @staticmethod
    def _print(data: bytes) -> None:
        with contextlib.suppress(OSError):  # a closed terminal
            while data:
                # A pipe may take a part of it.
                data = data[os.write(1, data) :]

    def last_words(self, killed: bool) -> str:
        """Return its last error, as the reason of a crash; without one its last line, which says
        nothing about a program that was killed."""
        lines = [line.rstrip() for line in reversed(self._tail_lines()) if re.search(r"\w", line)]
        lines = [line for line in lines if TORCHRUN_ERROR not in line and SIGTERMED not in line]
        if match := TORCHRUN_SAW.search(cause := self._root_cause()):
            return cause[match.start(1) :].splitlines()[0].strip()[:200]
        errors = [line for line in lines if EXCEPTION.match(line)]
        if cause:  # the other processes may have lost that one
            errors.sort(key=_is_lost)
        elif not errors:
            errors = [line for line in lines if ERROR.match(line)]
        if errors:
            return errors[0].strip()[:200]
        if (rank := ROOT_RANK.search(cause)) and (code := ROOT_EXIT.search(cause)):
            return f"{ROOT_CAUSE}: rank {rank[1]}: exit code {code[1]}"
        return "" if killed or not lines else lines[0].strip()[:200]

    def lost_peer(self) -> bool:
        """Return whether its error only says that another rank is gone. With torchrun all of its
        processes must say so: it ends the others once one has failed."""
        text = self.tail[-LOST_PEER_TAIL:].decode(errors="replace")
        if TORCHRUN_ERROR in text:
            lines = self._tail_lines()
            own = [line for line in lines if EXCEPTION.match(line) and TORCHRUN_ERROR not in line]
            if TORCHRUN_SAW.search(self._root_cause()) or not all(map(_is_lost, own)):
                return False
        return _is_lost(text)

    def _root_cause(self) -> str:
        """Return torchrun's report of the process that failed first; "" if there is none."""
        _, found, text = self.tail.decode(errors="replace").rpartition(ROOT_CAUSE)
        return text if found else ""

    def _tail_lines(self) -> list[str]:
        return self.tail.decode(errors="replace").splitlines()


def _is_lost(text: str) -> bool:
    return any(words in text for words in LOST_PEER_OUTPUT)
