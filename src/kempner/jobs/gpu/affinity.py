"""CPU affinity: the CPUs near a GPU, from /sys. No torch.

A copy between a GPU and memory of the other socket crosses the link between the sockets, at a half
to two thirds of the speed. A page is allocated near the CPU that first writes it, so the memory of
a process follows its CPUs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kempner.jobs import this_job

if TYPE_CHECKING:
    import torch

    from kempner.jobs.ranks.placement import World

CPU_SHARE = 0.75  # least part of a rank's share of the CPUs; the system keeps some CPUs


def bind_near_gpu(gpu: str, gpus: Sequence[str], ranks: int) -> set[int]:
    """Bind this process and its children to those of its CPUs that are near `gpu`. Returns these
    CPUs, or an empty set if nothing changed. GPUs are named by their PCI bus, 0000:3b:00; `gpus`:
    all that this process sees; `ranks`: processes of this run on this host.

    KEMPNER_NUMA=0 turns it off.
    """
    if os.environ.get("KEMPNER_NUMA") == "0":
        return set()
    allowed = os.sched_getaffinity(0)
    cpus = choose_cpus(gpu, gpus, ranks, allowed, os.environ)
    # A thread inherits its creator's CPUs, but torch's threads exist already: bind each of them.
    for thread in Path("/proc/self/task").iterdir() if cpus else ():
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread.name), cpus)
    return cpus


def choose_cpus(
    gpu: str, gpus: Sequence[str], ranks: int, allowed: set[int], env: Mapping[str, str]
) -> set[int]:
    """Choose the allowed CPUs that are near `gpu`. Returns none if all are near, for example
    because Slurm has bound this rank, or if the ranks there would get less than their share."""
    root = Path(env.get("KEMPNER_SYS", "/sys"))
    near = near_cpus(root, gpu) & allowed
    if not near or near == allowed:
        return set()
    # Ranks whose GPUs are near the same CPUs share them.
    others = gpus if len(gpus) > 1 else _same_kind(root, gpu)
    sharing = sum(near_cpus(root, other) & allowed == near for other in others)
    sharing = min(max(sharing, 1), ranks)
    cpus_per_task = env.get("SLURM_CPUS_PER_TASK", "")
    share = int(cpus_per_task) if cpus_per_task.isdecimal() else len(allowed) // ranks
    return near if len(near) >= CPU_SHARE * share * sharing else set()


def near_cpus(root: Path, gpu: str) -> set[int]:
    """Return the CPUs that the kernel calls local to a GPU: all without NUMA, none if unknown."""
    # CUDA omits the PCI function (the .0 of 0000:3b:00.0); all functions of a card have equal CPUs.
    for function in sorted(root.glob(f"bus/pci/devices/{gpu}.*")):
        with contextlib.suppress(OSError, ValueError):
            return parse_cpu_list((function / "local_cpulist").read_text())
    return set()


def _same_kind(root: Path, gpu: str) -> list[str]:
    """List the GPUs of this host of the same model as this one: a process that sees only its own
    does not know those of other ranks."""

    def kind(function: Path) -> tuple[str, ...]:
        return tuple((function / name).read_text() for name in ("vendor", "device"))

    own = next(iter(sorted(root.glob(f"bus/pci/devices/{gpu}.*"))))
    found = set()
    # /sys has every card of the host, even those that Slurm's cgroup hides from CUDA.
    for function in root.glob("bus/pci/devices/*"):
        with contextlib.suppress(OSError):
            if kind(function) == kind(own):
                found.add(function.name.rpartition(".")[0])
    return sorted(found)


def parse_cpu_list(text: str) -> set[int]:
    """Parse a CPU list in the kernel's notation: 0-15,64-79."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def bind_to_socket(device: torch.device, world: World) -> None:
    """Bind this process to the CPUs, and thus the memory, of its GPU's socket."""
    import torch

    if device.type != "cuda":
        return
    names = [_on_the_bus(index) for index in range(torch.cuda.device_count())]
    cpus = bind_near_gpu(names[device.index], names, world.per_node)
    if cpus and not world.local_rank:
        print(
            f"kempner: CPUs of {this_job.host_name()}: each rank stays on those of its GPU's "
            f"socket, the first one on {len(cpus)} (KEMPNER_NUMA=0: on all that it was given)",
            file=sys.stderr,
            flush=True,
        )


def _on_the_bus(index: int) -> str:
    """Return the PCI bus name of a GPU; "" if this version of torch does not have it."""
    import torch

    about: Any = torch.cuda.get_device_properties(index)
    try:
        parts = about.pci_domain_id, about.pci_bus_id, about.pci_device_id
    except AttributeError:
        return ""
    return "{:04x}:{:02x}:{:02x}".format(*parts)
