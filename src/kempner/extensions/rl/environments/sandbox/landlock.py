"""Landlock rules (Linux 5.19): the files that programs run by a reward may write. No torch.

A read-only mount does not keep a process from opening a FIFO there for writing.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # on every architecture
VERSION, PATH_BENEATH = 1, 1
WRITE_FILE, REFER = 1 << 1, 1 << 13
FIRST_LANDLOCK_ABI = 2  # version 1 forbids all moves between directories
LANDLOCK_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)


def allow_writing(directory: str, files: Iterable[str]) -> bool:
    """Allow writing only in `directory` and to these files, irrevocably, for this process and its
    children. Returns False if the kernel has no such rules. Raises OSError."""
    if _libc.syscall(CREATE_RULESET, None, 0, VERSION) < FIRST_LANDLOCK_ABI:
        return False
    attributes = struct.pack("Q", WRITE_FILE | REFER)
    rules = _check(_libc.syscall(CREATE_RULESET, attributes, len(attributes), 0))
    allowed = dict.fromkeys(files, WRITE_FILE) | {directory: WRITE_FILE | REFER}
    try:
        for path, rights in allowed.items():
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            # The kernel's record is packed, without padding.
            rule = struct.pack("=Qi", rights, fd)
            try:
                _check(_libc.syscall(ADD_RULE, rules, PATH_BENEATH, rule, 0))
            finally:
                os.close(fd)
        # An unprivileged process may restrict itself only after this (landlock(7)).
        _check(_libc.prctl(LANDLOCK_NO_NEW_PRIVS, 1, 0, 0, 0))
        _check(_libc.syscall(RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)
    return True


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
