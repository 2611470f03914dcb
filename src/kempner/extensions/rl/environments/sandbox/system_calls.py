"""System calls that programs run by a reward must not make (seccomp). Linux; no torch.

A mount or network namespace does not shield the Unix sockets of the user, such as those of tmux,
ssh-agent or a container's daemon, which execute commands outside it; nor does it prevent locks on
readable files, for which others then wait. And memory that no process has mapped is in no figure
that we could monitor.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 38, 22, 2
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
# Instructions of a classic BPF program, and the offsets in seccomp's record that they load.
LOAD, AND, RETURN, EQUAL, AT_LEAST = 0x20, 0x54, 0x06, 0x15, 0x35
NUMBER_OFFSET, ARCHITECTURE_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16
ANY = 0xFFFFFFFF  # a mask
X32 = 0x40000000  # x86-64's other table of system calls
IO_URING_SETUP, MEMFD_SECRET = 425, 447  # on every architecture


class Machine(NamedTuple):
    """The audit system's number of an architecture, and numbers of its system calls."""

    audit: int
    socket: int
    socketpair: int
    fcntl: int
    flock: int
    ipc: tuple[int, ...]  # shmget, semget, msgget, mq_open
    memfd_create: int
    keys: tuple[int, ...]  # add_key, request_key, keyctl


MACHINES = {
    "x86_64": Machine(0xC000003E, 41, 53, 72, 73, (29, 64, 68, 240), 319, (248, 249, 250)),
    "aarch64": Machine(0xC00000B7, 198, 199, 25, 32, (194, 190, 186, 180), 279, (217, 218, 219)),
}
LOCKS = (6, 7, 37, 38)  # F_SETLK and F_SETLKW, also of open files; fcntl has the 32-bit ones
SET_LEASE = 1024

Instruction = tuple[int, int, int, int]  # code, steps ahead if true, if false, constant
_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def forbid_calls() -> list[str]:
    """Forbid, irrevocably, for this process and its children: all sockets except the Internet's and
    stream pairs, memory in unnamed files, System V's shared objects, message queues, keys, leases,
    and io_uring, which can make sockets, too. A lock on a file succeeds without effect: a program
    may need one on its own file, and a filter does not see which file it is. Returns what the
    kernel does not allow."""
    machine = MACHINES.get(platform.machine())
    if machine is None:
        return [f"no system call filter on {platform.machine()}: a program may use Unix sockets"]
    missing = (*machine.ipc, machine.memfd_create, *machine.keys, IO_URING_SETUP, MEMFD_SECRET)
    # ENOSYS, as from a kernel without the call, so that libraries fall back.
    refused = {**dict.fromkeys(missing, errno.ENOSYS), machine.flock: 0}
    tests = [
        *_if(machine.socket, 0, ANY, (socket.AF_INET, socket.AF_INET6), errno.EACCES, False),
        *_if(machine.socketpair, 0, ANY, (socket.AF_UNIX,), errno.EACCES, False),
        # One end of a datagram pair can be connected to another socket.
        # 0xF: SOCK_NONBLOCK and SOCK_CLOEXEC are in the same argument.
        *_if(machine.socketpair, 1, 0xF, (socket.SOCK_STREAM,), errno.EACCES, False),
        *_if(machine.fcntl, 1, ANY, LOCKS, 0),
        *_if(machine.fcntl, 1, ANY, (SET_LEASE,), errno.EACCES),
    ]
    try:
        install_filter(refused, tests)
    except OSError as error:
        return [f"no system call filter ({error.strerror}): a program may use Unix sockets"]
    return []


def install_filter(refused: Mapping[int, int], tests: list[Instruction] | None = None) -> None:
    """Install a filter: calls by number, each with its error; `tests` see the number, and must
    leave it loaded. Raises OSError."""
    audit = MACHINES[platform.machine()].audit
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE_OFFSET),
        # In another architecture, such as the 32-bit one, the same numbers are other calls.
        (EQUAL, 1, 0, audit),
        (RETURN, 0, 0, ERRNO | errno.ENOSYS),
        (LOAD, 0, 0, NUMBER_OFFSET),
    ]
    if platform.machine() == "x86_64":
        program += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    for number, code in refused.items():
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | code)]
    program += [*(tests or []), (RETURN, 0, 0, ALLOW)]
    text = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    # Bound to a name: the structure holds only an address, which keeps nothing alive.
    buffer = ctypes.create_string_buffer(text, len(text))
    found = _Program(len(program), ctypes.addressof(buffer))
    for words in (
        # An unprivileged process may install a filter only after this (seccomp(2)).
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(found), 0, 0),
    ):
        if _libc.prctl(*words):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _if(
    number: int, argument: int, mask: int, values: Sequence[int], code: int, among: bool = True
) -> list[Instruction]:
    """Return instructions that give the call the error `code` if an argument, an int, is among
    these values under the mask; if `among` is false, if it is not."""
    last = len(values) - 1
    # On a match, jump over the rest: to the refusal, or past it.
    found = [(EQUAL, last - n + (not among), 0, value) for n, value in enumerate(values)]
    if among:
        found[last] = (EQUAL, 0, 1, values[last])
    return [
        (EQUAL, 0, len(values) + 4, number),
        (LOAD, 0, 0, ARGUMENTS_OFFSET + 8 * argument),  # little-endian: its lower half
        (AND, 0, 0, mask),
        *found,
        (RETURN, 0, 0, ERRNO | code),
        (LOAD, 0, 0, NUMBER_OFFSET),
    ]
