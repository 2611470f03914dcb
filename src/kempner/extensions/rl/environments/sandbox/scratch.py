"""The directory for temporary files of programs run by a reward. No torch."""

from __future__ import annotations

import os


def empty_directory(directory: str) -> bool:
    """Delete all contents, whatever a program has made of them; returns False if anything remains.

    Directories are moved up before they are deleted: even in a chain of thousands no path is too
    long, and nothing recurses.
    """
    # Random names for moved directories, which a program cannot have taken.
    top, prefix, number = os.fsencode(directory), os.urandom(8).hex(), 0
    try:
        # A program may have removed its own permissions, here and below.
        os.chmod(top, 0o700)
        while entries := _listing(top):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for below in _listing(entry.path):
                    if below.is_dir(follow_symlinks=False):
                        os.chmod(below.path, 0o700)  # its ".." changes
                        os.rename(below.path, os.path.join(top, f"{prefix}-{number}".encode()))
                        number += 1
                    else:
                        os.unlink(below.path)
                os.rmdir(entry.path)
    except OSError:
        return False
    return True


def _listing(directory: bytes) -> list[os.DirEntry[bytes]]:
    with os.scandir(directory) as found:
        return list(found)
