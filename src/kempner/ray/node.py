"""One node of a Ray cluster in a Slurm job: starts Ray, watches it, and leaves nothing behind.

scripts/slurm/ray_node.sh starts it, once a node. What happens goes to ray.sh as lines on file
descriptor 3, which srun carries to the batch script:

    UP <index> <pid>            this process is there
    SIGNAL <index> <name>       a signal has told it to end
    READY <text>                the head: every node is alive with all that it has
    FAULT <exit code> <text>    Ray cannot start here, or has died
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

EVENTS = 3
NOT_UP, DIED = 75, 70  # exit codes
TICK_S = 0.2
CONNECT_S = 1.5  # the patience for one connection: the kernel tries twice within it
PEERS_S = 0.5  # between two looks of the head at the other nodes
REFUSALS = 2  # connections in a row that a port which was open refuses, until its owner is dead
SILENCE_S = 10.0  # without any answer from a host, to several questions, until it is dead
SILENT = 3
RAY_STOPS_S = 2.0  # from SIGTERM to SIGKILL: Slurm's own patience (KillWait) has to last longer
COPY_S = 5.0  # for Ray's logs, at the end; ray.sh and Slurm wait for it
SRUN_TELLS_S = 0.5  # srun loses the last words of a task that fails and so ends the step
SOCKET_PATH = 107  # bytes that the kernel allows
# What Ray puts behind the temporary directory: the session, "sockets" and the longest name there.
SOCKET_TAIL = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.sock")
OBJECT_STORE_LEAST = 78643200  # Ray refuses less
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Plan:
    """What this node is to start. Ports are this node's own."""

    job: str
    index: int
    names: list[str]
    addresses: list[str]
    logs: Path
    cpus: int
    gpus: int
    object_store: int  # bytes; 0: a share of `memory`
    memory: int  # MiB that the job has on this node; 0: unknown, Ray decides
    began: float
    deadline: float
    log_sync: float
    dedicated_head: bool
    stride: int  # between the ports of two nodes
    port: int
    head_ports: dict[str, int]  # by ray start's option
    node_ports: dict[str, int]
    worker_ports: range

    @property
    def name(self) -> str:
        return self.names[self.index]

    @property
    def address(self) -> str:
        return self.addresses[self.index]

    @property
    def is_head(self) -> bool:
        return self.index == 0


HEAD_PORTS = ("ray-client-server-port", "dashboard-port")
NODE_PORTS = (
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
    "dashboard-agent-listen-port",
)


def parse(arguments: list[str]) -> Plan:
    parser = argparse.ArgumentParser(prog="kempner.ray.node")
    for name in ("job", "nodes", "addresses"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--logs", type=Path, required=True)
    for name in ("index", "cpus", "gpus", "object-store", "memory", "dedicated-ray-head"):
        parser.add_argument(f"--{name}", type=int, required=True)
    ports = ("port", "port-stride", "min-worker-port", "max-worker-port")
    for name in (*ports, *HEAD_PORTS, *NODE_PORTS):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("began", "deadline", "log-sync"):
        parser.add_argument(f"--{name}", type=float, required=True)
    given = vars(parser.parse_args(arguments))
    names, stride, index = given["nodes"].split(","), given["port_stride"], given["index"]
    share = given["max_worker_port"] - given["min_worker_port"] + 1
    share //= len(names) if stride else 1
    first = given["min_worker_port"] + (share * index if stride else 0)

    def moved(options: tuple[str, ...], offset: int) -> dict[str, int]:
        return {option: given[option.replace("-", "_")] + offset for option in options}

    return Plan(
        **{k: given[k] for k in ("job", "index", "logs", "cpus", "gpus", "object_store", "memory")},
        **{k: given[k] for k in ("began", "deadline", "log_sync", "port")},
        names=names,
        stride=stride,
        addresses=given["addresses"].split(","),
        dedicated_head=bool(given["dedicated_ray_head"]),
        head_ports=moved(HEAD_PORTS, 0),
        node_ports=moved(NODE_PORTS, stride * index),
        worker_ports=range(first, first + share),
    )


# --- before the start ---------------------------------------------------------------------------


def is_busy(port: int) -> bool:
    """Whether somebody on this host has the port, on whichever of its addresses."""
    with socket.socket() as probe:
        # As Ray does: a port that only waits for the last packets of an old connection is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return True
            raise
    return False


def busy_ports(plan: Plan) -> list[str]:
    """The ports of this node that are taken, as the user's variables name them."""
    wanted = dict(plan.node_ports)
    if plan.is_head:
        wanted |= {"port": plan.port, **{k: v for k, v in plan.head_ports.items() if v}}
    found = [f"{k.upper().replace('-', '_')}={v}" for k, v in wanted.items() if is_busy(v)]
    if all(map(is_busy, plan.worker_ports)):
        found.append(f"all of {plan.worker_ports[0]} to {plan.worker_ports[-1]} (MIN_WORKER_PORT)")
    return found


def is_open(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), CONNECT_S):
        return True
    return False


@dataclass
class Door:
    """A port of a Ray that runs. `ray start --block` does not end with its raylet, and of a host
    that is gone nothing comes at all: hence the ports."""

    node: str
    what: str
    address: str
    port: int
    opened: float = 0.0  # when it was last open; 0: not yet
    refusals: int = 0
    silent: int = 0  # times in a row that nothing came

    def fault(self) -> str:
        """What is wrong with it, in words; nothing while it opens, or has never opened."""
        try:
            socket.create_connection((self.address, self.port), CONNECT_S).close()
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            self.refusals, self.silent = self.refusals + refused, self.silent + (not refused)
        else:
            self.opened, self.refusals, self.silent = time.monotonic(), 0, 0
        if not self.opened:
            return ""
        if self.refusals >= REFUSALS:
            return f"{self.node}: Ray's {self.what} is gone: port {self.port} refuses connections"
        silence = time.monotonic() - self.opened
        if self.silent >= SILENT and silence > SILENCE_S:
            return f"{self.node}: no answer from {self.address} for {silence:.0f} s: is it down?"
        return ""


def copy_if_newer(source: Path, target: Path) -> None:
    """Copy a file, unless the copy has its size and its time."""
    was = source.stat()
    if not stat.S_ISREG(was.st_mode):
        return
    with contextlib.suppress(FileNotFoundError):
        there = target.stat()
        if (there.st_size, there.st_mtime) == (was.st_size, was.st_mtime):
            return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def make_temp(plan: Plan) -> Path:
    """This node's own directory for Ray, on a path that leaves room for the names of its
    sockets."""
    name = f"ray-{plan.job}.{plan.index}-"
    base = tempfile.gettempdir()
    if len(os.fsencode(f"{base}/{name}")) + 8 + SOCKET_TAIL > SOCKET_PATH:
        base = "/tmp"
    return Path(tempfile.mkdtemp(prefix=name, dir=base))


def object_store(plan: Plan) -> list[str]:
    """30 % of the job's memory on this node, not of the host's as Ray has it, if it fits into
    /dev/shm."""
    size = plan.object_store
    if not size and plan.memory:
        size = min(plan.memory * 2**20 * 3 // 10, shutil.disk_usage("/dev/shm").free * 9 // 10)
        size = max(size, OBJECT_STORE_LEAST)
    return [f"--object-store-memory={size}"] if size else []


def ray_start(plan: Plan, temp: Path) -> list[str]:
    """The command of this node."""
    words = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats",
        "--log-style=record", "--log-color=false",
        f"--node-ip-address={plan.address}", f"--node-name={plan.name}", f"--temp-dir={temp}",
        f"--min-worker-port={plan.worker_ports[0]}", f"--max-worker-port={plan.worker_ports[-1]}",
        *(f"--{option}={port}" for option, port in plan.node_ports.items()),
        *object_store(plan),
    ]  # fmt: skip
    works = not (plan.is_head and plan.dedicated_head)
    words += [f"--num-cpus={plan.cpus * works}", f"--num-gpus={plan.gpus * works}"]
    if not plan.is_head:
        return [*words, f"--address={plan.addresses[0]}:{plan.port}"]
    dashboard = bool(plan.head_ports["dashboard-port"])
    ports = [f"--{option}={port}" for option, port in plan.head_ports.items() if port]
    words += ["--head", f"--port={plan.port}", *ports]
    return [*words, f"--include-dashboard={dashboard}", "--dashboard-host=127.0.0.1"]


def node_managers(plan: Plan) -> list[tuple[str, tuple[str, int]]]:
    """The name of each node, with the address and the port of its node manager."""
    first = plan.node_ports["node-manager-port"] - plan.stride * plan.index
    places = zip(plan.names, plan.addresses, strict=True)
    return [(n, (a, first + plan.stride * k)) for k, (n, a) in enumerate(places)]


def ready_command(plan: Plan) -> list[str]:
    nodes = [f"{name}={address}:{port}" for name, (address, port) in node_managers(plan)]
    words = [sys.executable, "-m", "kempner.ray.ready", *nodes]
    words += [f"--cpus={plan.cpus}", f"--gpus={plan.gpus}"]
    words += [f"--began={plan.began}", f"--deadline={plan.deadline}"]
    return [*words, "--dedicated-head"] if plan.dedicated_head else words


# --- processes ----------------------------------------------------------------------------------


class Processes:
    """All that runs below this process. What loses its parent becomes our child, so that nothing
    can hide."""

    def __init__(self) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.codes: dict[int, int] = {}

    def start(self, command: list[str], fds: tuple[int, ...] = (), **env: str) -> int:
        # A session of its own: a signal for a process group does not come back to us.
        variables = {**os.environ, **env}
        process = subprocess.Popen(command, pass_fds=fds, env=variables, start_new_session=True)
        return process.pid

    def code(self, pid: int) -> int | None:
        """The exit code of a process that has ended."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self.codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
        return self.codes.get(pid)

    def below(self, pid: int) -> Iterator[int]:
        text = ""
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                text += Path(f"/proc/{pid}/task/{task}/children").read_text()
        for child in map(int, text.split()):
            yield child
            yield from self.below(child)

    def end(self, main: int) -> None:
        """SIGTERM to one, time for it to end the others, SIGKILL to all that are left."""
        if main and self.code(main) is None:
            os.kill(main, signal.SIGTERM)
            end = time.monotonic() + RAY_STOPS_S
            while self.code(main) is None and time.monotonic() < end:
                time.sleep(0.05)
        end = time.monotonic() + RAY_STOPS_S
        while (left := list(self.below(os.getpid()))) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.code(0)
            time.sleep(0.02)


# --- this node ----------------------------------------------------------------------------------


class Fault(Exception):
    """Ray cannot start here, or has died."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def tell(*words: object) -> None:
    with contextlib.suppress(OSError):  # srun may be gone
        os.write(EVENTS, (" ".join(map(str, words)) + "\n").encode())


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] kempner: {text}", flush=True)


class Node:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.processes = plan, Processes()
        self.signal = 0
        self.ray = self.ready = 0  # pids
        raylets = [Door(n, "raylet", *place) for n, place in node_managers(plan)]
        self.doors = [raylets.pop(plan.index)]
        self.peers = raylets if plan.is_head else []
        self.peers_seen = time.monotonic()
        if plan.is_head:
            self.doors.append(Door(plan.name, "GCS", plan.address, plan.port))
        self.had_head = True  # whether the head's raylet was there when ours was started
        self.temp = make_temp(plan)
        self.copying: threading.Thread | None = None
        self.left_out = 0  # files that could not be copied
        self.synced = time.monotonic()

    def on_signal(self, number: int, _: FrameType | None) -> None:
        if not self.signal:
            tell("SIGNAL", self.plan.index, signal.Signals(number).name.removeprefix("SIG"))
        self.signal = number

    def told_to_end(self) -> bool:
        # The listing, not a look for the file: NFS remembers for long that it was not there.
        with contextlib.suppress(OSError):  # ... and forgets the directory, for a while
            return bool(self.signal) or "ENDED" in os.listdir(self.plan.logs)
        return bool(self.signal)

    def run(self) -> None:
        """Until somebody asks for the end. Raises Fault."""
        plan = self.plan
        if busy := busy_ports(plan):
            text = f"{plan.name}: {', '.join(busy)}: in use on this host: another job's?"
            raise Fault(NOT_UP, f"{text} give other ports, or --exclusive nodes")
        if plan.is_head:
            self.ready = self.processes.start(ready_command(plan), (EVENTS,))
        while not plan.is_head and not is_open(plan.addresses[0], plan.port):
            if self.told_to_end():
                return
            time.sleep(TICK_S)
        self.start_ray()
        while not self.told_to_end():
            try:
                self.look()
            except Fault:
                time.sleep(TICK_S)  # Slurm ends the job, and has told Ray before us
                if self.told_to_end():
                    return
                raise
            time.sleep(TICK_S)

    def start_ray(self) -> None:
        self.had_head = self.plan.is_head or is_open(*node_managers(self.plan)[0][1])
        # The dashboard, and what workers start, make sockets and directories in TMPDIR, too.
        self.ray = self.processes.start(ray_start(self.plan, self.temp), TMPDIR=str(self.temp))

    def look(self) -> None:
        """One look at Ray; the head looks at the other nodes, too: one may be gone with its
        host."""
        code = DIED if self.doors[0].opened else NOT_UP
        if (ended := self.processes.code(self.ray)) is not None:
            if self.had_head:
                raise Fault(code, f"{self.plan.name}: ray start has ended with exit code {ended}")
            # The head's raylet comes after its GCS and its dashboard, and Ray waits 10 s for it.
            log("ray start has not found the head's raylet: once more")
            return self.start_ray()
        began, doors = time.monotonic(), self.doors
        if began - self.peers_seen > PEERS_S:
            doors = doors + self.peers
            self.peers_seen = began
        for door in doors:
            if fault := door.fault():
                raise Fault(code, fault)
            if time.monotonic() - began > CONNECT_S:
                break  # a host that is silent takes so long each time, and there may be many
        if self.ready and (ended := self.processes.code(self.ready)) is not None:
            self.ready = 0
            if ended == NOT_UP:
                raise Fault(NOT_UP, "")  # it has told why itself
            if ended:
                text = f"kempner.ray.ready has failed with exit code {ended}"
                raise Fault(NOT_UP, f"{self.plan.name}: {text}")
        if self.plan.log_sync and time.monotonic() - self.synced > self.plan.log_sync:
            self.start_copying()
            self.synced = time.monotonic()

    def start_copying(self) -> None:
        """Ray's own logs into <logs>/ray/<node>/, beside what else there is to do: a file system
        may be slow, or stand still."""
        if self.copying is None or not self.copying.is_alive():
            self.copying = threading.Thread(target=self.copy_logs, daemon=True)
            self.copying.start()

    def copy_logs(self) -> None:
        self.left_out = 0
        for source in self.temp.glob("session_2*/logs"):
            for file in sorted(source.rglob("*"), key=lambda file: len(file.parts)):
                target = self.plan.logs / "ray" / self.plan.name / file.relative_to(source)
                try:
                    copy_if_newer(file, target)
                    if self.plan.is_head and target.name == "dashboard.log":
                        copy_if_newer(file, self.plan.logs / file.name)
                except OSError:  # one that Ray has just moved, or a full disk
                    self.left_out += file.exists()

    def leave(self) -> None:
        self.processes.end(self.ray)
        end = time.monotonic() + COPY_S
        if self.copying is not None:  # that of a while ago
            self.copying.join(COPY_S)
        self.start_copying()
        assert self.copying is not None
        self.copying.join(max(0.0, end - time.monotonic()))
        if self.copying.is_alive():
            log(f"Ray's own logs: copying takes over {COPY_S:.0f} s: see RAY_LOG_SYNC_FREQUENCY")
        elif self.left_out:
            log(f"Ray's own logs: {self.left_out} file(s) could not be copied")
        shutil.rmtree(self.temp, ignore_errors=True)


def main() -> int:
    plan = parse(sys.argv[1:])
    try:
        node = Node(plan)
    except OSError as error:
        tell("FAULT", NOT_UP, f"{plan.name}: {error}")
        time.sleep(SRUN_TELLS_S)
        return NOT_UP
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, node.on_signal)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # not ours; Ray's workers do with it what they want
    tell("UP", node.plan.index, os.getpid())
    try:
        node.run()
    except (Fault, OSError) as problem:
        fault = problem if isinstance(problem, Fault) else Fault(DIED, f"{plan.name}: {problem}")
        log(f"fault: {fault}")
        if str(fault):
            tell("FAULT", fault.code, fault)
            time.sleep(SRUN_TELLS_S)
        return fault.code
    finally:
        node.leave()
        log("Ray has ended")
    return 128 + node.signal if node.signal else 0


if __name__ == "__main__":
    sys.exit(main())
