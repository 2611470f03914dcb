"""One task of the preflight step: describes its node, measures with others, answers the driver.

    srun ... task.sh python -m kempner.jobs.preflight.task

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

# The driver may end while a task still waits for it, and torch then prints its client's stack.
# Exceptions report failures, and the table shows them. torch reads this variable on import.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

import torch
import torch.distributed as dist

from kempner.jobs.gpu.driver import driver_problem, driver_version
from kempner.jobs.gpu.findings import at_rest
from kempner.jobs.gpu.reading import (
    MEMORY_USED,
    NoAnswer,
    Reader,
    given_names,
    of_this_job,
    open_reader,
    surely_of_this_job,
)
from kempner.jobs.preflight.allreduce import (
    MEASURE_S,
    connect_limit,
    measure_allreduce,
    run_in_child,
)
from kempner.jobs.preflight.channel import TaskChannel, new_token, token_file
from kempner.jobs.preflight.devices import measure_device
from kempner.jobs.preflight.storage import read_rate, remove_written, write_rate
from kempner.jobs.ranks.nccl_transport import chosen_by_user
from kempner.jobs.ranks.own_device import gpu_on_the_bus
from kempner.jobs.ranks.placement import World, discover_world
from kempner.jobs.system.files import try_to_write

SYS = Path(os.environ.get("KEMPNER_SYS", "/sys"))
PREFLIGHT_CONNECT_S = 120.0
BUSY_MIB = 2048.0  # of a GPU's memory; drivers and displays use less
FREED_S = 10.0  # a killed process frees its memory only after its kernels have ended
DRIVER_S = 60.0  # for the GPU driver to answer; without persistence mode it loads first


def main() -> int:
    world = discover_world()
    address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    port = int(os.environ["KEMPNER_PREFLIGHT_PORT"])
    if driver_has_ended(address, port):
        return 0
    task = TaskChannel(address, port, world.rank)
    try:
        while (question := task.question())["what"] != "end":
            task.answer(answer_question(address, world, **question))
    finally:
        remove_written()
    task.answer({})
    return 0


def answer_question(address: str, world: World, what: str, **question: Any) -> dict[str, Any]:
    """Answer a question of the driver."""
    if what == "node":
        return describe_node(local_rank=world.local_rank)
    if what == "time":
        return {"time": time.time()}
    if what == "device":
        return measure_device(question["kind"], world.local_rank, question["seconds"])
    if what == "measure":
        return measure_all_reduce(address, world, **question)
    folder = preflight_directory()
    if what == "write":
        return write_token(folder)
    if what == "read":
        return see_token(folder)
    if what == "write files":
        return write_rate(folder, world.rank, **question)
    return read_rate(folder, **question)


def driver_has_ended(address: str, port: int) -> bool:
    """Return whether nobody listens at the driver's port. The driver listens before it publishes
    the port; a client of torch's store would retry a closed port for two minutes, until the batch
    script ends the step by force."""
    try:
        socket.create_connection((address, port), PREFLIGHT_CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # unreachable: connecting gives the better error
        pass
    return False


def preflight_directory() -> Path:
    """Return the directory to check, from the batch script and never from the network."""
    return Path(os.environ["KEMPNER_PREFLIGHT_DIR"])


def measure_all_reduce(
    address: str, world: World, name: str, ranks: list[int], kind: str, store_port: int
) -> dict[str, Any]:
    """Measure all-reduces with the other `ranks`; `name`: prefix of the group's store keys."""

    def run(connected: Callable[[], None]) -> dict[str, Any]:
        store = dist.PrefixStore(name, dist.TCPStore(address, store_port))
        return measure_allreduce(store, ranks, world.rank, world.local_rank, kind, log, connected)

    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        log = Path(folder) / "nccl.log"
        return run_in_child(run, connect_limit(len(ranks), kind), MEASURE_S)


def describe_node(local_rank: int) -> dict[str, Any]:
    """Describe the node for the driver to compare; tasks but the first only identify themselves."""
    node: dict[str, Any] = {"host": socket.gethostname(), "local_rank": local_rank}
    if local_rank:
        return node
    gpus, faults = gpus_seen()
    gpu_names = given_names()
    usable, there = torch_sees_gpus(), gpu_on_the_bus() is not None
    if there and not usable:  # a container's newer libcuda makes up for an old driver
        why = driver_problem(driver_version(), torch.version.cuda)
        faults.append(why or "torch cannot use its GPUs: look at nvidia-smi there")
    return node | {
        "gpus": gpus,
        "gpus_given": None if gpu_names is None else len(gpu_names),
        "real_gpus": usable or there,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "gpu_faults": faults,
        "memory_free": memory_free(),
        "network": os.environ.get("KEMPNER_NETWORK", ""),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "nccl_setting": chosen_by_user(),
        "ports": active_ports(),
        "python": platform.python_version(),
        "packages": package_versions(),
    }


def torch_sees_gpus() -> bool:
    """Return whether torch can use GPUs. Runs in a child: otherwise torch would refuse CUDA in all
    processes forked later, and so in all measurements."""

    def ask(connected: Callable[[], None]) -> dict[str, Any]:
        connected()
        return {"any": torch.cuda.is_available()}

    return bool(run_in_child(ask, DRIVER_S, DRIVER_S).get("any"))


def package_versions() -> dict[str, str]:
    """Map each installed package to its version; of several copies, the one that Python imports."""
    versions: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        if package.name:
            versions.setdefault(package.name, package.version)
    return versions


def gpus_seen() -> tuple[int | None, list[str]]:
    """Return the number of the job's GPUs and the errors that they report, one line each. The
    number is of the GPUs that the driver lists, or the MIG instances that Slurm lists; without a
    driver, of those that Slurm gave to the task, or None if it set nothing."""
    gpu_names = given_names()
    instances = [name for name in gpu_names or () if name.startswith("MIG-")]
    reader = open_reader()
    with contextlib.suppress(NoAnswer):
        if reader is not None:
            gpus = of_this_job(reader.read())
            faults = [f"{gpu.label}: {n} = {v}" for gpu in gpus for n, v in at_rest(gpu)]
            # Other jobs may use the memory of the same card through other instances.
            if not instances:
                faults += memory_in_use(reader)
            return len(instances) or len(gpus), faults
    return None if gpu_names is None else len(gpu_names), []


def memory_in_use(reader: Reader) -> list[str]:
    """Describe GPUs whose memory other processes hold, one line each. The run would run out of
    memory, which looks like its own fault."""
    end = time.monotonic() + FREED_S
    while True:
        gpus = surely_of_this_job(reader.read())  # other jobs use theirs
        busy = [gpu for gpu in gpus if (gpu.number(MEMORY_USED) or 0) > BUSY_MIB]
        if not busy or time.monotonic() > end:
            break
        time.sleep(0.5)
    return [
        f"{gpu.label}: {(gpu.number(MEMORY_USED) or 0) / 1024:.1f} GiB of its memory in use "
        f"before the run{', by ' if pids else ''}{', '.join(map(process_name, pids))}"
        for gpu in busy
        for pids in (reader.processes(gpu),)
    ]


def process_name(pid: int) -> str:
    """Describe a process by program and user, if visible: not from inside a container."""
    try:
        program = Path(f"/proc/{pid}/comm").read_text().strip()
        user = Path(f"/proc/{pid}").owner()
    except (OSError, KeyError):
        return f"process {pid}"
    return f"process {pid} ({program}, {user})"


def memory_free() -> int:
    """Return the bytes available without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def active_ports() -> list[str]:
    """List the active RDMA ports and their rates."""
    ports = []
    for port in sorted(SYS.glob("class/infiniband/*/ports/*")):
        # The text is "4: ACTIVE".
        if (port / "state").read_text().startswith("4:"):
            rate = (port / "rate").read_text().split(" (")[0].strip()
            ports.append(f"{port.parents[1].name}:{port.name} {rate}")
    return ports


def write_token(folder: Path) -> dict[str, Any]:
    """Write a token for the other nodes to see."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        token_file(folder).write_text(new_token())
    except OSError as error:
        return {"error": str(error)}
    return {}


def see_token(folder: Path) -> dict[str, Any]:
    """Check that this node sees the first node's token and can write beside it."""
    file = token_file(folder)
    # Five seconds: an NFS client may take that long to show a new file.
    for _ in range(50):
        try:
            # Listing the directory makes an NFS client ask the server again.
            os.listdir(file.parent)
            if file.read_text() == new_token():
                break
        except OSError:
            pass
        time.sleep(0.1)
    else:
        return {"error": f"what the first node wrote to {file.parent} is not visible on this node"}
    try:
        try_to_write(file.parent)
    except OSError as error:
        return {"error": f"{file.parent} is not writable: {error.strerror}"}
    return {}


if __name__ == "__main__":
    sys.exit(main())
