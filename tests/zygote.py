"""Starts of Python programs for the price of a fork, from a process that has imported torch.

    process = zygote.Popen([sys.executable, "scripts/train.py", *words], cwd=ROOT, env=clean_env())
    done = zygote.run([sys.executable, "-m", "torch.distributed.run", ...], capture_output=True)

Two seconds of three that a trainer of a test takes are `import torch`. `Popen` is subprocess.Popen:
arguments, environment, directory, streams, signals, session and the end are those of a true start,
and so are the ranks that torchrun starts. What a fork cannot have starts truly: another
interpreter or option, `-c`, or a variable that Python, the C library or torch reads as it loads.
What still runs when a test ends is killed: for one that serves several tests, subprocess.Popen.
A program of scripts/ finds the trainer's modules imported too; others, such as those that put
faults into them, import them anew. Two differences stay: /proc/PID/cmdline is the zygote's, and all
forks share one seed of str's hashes.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import gc
import importlib.machinery
import io
import json
import os
import runpy
import select
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# What Python, the C library, torch or a package of its own reads before a program's first line.
READ_AT_START = (
    "PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_",
    "ATEN_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "NPY_", "TZ",
)  # fmt: skip
READ_LATER = ("TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR")  # torchrun gives these to its ranks
PRELOADED = (
    "torch", "torch.distributed.launcher.api", "torch.distributed.checkpoint",
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo", "torch.export",
    "torch.distributed.tensor.experimental", "torch.distributed.pipelining", "torch.profiler",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "sympy", "safetensors.torch",
    "torch.distributed.nn.functional",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
FIRST_ENVIRON = dict(os.environ)  # before any test changed it
OWNER = "STARTED_BY_TEST"  # a variable of all that this process has started, however far down


def read_at_start(env: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name.startswith(READ_AT_START) and not name.startswith(READ_LATER)
    }


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """subprocess.Popen, from the zygote where that can be; `forked` says whether."""

    _end: socket.socket | None = None  # the zygote writes there how the process has ended

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        STARTED.append(self)

    @property
    def forked(self) -> bool:
        return self._end is not None

    def _execute_child(self, args: Any, *rest: Any) -> None:
        executable, preexec, _, pass_fds, cwd, env, _, _, shell, *more = rest
        *pipes, _, gid, gids, uid, umask, new_session = more[:12]
        process_group = more[12] if len(more) > 12 else -1
        env = dict(os.environ if env is None else env)
        if zygote().owned is not None:  # else it is a fork itself: its ranks are its owner's
            env[OWNER] = str(os.getpid())
        special = (executable, preexec, *pass_fds) != (None, None) or shell or process_group != -1
        special = special or (gid, gids, uid) != (None, None, None) or umask != -1
        words = list(map(os.fspath, args)) if isinstance(args, list | tuple) else []
        if special or not can_fork(words) or read_at_start(env) != zygote().at_start:
            super()._execute_child(args, *rest[:5], env, *rest[6:])
            return
        request = {"words": words[1:], "env": env, "cwd": os.fspath(cwd or os.getcwd())}
        request["new_session"] = bool(new_session)
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        given = [p2cread, c2pwrite, errwrite]
        try:
            numbers = [n if n != -1 else i for i, n in enumerate(given)]
            self._end = ask(zygote().addresses[is_of_kit(request)], request, numbers)
            self.pid = int(self._end.recv(64))  # it is what it is to be
        finally:
            self._close_pipe_fds(*pipes)
        self._child_created = True

    def _internal_poll(self, _deadstate: Any = None, *rest: Any) -> int | None:
        if self._end is None:
            return super()._internal_poll(_deadstate, *rest)
        if self.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._end is None:
            return super()._wait(timeout)
        if self.returncode is None and not select.select([self._end], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        with self._waitpid_lock:
            if self.returncode is None:
                self.returncode = int(self._end.recv(64) or -signal.SIGKILL)
                self._end.close()
        return self.returncode


def run(
    args: Sequence[Any], *, timeout: float | None = None, check: bool = False, **more: Any
) -> subprocess.CompletedProcess[str]:
    """subprocess.run, from the zygote where that can be."""
    stdin = more.pop("input", None)
    if more.pop("capture_output", False):
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if stdin is not None:
        more["stdin"] = subprocess.PIPE
    with Popen(args, **more) as process:
        try:
            out, err = process.communicate(stdin, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def can_fork(words: list[str]) -> bool:
    """Is it `python [-u] SCRIPT.py ...`, or `python [-u] -m MODULE ...`?"""
    if not words or words[0] != sys.executable:
        return False
    program = words[2:] if words[1:2] == ["-u"] else words[1:]
    return bool(program) and (program[0] == "-m" or program[0].endswith(".py"))


def is_of_kit(request: dict[str, Any]) -> bool:
    """Does it start a program of scripts/?"""
    script = next(word for word in request["words"] if word != "-u")
    return Path(request["cwd"], script).resolve().parent == ROOT / "scripts"


class Zygote(NamedTuple):
    addresses: tuple[bytes, bytes]  # of the one that has torch, and of its fork that has the kit
    at_start: dict[str, str]  # what of its environment was read as it started
    owned: socket.socket | None  # it ends, with its forks, when this is closed


STARTED: list[Popen] = []
ZYGOTE: list[Zygote] = []  # that of this process, or, in a fork, the one that it is of


def zygote() -> Zygote:
    """The one of this process, started when need be."""
    if not ZYGOTE:
        env = {**FIRST_ENVIRON, "OMP_NUM_THREADS": "1"}
        servers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in "12"]
        for server in servers:
            server.bind("")  # a name of the kernel's choice, in no directory
            server.listen(64)
        ours, its = socket.socketpair()
        numbers = [end.fileno() for end in (*servers, its)]
        command = [sys.executable, __file__, *map(str, numbers)]
        subprocess.Popen(command, env=env, pass_fds=numbers, stdin=subprocess.DEVNULL)
        addresses = (servers[0].getsockname(), servers[1].getsockname())
        ZYGOTE.append(Zygote(addresses, read_at_start(env), ours))
        for end in (*servers, its):
            end.close()
    return ZYGOTE[0]


def ask(address: bytes, request: dict[str, Any], descriptors: list[int]) -> socket.socket:
    """The connection that a request was sent by."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
    return connection


def end_all() -> list[str]:
    """Kill what this process has started by `Popen`, and what that has started, as far as it still
    runs; returns the words of those that were killed themselves."""
    if not STARTED:
        return []
    left = [process for process in STARTED if process.poll() is None]
    if any(process.forked for process in STARTED):
        for address in zygote().addresses:
            with ask(address, {"end": True}, []) as answer:
                answer.recv(64)
    while found := [pid for pid in owned() if kill(pid)]:
        time.sleep(0.01 * len(found))
    for process in left:
        process.kill()
        process.wait()
    STARTED.clear()
    return [shlex.join(map(str, process.args)) for process in left]


def owned() -> list[int]:
    """The processes below those of `Popen`, and the true starts among these."""
    mark = f"{OWNER}={os.getpid()}\0".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def kill(pid: int) -> bool:
    """Kill a process; is there anything left of it?"""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


# In the zygote.


def of_trainer() -> list[str]:
    """The kit's modules that scripts/train.py imports by name."""
    lines = ast.parse((ROOT / "scripts/train.py").read_text()).body
    found = [
        x for x in lines if isinstance(x, ast.ImportFrom) and str(x.module).startswith("kempner")
    ]
    whole = [f"kempner.{name.name}" for x in found if x.module == "kempner" for name in x.names]
    return whole + [str(x.module) for x in found]


def preload(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has none of these threads"
    gc.collect()
    gc.freeze()


def serve(server: socket.socket, owner: socket.socket) -> dict[str, Any]:
    """Fork for each request, until the owner is gone; returns, in a fork, what it is to be."""
    children: dict[int, socket.socket] = {}
    waker, woken = socket.socketpair()
    for one in (waker, woken):
        one.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: its owner ends it
    watched = selectors.DefaultSelector()
    for one in (server, owner, woken):
        watched.register(one, selectors.EVENT_READ)
    while True:
        for key, _ in watched.select():
            if key.fileobj is owner:
                end_children(children)
                os._exit(0)
            if key.fileobj is server and (request := answer(server, children)) is not None:
                signal.set_wakeup_fd(-1)
                for one in (watched, waker, woken, server, owner, *children.values()):
                    one.close()
                return request
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)
            reap(children)


def answer(server: socket.socket, children: dict[int, socket.socket]) -> dict[str, Any] | None:
    connection, _ = server.accept()
    message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    request = json.loads(message or "{}")
    if "words" not in request:
        end_children(children)
        connection.close()
    elif pid := os.fork():
        children[pid] = connection
        for number in descriptors:
            os.close(number)
    else:
        return {**request, "descriptors": descriptors, "connection": connection}
    return None


def reap(children: dict[int, socket.socket]) -> None:
    for pid in list(children):
        found, how = os.waitpid(pid, os.WNOHANG)
        if found:
            with children.pop(pid) as connection, contextlib.suppress(OSError):
                connection.send(b"%d" % os.waitstatus_to_exitcode(how))


def end_children(children: dict[int, socket.socket]) -> None:
    for pid in children:
        kill(pid)
    while children:
        reap(children)
        time.sleep(0.01)


def become(request: dict[str, Any]) -> list[str]:
    """In a fork: what a true start has as its first line runs; returns the program's words."""
    if request["new_session"]:
        os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for number, descriptor in enumerate(request["descriptors"]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with request["connection"] as connection:
        connection.send(b"%d" % os.getpid())
    words = request["words"]
    sys.orig_argv = [sys.executable, *words]
    unbuffered = words[0] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = stream(0, False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = stream(1, unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = stream(2, unbuffered)  # type: ignore[misc]
    numpy.random.seed()
    return words[words[0] == "-u" :]


def stream(number: int, unbuffered: bool) -> io.TextIOWrapper:
    """One of the three, as Python makes it."""
    mode = "w" if number else "r"
    raw = open(number, f"{mode}b", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    was = (sys.stdin, sys.stdout, sys.stderr)[number]
    getattr(raw, "raw", raw).name = was.name
    lines = not unbuffered and (number == 2 or os.isatty(number))
    text = io.TextIOWrapper(raw, was.encoding, was.errors, "\n", lines, unbuffered)  # type: ignore[type-var]
    text.mode = mode  # type: ignore[attr-defined]
    return text


def run_program(words: list[str]) -> None:
    """As `python SCRIPT.py ...` or `python -m MODULE ...` does, in a module __main__ of its own."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        if words[1] == "torch.distributed.run":  # the ranks that it starts are forks too
            from torch.distributed.elastic.multiprocessing.subprocess_handler import (
                subprocess_handler,
            )

            subprocess_handler.Popen = Popen  # type: ignore[misc]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    sys.argv, sys.path[0] = words, os.path.dirname(os.path.realpath(words[0]))
    loader = importlib.machinery.SourceFileLoader("__main__", words[0])
    vars(main).update(__file__=words[0], __builtins__=builtins, __loader__=loader)
    exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), vars(main))


if __name__ == "__main__":
    import numpy

    SERVERS = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    OWNED = SERVERS.pop()
    ADDRESSES = (SERVERS[0].getsockname(), SERVERS[1].getsockname())
    ZYGOTE.append(Zygote(ADDRESSES, read_at_start(dict(os.environ)), None))
    preload(PRELOADED)
    OF_KIT = os.fork() == 0
    SERVERS.pop(not OF_KIT).close()
    if OF_KIT:
        preload(of_trainer())
    try:
        run_program(become(serve(SERVERS[0], OWNED)))
    except KeyboardInterrupt:  # Python itself would end with code 1 here, and not by the signal
        sys.excepthook(*sys.exc_info())
        for STREAM in (sys.stdout, sys.stderr):
            STREAM.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
