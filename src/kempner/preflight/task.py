"""One task of the preflight step: describes its node, measures with others, answers the driver.

    srun ... task.sh python -m kempner.preflight.task

The first task of each node describes the node; all tasks take part in the all-reduces.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kempner.gpu.findings import at_rest
from kempner.gpu.reading import NoAnswer, open_reader
from kempner.nccl_transport import chosen_by_user
from kempner.preflight.allreduce import MEASURE_S, connect_limit, measure_allreduce, run_in_child
from kempner.preflight.channel import TOKEN, Task, token
from kempner.process_group import World, discover, gpu_on_the_bus

SYS = Path(os.environ.get("KEMPNER_SYS", "/sys"))


def main() -> int:
    world = discover()
    address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    port = int(os.environ["KEMPNER_PREFLIGHT_PORT"])
    task = Task(address, port, world.rank)
    while True:
        question = task.question()
        what = question.pop("what")
        if what == "end":
            task.answer({})
            return 0
        if what == "node":
            answer = describe_node(local_rank=world.local_rank)
        elif what == "time":
            answer = {"time": time.time()}
        elif what == "write":
            answer = write_token(directory(), token())
        elif what == "read":
            answer = read_token(directory(), token())
        else:
            answer = measure(address, world, **question)
        task.answer(answer)


def directory() -> Path:
    """That must be shared and writable: from the batch script, never from the network."""
    return Path(os.environ["KEMPNER_PREFLIGHT_DIR"])


def measure(
    address: str, world: World, name: str, ranks: list[int], kind: str, store_port: int
) -> dict[str, Any]:
    """All-reduce with the other `ranks`; `name` keeps this group's keys in the store apart."""

    def run(connected: Callable[[], None]) -> dict[str, Any]:
        store = dist.PrefixStore(name, dist.TCPStore(address, store_port))
        return measure_allreduce(store, ranks, world.rank, world.local_rank, kind, log, connected)

    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        log = Path(folder) / "nccl.log"
        return run_in_child(run, connect_limit(len(ranks), kind), MEASURE_S)


def describe_node(local_rank: int) -> dict[str, Any]:
    """What the driver compares between nodes; of tasks other than the first only who they are."""
    node: dict[str, Any] = {"host": socket.gethostname(), "local_rank": local_rank}
    if local_rank:
        return node
    gpus, faults = gpus_seen()
    return node | {
        "gpus": gpus,
        "real_gpus": torch.cuda.is_available() or gpu_on_the_bus() is not None,
        "gpu_faults": faults,
        "memory_free": memory_free(),
        "network": os.environ.get("KEMPNER_NETWORK", ""),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "nccl_setting": chosen_by_user(),
        "ports": active_ports(),
        "python": platform.python_version(),
        "packages": packages(),
    }


def packages() -> dict[str, str]:
    """Version of each installed package; of several, of the one that Python imports."""
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        if package.name:
            found.setdefault(package.name, package.version)
    return found


def gpus_seen() -> tuple[int | None, list[str]]:
    """How many GPUs the driver lists; without it, how many Slurm gave to the task, or None where
    Slurm set nothing. And the errors that they report, one line each."""
    reader = open_reader()
    with contextlib.suppress(NoAnswer):
        if reader is not None:
            gpus = reader.read()
            faults = [f"{gpu.label}: {n} = {v}" for gpu in gpus for n, v in at_rest(gpu)]
            return len(gpus), faults
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len([gpu for gpu in given.split(",") if gpu]) if given is not None else None, []


def memory_free() -> int:
    """Bytes available without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def active_ports() -> list[str]:
    """The active RDMA ports, with their rates."""
    ports = []
    for port in sorted(SYS.glob("class/infiniband/*/ports/*")):
        if (port / "state").read_text().startswith("4:"):
            rate = (port / "rate").read_text().split(" (")[0].strip()
            ports.append(f"{port.parents[1].name}:{port.name} {rate}")
    return ports


def write_token(folder: Path, text: str) -> dict[str, Any]:
    """Write a token for the other nodes to see."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TOKEN).write_text(text)
    except OSError as error:
        return {"error": str(error)}
    return {}


def read_token(folder: Path, text: str) -> dict[str, Any]:
    """Can this node see the first node's token, and write beside it?"""
    file = folder / TOKEN
    for _ in range(50):  # NFS may take seconds to show a new file
        try:
            os.listdir(file.parent)
            if file.read_text() == text:
                break
        except OSError:
            pass
        time.sleep(0.1)
    else:
        return {"error": f"what the first node wrote to {file.parent} is not visible on this node"}
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            return {}
    except OSError as error:
        return {"error": f"{file.parent} is not writable: {error.strerror}"}


if __name__ == "__main__":
    sys.exit(main())
