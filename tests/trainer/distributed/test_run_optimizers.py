"""Every optimizer and both ramps through the real trainer: resumed bit for bit, and on another mesh
with the losses and the state of the unbroken run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kempner.checkpoint.format.reader import read_tensors
from tests.conftest import TINY, Train, losses, start_train

ALL = ("--train.max_steps=6", "--checkpoint.interval=3", "--eval.samples=4")
RAMPS = ("--train.batch_ramp=[4, 2, 4]", "--train.seq_len_ramp=[8, 4]", "--train.micro_batch=1")
OPTIMIZERS = {
    "muon": (*RAMPS, "--optimizer.name=muon", "--schedule.name=rex"),
    "schedule_free": (
        "--optimizer.name=schedule_free",
        "--optimizer.moments=bf16",
        "--schedule.name=constant",
    ),
}


@pytest.fixture(scope="module")
def unbroken(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of an optimizer, of 6 steps on one process; it validates, which changes no step."""
    root = tmp_path_factory.mktemp("unbroken")

    def run(name: str) -> Path:
        if not (root / name).exists():
            words = (*TINY, *ALL, *OPTIMIZERS[name], "--eval.interval=4")
            paths = (f"--data.dataset_path={data_dir}", f"--run.dir={root / name}")
            process = start_train(*words, *paths)
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, out + err
        return root / name

    return run


def continued_after_3(train: Train, run: Path, to: Path, name: str, nproc: int) -> Path:
    shutil.copytree(run, to, symlinks=True)
    shutil.rmtree(to / "checkpoints/step_00000006")
    (to / "metrics.jsonl").unlink()
    done = train(to, *ALL, *OPTIMIZERS[name], nproc=nproc)
    assert "continues after step 3" in done.stdout
    assert sorted(losses(to)) == [4, 5, 6]
    return to / "checkpoints/latest"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_equals_unbroken_bit_for_bit(
    train: Train, tmp_path: Path, unbroken: Callable[[str], Path], name: str
) -> None:
    before = unbroken(name)
    latest = continued_after_3(train, before, tmp_path / "again", name, nproc=1)
    assert losses(before) == losses(before) | losses(tmp_path / "again")
    same, mine = read_tensors(before / "checkpoints/latest"), read_tensors(latest)
    assert list(same) == list(mine) and all(torch.equal(same[key], mine[key]) for key in same)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_mesh_goes_on_alike(
    train: Train, tmp_path: Path, unbroken: Callable[[str], Path], name: str
) -> None:
    """The state is read on two ranks that shard it, and written by them. What is rounded to bf16 is
    rounded as on one rank, but for the few numbers that another order of a sum has changed."""
    before = unbroken(name)
    latest = continued_after_3(train, before, tmp_path / "mesh", name, nproc=2)
    assert losses(before) == pytest.approx(losses(before) | losses(tmp_path / "mesh"), rel=1e-5)
    same, mine = read_tensors(before / "checkpoints/latest"), read_tensors(latest)
    assert {key: x.shape for key, x in same.items() if "rng" not in key} == {
        key: x.shape for key, x in mine.items() if "rng" not in key
    }
    for key in (key for key in same if key.startswith("model.")):
        torch.testing.assert_close(mine[key], same[key], rtol=1e-3, atol=1e-5)
    rounded = [key for key, x in same.items() if x.dtype is torch.bfloat16]
    assert bool(rounded) == (name == "schedule_free")
    for key in rounded:
        assert (mine[key] != same[key]).float().mean() < 0.05, key


def test_the_records_of_a_ramp(unbroken: Callable[[str], Path]) -> None:
    lines = (unbroken("muon") / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    assert [record["samples"] for record in records] == [4, 8, 14, 20, 28, 36]
    assert [record["tokens"] for record in records] == [32 * x for x in (4, 8, 14, 20, 28, 36)]
