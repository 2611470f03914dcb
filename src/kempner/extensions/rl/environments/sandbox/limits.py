"""Limits of a reward: kernel namespaces and limits for its process, and the end of all processes
that it has started. Linux; no torch."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import resource
import signal
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from kempner.extensions.rl.environments.sandbox import landlock, system_calls

PROCESSES = 64  # that a reward may have at a time
REWARD_FILE_BYTES = 64 << 20  # per file that it writes
SCRATCH = "/dev/shm"  # exists everywhere; covered by our own file system
SCRATCH_OPTIONS = b"size=256m,nr_inodes=32k,mode=1777"
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}  # in /dev, to /proc/self/fd

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 4, 24, 36
MS_REC, MS_PRIVATE, AT_FDCWD, AT_RECURSIVE = 0x4000, 0x40000, -100, 0x8000
MS_READ_ONLY, MS_NO_SUID, MS_NO_DEVICES, MS_NO_EXEC = 1, 2, 4, 8  # also for mount_setattr
MS_REMOUNT, MS_BIND, MS_MOVE = 0x20, 0x1000, 0x2000
KEPT_OPTIONS = {"nosuid": 2, "noexec": 8}  # of a mount: they cannot be dropped
SYS_MOUNT_SETATTR = 442  # on every architecture; Linux 5.12
# RLIMIT_NPROC does not apply to root. Since Linux 6.14 a process namespace has its own pid_max;
# earlier, root would set that of the whole node. Past 300 the kernel gives no lower numbers.
PID_MAX, PID_MAX_OF_NAMESPACE = 300 + 2 * PROCESSES, (6, 14)
# Earlier, RLIMIT_NPROC counts all of the user's processes on the node, not a namespace's.
NPROC_OF_NAMESPACE = (5, 14)

_libc = ctypes.CDLL(None, use_errno=True)


def isolate_children() -> list[str]:
    """Isolate the future children of this process: no network, and a new process namespace,
    whose init is the first child. Returns what the kernel does not allow. The process must
    have one thread."""
    user, group = os.getuid(), os.getgid()
    parts = NEWPID | NEWNET | NEWIPC
    try:
        # A user namespace even for root: a process whose capabilities are confined to it cannot
        # reach processes outside, nor their memory and environment.
        _check(_libc.unshare(NEWUSER | parts))
        for file, text in (
            # First: an unprivileged gid_map is accepted only after it (user_namespaces(7)).
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            Path(f"/proc/self/{file}").write_text(text)
    except OSError as error:
        return [f"no namespaces ({error.strerror}): a program may use the network and write files"]
    return []


def confine_process(isolated: bool) -> tuple[list[str], str]:
    """Restrict the process that asks the environments, and its children. Returns what the kernel
    does not allow, and its private file system for temporary files, if any."""
    lacks, scratch = _seal() if isolated else ([], "")
    lacks += system_calls.forbid_calls()
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    become_subreaper()  # if it is not the init of a namespace
    # Otherwise a program could open this process's pipes in /proc, and write a reward there.
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # Without these, even a program run as root cannot remount anything.
    for capability in range(64):
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: REWARD_FILE_BYTES}
    if isolated and _kernel() >= NPROC_OF_NAMESPACE:
        limits[resource.RLIMIT_NPROC] = 2 * PROCESSES
    for name, limit in limits.items():
        most = resource.getrlimit(name)[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(name, (limit, limit))
    os.nice(5)  # the trainer's ranks come first
    return lacks, scratch


def _seal() -> tuple[list[str], str]:
    """Make all files read-only except an empty file system, which is mounted first; before that,
    SCRATCH is a directory of the host."""
    if _kernel() >= PID_MAX_OF_NAMESPACE:
        with contextlib.suppress(OSError):
            Path("/proc/sys/kernel/pid_max").write_text(str(PID_MAX))
    scratch = ""
    try:
        _check(_libc.unshare(NEWNS))
        # Private: these mounts do not reach the host, nor its later ones this process.
        _check(_libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
        _make_devices()
        own = MS_NO_SUID | MS_NO_DEVICES
        _check(_libc.mount(b"tmpfs", SCRATCH.encode(), b"tmpfs", own, SCRATCH_OPTIONS))
        scratch = SCRATCH
        with contextlib.suppress(OSError):  # refused in a container that hides a part of its /proc
            _check(_libc.mount(b"proc", b"/proc", b"proc", own | MS_NO_EXEC, None))
        _make_read_only(scratch)
        landlock.allow_writing(scratch, [f"/dev/{name}" for name in DEVICES])
        _return_to(_leave_pid_namespace())  # checks that own_processes() can do so
    except OSError as error:
        return [f"no read-only files ({error.strerror}): a program may write files"], scratch
    return [], scratch


def _make_devices() -> None:
    """Mount a /dev without terminals and disks, and an empty SCRATCH. Raises OSError."""
    _check(_libc.mount(b"tmpfs", SCRATCH.encode(), b"tmpfs", MS_NO_SUID, b"size=64k,mode=755"))
    for name in DEVICES:
        path = Path(SCRATCH, name)
        path.touch()
        # Bound from the host's: mknod() of a device is refused in a user namespace.
        _check(_libc.mount(f"/dev/{name}".encode(), os.fsencode(path), None, MS_BIND, None))
    for name, of in LINKS.items():
        Path(SCRATCH, name).symlink_to(f"/proc/self/fd{of}")
    # Mount point of SCRATCH itself, once this file system covers /dev.
    Path(SCRATCH, Path(SCRATCH).name).mkdir()
    _check(_libc.mount(SCRATCH.encode(), b"/dev", None, MS_MOVE, None))


def _make_read_only(scratch: str) -> None:
    """Make all mounts but this one read-only, and without devices but DEVICES. Raises OSError."""
    devices = {f"/dev/{name}" for name in DEVICES}
    try:
        _set_attributes("/", AT_RECURSIVE, MS_READ_ONLY | MS_NO_DEVICES, 0)
        _set_attributes(scratch, 0, 0, MS_READ_ONLY)
        for path in devices:
            _set_attributes(path, 0, 0, MS_NO_DEVICES)
        return
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    for path, options in _mounts():  # Linux before 5.12
        own_flags = sum(flag for name, flag in KEPT_OPTIONS.items() if name in options)
        own_flags |= 0 if path in devices else MS_NO_DEVICES
        if path == scratch or ("ro" in options and ("nodev" in options or path in devices)):
            continue
        try:
            flags = MS_REMOUNT | MS_BIND | MS_READ_ONLY | own_flags
            _check(_libc.mount(None, os.fsencode(path), None, flags, None))
        except OSError as error:
            if _is_reachable(path, error.errno):
                raise


def _set_attributes(path: str, flags: int, attr_set: int, attr_clr: int) -> None:
    # struct mount_attr: attributes to set and to clear, propagation, user namespace.
    attributes = struct.pack("4Q", attr_set, attr_clr, 0, 0)
    where = (SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), flags)
    _check(_libc.syscall(*where, attributes, len(attributes)))


def _mounts() -> Iterator[tuple[str, list[str]]]:
    """Yield path and options of each mount; nested mounts come after their parents."""
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        fields = line.split()
        # mountinfo escapes spaces and the like as octal numbers: \040.
        path = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), fields[4])
        yield os.fsdecode(path), fields[5].decode().split(",")


def _is_reachable(path: str, number: int | None) -> bool:
    """Return whether a program could write there: not if another mount covers it, or the
    way is closed."""
    if number in (errno.ENOENT, errno.EACCES, errno.ENOTDIR):
        return False
    return number != errno.EINVAL or not os.statvfs(path).f_flag & os.ST_RDONLY


@contextlib.contextmanager
def own_processes() -> Iterator[None]:
    """Make the process started within this context the init of a new process namespace, if the
    kernel allows that: it neither sees nor signals other processes, and everything that it starts
    ends with it."""
    try:
        ours = _leave_pid_namespace()
    except PermissionError:  # only `unsafe` runs programs in spite of this
        yield
        return
    try:
        yield
    finally:
        _return_to(ours)


def _leave_pid_namespace() -> int:
    """Move the future children of this process to a new namespace; returns what leads
    back. Raises OSError."""
    ours = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.unshare(NEWPID))
    except OSError:
        os.close(ours)
        raise
    return ours


def _return_to(namespace: int) -> None:
    try:
        _check(_libc.setns(namespace, NEWPID))
    finally:
        os.close(namespace)


@contextlib.contextmanager
def address_space(mib: int) -> Iterator[None]:
    """Limit the address space to `mib` MiB above its present size; past it, MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = pages * resource.getpagesize() + (mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def list_descendants(pid: int, most: int | None = None) -> list[int]:
    """List at most `most` descendants of a process that have not ended."""
    descendants: list[int] = []
    queue = [pid]
    while queue and (most is None or len(descendants) < most):
        parent = queue.pop()
        # The kernel lists children by the thread that started them.
        for task in _listing(f"/proc/{parent}/task"):
            queue += map(int, _text(f"/proc/{parent}/task/{task}/children").split())
        if parent != pid and _text(f"/proc/{parent}/stat").rpartition(")")[2].split()[:1] != ["Z"]:
            descendants.append(parent)
    return descendants


def process_memory(pids: Iterable[int]) -> int:
    """Memory of these processes, in MiB, that is not backed by a file on disk."""
    kib = 0
    for pid in pids:
        status = _text(f"/proc/{pid}/status")
        kib += sum(map(int, re.findall(r"^Rss(?:Anon|Shmem):\s*(\d+)", status, re.MULTILINE)))
    return kib >> 10


def end_descendants(pid: int, seconds: float) -> bool:
    """Kill all descendants; returns False if some remain after `seconds`."""
    limit = time.monotonic() + seconds
    while pids := list_descendants(pid):
        if time.monotonic() > limit:
            return False
        # Stop all of them first, so that none starts others while these are killed.
        for signal_number in (signal.SIGSTOP, signal.SIGKILL):
            for member in pids:
                _kill(member, signal_number)
        reap_children()
        time.sleep(0.002)
    return True


def become_subreaper() -> None:
    """Make this process the parent of its descendants' orphans, so that none escapes."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_children() -> bool:
    """Collect the exit codes of all children that have ended; returns True when none is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _listing(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        # A process name may contain any bytes.
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
