"""A private directory in a place that others can write, such as /tmp or a node's /local: whoever
creates it first, or may rename it, controls the files run and read there. No torch.

The same in bash: scripts/slurm/lib/private.sh.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

WRITABLE = stat.S_IWGRP | stat.S_IWOTH
WHOLE_MAP = ["0", "0", "4294967295"]  # /proc/self/uid_map outside a container's user namespace


def make_private(path: Path) -> None:
    """Make the directory with mode 700, or use an existing one if nobody else can change its
    contents. Raises OSError with the problem."""
    if not path.parent.exists():
        make_private(path.parent)
    if not (wrong := _wrong_above(path.parent)):
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            wrong = why_not(path)
    if wrong:
        raise PermissionError(errno.EPERM, wrong, str(path))


def why_not(path: Path) -> str:
    """Return why nothing may be run or read from here; "" if only this user can change it."""
    try:
        status = path.lstat()
    except OSError as error:
        return f"{path}: {error.strerror}"
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a link"
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a directory"
    if status.st_uid != os.getuid():
        return f"{path} belongs to another user"
    if status.st_mode & WRITABLE:
        return f"{path} may be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return _wrong_above(path.parent)


def _wrong_above(path: Path) -> str:
    """Return who else may rename the contents of this directory or a parent; "" for nobody."""
    path, owners = Path(os.path.realpath(path)), {0, os.getuid()}
    if Path("/proc/self/uid_map").read_text().split() != WHOLE_MAP:
        owners.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))  # root may be that here
    for above in (path, *path.parents):
        status = above.stat()
        if status.st_uid not in owners:
            return f"{above} belongs to another user"
        # With the sticky bit, as on /tmp, only the owner of an entry may rename or remove it.
        if status.st_mode & WRITABLE and not status.st_mode & stat.S_ISVTX:
            return f"{above} may be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""
