"""One task of the preflight step: looks at its node, measures with others, answers the driver.

    srun ... task.sh python -m kempner.preflight.task

The first task of a node speaks for the node; all of them take part in the all-reduces.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from kempner.preflight.allreduce import measure, measure_apart
from kempner.preflight.channel import Task
from kempner.process_group import discover

SYS = Path(os.environ.get("KEMPNER_SYS", "/sys"))
# Asked of nvidia-smi one by one, because it refuses the whole query for one name that it does not
# know. A value other than these means a fault.
GPU_FAULTS = {
    "ecc.errors.uncorrected.volatile.total": ("0",),
    "remapped_rows.failure": ("No", "0"),
    "remapped_rows.pending": ("No", "0"),
    "retired_pages.pending": ("No", "0"),
    "clocks_throttle_reasons.hw_slowdown": ("Not Active",),
    "clocks_throttle_reasons.hw_thermal_slowdown": ("Not Active",),
    "clocks_throttle_reasons.hw_power_brake_slowdown": ("Not Active",),
}
UNKNOWN = ("[N/A]", "N/A", "[Not Supported]", "[Unknown Error]")


def main() -> int:
    world = discover()
    address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    port = int(os.environ["KEMPNER_PREFLIGHT_PORT"])
    task = Task(address, port, world.rank)
    while True:
        question = task.question()
        what = question.pop("what")
        if what == "end":
            return 0
        if what == "node":
            answer = look(local_rank=world.local_rank)
        elif what == "time":
            answer = {"time": time.time()}
        elif what == "write":
            answer = write(**question)
        elif what == "read":
            answer = read(**question)
        else:
            name, ranks = question["name"], question["ranks"]
            kind, limit = question["kind"], question["limit"]

            def run() -> dict[str, Any]:
                store = dist.PrefixStore(name, dist.TCPStore(address, port))  # noqa: B023
                return measure(store, ranks, world.rank, world.local_rank, kind, limit)  # noqa: B023

            answer = measure_apart(run, limit)
        task.answer(answer)


def look(local_rank: int) -> dict[str, Any]:
    """What this node is: the parts that the driver compares. Only the first task looks closely."""
    node: dict[str, Any] = {"host": socket.gethostname(), "local_rank": local_rank}
    if local_rank:
        return node
    return node | {
        "gpus": gpus_seen(),
        "gpu_faults": gpu_faults(),
        "memory_free": memory_free(),
        "network": os.environ.get("KEMPNER_NETWORK", ""),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "ports": active_ports(),
        "python": platform.python_version(),
        "packages": packages(),
    }


def packages() -> dict[str, str]:
    """The version of each package, as Python would import it: the first one on its path."""
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        if package.name:
            found.setdefault(package.name, package.version)
    return found


def gpus_seen() -> int | None:
    """Those that nvidia-smi lists; without it those that Slurm has given to the task, None when it
    has given none."""
    if listed := smi("index"):
        return len(listed)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len([gpu for gpu in given.split(",") if gpu]) if given is not None else None


def gpu_faults() -> list[str]:
    faults = []
    for name, good in GPU_FAULTS.items():
        for gpu, value in enumerate(smi(name)):
            if value not in (*good, *UNKNOWN):
                faults.append(f"GPU {gpu}: {name} = {value}")
    return faults


def smi(name: str) -> list[str]:
    """One figure of every GPU; empty without nvidia-smi, or when it does not know it."""
    program = shutil.which("nvidia-smi")
    if not program:
        return []
    try:
        told = subprocess.run(
            [program, f"--query-gpu={name}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in told.stdout.splitlines()]


def memory_free() -> int:
    """Bytes that can be used without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def active_ports() -> list[str]:
    """The RDMA ports that are up, with their rate."""
    ports = []
    for port in sorted(SYS.glob("class/infiniband/*/ports/*")):
        if (port / "state").read_text().startswith("4:"):
            rate = (port / "rate").read_text().split(" (")[0].strip()
            ports.append(f"{port.parents[1].name}:{port.name} {rate}")
    return ports


def write(path: str, text: str) -> dict[str, Any]:
    """Leave a token for the other nodes."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    except OSError as error:
        return {"error": str(error)}
    return {}


def read(path: str, text: str) -> dict[str, Any]:
    """Is the first node's token here, and may this node write beside it?"""
    file = Path(path)
    for _ in range(50):  # NFS may show a new file some seconds late
        try:
            os.listdir(file.parent)
            if file.read_text() == text:
                break
        except OSError:
            pass
        time.sleep(0.1)
    else:
        return {"error": f"what the first node has written to {file.parent} is not here"}
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            return {}
    except OSError as error:
        return {"error": f"{file.parent} cannot be written: {error.strerror}"}


if __name__ == "__main__":
    sys.exit(main())
