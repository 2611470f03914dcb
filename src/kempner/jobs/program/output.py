"""Output of a program: to the batch log with the rank before each line, and unchanged to the rank's
own log. No torch."""

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
PARTIAL_S = 10.0  # seconds after which an unfinished line (a progress bar) is shown
CRASH_TAIL_BYTES = 1 << 14  # bytes searched for the cause of a crash
BATCH_LOG = 100 << 20  # most bytes per attempt from a rank in the batch log; its own log has all
# A Python exception at the start of a line, perhaps after "[rank3]:"; else a word for an error.
EXCEPTION = re.compile(r"(?:\[rank\d+\]: ?)?[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b")
ERROR = re.compile(
    r".*\b(?:[Ee]rror|ERROR|[Ff]atal|FATAL|panic(?:ked)?|Segmentation fault|Killed|Aborted)\b"
)
# torchrun's summary of its processes' errors, not an error itself.
TORCHRUN_ERROR = "ChildFailedError"
ROOT_CAUSE = "Root Cause (first observed failure)"  # torchrun prints it last
ROOT_EXIT = re.compile(r" *exitcode *: (-?\d+)", re.M)
ROOT_RANK = re.compile(r" *rank *: (\d+)", re.M)
# Not SIGTERM, with which torchrun ends the other processes.
TORCHRUN_SAW = re.compile(r" *traceback *: (Signal (?!15 )\d+ \(\w+\) received by PID)", re.M)
SIGTERMED = "Signal 15 (SIGTERM) received by PID"
# Python prints a traceback before its exit handlers run.
TRACEBACK, IGNORED = b"Traceback (most recent call last)", b"Exception ignored in"
# Errors of a program that has only lost another rank.
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
# Keep the batch log text for grep: no control bytes but tab, newline, carriage return and escape.
CONTROL_BYTES = bytes(byte for byte in range(32) if byte not in b"\t\n\r\x1b") + b"\x7f"


RESUMES = re.compile(rb"resum|restor|continu|load", re.I)  # "resuming at step 40"


class OutputSteps(NamedTuple):
    """Steps that a program has reported: the first and its unix time; the distance to the second,
    None before it, 0 if the first line says that the program resumes there; the last."""

    first: int
    at: float
    every: int | None
    last: int
    beats: bool = False  # from heartbeats: earlier steps may be missing


def steps_after(steps: OutputSteps | None, step: int, line: bytes = b"") -> OutputSteps:
    """Update the steps with another one, printed in this line."""
    if steps is None:
        return OutputSteps(step, time.time(), 0 if RESUMES.search(line) else None, step)
    every = steps.every
    if every is None and step > steps.first:
        every = step - steps.first
    return steps._replace(every=every, last=step)


class OutputReader(threading.Thread):
    """A thread that reads until the program, and all processes that inherited its output, have
    closed it. As a thread, it does not hold up signals and heartbeats if a log blocks."""

    def __init__(self, source: int, rank: int, path: Path, options: Options) -> None:
        super().__init__(daemon=True, name="output")
        self._source, self._path = source, path
        self._prefix = f"[{rank}] ".encode()
        self._steps = options.steps
        self._partial, self._since = b"", 0.0
        self._failed = False
        self.printed: OutputSteps | None = None
        self.lines = 0  # pieces read so far
        self.error_at = 0.0  # time of the last traceback, monotonic
        self.tail = b""
        self._room = BATCH_LOG
        self._log = -1
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def run(self) -> None:
        # Not select(), which is limited to descriptors up to 1023: rank 0 has one per rank.
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
            # Unprefixed and uncut, to search for the cause of a crash.
            self.tail = (self.tail + data)[-CRASH_TAIL_BYTES:]
            self.lines += 1
            if TRACEBACK in data and IGNORED not in data:
                self.error_at = time.monotonic()
            self._take(data)
        self._flush()

    def _write_log(self, data: bytes) -> None:
        """Write to the rank's log. A full disk loses lines only here; the batch log has them."""
        try:
            # Unbuffered: after SIGKILL the last lines matter most.
            written = os.write(self._log, data)
            failed = os.strerror(errno.ENOSPC) if written < len(data) else ""
        except OSError as error:
            failed = error.strerror or str(error)
        if failed and not self._failed:
            self._failed = True
            self.say(f"{self._path}: {failed}; the missing lines are in the batch log")

    def _take(self, data: bytes) -> None:
        data = self._partial + data
        # Whole lines only: srun mixes the output of the ranks, and each line needs its prefix.
        cut = data.rfind(b"\n") + 1
        if cut or not self._partial:
            self._since = time.monotonic()
        lines, self._partial = data[:cut], data[cut:]
        if b"\r" in self._partial:  # a progress bar: its current text
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
            self.say(f"more than {BATCH_LOG >> 20} MiB: what follows is only in {self._path}")

    def say(self, text: str) -> None:
        """Print a line of the supervisor's own."""
        self._print(self._prefix + f"kempner: {text}\n".encode(errors="replace"))

    @staticmethod
    def _print(data: bytes) -> None:
        with contextlib.suppress(OSError):  # a closed terminal
            while data:
                # A pipe may take only a part.
                data = data[os.write(1, data) :]

    def last_words(self, killed: bool) -> str:
        """Return its last error as the reason of a crash, or its last line; "" if it was killed
        without an error."""
        lines = [line.rstrip() for line in reversed(self._tail_lines()) if re.search(r"\w", line)]
        lines = [line for line in lines if TORCHRUN_ERROR not in line and SIGTERMED not in line]
        if match := TORCHRUN_SAW.search(cause := self._root_cause()):
            return cause[match.start(1) :].splitlines()[0].strip()[:200]
        errors = [line for line in lines if EXCEPTION.match(line)]
        if cause:  # the other processes may only have lost that one
            errors.sort(key=_is_lost)
        elif not errors:
            errors = [line for line in lines if ERROR.match(line)]
        if errors:
            return errors[0].strip()[:200]
        if (rank := ROOT_RANK.search(cause)) and (code := ROOT_EXIT.search(cause)):
            return f"{ROOT_CAUSE}: rank {rank[1]}: exit code {code[1]}"
        return "" if killed or not lines else lines[0].strip()[:200]

    def lost_peer(self) -> bool:
        """Return whether its error only says that another rank is gone. With torchrun, which ends
        all processes once one has failed, all of them must say so."""
        text = self.tail[-LOST_PEER_TAIL:].decode(errors="replace")
        if TORCHRUN_ERROR in text:
            lines = self._tail_lines()
            own = [line for line in lines if EXCEPTION.match(line) and TORCHRUN_ERROR not in line]
            if TORCHRUN_SAW.search(self._root_cause()) or not all(map(_is_lost, own)):
                return False
        return _is_lost(text)

    def _root_cause(self) -> str:
        """Return torchrun's report of the process that failed first; "" without one."""
        _, found, text = self.tail.decode(errors="replace").rpartition(ROOT_CAUSE)
        return text if found else ""

    def _tail_lines(self) -> list[str]:
        return self.tail.decode(errors="replace").splitlines()


def _is_lost(text: str) -> bool:
    return any(words in text for words in LOST_PEER_OUTPUT)
