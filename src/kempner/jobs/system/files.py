"""Files that a crash, a full disk or a reader in between never shows half-written. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

FULL = (errno.ENOSPC, errno.EDQUOT)  # of an OSError: the disk, or what the user may have of it
STEP_NAME = re.compile(r"step_(\d{8,})")


def fsync(path: Path) -> None:
    """Make a file's data, or a directory's entries, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def try_to_write(folder: Path, size: int = 0) -> None:
    """Make a file of `size` bytes there that is gone at once. Raises OSError; os.access() knows
    nothing of /proc, and for root everything is writable."""
    import tempfile  # most programs that load this module do without it

    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(size))


def write_atomic(
    path: Path, content: str | bytes | Callable[[BinaryIO], object], mode: int = 0o666
) -> None:
    """Replace a file so that a reader, or a crash, sees the old content or the new, and the new one
    is durable. `content` may be a function that writes to the open file. An error, such as OSError
    on a full disk, leaves the old file and nothing else. `mode`: less the umask; 0o600 for a
    secret."""
    # Named by thread: two threads may write the same file. The main thread has the process's id.
    fresh = path.with_name(f".{path.name}.{threading.get_native_id()}.new")
    try:
        with open(_create(fresh, mode), "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            # Before the rename: else a crash of the host may leave the new name with an empty file.
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # it may be the very file system that fails
            fresh.unlink(missing_ok=True)
        if isinstance(error, OSError):  # a full disk comes without a name, another with `fresh`
            error.filename = str(path)
            del error.filename2  # None would be shown: "-> None"
        raise
    # The rename is durable once the directory is.
    fsync(path.parent)


def _create(path: Path, mode: int) -> int:
    """Create a new file: where others can write, an existing one of that name could be a link that
    leads anywhere, or a FIFO that nobody reads. A leftover of a killed process is removed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode)
    except FileExistsError:
        path.unlink()
        return os.open(path, flags, mode)


def swap_link(link: Path, target: str) -> None:
    """Point a symbolic link at `target`; a reader sees the old target or the new."""
    fresh = link.with_name(f".{link.name}.{os.getpid()}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)
    fsync(link.parent)


def name_of_step(step: int) -> str:
    """Return the name of what belongs to a step, such as its checkpoint: 100 -> step_00000100."""
    return f"step_{step:08d}"


def step_of_name(name: str) -> int | None:
    """Parse the step in the name of a complete checkpoint: step_00000100 -> 100; None for any other
    name."""
    found = STEP_NAME.fullmatch(name)
    return int(found[1]) if found else None


class LineFile:
    """A file to which whole lines are appended. Unbuffered: what a full disk does not take is lost,
    and never written later in the middle of something else."""

    def __init__(self, path: Path) -> None:
        end_torn_line(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._torn = False

    def write(self, line: str) -> None:
        """Append a line. Raises OSError; half a line may be there then, and the next one starts
        anew."""
        data = f"{line}\n".encode()
        if self._torn:
            data = b"\n" + data
        # Until the line is complete: any error may leave a part of it.
        self._torn = True
        # A raw write() takes a part of it where the disk fills up.
        if self._file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False


def end_torn_line(path: Path) -> None:
    """End half a line that a killed writer may have left, so that it does not swallow the next."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
