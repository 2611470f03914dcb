"""A mixture of experts through the trainer: balanced, the same on any mesh, resumed bit for bit."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kempner.checkpoint.format.reader import read_tensors
from kempner.config import toml
from tests.conftest import ROOT, TINY, losses, start_train
from tests.trainer.distributed.test_tensor import begun
from tests.trainer.distributed.test_train import same_tensors

STEPS = 20
# Balanced in both ways, with a router that has all there is. Two experts whose scores differ by a
# rounding error would be chosen in another order on another mesh: fixed data, and scores far apart.
MIXTURE = [
    *TINY,
    f"--train.max_steps={STEPS}",
    "--schedule.name=constant",
    "--optimizer.lr=3e-3",
    "--model.ffn_dim=32",
    "--train.seq_len=16",
    "--model.init_std=0.1",
    "--model.n_experts=4",
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
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words that are the same every time."""
    folder = tmp_path_factory.mktemp("words")
    words = ["token", "expert", "router", "layer", "weight", "and", "of", "the", "a", "is"]
    text = " ".join(random.Random(0).choices(words, k=40_000))
    (folder / "words.txt").write_text(text)
    command = ["scripts/prepare_data.py", folder / "words.txt", "--out", folder / "data"]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    return folder / "data"


@pytest.fixture(scope="module")
def one_process(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("one") / "run"
    run(data_dir, run_dir)
    return run_dir


def test_biases_balance_the_experts(data_dir: Path, tmp_path: Path) -> None:
    """With neither biases nor auxiliary loss some experts get every token here, and some none."""
    more = ("--train.max_steps=100", "--optimizer.lr=1e-3", "--model.aux_loss=0")
    more += ("--model.n_experts=8", "--model.init_std=0.02", "--train.seq_len=32")
    run(data_dir, tmp_path / "run", *more)
    seen = experts(tmp_path / "run")
    assert max(each["load_max"] for each in seen) > 2.5 > 2.0 > seen[-1]["load_max"]
    assert min(each["load_min"] for each in seen) < 0.1 < 0.25 < seen[-1]["load_min"]
    assert not any(each["aux_loss"] for each in seen)


LAYOUTS = {
    "shard": (2, ("--train.recompute=full", "--train.micro_batch=2")),
    "ep and dp": (4, ("--distributed.ep=2", "--train.recompute=full", "--train.micro_batch=1")),
    "ep and hsdp": (4, ("--distributed.ep=2", "--distributed.dp_replicate=2")),
    # Buffers without room above the mean: steps are repeated without them.
    "ep, in buffers": (
        2,
        (
            "--distributed.ep=2",
            "--experts.spare=0",
            "--distributed.overlap=['shared']",
            "--train.recompute=full",
            "--train.micro_batch=2",
        ),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_numbers_of_one_process(
    data_dir: Path, one_process: Path, tmp_path: Path, layout: str
) -> None:
    """Also the load, and so the biases, which move by the tokens of all ranks; and every first
    moment: each gradient has a part in it."""
    nproc, more = LAYOUTS[layout]
    said = run(data_dir, tmp_path / "run", *more, nproc=nproc)
    repeated = re.findall(r"step (\d+) is repeated: \d+ rows .* the next (\d+) steps", said)
    # The step after it was done in vain, and counts.
    assert repeated == ([("1", "8"), ("9", "16")] if layout == "ep, in buffers" else [])
    assert losses(tmp_path / "run") == pytest.approx(losses(one_process), rel=1e-5)
    for got, want in zip(experts(tmp_path / "run"), experts(one_process), strict=True):
        assert got == pytest.approx(want, rel=1e-5)
    got, want = (read_tensors(at / "checkpoints/latest") for at in (tmp_path / "run", one_process))
    for name in (name for name in want if name.endswith("exp_avg")):
        assert (got[name] - want[name]).norm() < 1e-5 * want[name].norm(), name
    assert torch.equal(torch.stack(biases(tmp_path / "run")), torch.stack(biases(one_process)))


def test_resumed_equals_unbroken_bit_for_bit(
    data_dir: Path, one_process: Path, tmp_path: Path
) -> None:
    run(data_dir, tmp_path / "run", "--train.max_steps=7")
    run(data_dir, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(one_process)
    assert same_tensors(*(path / "checkpoints/latest" for path in (tmp_path / "run", one_process)))


def test_a_checkpoint_of_expert_parallel_ranks_is_loaded_by_others(
    data_dir: Path, one_process: Path, tmp_path: Path
) -> None:
    """And the reverse."""
    run(data_dir, tmp_path / "run", "--train.max_steps=7")
    run(data_dir, tmp_path / "run", "--train.max_steps=14", "--distributed.ep=2", nproc=2)
    run(data_dir, tmp_path / "run")
    assert losses(tmp_path / "run") == pytest.approx(losses(one_process), rel=1e-5)


def test_experts_over_context_parallel_ranks_resume_bit_for_bit(
    data_dir: Path, tmp_path: Path
) -> None:
    """Both ranks have the same rows, and each has half of the experts."""
    mesh = ("--distributed.ep=2", "--distributed.cp=2", "--model.aux_loss=0")
    state = ("--train.max_steps=8", "--checkpoint.interval=4", "--checkpoint.keep_last_n=9")
    run(data_dir, tmp_path / "whole", *mesh, *state, nproc=2)
    resumed = begun(tmp_path, "whole", tmp_path / "resumed", 4)
    assert "continues after step 4" in run(data_dir, resumed, *mesh, *state, nproc=2)
    assert losses(resumed) == losses(tmp_path / "whole")
    assert same_tensors(*(at / "checkpoints/latest" for at in (tmp_path / "whole", resumed)))


def test_the_recipe_for_one_node_gives_the_numbers_of_one_process(
    data_dir: Path, tmp_path: Path
) -> None:
    """All that configs/scale/moe-30b-1node.toml sets, but its size and the compiler."""
    recipe = toml.loads((ROOT / "configs/scale/moe-30b-1node.toml").read_text())
    assert recipe.pop("base") == "../train/moe-30b.toml" and recipe["distributed"].pop("ep") == 8
    assert recipe["train"].pop("global_batch_tokens") and recipe["train"].pop("compile")
    words = [
        f"--{section}.{key}={value}"
        for section, values in recipe.items()
        for key, value in values.items()
    ]
    words += ["--train.dtype=bf16", "--train.max_steps=5", "--train.micro_batch=2"]
    run(data_dir, tmp_path / "one", *words)
    more = ("--distributed.ep=2", "--experts.spare=0.1", "--distributed.overlap=['shared']")
    run(data_dir, tmp_path / "two", *words, *more, nproc=2)
    found, expected = (losses(tmp_path / name) for name in ("two", "one"))
    assert found == pytest.approx(expected, rel=2e-3) and len(found) == 5


def test_what_ep_cannot_share_out_is_refused(data_dir: Path, tmp_path: Path) -> None:
    said = run(data_dir, tmp_path / "run", "--distributed.ep=3", code=2)
    assert "distributed.ep = 3: must divide model.n_experts = 4" in said
    said = run(data_dir, tmp_path / "run", "--experts.spare=0.25", code=2)
    assert "experts.spare = 0.25: not built for distributed.ep = 1: no tokens travel" in said
    words = ("--check", "--nodes=1", "--gpus-per-node=6", "--distributed.ep=2")
    batch = ("--train.global_batch=12", "--model.ffn_dim=32")
    said = run(data_dir, tmp_path / "run", *words, *batch, code=2)
    assert "model.ffn_dim = 32: with distributed.ep = 2 it must be divisible by the 3 ranks" in said
