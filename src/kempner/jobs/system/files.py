"""Files that are never half-written, not even on a crash, a full disk or for a reader. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

FULL = (errno.ENOSPC, errno.EDQUOT)  # errno if the disk is full, or the user's quota
STEP_NAME = re.compile(r"step_(\d{8,})")


def fsync(path: Path) -> None:
    """Make a file's data, or a directory's entries, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def try_to_write(folder: Path, size: int = 0) -> None:
    """Write a temporary file of `size` bytes there. Raises OSError. os.access() is no substitute:
    it is wrong for /proc, and for root everything is writable."""
    import tempfile  # most importers of this module do not need it

    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(size))


def write_atomic(
    path: Path, content: str | bytes | Callable[[BinaryIO], object], mode: int = 0o666
) -> None:
    """Replace a file atomically and durably: a reader, or a crash, leaves either the old or the new
    content. `content` may be a function that writes to the open file. An error, such as OSError on
    a full disk, leaves only the old file. `mode`: before the umask; 0o600 for a secret."""
    # Named by thread: two threads may write the same file. The main thread has the process's id.
    fresh = path.with_name(f".{path.name}.{threading.get_native_id()}.new")
    try:
        with open(_create(fresh, mode), "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            # Before the rename: otherwise a crash of the host may leave an empty file.
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the file system itself may fail
            fresh.unlink(missing_ok=True)
        if isinstance(error, OSError):  # a full disk has no name, other errors have `fresh`
            error.filename = str(path)
            del error.filename2  # None would be printed: "-> None"
        raise
    # The rename is durable once the directory is.
    fsync(path.parent)


def _create(path: Path, mode: int) -> int:
    """Create a new file. In a directory that others can write, an existing file of that name could
    be a link to anything or a FIFO without a reader. Removes a killed process's leftover."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode)
    except FileExistsError:
        path.unlink()
        return os.open(path, flags, mode)


def swap_link(link: Path, target: str) -> None:
    """Point a symbolic link at `target` atomically: a reader sees the old or the new target."""
    fresh = link.with_name(f".{link.name}.{os.getpid()}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)
    fsync(link.parent)


def name_of_step(step: int) -> str:
    """Return the name for files of a step, such as its checkpoint: 100 -> step_00000100."""
    return f"step_{step:08d}"


def step_of_name(name: str) -> int | None:
    """Parse the step in the name of a complete checkpoint: step_00000100 -> 100; None for any other
    name."""
    found = STEP_NAME.fullmatch(name)
    return int(found[1]) if found else None


class LineFile:
    """A file to which whole lines are appended. Unbuffered: text that a full disk rejects is lost,
    and never written later in the middle of another line."""

    def __init__(self, path: Path) -> None:
        end_torn_line(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._torn = False

    def write(self, line: str) -> None:
        """Append a line. Raises OSError, perhaps after a part of it; the next line is separate."""
        data = f"{line}\n".encode()
        if self._torn:
            data = b"\n" + data
        # Until the line is complete: any error may leave a part of it.
        self._torn = True
        # A raw write() writes only a part if the disk fills up.
        if self._file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False


def end_torn_line(path: Path) -> None:
    """End a partial line of a killed writer, if any, so that it does not merge with the next."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
