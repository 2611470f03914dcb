"""The record of a run: what is counted, how it is divided, and what a reader finds."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kempner.jobs.ranks.placement import World
from kempner.optim.spikes import Spikes
from kempner.train.objective import NextToken
from kempner.train.progress import Progress
from kempner.train.recording.config import MetricsConfig
from kempner.train.recording.gpu_clock import GpuClock
from kempner.train.recording.metrics import Clock, console_line, short_number
from kempner.train.recording.peak import peak_flops
from kempner.train.recording.recorder import Recorder, has_validation
from kempner.train.replicas import Replicas
from kempner.train.sections import RunConfig, TrainConfig
from kempner.train.step import StepResult


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),  # not counted as the SXM card
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A40", 149.7),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA B200", 2250),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GB300", 2500),
        ("AMD Instinct MI300X", None),  # nobody has run the kit on one
        ("NVIDIA RTX A4000", None),  # neither an A40 nor an A100
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("CPU", None),
    ],
)
def test_peak_of_a_card_by_its_name(name: str, tera: float | None) -> None:
    assert peak_flops(MetricsConfig(), name) == (tera and tera * 1e12)
    assert peak_flops(MetricsConfig(peak_tflops=50.0), name) == 50e12


def test_the_clock_divides_the_time() -> None:
    clock = Clock()
    for _ in range(2):
        with clock.part("data"):
            time.sleep(0.02)
    time.sleep(0.03)
    spent = clock.spent()
    assert spent["data"] >= 0.04 and spent["total"] >= spent["data"] + 0.03
    assert 0.02 <= clock.last["data"] < spent["data"]
    with pytest.raises(ValueError), clock.part("checkpoint"):
        raise ValueError
    after = clock.spent()
    assert after["data"] == spent["data"] and "checkpoint" in after
    assert after["total"] > spent["total"] and "checkpoint" not in spent


# --- The recorder -------------------------------------------------------------------------------


class FakeRun:
    """What the recorder asks of a run, and what it says."""

    def __init__(self, path: Path, rank: int = 0, world_size: int = 2, **metrics: Any) -> None:
        train = TrainConfig(max_steps=7, seq_len=8, global_batch=4)
        self.cfg = RunConfig(train=train, metrics=MetricsConfig(**metrics))
        self.world = World(rank, rank, world_size, "slurm")
        self.dir, self.attempt, self.hosts = path, 3, ["one"] * world_size
        self.said: list[str] = []
        self.background = self

    def put(self, write: Callable[[], object], path: Path) -> None:
        """What Background does, at once."""
        with contextlib.suppress(OSError):
            write()

    def announce(self, text: str) -> None:
        self.said.append(text)

    def progress(self, step: int) -> None: ...


def result(step: int, spent: dict[str, float], loss: float = 2.0, bad: bool = False) -> StepResult:
    values = {"loss": loss, "grad_norm": 0.5, "bad": float(bad), "asks_profile": 0.0}
    return StepResult(Progress(step, 4 * step, 32 * step), 1e-3, values, spent)


LOADER: Any = SimpleNamespace(
    names=["data"],
    sources=(),
    sample_numbers=lambda position, count: list(range(position, position + count)),
    keys_per_query=lambda window: None,
    at_once=False,
    places=lambda tokens: tokens,
    record=lambda result, lap, counted: {},
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until it is told."""
    now = SimpleNamespace(value=100.0)
    monkeypatch.setattr("kempner.train.recording.metrics.time.perf_counter", lambda: now.value)
    return now


def record(run: FakeRun, clock: SimpleNamespace, **faults: Any) -> list[dict[str, Any]]:
    """Steps 1 to 7 of 2 s each, 0.5 s of it waiting for data; returns the lines of the file."""
    parts = (LOADER, NextToken(), Replicas(), Spikes(6.0, 8))
    made = Recorder(run, torch.device("cpu"), Progress(), *parts)  # type: ignore[arg-type]
    for step in range(1, 8):
        with made.clock.part("data"):
            clock.value += 0.5
        clock.value += 1.5
        made.step(result(step, made.clock.spent(), **faults.get(f"step{step}", {})))
    path = run.dir / "metrics.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def test_a_line_every_interval_and_at_the_last_step(tmp_path: Path, clock: SimpleNamespace) -> None:
    run = FakeRun(tmp_path, log_interval=3, peak_tflops=1e-6)
    lines = record(run, clock)
    assert [x["step"] for x in lines] == [3, 6, 7]
    flops = run.cfg.model.flops_per_token(8)
    for x in lines:
        assert x["attempt"] == 3 and x["lr"] == 1e-3 and x["grad_norm"] == 0.5 and x["loss"] == 2.0
        assert x["tokens_per_s"] == pytest.approx(16.0)  # 32 tokens of a step in 2 s
        assert x["step_time"] == pytest.approx(2.0) and x["data_time"] == pytest.approx(0.5)
        assert x["compute_time"] == pytest.approx(1.5) and x["checkpoint_time"] == 0.0
        assert x["mfu"] == pytest.approx(16.0 * flops / (2 * 1e6))  # two ranks' peak
        assert x["tokens"] == 32 * x["step"] and x["samples"] == 4 * x["step"]
    assert "flops/token / (2 x 1e+06 flops/s)" in run.said[0]
    assert [text for text in run.said if text.startswith("step 3/7 loss 2.0000")]


class Event:
    """In the place of torch.Event: `now` is the time of the device."""

    now = 5.0

    def __init__(self, device: str, enable_timing: bool) -> None:
        assert device == "cuda" and enable_timing

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


def test_a_step_ends_when_the_gpu_has_done_it(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is held up by a full queue, and reads two steps at once: seen on an H200, where a
    step of 2.7 s was recorded as one of 0.1 s, and the next but one as 5.2 s."""
    monkeypatch.setattr(torch, "Event", Event)
    run = FakeRun(tmp_path, log_interval=1)
    parts = (LOADER, NextToken(), Replicas(), Spikes(6.0, 8))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    made = Recorder(run, torch.device("cuda"), Progress(), *parts)  # type: ignore[arg-type]
    assert isinstance(made.clock, GpuClock)
    for step, host in enumerate((2.6, 0.1, 5.2, 0.0), 1):
        with made.clock.part("data"):
            clock.value += 0.25
        Event.now += 2.0
        spent, mark = made.clock.spent(), made.clock.mark()
        clock.value += host
        made.step(result(step, spent | {"total": made.clock.reach(mark)}))
    lines = [json.loads(text) for text in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step_time"] for line in lines] == pytest.approx([2.0] * 4)
    assert [line["data_time"] for line in lines] == pytest.approx([0.25] * 4)
    assert [line["tokens_per_s"] for line in lines] == pytest.approx([16.0] * 4)


def test_not_finite_is_null_and_counted(tmp_path: Path, clock: SimpleNamespace) -> None:
    run = FakeRun(tmp_path, log_interval=1)
    lines = record(run, clock, step4={"loss": math.nan, "bad": True})
    losses = {x["step"]: x for x in lines if "loss" in x}
    assert losses[4]["loss"] is None and losses[5]["loss"] == 2.0
    assert [losses[step]["skipped"] for step in (3, 4, 7)] == [0, 1, 1]
    (bad,) = [x for x in lines if x.get("not_finite")]
    assert bad["step"] == 4 and bad["sample_numbers"] == [12, 13, 14, 15]
    assert losses[7]["mfu"] is None  # a CPU has no peak


def test_no_number_of_a_part_is_nan(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has none: jq, among others, refuses the line."""
    parts = {"experts": {"aux_loss": math.nan, "load_max": 2.0}, "shares": [math.inf, 1]}
    monkeypatch.setattr(LOADER, "record", lambda *_: parts)
    line = record(FakeRun(tmp_path), clock)[0]
    assert line["experts"] == {"aux_loss": None, "load_max": 2.0} and line["shares"] == [None, 1]


def test_a_validation_is_found_among_damaged_lines(tmp_path: Path) -> None:
    lines = b'{"step": 4, "val_lo\xff\x00\n{"step": 8, "time": 1.5, "val_loss": null}\n'
    (tmp_path / "metrics.jsonl").write_bytes(lines)
    assert has_validation(tmp_path, 8) and not has_validation(tmp_path, 4)


def test_rank_0_alone_writes(tmp_path: Path, clock: SimpleNamespace) -> None:
    assert record(FakeRun(tmp_path, rank=1), clock) == []


def test_the_console_line_fits_80_columns() -> None:
    known = {
        "step": 20, "loss": 3.25, "lr": 3e-4, "grad_norm": 0.5, "tokens_per_s": 12345.6,
        "step_time": 2.0, "data_time": 0.5, "checkpoint_time": 0.09, "mfu": 0.414, "skipped": 2,
    }  # fmt: skip
    expected = "step   20/1000 loss 3.2500 lr 3.00e-04 |g| 0.50 12.3k tok/s 2s"
    assert console_line(known, 1000) == f"{expected} mfu 41.4% data 25% skipped 2"
    assert console_line(known | {"mfu": None, "skipped": 0, "data_time": 0.0}, 1000) == expected
    large = {"step": 12345, "tokens_per_s": 1.2e7, "step_time": 12.345, "data_time": 0.1}
    assert len(console_line(known | large | {"skipped": 0}, 100_000)) <= 80


@pytest.mark.parametrize(
    ("number", "expected"), [(999, "999"), (1000, "1.0k"), (1.25e6, "1.2M"), (3e9, "3.0G")]
)
def test_short(number: float, expected: str) -> None:
    assert short_number(number) == expected
