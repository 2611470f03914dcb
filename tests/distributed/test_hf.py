"""Models through the trainer: from transformers, five steps, back to transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import start_train
from tests.hf_models import FAMILIES, convert, load_quietly, make, ours, theirs

CONFIG = """
[train]
max_steps = 5
seq_len = 32
global_batch = 8
deterministic = true
[optimizer]
lr = 1e-2
[metrics]
log_interval = 1
"""


@pytest.fixture
def words(data_dir: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "five.toml").write_text(CONFIG)
    return [f"{tmp_path}/five.toml", f"--data.dataset_path={data_dir}"]


def trained(*words: str, nproc: int = 1, **env: str) -> str:
    """Train to the end; returns what was printed."""
    process = start_train(*words, nproc=nproc, **env)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    return out


def same(first: torch.Tensor, second: torch.Tensor) -> None:
    torch.testing.assert_close(first, second, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_from_transformers_five_steps_and_back(
    words: list[str], tmp_path: Path, family: str
) -> None:
    """Qwen2 by four ranks, with parameters that do not divide by four."""
    model, run = make(family, tmp_path / "model", max_shard_size="60KB"), tmp_path / "run"
    same(ours(tmp_path / "model"), theirs(model))
    words += [f"--model.init_from={tmp_path / 'model'}", f"--run.dir={run}"]
    out = trained(*words, nproc=4 if family == "qwen2" else 1)
    assert f"starts from the weights of {tmp_path / 'model'}" in out
    convert("export", run, tmp_path / "out", "--max-shard-size=1MB")
    back = load_quietly(tmp_path / "out")
    same(theirs(back), ours(run))
    assert (theirs(back) - theirs(model)).abs().max() > 0.1  # it has learned something
