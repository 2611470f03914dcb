"""Speed and bits of devices, and rates of the run directory: the judgement on made-up figures, and
the measurements themselves on this machine."""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kempner.jobs.preflight import devices, storage
from kempner.jobs.preflight.devices import SlowLimits, judge_devices, measure_device, slow_limits
from kempner.jobs.preflight.storage import data_file, judge_storage, read_rate, write_rate
from kempner.jobs.preflight.verdict import NodeResult, Report, compare_nodes
from kempner.jobs.ranks import peers
from tests.jobs.unit.test_preflight_verdict import figure as pair_figure
from tests.jobs.unit.test_preflight_verdict import node

LIMITS = SlowLimits()


@pytest.fixture(autouse=True)
def nobody_has_asked_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier tests of this process may have, which a torch built with it remembers."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)


def gpu_figure(
    speed: float = 1.0, copy: float = 1.0, bits: str = "a", **more: Any
) -> dict[str, Any]:
    speeds = {"flops_per_s": speed * 6e14, "copy_bytes_per_s": copy * 3e12}
    return {"device": "H100", "bits": bits, "steady": True} | speeds | more


def judged(
    *figures: dict[str, Any], kind: str = "cuda", limits: SlowLimits = LIMITS
) -> tuple[Report, list[NodeResult]]:
    """Nodes of two devices each, of which only the first has these figures."""
    nodes = [node(f"n{k}") for k in range(len(figures))]
    for k, (one, mine) in enumerate(zip(nodes, figures, strict=True)):
        one.ranks, one.devices = [2 * k, 2 * k + 1], {2 * k: mine, 2 * k + 1: gpu_figure()}
    report = Report(nodes, kind=kind)
    judge_devices(report, limits)
    return report, nodes


@pytest.mark.parametrize(
    ("speed", "named", "refused"),
    [(0.96, False, False), (0.94, True, False), (0.86, True, False), (0.84, False, True)],
)
def test_a_slow_gpu_is_named_or_refused(speed: float, named: bool, refused: bool) -> None:
    slow = gpu_figure(speed), gpu_figure(copy=speed)
    for what, mine in zip(("matrix product", "copy in its memory"), slow, strict=True):
        report, nodes = judged(gpu_figure(), mine, gpu_figure())
        assert (bool(nodes[1].notes), bool(nodes[1].faults)) == (named, refused)
        assert not nodes[0].notes + nodes[0].faults + nodes[2].notes + nodes[2].faults
        for said in nodes[1].notes + nodes[1].faults:
            assert said.startswith(f"GPU of task 2: {what} "), said
            assert f"{1 - speed:.0%} under the median of " in said
        assert report.record()["bad"] == ("n1" if refused else "")


def test_the_limits_are_chosen() -> None:
    _, nodes = judged(gpu_figure(), gpu_figure(0.98), limits=slow_limits("1,1.5"))
    assert nodes[1].faults and not nodes[0].faults
    for wrong in ("5", "15,5", "a,b", "0,5", "5,100"):
        with pytest.raises(argparse.ArgumentTypeError, match="two percentages"):
            slow_limits(wrong)


def test_gpus_of_other_names_are_not_compared() -> None:
    other = gpu_figure(0.3, bits="b", device="A100")
    report, nodes = judged(gpu_figure(), other)
    assert not nodes[1].faults + nodes[1].notes + report.notes


def test_a_slow_cpu_is_a_note() -> None:
    """Virtual hosts share their cores."""
    for speed, noted in ((0.5, False), (0.1, True)):
        report, nodes = judged(gpu_figure(), gpu_figure(speed), kind="cpu")
        assert not report.faulty and bool(nodes[1].notes) is noted
    _, nodes = judged(gpu_figure(), {"error": "no result after 12 s"}, kind="cpu")
    assert nodes[1].notes == ["CPU of task 2: no result after 12 s"] and not nodes[1].faults
    _, nodes = judged(gpu_figure(), {"error": "no result after 12 s"})
    assert nodes[1].faults == ["GPU of task 2: no result after 12 s"]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_other_bits_are_wrong_numbers(kind: str) -> None:
    report, nodes = judged(gpu_figure(), gpu_figure(bits="b"), kind=kind)
    assert report.record()["bad"] == "n1"
    assert "task 2: its product differs in bits from that of 3 of the 4" in nodes[1].faults[0]
    report, nodes = judged(gpu_figure(), gpu_figure(steady=False), kind=kind)
    assert report.record()["bad"] == "n1" and "new bits each time" in nodes[1].faults[0]


def test_without_a_majority_nobody_computes_wrong_numbers() -> None:
    nodes = [node("n0"), node("n1")]
    for one, bits in zip(nodes, "ab", strict=True):
        one.devices = {0: gpu_figure(bits=bits)}
    report = Report(nodes, kind="cuda")
    judge_devices(report, LIMITS)
    assert not report.faulty and "there is no majority: n0, n1" in report.notes[0]


def test_the_share_of_the_ports() -> None:
    """Of the fastest ones, a port for each task; gloo says nothing about them."""
    ports = [f"mlx5_{k}:1 {rate} Gb/sec" for k, rate in enumerate((100, 400, 400))]
    for kind, rate, share, noted in (
        ("cuda", 9e10, "90%", False),
        ("cuda", 4e10, "40%", True),
        ("cpu", 4e10, "", False),
    ):
        nodes = [node(name, ports=ports) for name in "abc"]
        report = Report(nodes, kind=kind)
        for one in nodes:
            one.ranks, one.pairs = [0, 1], {"a": pair_figure(rate)}
        compare_nodes(report)
        assert (f", {share} of its ports" in report.table()) is bool(share)
        assert bool(nodes[0].notes) is noted and not report.faulty
    assert nodes[0].ports_bytes_per_s == 1e11


def test_a_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.PRODUCT_SIZE, "cpu", 16)  # without threads, which a fork would lose
    monkeypatch.setitem(devices.COPY_BYTES, "cpu", 1 << 16)
    first, second = (measure_device("cpu", 0, 0.02) for _ in range(2))
    assert first["flops_per_s"] > 1e5 and first["copy_bytes_per_s"] > 1e6 and first["steady"]
    assert first["bits"] == second["bits"] and first["device"] == second["device"]
    real, wrong = torch.mm, [0.0]

    def flawed(*args: Any, **more: Any) -> torch.Tensor:
        wrong[0] += 1.0
        return real(*args, **more) + wrong[0] * ("out" not in more)

    monkeypatch.setattr(torch, "mm", flawed)
    third = measure_device("cpu", 0, 0.02)
    assert third["bits"] != first["bits"] and not third["steady"]


def test_rates_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.PEER_KEY_VARIABLE, peers.new_key())
    wrote = write_rate(tmp_path, 3, 1 << 20, 5.0)
    assert wrote["bytes"] == 1 << 20 and wrote["write_bytes_per_s"] > 0
    assert data_file(tmp_path, 3).stat().st_mode & 0o777 == 0o600
    assert read_rate(tmp_path, 3, 5.0)["read_bytes_per_s"] > 0
    assert "FileNotFoundError" in read_rate(tmp_path, 4, 5.0)["error"]
    assert write_rate(tmp_path, 3, 0, 0.0) == {} and not list(tmp_path.iterdir())

    def full(fd: int, data: bytes) -> int:
        if len(data) < 1 << 19:  # the figures of the child, through its pipe
            return real(fd, data)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = os.write
    monkeypatch.setattr(os, "write", full)
    assert "No space left on device" in write_rate(tmp_path, 3, 1 << 20, 5.0)["error"]
    assert not list(tmp_path.iterdir())


class Answering:
    """A driver whose tasks answer at once, from this process."""

    def __init__(self, folder: Path, full: tuple[int, ...] = ()) -> None:
        self.folder, self.full = folder, full

    def ask(self, ranks: Any, question: dict[str, Any]) -> dict[int, Any]:
        return dict.fromkeys(ranks, question)

    def answers(self, keys: dict[int, Any], deadline: float) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for rank, question in keys.items():
            if question["what"] == "read files":
                owner = data_file(self.folder, question["owner"])
                found[rank] = {"read_bytes_per_s": 1e6 * int(owner.read_text())}
            elif question["size"] and rank in self.full:
                found[rank] = {"error": "no room"}
            elif question["size"]:
                data_file(self.folder, rank).write_text(str(rank + 1))
                found[rank] = {"write_bytes_per_s": 1e9 * (1 if rank else 0.1), "bytes": 1}
        return found


@pytest.mark.parametrize("count", [1, 2, 4])
def test_one_alone_and_all_at_once(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads what its neighbour has written. A slow file system is nobody's fault."""
    monkeypatch.setenv(peers.PEER_KEY_VARIABLE, peers.new_key())
    report = Report([node(f"n{k}") for k in range(count)])
    for k, one in enumerate(report.nodes):
        one.ranks = [k]
    driver: Any = Answering(tmp_path)
    storage.ask_storage(driver, report, tmp_path, 1.0)
    read = [one.storage and one.storage["read_bytes_per_s"] / 1e6 for one in report.nodes]
    assert read == [count, *range(1, count)]
    assert report.storage_alone and report.storage_alone["write_bytes_per_s"] == 1e8
    assert not list(tmp_path.iterdir())
    judge_storage(report)
    assert bool(report.nodes[0].notes) is (count > 1) and not report.faulty
    assert ("nodes at once" in report.table()) is (count > 1)


@pytest.mark.parametrize("count", [1, 2])
def test_a_writer_that_fails_says_why(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody was asked to read its file: no answer of a reader is missing."""
    monkeypatch.setenv(peers.PEER_KEY_VARIABLE, peers.new_key())
    report = Report([node(f"n{k}") for k in range(count)])
    for k, one in enumerate(report.nodes):
        one.ranks = [k]
    driver: Any = Answering(tmp_path, full=(0,))
    storage.ask_storage(driver, report, tmp_path, 1.0)
    judge_storage(report)
    assert report.nodes[0].notes[0] == "run directory: no room"
    assert report.storage_alone == {"error": "no room"}


def test_without_room_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "free_bytes", lambda _: 15 << 20)
    report = Report([node("a"), node("b")])
    nobody: Any = None
    storage.ask_storage(nobody, report, tmp_path, 1.0)
    assert "too little room" in report.notes[0] and report.storage_alone is None
