"""What a program prints: to the batch log, each line behind its rank, and as it is to the log of
its rank. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
from pathlib import Path

from kempner.program.options import Options

LONGEST = 1 << 16  # bytes; a longer line is cut
PARTIAL_S = 10.0  # a line that does not end (a progress bar) is shown after so many seconds
TAIL = 4096  # bytes that are looked through for the cause of a crash
# The batch log stays a text that grep reads: no control bytes but tab, line feed and escape.
CONTROL = bytes(byte for byte in range(32) if byte not in b"\t\n\r\x1b") + b"\x7f"


class Output(threading.Thread):
    """Reads until the program and all that have inherited its output have closed it. In a thread:
    a log that cannot be written for a while must not keep signals and heartbeats waiting."""

    def __init__(self, source: int, rank: int, path: Path, options: Options) -> None:
        super().__init__(daemon=True, name="output")
        self._source, self._path = source, path
        self._prefix = f"[{rank}] ".encode()
        self._steps = options.steps
        self._partial, self._since = b"", 0.0
        self._failed = False
        self.step: int | None = None  # the last one that it has printed
        self.lines = 0  # pieces that have come so far
        self.tail = b""
        self._log = -1
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def run(self) -> None:
        while True:
            wait = PARTIAL_S if self._partial else None
            if not select.select([self._source], [], [], wait)[0]:
                self._flush()
                continue
            try:
                data = os.read(self._source, 1 << 16)
            except OSError:
                break
            if not data:
                break
            self._write_log(data)
            self.tail = (self.tail + data)[-TAIL:]
            self.lines += 1
            self._take(data)
        self._flush()

    def _write_log(self, data: bytes) -> None:
        """A full disk loses lines of this file, and nothing else; they are in the batch log."""
        try:
            written = os.write(self._log, data)
            failed = os.strerror(errno.ENOSPC) if written < len(data) else ""
        except OSError as error:
            failed = error.strerror or str(error)
        if failed and not self._failed:
            self._failed = True
            self.say(f"{self._path}: {failed}; what is missing there is in the batch log")

    def _take(self, data: bytes) -> None:
        data = self._partial + data
        cut = data.rfind(b"\n") + 1
        if cut or not self._partial:
            self._since = time.monotonic()
        lines, self._partial = data[:cut], data[cut:]
        if b"\r" in self._partial:  # a progress bar: what it shows now
            self._partial = self._partial[self._partial.rstrip(b"\r").rfind(b"\r") + 1 :]
        if lines:
            self._show(lines[:-1])
        if self._partial and (
            len(self._partial) > LONGEST or time.monotonic() - self._since > PARTIAL_S
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
                    self.step = int(found[1].replace(b",", b""))
        if b"\r" in lines:
            lines = b"\n".join(
                line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines.split(b"\n")
            )
        lines = lines.decode(errors="replace").encode().translate(None, CONTROL)
        self._print(self._prefix + lines.replace(b"\n", b"\n" + self._prefix) + b"\n")

    def say(self, text: str) -> None:
        """A line of the supervisor's own."""
        self._print(self._prefix + f"kempner: {text}\n".encode())

    @staticmethod
    def _print(data: bytes) -> None:
        with contextlib.suppress(OSError):  # a closed terminal
            while data:
                data = data[os.write(1, data) :]

    def last_words(self) -> str:
        """Its last line, as the reason of a crash."""
        lines = [line.strip() for line in self.tail.decode(errors="replace").splitlines()]
        return next((line[:200] for line in reversed(lines) if line), "")
