"""The preflight's judgement, on made-up answers; tests/jobs/slurm/test_preflight.py has real
ones."""

from __future__ import annotations

import itertools
import os
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from kempner.jobs.gpu.findings import ECC
from kempner.jobs.preflight import task
from kempner.jobs.preflight.__main__ import await_tasks, pair_rounds, take_transport
from kempner.jobs.preflight.allreduce import connect_limit, run_in_child
from kempner.jobs.preflight.verdict import NodeResult, Report, blame_late, compare_nodes, slow_nodes
from tests.gpus import Shim, gpu


def node(name: str, **facts: Any) -> NodeResult:
    usual: dict[str, Any] = {
        "gpus": 4,
        "gpus_given": 4,
        "gpu_faults": [],
        "memory_free": 100 << 30,
        "network": "InfiniBand",
        "interface": "ib0",
        "nccl_setting": "",
        "ports": ["mlx5_0:1 400 Gb/sec"],
        "python": "3.11.7",
        "packages": {"torch": "2.13.0", "numpy": "2.3"},
    }
    return NodeResult(name, [0], usual | facts, clock_s=0.0)


def figure(rate: float) -> dict[str, Any]:
    return {"bus_bytes_per_s": rate, "latency_s": 1e-4, "bytes": 1 << 24}


def judge(*nodes: NodeResult, **more: Any) -> Report:
    report = Report(list(nodes), gpus=4, **more)
    compare_nodes(report)
    return report


@pytest.mark.parametrize("count", range(10))
def test_every_node_meets_two_others(count: int) -> None:
    met: dict[int, set[int]] = {k: set() for k in range(count)}
    for pairs in pair_rounds(count):
        once = list(itertools.chain(*pairs))
        assert len(set(once)) == len(once)  # no node is in two pairs at a time
        for a, b in pairs:
            met[a].add(b)
            met[b].add(a)
    assert all(len(others) == (2 if count > 2 else 0) for others in met.values())
    assert len(pair_rounds(count)) <= 3


def test_equal_nodes_are_ok() -> None:
    report = judge(node("a"), node("b"), node("c"), whole=figure(1e9))
    assert not report.faulty and report.record()["bad"] == ""


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"gpus": 3}, "3 GPU(s) seen, 4 expected"),
        ({"gpus": None}, "0 GPU(s) seen, 4 expected"),
        ({"gpu_faults": ["GPU 1: remapped_rows.failure = Yes"]}, "remapped_rows.failure"),
        ({"network": "Ethernet"}, "network: Ethernet; the other nodes have InfiniBand"),
        ({"ports": []}, "active RDMA ports: none; the other nodes have 400 Gb/sec"),
        ({"ports": ["mlx5_0:1 100 Gb/sec"]}, "100 Gb/sec; the other nodes have 400 Gb/sec"),
        ({"python": "3.10.1"}, "Python: 3.10.1; the other nodes have 3.11.7"),
        ({"packages": {"torch": "2.13.0"}}, "numpy: none; the other nodes have 2.3"),
    ],
)
def test_the_one_that_differs_is_named(facts: dict[str, Any], said: str) -> None:
    for place in range(3):
        nodes = [node(name) for name in "abc"]
        nodes[place] = node("abc"[place], **facts)
        report = judge(*nodes)
        assert report.record()["bad"] == "abc"[place]
        assert any(said in fault for fault in nodes[place].faults), nodes[place].faults


def test_gpus_of_other_jobs_and_of_other_tasks_are_none_of_ours() -> None:
    shared = node("a", gpus=8, gpus_given=None)  # Slurm hides nothing, and has set nothing
    bound = node("b", gpus=1, gpus_given=1)  # --gpu-bind: its first task sees one
    report = judge(shared, bound)
    assert not report.faulty
    assert [row.split()[1] for row in report.table().splitlines()[1:3]] == ["8/4", "1/1"]


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({"SLURM_STEP_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}, (2, [])),  # of eight
        ({"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}, (2, [f"GPU 3: {ECC} = 3"])),
        ({}, (8, [f"GPU 3: {ECC} = 3"])),
        ({"SLURM_STEP_GPUS": "0,1,2", "CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c"},
         (3, [f"GPU 3: {ECC} = 3"])),
    ],
)  # fmt: skip
def test_only_the_gpus_of_the_job_are_looked_at(
    env: dict[str, str], seen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node whose other GPUs are another job's, and not hidden."""
    broken = {"ecc__errors__uncorrected__volatile__total": "3"}
    shim = Shim(tmp_path / "gpus")
    shim.say(*(gpu(k, **(broken if k == 3 else {})) for k in range(8)))
    for name in ("SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (shim.env | env).items():
        monkeypatch.setenv(name, value)
    assert task.gpus_seen() == seen


def test_memory_that_others_have_is_a_fault_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run would end by lack of memory, and be blamed for it."""
    shim = Shim(tmp_path / "gpus")
    monkeypatch.setenv("SLURM_STEP_GPUS", "0,1")
    monkeypatch.setenv("PATH", shim.env["PATH"])
    held, other = gpu(1, memory__used="61440"), gpu(2, memory__used="61440")
    shim.say(
        gpu(0, memory__used="612"), held, other, processes=[f"GPU-1, {os.getpid()}", "GPU-1, [N/A]"]
    )
    monkeypatch.setattr(task, "FREED_S", 0.0)
    count, (said,) = task.gpus_seen()
    assert count == 2
    assert said.startswith("GPU 1: 60.0 GiB of its memory in use before the run, by process ")
    assert f" {os.getpid()} (" in said and said.count("process ") == 1
    assert task.process_name(1 << 30) == f"process {1 << 30}"
    # Where it is not known which are the job's, other jobs are not blamed.
    monkeypatch.setenv("SLURM_STEP_GPUS", "7")
    assert task.gpus_seen() == (3, [])
    monkeypatch.delenv("SLURM_STEP_GPUS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-")
    assert task.gpus_seen() == (3, [])
    monkeypatch.setenv("SLURM_STEP_GPUS", "0,1")
    # One that is freed while it is looked at is none.
    monkeypatch.setattr(task, "FREED_S", 60.0)
    freed = lambda _: shim.say(gpu(0), gpu(1, memory__used="3"))  # noqa: E731
    own_time = types.SimpleNamespace(monotonic=time.monotonic, sleep=freed)  # not that of others
    monkeypatch.setattr(task, "time", own_time)
    assert task.gpus_seen() == (2, [])


@pytest.mark.parametrize(
    ("count", "late", "blamed"),
    [(2, 1, True), (3, 2, True), (4, 3, False), (1000, 30, True), (1000, 31, False)],
)
def test_many_that_are_late_are_not_blamed(count: int, late: int, blamed: bool) -> None:
    """A cold file system: they are named, and the run starts on them."""
    report = Report([node(f"n{k}") for k in range(count)])
    for one in report.nodes[:late]:
        one.late, one.facts = "1 of 1 task(s) did not answer", {}
    blame_late(report, ended=False)
    compare_nodes(report)
    assert report.faulty is blamed
    assert len(list(filter(None, report.record()["bad"].split(",")))) == (late if blamed else 0)
    assert bool(report.notes) is not blamed
    if not blamed:
        assert f"note: {late} of {count} nodes did not answer in time" in report.table()
        assert len(report.table().splitlines()[-2]) < 300 and "late" in report.table()


def test_many_that_fail_are_a_fault_of_what_they_share() -> None:
    report = Report([node(f"n{k}") for k in range(4)])
    for one in report.nodes:
        one.late = "1 of 1 task(s) did not answer before srun ended"
    blame_late(report, ended=True)
    assert report.record()["bad"] == "" and report.faulty
    assert "4 of 4 nodes did not answer before srun ended" in report.faults[0]


class SlowDriver:
    """Its tasks answer at these seconds after the first question; a clock that the test sets."""

    def __init__(self, times: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.times, self.now = times, 0.0
        monkeypatch.setattr("kempner.jobs.preflight.__main__.time.monotonic", lambda: self.now)

    def ask(self, ranks: Any, question: object) -> dict[int, str]:
        return {rank: str(rank) for rank in ranks}

    def answers(self, keys: dict[int, str], deadline: float) -> dict[int, dict[str, Any]]:
        self.now = max(self.now, deadline)
        return {rank: {"local_rank": 0} for rank in keys if self.times[rank] <= self.now}


@pytest.mark.parametrize(
    ("times", "late"),
    [
        ([5.0, 5.0, 25.0, 999.0], 1),
        ([50.0] * 3 + [120.0], 0),  # the first half was slow, too
        ([250.0] * 500 + [500.0] * 500, 0),  # half a second more for each node
        ([2000.0] * 4, 4),
    ],
)
def test_a_cold_file_system_takes_longer_for_more_nodes(
    times: list[float], late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver: Any = SlowDriver(times, monkeypatch)
    names = [f"n{k}" for k in range(len(times))]
    nodes = await_tasks(driver, tmp_path / "ended", names, 1)
    assert sum(bool(one.late) for one in nodes) == late
    assert driver.now < 1000


def test_of_two_that_differ_neither_is_blamed() -> None:
    report = judge(node("a"), node("b", python="3.10.1"))
    assert report.record()["bad"] == "" and report.faulty
    assert report.faults == ["Python: a has 3.11.7, b has 3.10.1"]


def test_of_two_networks_the_slower_kind_is_at_fault() -> None:
    assert judge(node("a", network="Ethernet"), node("b")).record()["bad"] == "a"
    assert judge(node("a"), node("b", network="Ethernet")).record()["bad"] == "b"


def test_clock_and_memory() -> None:
    late, poor = node("b"), node("c", memory_free=10 << 30)
    late.clock_s = -7.0
    report = judge(node("a"), late, poor)
    assert report.record()["bad"] == "b" and "-7.0 s" in late.faults[0]
    assert poor.notes == ["10.0 GiB of memory free"] and not poor.faults


def ring(*rates: float, least: float = 0.0) -> Report:
    """A ring of nodes of which each sends at its own rate: a pair has that of the slower one."""
    nodes = [node(f"n{k}") for k in range(len(rates))]
    report = Report(nodes, least=least)
    for a, b in itertools.chain(*pair_rounds(len(rates))):
        report.add_pair(nodes[a], nodes[b], figure(min(rates[a], rates[b])))
    return report


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_the_slow_one_is_found_and_its_neighbours_are_not_blamed(count: int) -> None:
    for slow in range(count):
        rates = [1e9] * count
        rates[slow] = 1e6
        assert [n.name for n in slow_nodes(ring(*rates))] == [f"n{slow}"]
    assert slow_nodes(ring(*[1e9] * count)) == []


def test_the_minimum_applies_to_all() -> None:
    assert len(slow_nodes(ring(1e6, 1e6, 1e6, least=12.5e6))) == 3


def test_a_group_that_fails_as_a_whole() -> None:
    report = judge(node("a"), node("b"), whole={"error": "timeout"})
    assert report.faults == ["all-reduce of all tasks: timeout"]
    report = judge(node("a"), node("b"), whole=figure(1e6), least=12.5e6)
    assert (
        "under 12.5 MB/s; with three or more nodes preflight finds the slow one" in report.faults[0]
    )


def test_table_of_a_node_that_does_not_answer() -> None:
    gone = NodeResult("b", [], faults=["1 of 1 task(s) did not answer"])
    report = judge(node("a"), gone)
    text = report.table()
    assert "b: 1 of 1 task(s) did not answer" in text and "sbatch --exclude=b" in text
    assert text.splitlines()[1].startswith("a") and text.splitlines()[1].endswith("ok")
    assert text.splitlines()[2].endswith("FAULTY")


def test_nccl_on_tcp_beside_a_fast_network() -> None:
    """NCCL falls back without an error, so that preflight has to say it."""
    slow, usual = node("a"), node("b")
    slow.transport, usual.transport = "Socket", "IB"
    report = judge(slow, usual)
    assert report.record()["bad"] == "a"
    assert slow.faults[0].startswith("NCCL uses Socket, not the node's InfiniBand")
    assert "ib0 InfiniBand (NCCL: Socket)" in report.table()
    asked = node("a", nccl_setting="NCCL_NET=Socket")
    asked.transport = "Socket"
    assert not judge(asked, usual).faulty
    assert asked.notes == ["NCCL uses Socket, not the node's InfiniBand: NCCL_NET=Socket is set"]
    for network, used in (
        ("Ethernet", "Socket"),
        ("given", "Socket"),
        ("EFA", "OFI"),
        ("RoCE", ""),
    ):
        fine = [node(name, network=network) for name in "ab"]
        for one in fine:
            one.transport = used
        assert not judge(*fine).faulty, (network, used)
    alone = node("a")
    alone.transport = "Socket"  # NCCL names a network that a single node never uses
    assert not judge(alone).faulty


def test_transport_of_each_node() -> None:
    """Ranks that reach their neighbours inside the node name no network."""
    nodes = [NodeResult("a", [0, 1]), NodeResult("b", [2, 3]), NodeResult("c", [4, 5])]
    nodes[2].transport = "IB"  # from an earlier group
    figure: dict[str, Any] = {"transports": ["", "IB", "Socket", "Socket", "", ""]}
    take_transport(figure, nodes)
    assert [one.transport for one in nodes] == ["IB", "Socket", "IB"] and not figure
    take_transport({"error": "timeout"}, nodes)
    assert [one.transport for one in nodes] == ["IB", "Socket", "IB"]


@pytest.fixture
def nobody_has_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier tests of this process may have asked for CUDA, which a torch built with it remembers
    after a fork."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)


@pytest.mark.usefixtures("nobody_has_asked")
def test_a_measurement_that_hangs_dies_or_fails() -> None:
    """It costs its time and no more, and the error says in which phase."""
    began = time.monotonic()
    hang = "not connected after 0.5 s"
    assert run_in_child(lambda _: time.sleep(60) or {}, 0.5, 60) == {"error": hang}
    hang = "no result after 0.5 s"
    assert run_in_child(lambda ok: ok() or time.sleep(60) or {}, 60, 0.5) == {"error": hang}  # type: ignore[func-returns-value]
    assert time.monotonic() - began < 10
    assert run_in_child(lambda ok: ok() or {"a": 1}, 5, 5) == {"a": 1}  # type: ignore[func-returns-value]
    assert run_in_child(lambda _: 1 / 0, 5, 5) == {  # type: ignore[arg-type,return-value]
        "error": "ZeroDivisionError: division by zero"
    }
    assert run_in_child(lambda _: os._exit(3), 5, 5) == {  # type: ignore[arg-type,return-value]
        "error": "the process that measures died"
    }


@pytest.mark.usefixtures("nobody_has_asked")
def test_the_process_that_measures_forks_asks_nothing_of_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses CUDA in what a process forks after it has asked whether there is a GPU."""
    asked = tmp_path / "asked"

    def available() -> bool:
        asked.write_text(str(os.getpid()))
        return True

    for name in ("is_available", "device_count"):
        monkeypatch.setattr(torch.cuda, name, available)
    assert task.describe_node(local_rank=0)["real_gpus"] is True
    assert int(asked.read_text()) != os.getpid()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    said = run_in_child(lambda ok: ok() or {"a": 1}, 5, 5)  # type: ignore[func-returns-value]
    assert said == {"error": "AssertionError: CUDA was asked before the fork"}


@pytest.mark.usefixtures("nobody_has_asked")
def test_connecting_has_a_limit_of_its_own() -> None:
    """A slow start must not use up the time of the measurement, nor be taken for a fault."""
    slow_start = run_in_child(lambda ok: time.sleep(1) or ok() or {"a": 1}, 30, 0.5)  # type: ignore[func-returns-value]
    assert slow_start == {"a": 1}
    assert connect_limit(2, "cuda") >= 60 and connect_limit(1024, "cuda") > 250
    assert connect_limit(2, "cpu") < 15 and connect_limit(16384, "cuda") == 600
