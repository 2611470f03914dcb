"""One node of a Ray cluster in a Slurm job: starts Ray, watches it, and leaves nothing behind.

scripts/slurm/lib/ray_node.sh starts it once per node. It reports to ray.sh in lines on file
descriptor 3, which srun carries to the batch script:

    UP <index> <pid>            this process runs
    SIGNAL <index> <name>       a signal has told it to end
    READY <text>                from the head: every node is alive with all of its CPUs and GPUs
    FAULT <exit code> <text>    Ray cannot start here, or has died
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from kempner.jobs.ray.logs import LogCopier
from kempner.jobs.ray.ports import PORT_CONNECT_S, PortProbe, Ports, busy_ports, is_open
from kempner.jobs.ray.processes import Processes
from kempner.jobs.system.process import module_command

EVENTS = 3  # file descriptor
NOT_UP_EXIT, DIED_EXIT = 75, 70  # exit codes
NODE_TICK_S = 0.2
PROBE_PEERS_S = 0.5  # how often the head probes the other nodes
EMIT_S = 0.5  # srun loses the last output of a task whose failure ends the step
SOCKET_PATH = 107  # bytes that the kernel allows
# Ray appends the session, "sockets" and a name to its temporary directory; this is the longest.
SOCKET_TAIL = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.sock")
OBJECT_STORE_LEAST = 78643200  # bytes; Ray refuses less
# In raylet.err, after 15 s that nobody can change: github.com/ray-project/ray/issues/65983.
AGENT_IS_LATE = "Timed out waiting for file"


def emit_line(*words: object) -> None:
    """Send one line to ray.sh."""
    with contextlib.suppress(OSError):  # srun may have ended
        os.write(EVENTS, (" ".join(map(str, words)) + "\n").encode())


def log_text(text: str) -> None:
    print(f"[{time.strftime('%F %T')}] kempner: {text}", flush=True)


class RayFault(Exception):
    """Ray cannot start here, or has died."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


# --- what to start ------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodePlan:
    """The processes that this node starts, and the addresses of the other nodes."""

    job: str
    index: int  # 0: the head
    addresses: dict[str, str]  # of all nodes, by name, in order
    ports: Ports
    logs: Path
    cpus: int
    gpus: int
    dedicated_head: bool
    object_store: int  # bytes; 0: a share of `memory`
    memory: int  # MiB that the job has on this node; 0: unknown, Ray decides
    began: float  # Unix time
    deadline: float
    log_sync: float  # seconds between copies of Ray's logs; 0: only at the end

    @property
    def name(self) -> str:
        return list(self.addresses)[self.index]

    @property
    def address(self) -> str:
        return self.addresses[self.name]

    @property
    def head_address(self) -> str:
        return next(iter(self.addresses.values()))

    @property
    def is_head(self) -> bool:
        return self.index == 0

    def raylets(self) -> Iterator[tuple[str, str, int]]:
        """The name, the address and the node manager's port of each node, in order."""
        for index, (name, address) in enumerate(self.addresses.items()):
            yield name, address, self.ports.node_manager(index)


def parse_node_plan(arguments: list[str]) -> NodePlan:
    parser = argparse.ArgumentParser(prog="kempner.jobs.ray.node")
    parser.add_argument("--job", required=True)
    parser.add_argument("--nodes", nargs="+", required=True, help="NAME=ADDRESS")
    parser.add_argument(
        "--ports", required=True, help="the line that kempner.jobs.ray.ports prints"
    )
    parser.add_argument("--logs", type=Path, required=True)
    for name in ("index", "cpus", "gpus", "dedicated-head", "object-store", "memory"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("began", "deadline", "log-sync"):
        parser.add_argument(f"--{name}", type=float, required=True)
    options = vars(parser.parse_args(arguments))
    addresses = dict(word.split("=", 1) for word in options.pop("nodes"))
    ports = Ports.parse(options.pop("ports"), len(addresses))
    dedicated = bool(options.pop("dedicated_head"))
    return NodePlan(**options, addresses=addresses, ports=ports, dedicated_head=dedicated)


def make_temp(plan: NodePlan) -> Path:
    """Create this node's own directory for Ray, on a path short enough for its sockets."""
    name = f"ray-{plan.job}.{plan.index}-"
    base = tempfile.gettempdir()
    # mkdtemp() appends 8 characters.
    if len(os.fsencode(f"{base}/{name}")) + 8 + SOCKET_TAIL > SOCKET_PATH:
        base = "/tmp"
    return Path(tempfile.mkdtemp(prefix=name, dir=base))


def object_store(plan: NodePlan) -> list[str]:
    """Return the size of the object store: 30 % of the job's memory on this node, limited by
    /dev/shm. Ray's own default is 30 % of the host's memory, which may belong to other jobs."""
    size = plan.object_store
    if not size and plan.memory:
        # If /dev/shm is too small, Ray refuses to start or, for a small store, uses its temporary
        # directory, which is slow.
        size = min(plan.memory * 2**20 * 3 // 10, shutil.disk_usage("/dev/shm").free * 9 // 10)
        size = max(size, OBJECT_STORE_LEAST)
    return [f"--object-store-memory={size}"] if size else []


def ray_start(plan: NodePlan, temp: Path) -> list[str]:
    """Return the `ray start` command of this node."""
    ports, workers = plan.ports.of_node(plan.index), plan.ports.workers(plan.index)
    works = not (plan.is_head and plan.dedicated_head)
    words = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats",
        "--log-style=record", "--log-color=false",
        f"--node-ip-address={plan.address}", f"--node-name={plan.name}", f"--temp-dir={temp}",
        f"--min-worker-port={workers[0]}", f"--max-worker-port={workers[-1]}",
        *(f"--{name.lower().replace('_', '-')}={port}" for name, port in ports.items()),
        f"--num-cpus={plan.cpus * works}", f"--num-gpus={plan.gpus * works}",
        *object_store(plan),
    ]  # fmt: skip
    if not plan.is_head:
        return [*words, f"--address={plan.head_address}:{plan.ports.gcs}"]
    dashboard = f"--include-dashboard={plan.ports.has_dashboard}"
    return [*words, "--head", dashboard, "--dashboard-host=127.0.0.1"]


def ready_command(plan: NodePlan) -> list[str]:
    """Return the command that waits until the cluster is complete; see kempner.jobs.ray.ready."""
    nodes = [f"{name}={address}:{port}" for name, address, port in plan.raylets()]
    words = [*module_command("kempner.jobs.ray.ready"), *nodes]
    words += [f"--cpus={plan.cpus}", f"--gpus={plan.gpus}"]
    words += [f"--began={plan.began}", f"--deadline={plan.deadline}"]
    return [*words, "--dedicated-head"] if plan.dedicated_head else words


# --- this node ----------------------------------------------------------------------------------


class RayNode:
    def __init__(self, plan: NodePlan) -> None:
        self.plan, self.processes = plan, Processes()
        self.signal = 0
        self.ray = self.ready = 0  # pids
        raylets = [PortProbe(name, "raylet", host, port) for name, host, port in plan.raylets()]
        self.probes = [raylets.pop(plan.index)]
        self.peers = raylets if plan.is_head else []
        self.peers_probed = time.monotonic()
        if plan.is_head:
            self.probes.append(PortProbe(plan.name, "GCS", plan.address, plan.ports.gcs))
        self.head_was_up = True  # whether the head's raylet has run all the time that ours starts
        self.temp = make_temp(plan)
        self.logs = LogCopier(self.temp, plan.logs, plan.name, plan.is_head)
        self.synced = time.monotonic()

    def on_signal(self, number: int, _: FrameType | None) -> None:
        if not self.signal:
            emit_line("SIGNAL", self.plan.index, signal.Signals(number).name.removeprefix("SIG"))
        self.signal = number

    def end_requested(self) -> bool:
        # List the directory: NFS caches for a long time that a file does not exist.
        with contextlib.suppress(OSError):  # the directory may be unavailable for a while
            return bool(self.signal) or "ENDED" in os.listdir(self.plan.logs)
        return bool(self.signal)

    def run(self) -> None:
        """Run Ray until a signal or the file ENDED asks for the end. Raises RayFault."""
        plan = self.plan
        # Before Ray starts, so that the job ends with a message that names the port.
        if busy := busy_ports(plan.ports, plan.index):
            text = f"{plan.name}: {', '.join(busy)}: in use on this host, perhaps by another job:"
            raise RayFault(NOT_UP_EXIT, f"{text} give other ports, or --exclusive nodes")
        if plan.is_head:
            # It reports to ray.sh itself; Ray's processes do not inherit that channel.
            self.ready = self.processes.start(ready_command(plan), (EVENTS,))
        while not plan.is_head and not is_open(plan.head_address, plan.ports.gcs):
            if self.end_requested():
                return
            time.sleep(NODE_TICK_S)
        self.start_ray()
        while not self.end_requested():
            try:
                self.poll()
            except RayFault:
                # When Slurm ends the job, its signal may kill Ray before it reaches this process.
                time.sleep(NODE_TICK_S)
                if self.end_requested():
                    return
                raise
            time.sleep(NODE_TICK_S)

    def start_ray(self) -> None:
        plan = self.plan
        self.head_was_up = plan.is_head or is_open(plan.head_address, plan.ports.node_manager(0))
        # The dashboard and the workers create sockets and directories in TMPDIR.
        self.ray = self.processes.start(ray_start(plan, self.temp), TMPDIR=str(self.temp))

    def poll(self) -> None:
        """Check Ray once, and restart it if it was only too slow to start, here or on the head."""
        try:
            self.check()
        except RayFault:
            if self.agent_was_late():
                why = "Ray's agent took more than the 15 s that Ray allows"
            elif self.head_is_starting():
                why = "the head has not started yet, or is restarting"
            else:
                raise
            log_text(f"{why}: starting Ray again")
            self.start_again()

    def agent_was_late(self) -> bool:
        """Return whether a raylet of this node has ended because its agent, whose imports may come
        from a slow file system, was not ready in time. Each end is reported once."""
        for path in sorted(self.temp.glob("session_2*/logs/raylet.err")):
            with contextlib.suppress(OSError):
                if AGENT_IS_LATE in path.read_text(errors="replace"):
                    path.rename(path.with_name(f"raylet-{time.time():.0f}.err"))  # the next appends
                    return True
        return False

    def head_is_starting(self) -> bool:
        """Return whether the head's raylet is unavailable while the cluster may still become
        complete. If it has died for good, the head reports that."""
        plan = self.plan
        away = not plan.is_head and not is_open(plan.head_address, plan.ports.node_manager(0))
        return away and time.time() < plan.deadline

    def start_again(self) -> None:
        """End all of Ray's remaining processes on this node, and restart Ray."""
        self.processes.terminate(self.ray)
        for probe in self.probes:
            probe.opened, probe.refusals, probe.silent = 0.0, 0, 0
        if self.ready:
            self.ready = self.processes.start(ready_command(self.plan), (EVENTS,))
        self.start_ray()

    def check(self) -> None:
        """Raise RayFault for any fault; the head also probes the other nodes: hosts may be down."""
        code = DIED_EXIT if self.probes[0].opened else NOT_UP_EXIT
        if self.head_was_up and not self.plan.is_head and not self.probes[0].opened:
            self.head_was_up = is_open(self.plan.head_address, self.plan.ports.node_manager(0))
        if (exit_code := self.processes.exit_code(self.ray)) is not None:
            if self.head_was_up:
                raise RayFault(
                    code, f"{self.plan.name}: ray start has ended with exit code {exit_code}"
                )
            # The head's raylet starts after its GCS and dashboard, and Ray waits only 10 s for it.
            log_text("ray start did not find the head's raylet: starting it again")
            return self.start_ray()
        self.probe_ports(code)
        if self.ready and (exit_code := self.processes.exit_code(self.ready)) is not None:
            self.ready = 0
            if exit_code == NOT_UP_EXIT:
                raise RayFault(NOT_UP_EXIT, "")  # it has already reported the reason
            if exit_code:
                text = f"kempner.jobs.ray.ready has failed with exit code {exit_code}"
                raise RayFault(NOT_UP_EXIT, f"{self.plan.name}: {text}")
        if self.plan.log_sync and time.monotonic() - self.synced > self.plan.log_sync:
            self.logs.start()
            self.synced = time.monotonic()

    def probe_ports(self, code: int) -> None:
        began, probes = time.monotonic(), self.probes
        if began - self.peers_probed > PROBE_PEERS_S:
            probes = probes + self.peers
            self.peers_probed = began
        for probe in probes:
            fault = probe.fault()
            # Until the cluster is complete another node may restart its Ray.
            if fault and not (self.ready and probe.refusals and probe in self.peers):
                raise RayFault(code, fault)
            if time.monotonic() - began > PORT_CONNECT_S:
                break  # each silent host costs a timeout, and there may be many

    def shut_down(self) -> None:
        self.processes.terminate(self.ray)
        # After Ray has ended its logs are complete; the directory goes last.
        if missing := self.logs.finish():
            log_text(f"Ray's own logs: {missing}")
        shutil.rmtree(self.temp, ignore_errors=True)


def main() -> int:
    plan = parse_node_plan(sys.argv[1:])
    try:
        node = RayNode(plan)
    except OSError as error:
        emit_line("FAULT", NOT_UP_EXIT, f"{plan.name}: {error}")
        time.sleep(EMIT_S)
        return NOT_UP_EXIT
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, node.on_signal)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # for Ray's workers, which may handle them
    emit_line("UP", plan.index, os.getpid())
    try:
        node.run()
    except (RayFault, OSError) as problem:
        fault = (
            problem
            if isinstance(problem, RayFault)
            else RayFault(DIED_EXIT, f"{plan.name}: {problem}")
        )
        log_text(f"fault: {fault}")
        if str(fault):
            emit_line("FAULT", fault.code, fault)
            time.sleep(EMIT_S)
        return fault.code
    finally:
        node.shut_down()
        log_text("Ray has ended")
    return 128 + node.signal if node.signal else 0


if __name__ == "__main__":
    sys.exit(main())
