"""The ports of a Ray cluster: defaults, checks, each node's share, and whether one answers.

scripts/slurm/ray.sh runs this once, on the batch host, before any step starts:

    python -m kempner.jobs.ray.ports CPUS_PER_NODE NAME=ADDRESS...

It reads the user's variables (docs/guide/ray.md) from the environment and prints every port as
NAME=value, all on one line, which kempner.jobs.ray.node takes as --ports. It exits with code 2 if
the ports cannot work. kempner.jobs.ray imports only the standard library (and Ray in ready.py): the
batch host's Python may have nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kempner.jobs.ranks.port_range import allowed_ports
from kempner.jobs.system.front_door import BadPortRange

# Keyed by the user's variable; the option of `ray start` has the same name in lower case.
HEAD_PORTS = {"PORT": 54514, "RAY_CLIENT_SERVER_PORT": 10001, "DASHBOARD_PORT": 8265}
NODE_PORTS = {
    "NODE_MANAGER_PORT": 53001,
    "OBJECT_MANAGER_PORT": 53003,
    "RUNTIME_ENV_AGENT_PORT": 53005,
    "DASHBOARD_AGENT_GRPC_PORT": 53007,
    "METRICS_EXPORT_PORT": 53009,
    "DASHBOARD_AGENT_LISTEN_PORT": 52365,
}
WORKER_PORTS = {"MIN_WORKER_PORT": 54001, "MAX_WORKER_PORT": 54513}
WORKERS_A_CPU = 4  # worker ports: Ray starts more than one process per CPU
NOT_READ = "DASHBOARD_GRPC_PORT"  # from NeMo RL's documentation
STRIDE = "PORT_STRIDE"
STRIDE_ON_SHARED_HOSTS = 20
LEAST_PORT, LAST_PORT = 1024, 65535

PORT_CONNECT_S = 1.5  # timeout of one connection: the kernel sends a second SYN within it
DEAD_REFUSALS = 2  # consecutive refusals after which a port that was open counts as dead
HOST_SILENCE_S = 10.0  # a host is dead after this time without an answer ...
SILENT_CONNECTIONS = 3  # ... to at least this many connections


class PortError(ValueError):
    """The user's ports cannot work; the message says which one and what to do."""


@dataclass(frozen=True)
class Ports:
    """The ports of all nodes. `base` has the ports of node 0, by user variable, and PORT_STRIDE.

    Node k has its node ports k x PORT_STRIDE higher and the k-th share of the worker ports. With
    PORT_STRIDE=0 every node is a separate host, and all have the same ports.
    """

    base: dict[str, int]
    nodes: int

    @classmethod
    def parse(cls, line: str, nodes: int) -> Ports:
        """Parse the output of str()."""
        return cls({k: int(v) for k, v in (word.split("=") for word in line.split())}, nodes)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.base.items())

    @property
    def gcs(self) -> int:
        return self.base["PORT"]

    @property
    def has_dashboard(self) -> bool:
        return self.base["DASHBOARD_PORT"] != 0

    @property
    def shares(self) -> int:
        """Return the number of nodes that may share one host's ports."""
        return self.nodes if self.base[STRIDE] else 1

    def node_port(self, name: str, index: int) -> int:
        return self.base[name] + index * self.base[STRIDE]

    def node_manager(self, index: int) -> int:
        return self.node_port("NODE_MANAGER_PORT", index)

    def of_node(self, index: int) -> dict[str, int]:
        """Return the ports that node `index` listens on, by variable, except its workers'."""
        head = {k: self.base[k] for k in HEAD_PORTS if self.base[k]} if index == 0 else {}
        return head | {name: self.node_port(name, index) for name in NODE_PORTS}

    def workers(self, index: int) -> range:
        """Return node `index`'s share of the worker ports."""
        first, last = (self.base[name] for name in WORKER_PORTS)
        width = (last - first + 1) // self.shares
        if self.base[STRIDE]:
            first += width * index
        return range(first, first + width)


# --- the user's variables -----------------------------------------------------------------------


def whole_number(name: str, text: str, least: int, most: int) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,14}", text) or not least <= int(text) <= most:
        raise PortError(f"{name}={text}: give a whole number from {least} to {most}")
    return int(text)


def read_stride(variables: Mapping[str, str], addresses: Mapping[str, str]) -> int:
    """Read PORT_STRIDE. By default 0, or 20 if two Slurm nodes share a host."""
    text = variables.get(STRIDE, "")
    stride = whole_number(STRIDE, text, 0, 10000) if text else None
    first: dict[str, str] = {}  # the first node at each address
    for name, address in addresses.items():
        if first.setdefault(address, name) == name:
            continue
        if stride == 0:
            pair = f"{name} and {first[address]} are the same host ({address})"
            raise PortError(f"{STRIDE}=0: {pair}: give {STRIDE_ON_SHARED_HOSTS}")
        stride = stride or STRIDE_ON_SHARED_HOSTS
    return stride or 0


def default_ports(
    variables: Mapping[str, str], stride: int, nodes: int, cpus: int
) -> dict[str, int]:
    """Return default ports by user variable. With KEMPNER_PORTS they are a part of that range, if
    possible a different part for each consecutive job number. Raises PortError."""
    try:
        allowed = allowed_ports(variables)
    except BadPortRange as error:
        raise PortError(error.strerror) from None
    if allowed is None:
        return HEAD_PORTS | NODE_PORTS | WORKER_PORTS
    fixed = [*HEAD_PORTS, *NODE_PORTS]
    shares = nodes if stride else 1
    before = len(fixed) + stride * (nodes - 1)  # before the workers' ports
    parts = max(1, len(allowed) // (before + shares * WORKERS_A_CPU * cpus))
    # By job number: jobs that share a host cannot coordinate.
    digits = re.sub(r"\D", "", variables.get("SLURM_JOB_ID", "")) or "0"
    width = len(allowed) // parts
    first = allowed[0] + int(digits) % parts * width
    ports = {name: first + i for i, name in enumerate(fixed)}
    return ports | {"MIN_WORKER_PORT": first + before, "MAX_WORKER_PORT": first + width - 1}


def read_ports(variables: Mapping[str, str], addresses: Mapping[str, str], cpus: int) -> Ports:
    """Read the ports from the user's variables; an unset or empty one takes its default.

    `addresses`: of each node, by name, in order. `cpus`: workers per node. Raises PortError.
    """
    stride = read_stride(variables, addresses)
    base = {}
    for name, default in default_ports(variables, stride, len(addresses), cpus).items():
        text = variables.get(name) or str(default)
        off = name == "DASHBOARD_PORT" and text == "0"
        base[name] = 0 if off else whole_number(name, text, LEAST_PORT, LAST_PORT)
    ports = Ports({**base, STRIDE: stride}, len(addresses))
    check_ports(ports, cpus)
    return ports


def check_ports(ports: Ports, cpus: int) -> None:
    """Raise PortError if a port is used twice on a host, or the workers have too few."""
    first, last = (ports.base[name] for name in WORKER_PORTS)
    if (width := len(ports.workers(0))) < cpus:
        raise PortError(
            f"MIN_WORKER_PORT={first} to MAX_WORKER_PORT={last}: {width} a node, too few for"
            f" {cpus} workers; give a wider range"
        )
    user: dict[int, str] = {}
    for name in HEAD_PORTS | NODE_PORTS:
        for index in range(ports.shares):
            if not (port := ports.of_node(index).get(name)):
                continue
            setting = f"{name}={ports.base[name]}"
            if port > LAST_PORT:
                smaller = f"give a smaller {STRIDE} ({ports.base[STRIDE]})"
                raise PortError(f"{setting}: node {index} would have {port}: {smaller}")
            if owner := "a worker" if first <= port <= last else user.get(port):
                another = f"give another, or another {STRIDE} ({ports.base[STRIDE]})"
                raise PortError(f"{setting}: port {port} of node {index} is {owner}'s: {another}")
            user[port] = name


def ephemeral_range() -> range:
    """Return the ports that the kernel gives to outgoing connections; empty if unknown."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return range(0)
    return range(int(low), int(high) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="kempner.jobs.ray.ports")
    parser.add_argument("cpus", type=int)
    parser.add_argument("nodes", nargs="+")
    options = parser.parse_args()
    addresses = dict(word.split("=", 1) for word in options.nodes)
    try:
        ports = read_ports(os.environ, addresses, options.cpus)
    except PortError as error:
        print(f"kempner: error: {error}", file=sys.stderr)
        return 2
    if os.environ.get(NOT_READ):
        _note(
            f"{NOT_READ} is not read, as Ray has no such port; that of the nodes' agents is "
            "DASHBOARD_AGENT_GRPC_PORT"
        )
    taken = ephemeral_range()
    used = [p for k in range(ports.shares) for p in ports.of_node(k).values()]
    used += [ports.base[name] for name in WORKER_PORTS]
    if any(port in taken for port in used):
        _note(
            f"some of Ray's ports are in the kernel's ephemeral range {taken[0]}-{taken[-1]}: "
            "another program's connection may hold one"
        )
    print(ports)
    return 0


def _note(text: str) -> None:
    """Write a note to the batch log."""
    # Not to standard output, which ray.sh reads as the ports.
    print(f"[{time.strftime('%F %T')}] kempner: note: {text}", file=sys.stderr)


# --- on a node ----------------------------------------------------------------------------------


def is_busy(port: int) -> bool:
    """Return whether a process on this host uses the port, on any address."""
    with socket.socket() as probe:
        # As in Ray: a port in TIME_WAIT after an old connection counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return True
            raise
    return False


def busy_ports(ports: Ports, index: int) -> list[str]:
    """List the busy ports of node `index`, which is this one, by user variable."""
    names = [f"{name}={port}" for name, port in ports.of_node(index).items() if is_busy(port)]
    workers = ports.workers(index)
    if all(map(is_busy, workers)):
        names.append(f"all of {workers[0]} to {workers[-1]} (MIN_WORKER_PORT)")
    return names


def is_open(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), PORT_CONNECT_S):
        return True
    return False


@dataclass
class PortProbe:
    """Watches one port of a running Ray.

    Watching the processes is not enough: `ray start --block` keeps blocking after its raylet has
    died, and a crashed host sends nothing at all. So each node probes its own ports, and the head
    probes those of the others.
    """

    node: str
    what: str
    address: str
    port: int
    opened: float = 0.0  # when it last accepted a connection; 0: never
    refusals: int = 0
    silent: int = 0  # consecutive connections without any answer

    def fault(self) -> str:
        """Connect once; returns the fault, or "" while the port is open or has never been open."""
        try:
            socket.create_connection((self.address, self.port), PORT_CONNECT_S).close()
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            self.refusals, self.silent = self.refusals + refused, self.silent + (not refused)
        else:
            self.opened, self.refusals, self.silent = time.monotonic(), 0, 0
        # Ray is still starting: kempner.jobs.ray.ready and its deadline decide whether it comes up.
        if not self.opened:
            return ""
        if self.refusals >= DEAD_REFUSALS:
            return f"{self.node}: Ray's {self.what} is gone: port {self.port} refuses connections"
        silence = time.monotonic() - self.opened
        if self.silent >= SILENT_CONNECTIONS and silence > HOST_SILENCE_S:
            return f"{self.node}: no answer from {self.address} for {silence:.0f} s: is it down?"
        return ""


if __name__ == "__main__":
    sys.exit(main())
