"""A mixture of experts through the trainer: balanced, the same on any mesh, resumed bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kempner.checkpoint.reader import read_tensors
from tests.conftest import TINY, losses, start_train
from tests.distributed.test_train import same_tensors

STEPS = 20
# Balanced in both ways, with a router that has all there is.
MIXTURE = [
    *TINY,
    f"--train.max_steps={STEPS}",
    "--schedule.name=constant",
    "--optimizer.lr=3e-3",
    "--model.ffn_dim=32",
    "--model.n_experts=8",
    "--model.shared_experts=1",
    "--model.router=sigmoid",
    "--model.router_bias",
    "--model.router_bias_speed=0.01",
    "--model.aux_loss=0.01",
]


def run(data_dir: Path, run_dir: Path, *more: str, nproc: int = 1, code: int = 0) -> str:
    words = [*MIXTURE, f"--data.dataset_path={data_dir}", f"--run.dir={run_dir}", *more]
    process = start_train(*words, nproc=nproc)
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    return out + err


def experts(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["experts"] for line in lines]


def biases(run_dir: Path) -> list[torch.Tensor]:
    tensors = read_tensors(run_dir / "checkpoints/latest")
    return [value for name, value in tensors.items() if name.endswith("ffn.router_bias")]


@pytest.fixture(scope="module")
def one_process(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("one") / "run"
    run(data_dir, run_dir)
    return run_dir


def test_experts_become_balanced_and_the_metrics_show_it(one_process: Path) -> None:
    loss, seen = losses(one_process), experts(one_process)
    assert loss[STEPS] < 4.0 < 5.2 < loss[1]
    assert all(each["load_min"] <= 1 <= each["load_max"] for each in seen)
    assert all(0.9 < each["aux_loss"] < 2.0 for each in seen)
    assert seen[-1]["load_max"] < seen[0]["load_max"]
    moved = torch.stack(biases(one_process))  # [L, E]
    assert moved.shape == (2, 8) and 0.01 < moved.abs().max() <= 0.01 * STEPS + 1e-6


LAYOUTS = {
    "shard": (2, ("--train.recompute", "--train.micro_batch=2")),
    "replicate": (2, ("--distributed.dp_replicate=2", "--distributed.dp_shard=1")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_losses_of_one_process(
    data_dir: Path, one_process: Path, tmp_path: Path, layout: str
) -> None:
    """And the same load, and so the same biases: these move by the tokens of all ranks."""
    nproc, more = LAYOUTS[layout]
    run(data_dir, tmp_path / "run", *more, nproc=nproc)
    assert losses(tmp_path / "run") == pytest.approx(losses(one_process), rel=1e-5)
    for got, want in zip(experts(tmp_path / "run"), experts(one_process), strict=True):
        assert got == pytest.approx(want, rel=1e-5)
    assert torch.equal(torch.stack(biases(tmp_path / "run")), torch.stack(biases(one_process)))


def test_resumed_equals_unbroken_bit_for_bit(
    data_dir: Path, one_process: Path, tmp_path: Path
) -> None:
    run(data_dir, tmp_path / "run", "--train.max_steps=7")
    run(data_dir, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(one_process)
    assert same_tensors(*(path / "checkpoints/latest" for path in (tmp_path / "run", one_process)))
