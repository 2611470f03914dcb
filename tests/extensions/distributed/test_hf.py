"""Models through the trainer: from transformers, five steps, back to transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from kempner.extensions.hf.source import find_weights
from tests.conftest import start_train
from tests.hf_models import convert, load_quietly, make, ours, theirs
from tests.trainer.distributed.test_bad_input import rejected

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


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen2", "qwen3", "glm4_moe"])
def test_from_transformers_five_steps_and_back(
    words: list[str], tmp_path: Path, family: str
) -> None:
    """Qwen2 by four ranks, with parameters that do not divide by four; experts shared out."""
    ranks = {"qwen2": (4, 1), "glm4_moe": (4, 2)}
    nproc, ep = ranks.get(family, (1, 1))
    model, run = make(family, tmp_path / "model", max_shard_size="60KB"), tmp_path / "run"
    same(ours(tmp_path / "model"), theirs(model))
    words += [f"--model.init_from={tmp_path / 'model'}", f"--run.dir={run}"]
    out = trained(*words, f"--distributed.ep={ep}", nproc=nproc)
    assert f"starts from the weights of {tmp_path / 'model'}" in out
    convert("export", run, tmp_path / "out", "--max-shard-size=1MB")
    back = load_quietly(tmp_path / "out")
    same(theirs(back), ours(run))
    assert (theirs(back) - theirs(model)).abs().max() > 0.1  # it has learned something


def test_a_run_starts_from_another_and_needs_it_no_more(words: list[str], tmp_path: Path) -> None:
    make("mistral", tmp_path / "model")
    first, second = tmp_path / "first", tmp_path / "second"
    convert("import", tmp_path / "model", first)
    words += [f"--model.init_from={first}@0", f"--run.dir={second}", "--model.max_seq_len=48"]
    trained(*words, "--train.max_steps=2")
    assert (second / "hf/config.json").is_file()
    shutil.rmtree(first)
    assert "continues after step 2" in trained(*words)
    assert find_weights(str(second)).model()["max_seq_len"] == 48
    third = tmp_path / "third"
    longer = ("--model.rope_factor=8", "--model.rope_original_len=16")
    trained(*words, *longer, f"--run.dir={third}", f"--run.fork={second}", "--train.max_steps=1")
    convert("export", third, tmp_path / "out")  # its context is longer, and all else is there
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["rope_scaling"]["factor"] == 8.0 and config["eos_token_id"] == 256
    assert (third / "hf/config.json").is_file()  # an export of the fork has it, too
    # What it started from is part of what it is.
    process = start_train(*words, f"--model.init_from={second}")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert f"model.init_from is {first}@0 there, {second} here" in err


def test_bad_weights_end_before_the_start_with_every_problem(
    words: list[str], tmp_path: Path
) -> None:
    make("llama3", tmp_path / "model", max_shard_size="60KB")
    words += [f"--model.init_from={tmp_path / 'model'}", f"--run.dir={tmp_path / 'run'}"]
    problems = rejected(*words, "--model.dim=64", "--model.rope_theta=9e5", "--model.n_heads=4")
    assert len(problems) == 2
    assert "model.dim = 64: the weights of model.init_from" in problems[0]
    assert "have 48; leave model.dim out" in problems[0] and "model.rope_theta" in problems[1]
    # Also what its config.json does not name.
    more = ("--model.attention_softcap=30", "--model.post_norms", "--model.sliding_window=9")
    problems = rejected(*words, *more)
    assert len(problems) == 3
    assert 'have "none"; leave model.attention_softcap out' in problems[0]
    assert "have false; leave model.post_norms out" in problems[1]
    file = sorted((tmp_path / "model").glob("*.safetensors"))[-1]
    with file.open("r+b") as opened:
        opened.truncate(100)
    (problem,) = rejected(*words)
    assert str(file) in problem and "truncated" in problem
    (problem,) = rejected(*words, "--model.init_from=me/missing", HF_HOME=str(tmp_path))
    assert "convert.py prefetch me/missing" in problem
    assert not (tmp_path / "run").exists()
