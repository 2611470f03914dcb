"""Readers of files that others may have damaged or replaced. No torch."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any


def open_regular(path: str, flags: int) -> int:
    """Open a regular file only, as the `opener` of open(). A FIFO would block its reader until
    somebody writes to it. Raises OSError."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "not a regular file", path)


def read_jsonl(path: Path, tail: int | None = None) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file in order, without torn lines; [] if it cannot be read.
    `tail`: read only so many bytes at its end."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            if tail is not None:
                file.seek(max(0, file.seek(0, os.SEEK_END) - tail))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    # Not splitlines(), which also splits at U+2028 and others that a JSON string may have.
    lines = [line for line in text.split("\n") if line]
    try:  # all in one call: a file may have 100,000 lines
        records = json.loads(f"[{','.join(lines)}]")
    except (ValueError, RecursionError):  # torn lines, or deep nesting in a damaged file
        records = [_record(line) for line in lines]
    return [record for record in records if isinstance(record, dict)]


def _record(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
