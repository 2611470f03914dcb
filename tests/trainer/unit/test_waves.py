"""Saves where memory is small or the disk slow: the file is the same, made in waves, and one save
waits for the other."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kempner.checkpoint import checkpointer as checkpoints
from kempner.checkpoint import commit, history
from kempner.checkpoint.config import CheckpointConfig
from kempner.checkpoint.format import waves, writer
from kempner.checkpoint.format.plan import make_table
from kempner.checkpoint.format.reader import verify_checkpoint
from kempner.checkpoint.format.waves import WavedImage
from kempner.checkpoint.format.writer import PAGE, Image, plan_file
from kempner.jobs.ranks import host_memory
from kempner.train.progress import Progress
from kempner.train.recording import saves as saving
from kempner.train.recording.metrics import Clock
from kempner.train.recording.saves import Saves
from tests.trainer.unit.test_checkpointer import DATA, Job

pytestmark = pytest.mark.usefixtures("one_process")

STATE = {
    "weight": torch.randn(300, 70).t(),  # not contiguous
    "half": torch.randn(7, 1001).bfloat16(),
    "step": torch.tensor(3.0),
    "none": torch.empty(0, 4),
    "codes": torch.arange(3 * PAGE, dtype=torch.uint8),
}


@pytest.fixture(autouse=True)
def small_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (writer, waves, checkpoints):
        monkeypatch.setattr(module, "WRITE", 2 * PAGE)
    monkeypatch.setattr(writer, "CRC_BLOCK_BYTES", PAGE)


@pytest.mark.parametrize("room", [1, 3 * PAGE, 4 * PAGE, 1 << 30])
def test_the_bytes_are_those_of_one_piece(room: int) -> None:
    plan = plan_file(make_table(STATE, {}, world=1), 0)
    whole, log = Image(plan, None, print), list[str]()
    whole.stage(STATE)
    waved = WavedImage(plan, None, log.append, room)
    for _ in range(2):  # the second save finds the first one's bytes in its memory
        waved.stage(STATE)
        pieces = [bytes(piece) for piece in waved.pieces()]
        assert b"".join(pieces) == bytes(whole.bytes)
    assert len(pieces) == waved.waves and waved.entries == whole.entries
    assert f"in {waved.waves} waves" in log[0] and "the steps wait" in log[0]


def test_a_save_that_does_not_fit_is_the_same_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is durable when the step goes on: nothing may change its tensors meanwhile."""
    files = []
    for name, room in (("whole", 1 << 30), ("waves", 4 * PAGE)):
        monkeypatch.setattr(host_memory, "memory_of_rank", lambda room=room: room)
        job = Job(tmp_path / name)
        job.train(2)
        for step in (1, 2):
            job.checkpointer.save(step, {"samples": 8 * step, "tokens": 80 * step})
            assert name == "whole" or job.checkpointer.saved_step == step
            job.checkpointer.wait()
            job.train()
        assert any("waves" in line for line in job.log) == (name == "waves"), job.log
        assert verify_checkpoint(tmp_path / name / "latest") == []
        files.append((tmp_path / name / "latest" / DATA).read_bytes())
        job.checkpointer.close()
    assert files[0] == files[1]


def test_a_save_waits_for_the_one_before_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never are there two: what is committed is in order, and no request is dropped."""

    def slow(*given: Any) -> None:
        time.sleep(0.2)
        writer.write_file(*given)

    monkeypatch.setattr(checkpoints, "write_file", slow)
    monkeypatch.setattr(saving, "WAIT_S", 0.05)
    committed, said, lines = list[int](), list[str](), list[dict[str, Any]]()
    real = commit.commit_save
    monkeypatch.setattr(
        commit, "commit_save", lambda *given: committed.append(given[1]) or real(*given)
    )
    job = Job(tmp_path)
    run: Any = SimpleNamespace(
        cfg=SimpleNamespace(checkpoint=CheckpointConfig(interval=1)),
        announce=said.append,
        world=SimpleNamespace(rank=0),
    )
    recorder: Any = SimpleNamespace(clock=Clock(), write=lines.append)
    saves = Saves(run, job.checkpointer, recorder, contextlib.nullcontext)
    for step in (1, 2, 3):
        job.train()
        saves.after_step(step, 0.01)
        for _ in range(2):  # a request for the step that is being saved asks for nothing new
            saves.save(Progress(step=step))
        assert job.checkpointer.in_flight == step
    job.checkpointer.close()
    assert committed == [1, 2, 3] and history.latest_checkpoint(tmp_path).name == "step_00000003"
    assert [line["saved_step"] for line in lines] == [1, 2]
    assert all(0.05 < line["save_drain"] < 5 for line in lines) and lines[1]["save_wait"] > 0.05
    assert "waited" in said[0] and "take longer than checkpoint.interval" in said[0]


def test_the_slowest_rank_counts_and_rank_0_says_that_others_save_in_waves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the reduction that a save has anyway."""
    job, lines = Job(tmp_path), list[dict[str, Any]]()
    run: Any = SimpleNamespace(
        cfg=SimpleNamespace(checkpoint=CheckpointConfig(interval=1)),
        announce=print,
        world=SimpleNamespace(rank=0),
    )
    recorder: Any = SimpleNamespace(clock=Clock(), write=lines.append)
    saves = Saves(run, job.checkpointer, recorder, contextlib.nullcontext)
    ranks, calls = job.checkpointer.ranks, list[int]()
    on_all, others = ranks.on_all, [(0, 1), (2_000_000, 1), (0, 3), (0, 3)]

    def beside(act: Any, most: Any) -> Any:
        result = on_all(act, most)
        calls.append(len(most))
        most[:] = map(max, most, others[len(calls) - 1])
        return result

    monkeypatch.setattr(ranks, "on_all", beside)
    for step in (1, 2, 3, 4):
        job.train()
        saves.after_step(step, 0.01)
        saves.save(Progress(step=step))
        job.checkpointer.wait()
    saves.see()
    assert calls == [2] * 4
    first, second, third, last = lines
    assert first["save_stall"] < 1 and second["save_stall"] == pytest.approx(2, abs=0.1)
    assert third["save_drain"] == 0.0 and last["save_step_mean"] is None
    assert [line["saved_step"] for line in lines] == [1, 2, 3, 4]
    said = [line for line in job.log if "waves" in line]
    assert len(said) == 1 and "on some ranks the memory is too small" in said[0]
    job.checkpointer.close()


def of_two_hosts(rank: int, root: Path) -> None:
    """One of two ranks, of which the host of rank 1 has no room for its part."""
    for module in (writer, waves, checkpoints):
        module.WRITE = 2 * PAGE  # type: ignore[attr-defined]
    host_memory.memory_of_rank = lambda: 1 if rank else 1 << 40
    real = checkpoints.write_file

    def slow(*given: Any) -> None:
        time.sleep(0.5 * rank)
        real(*given)

    checkpoints.write_file = slow
    store = dist.FileStore(str(root / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    job = Job(root / "checkpoints")
    job.train()
    job.checkpointer.save(1, {})
    # Or rank 0 would wait for rank 1 in its next step, where the watchdog would end the run.
    assert job.checkpointer.saved_step == 1, job.log
    dist.destroy_process_group()


def test_all_ranks_wait_for_one_that_saves_in_waves(tmp_path: Path) -> None:
    mp.spawn(of_two_hosts, (tmp_path,), nprocs=2)


V2 = {"memory.max": "{limit}", "memory.current": "{used}", "memory.stat": "{cached}"}
V1 = {
    "memory.limit_in_bytes": "{limit}",
    "memory.usage_in_bytes": "{used}",
    "memory.stat": "{cached}",
}


@pytest.mark.parametrize(
    ("line", "root", "names", "prefix"),
    [("0::/job_7/step_0", "", V2, ""), ("4:cpu,memory:/job_7/step_0", "memory", V1, "total_")],
    ids=["v2", "v1"],
)
def test_the_memory_is_that_of_the_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    root: str,
    names: dict[str, str],
    prefix: str,
) -> None:
    """Slurm limits the job, a folder above that of the step; files in the cache do not count."""
    for name, path in (("MEMINFO", "meminfo"), ("OWN_CGROUPS", "own"), ("CGROUPS", "cgroup")):
        monkeypatch.setattr(host_memory, name, tmp_path / path)
    (tmp_path / "meminfo").write_text("MemTotal: 4000 kB\nMemAvailable:  1000 kB\n")
    (tmp_path / "own").write_text(f"7:pids:/x\n{line}\n")
    assert host_memory.available_memory() == 1000 * 1024
    job = tmp_path / "cgroup" / root / "job_7"
    (job / "step_0").mkdir(parents=True)
    cached = f"anon 9\n{prefix}active_file 30000\n{prefix}inactive_file 20000"
    for name, text in names.items():
        text = text.format(limit=200_000, used=150_000, cached=cached)
        (job / name).write_text(text)
        (job / "step_0" / name).write_text(text.replace("200000", "max"))
    assert host_memory.available_memory() == 100_000
    assert host_memory.job_memory() == 200_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    status = tmp_path / "status"
    monkeypatch.setattr(host_memory, "OWN_STATUS", status)
    status.write_text("Name:\ta: b\nVmHWM:\t  100 kB\nVmRSS:\t  100 kB\n")
    assert host_memory.memory_of_rank() == 80_000
    # What a step takes and returns comes again while a save is written.
    status.write_text("VmHWM:\t  150 kB\nVmRSS:\t  100 kB\n")
    assert host_memory.memory_of_rank() == 80_000 - 50 * 1024
    status.write_text("VmHWM:\t  200 kB\nVmRSS:\t  100 kB\n")
    assert host_memory.memory_of_rank() == 0
    monkeypatch.setattr(host_memory, "OWN_STATUS", Path("/proc/self/status"))
    assert host_memory.peak_above_now() >= 0
