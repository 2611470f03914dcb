"""Which CPUs a rank keeps to: a directory tree stands for /sys, with hosts of several kinds."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from kempner.jobs.gpu import affinity
from kempner.jobs.gpu.affinity import choose_cpus, parse_cpu_list
from kempner.jobs.ranks.placement import World

ALL = set(range(64))
FIRST, SECOND = parse_cpu_list("0-15,32-47"), parse_cpu_list("16-31,48-63")


class Host:
    """Its GPUs on the bus, by the list of CPUs that is local to each."""

    def __init__(self, root: Path, *local: str) -> None:
        self.root, self.gpus = root, [f"0000:{0x17 + k:02x}:00" for k in range(len(local))]
        for gpu, cpulist in zip(self.gpus, local, strict=True):
            self.device(f"{gpu}.0", cpulist, "0x10de", "0x2330")
        self.device("0000:02:00.0", "0-15,32-47", "0x15b3", "0x1021")  # a network card

    def device(self, name: str, cpulist: str, vendor: str, device: str) -> None:
        folder = self.root / "bus/pci/devices" / name
        folder.mkdir(parents=True)
        for file, text in (("local_cpulist", cpulist), ("vendor", vendor), ("device", device)):
            (folder / file).write_text(f"{text}\n")

    def chosen(
        self, rank: int, allowed: set[int] = ALL, sees: int = 8, ranks: int = 8, **env: str
    ) -> set[int]:
        """For the rank with that GPU; with one visible GPU it does not know of the others."""
        gpus = self.gpus[:: 8 // sees] if sees > 1 else [self.gpus[rank]]
        env = {"KEMPNER_SYS": str(self.root), **env}
        return choose_cpus(self.gpus[rank], gpus, ranks, allowed, env)


@pytest.fixture
def sockets(tmp_path: Path) -> Host:
    """Two, of 32 CPUs and four GPUs each."""
    return Host(tmp_path, *["0-15,32-47"] * 4, *["16-31,48-63"] * 4)


def test_lists_of_cpus() -> None:
    assert parse_cpu_list("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}


@pytest.mark.parametrize("sees", [8, 1])
@pytest.mark.parametrize("env", [{}, {"SLURM_CPUS_PER_TASK": "8"}])
def test_each_rank_keeps_to_the_socket_of_its_gpu(
    sockets: Host, sees: int, env: dict[str, str]
) -> None:
    assert sockets.chosen(0, sees=sees, **env) == FIRST
    assert sockets.chosen(7, sees=sees, **env) == SECOND


def test_only_within_what_the_process_may_use(sockets: Host) -> None:
    part = {0, 1, 2, 3, 16, 17, 18, 19}  # a job on a shared node: two of its GPUs, eight CPUs
    assert sockets.chosen(0, part, sees=2, ranks=2) == {0, 1, 2, 3}
    assert sockets.chosen(4, part, sees=2, ranks=2) == {16, 17, 18, 19}
    assert sockets.chosen(0, {16, 17}, ranks=2) == set()  # never none
    assert sockets.chosen(0, {1, 2}, ranks=2) == set()  # all near: nothing to do


def test_cpus_that_slurm_has_bound_a_task_to_stay(sockets: Host) -> None:
    """They are its own: with half of them it would be slower, wherever they are."""
    own = {12, 13, 14, 15, 16, 17, 18, 19}
    assert sockets.chosen(0, own, SLURM_CPUS_PER_TASK="8") == set()


@pytest.mark.parametrize("sees", [8, 1])
def test_no_rank_gets_less_than_its_share(tmp_path: Path, sees: int) -> None:
    """All GPUs hang on one socket: the other's CPUs would be idle."""
    host = Host(tmp_path, *["0-15,32-47"] * 8)
    assert host.chosen(0, sees=sees) == set()
    assert host.chosen(0, sees=sees, ranks=2, SLURM_CPUS_PER_TASK="16") == FIRST


def test_cpus_that_the_system_keeps_are_no_reason(sockets: Host) -> None:
    allowed = ALL - {0, 1, 32, 33}
    assert sockets.chosen(0, allowed) == FIRST & allowed


def test_hosts_without_an_answer(tmp_path: Path) -> None:
    host = Host(tmp_path, "0-63", "0-63")  # one node, or a virtual machine that does not say
    assert host.chosen(0, ranks=2) == set()
    assert affinity.near_cpus(tmp_path, "0000:99:00") == affinity.near_cpus(tmp_path, "") == set()
    host.device("0000:18:00.1", "none", "0x10de", "0x2330")
    assert affinity.near_cpus(tmp_path, "0000:18:00") == ALL


PROCESS = """
import os, sys, threading
from pathlib import Path
from kempner.jobs.gpu import affinity
before = threading.Event()
threading.Thread(target=before.wait, daemon=True).start()  # as those of torch
one = min(os.sched_getaffinity(0))
chosen = affinity.bind_near_gpu("0000:17:00", ["0000:17:00"], 1)
threads = Path("/proc/self/task").iterdir()
print(one, sorted(chosen), *{tuple(os.sched_getaffinity(int(thread.name))) for thread in threads})
"""


def test_all_threads_move(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("needs two CPUs")
    Host(tmp_path, str(allowed[0]))
    env = os.environ | {"KEMPNER_SYS": str(tmp_path), "SLURM_CPUS_PER_TASK": "1"}

    def run(**more: str) -> str:
        command = [sys.executable, "-c", PROCESS]
        return subprocess.run(command, env=env | more, capture_output=True, text=True).stdout

    one = allowed[0]
    assert run() == f"{one} [{one}] ({one},)\n"
    assert run(KEMPNER_NUMA="0") == f"{one} [] {tuple(allowed)}\n"


def test_a_rank_asks_for_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def stay_near(*arguments: object) -> set[int]:
        asked.append(arguments)
        return FIRST

    def about(index: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3A + index, pci_device_id=0)

    monkeypatch.setattr(affinity, "bind_near_gpu", stay_near)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", about)
    affinity.bind_to_socket(torch.device("cpu"), World(0, 0, 1, "single"))
    assert not asked
    affinity.bind_to_socket(torch.device("cuda", 1), World(1, 1, 4, "slurm", 2))
    assert asked == [("0000:3b:00", ["0000:3a:00", "0000:3b:00"], 2)]
    assert not capsys.readouterr().err  # the first rank of a host speaks
    affinity.bind_to_socket(torch.device("cuda", 0), World(0, 0, 4, "slurm", 2))
    assert "the first one on 32 (KEMPNER_NUMA=0" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace())
    affinity.bind_to_socket(torch.device("cuda", 1), World(1, 1, 4, "slurm", 2))
    assert asked[-1] == ("", ["", ""], 2)
