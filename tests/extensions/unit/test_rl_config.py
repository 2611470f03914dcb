"""What the trainer of reinforcement learning refuses, and what it needs no more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kempner.config.loading import to_toml
from kempner.config.option import ConfigError
from kempner.data.text.tokenizer import ByteTokenizer
from kempner.extensions.hf.source import copy_model_files
from kempner.extensions.planner.memory import estimate_memory, forward_rows
from kempner.extensions.rl.engines.words import keep_words, write_sidecar
from kempner.extensions.rl.extension import OTHER_PROGRAM, RlExtension
from kempner.extensions.rl.opening import open_parts
from kempner.train.configure import check_config, load_config
from tests.served import make_model

GOOD = ["--model.vocab_size=257", "--rl.tokenizer=bytes", "--rl.env=[{id='arithmetic'}]",
        "--rl.sampling.max_tokens=64"]  # fmt: skip
ONLY: dict[str, Any] = {"check": True, "build": False, "nodes": None, "gpus-per-node": None}
REFUSED = {
    "--distributed.pp=2": "distributed.pp = 2: is not built for [rl]",
    "--distributed.cp=2": "distributed.cp = 2: is not built for [rl]",
    "--rl.inference.tp=2": "rl.inference.tp = 2 with rl.inference.engine = kit: is not built",
    "--distributed.fsdp_cpu_offload": "distributed.fsdp_cpu_offload: is not built for [rl]",
    "--optimizer.name=schedule_free": "optimizer.name = schedule_free: is not built for [rl]",
    "--preference.loss=reward": "preference.loss = reward: is not built for [rl]",
    "--rl.weights=direct --rl.inference.engine=vllm": "rl.inference.engine = vllm: is not built",
    "--model.n_experts=4 --model.qkv_bias": "must be false for an export, and engines get",
    "--model.n_experts=4 --model.router=sigmoid --model.shared_experts=1 --model.router_bias": (
        "model.router_bias: the biases of routers move with the weights"
    ),
    "--run.fork=runs/other": "run.fork = runs/other: is not built for [rl]",
    "--train.global_batch=7": "train.global_batch = 7: the batch follows from rl.batch_samples",
    "--train.global_batch_tokens=4096": "train.global_batch_tokens: the batch follows",
    "--train.batch_ramp=[8,8,10]": "train.batch_ramp: the batch follows",
    "--train.seq_len_ramp=[512,10]": "train.seq_len_ramp: samples are never cut",
    "--data.dataset_path=data/x": "data: a run with [[rl.env]] learns from rewards",
    "--eval.interval=5": "eval.interval: validates on data; rl.eval_interval",
    "--bench.data=real": "bench.data = real: rollouts are made by a whole run",
    "--rl.loss.mask=0.1": "rl.loss.mask = 0.1: is for rl.loss.name = masked",
    "--rl.env=[{id='arithmetic',weight=0.0}]": "rl.env: the weights of those used for training",
    "--rl.env=[{id='arithmetic',use='eval'}]": "rl.env: none is for training; give one",
    "--rl.group_size=6": "rl.batch_samples = 64: must be a multiple of rl.group_size = 6",
    "--rl.batch_samples=none": "rl.batch_samples = none: give it, or rl.batch_tokens",
    "--rl.sampling.max_tokens=1024": "exceeds train.seq_len = 1024",
    "--rl.sampling.top_p=0.0": "rl.sampling.top_p = 0.0: must be over 0 and at most 1",
    "--rl.solve_rate=[0.9,0.1]": "rl.solve_rate = [0.9, 0.1]: the lower bound comes first",
}


def problems(*words: str) -> list[str]:
    try:
        return check_config(load_config([], [*GOOD, *words]), ONLY, RlExtension)
    except ConfigError as error:
        return error.problems


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_combined_is_refused(word: str) -> None:
    more = ["--schedule.name=constant"] if "schedule_free" in word else []
    (problem,) = problems(*word.split(), *more)
    assert REFUSED[word] in problem


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--model.vocab_size=300", "give --model.vocab_size=257"),
        ("--model.vocab_size=200", "rl.tokenizer: has 257 tokens"),
        ("--rl.env=[{id='arithmetc'}]", "did you mean arithmetic?"),
        ("--rl.tokenizer=", "rl.tokenizer: is required"),
        ("--rl.sampling.max_tokens=1023", "exceed train.seq_len = 1024"),
        ("--rl.inference.args=['--nope']", "rl.inference.args: unrecognized arguments: --nope"),
        ("--rl.inference.args=['--device','tpu']", "rl.inference.args: argument --device: invalid"),
        ("--rl.inference.args=['--queue=0']", "rl.inference.args: --queue 0: must be at least 1"),
        ("--rl.inference.args=['--window','4']", "--window 4: is under train.seq_len = 1024"),
        ("--rl.inference.args=['--window=4096']", "--window 4096: the model sees 2048 tokens"),
        ("--rl.inference.args=['--check']", "--check: cannot be given to an engine of a run"),
        ("--rl.inference.args=['--publish=x']", "--publish: cannot be given to an engine"),
        ("--rl.inference.args=['--help']", "--help: cannot be given to an engine"),
    ],
)
def test_the_environments_and_the_tokenizer_are_opened(word: str, expected: str) -> None:
    (problem,) = problems(word)
    assert expected in problem


def test_it_needs_no_data_and_its_batch_is_that_of_rl() -> None:
    assert problems() == []
    cfg = load_config([], [*GOOD, "--rl.batch_samples=48"])
    assert cfg.train.global_batch == 48 and cfg.data.mixed == ()
    assert (
        estimate_memory(cfg, 1, 1).peak and forward_rows(cfg, 5) == 10
    )  # no division without a rest


def test_each_program_has_its_own_configurations() -> None:
    assert check_config(load_config([], GOOD), ONLY) == [OTHER_PROGRAM[False]]
    data = load_config([], ["--data.dataset_path=fake:"])
    assert check_config(data, ONLY, RlExtension) == [OTHER_PROGRAM[True]]


def test_a_tokenizer_of_its_own_means_what_that_of_the_weights_means(tmp_path: Path) -> None:
    """Ids that mean other texts would train the model on noise, silently."""
    base, other = make_model(tmp_path / "base"), make_model(tmp_path / "other")
    words = [f"--model.init_from={base}", "--model.vocab_size=260"]
    words += ["--train.seq_len=128", f"--rl.tokenizer={other}"]
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content, indent=1))
    assert problems(*words) == []  # another file, with the same ids
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    (problem,) = problems(*words)
    assert problem.startswith(f"rl.tokenizer = {other}: its tokenizer is other/tokenizer.json")
    assert "so that a token id means different text; leave rl.tokenizer out" in problem
    (problem,) = problems(*words[:-1])  # GOOD has that of bytes
    assert problem.startswith("rl.tokenizer = bytes: its tokenizer is bytes, that of the weights")


@pytest.mark.parametrize("data", [False, True])
def test_a_begun_run_needs_the_weights_that_it_started_from_no_more(
    tmp_path: Path, data: bool
) -> None:
    """Its own directory has their tokenizer, or that of their run's data."""
    base, run = make_model(tmp_path / "base"), tmp_path / "run"
    words = [*GOOD, f"--run.dir={run}", f"--model.init_from={base}", "--rl.tokenizer="]
    words += ["--model.vocab_size=260", "--train.seq_len=128"]
    cfg = load_config([], words)
    copy_model_files(base, run / "hf")  # as its first start does
    before = open_parts(cfg)[1]
    if data:
        write_sidecar(run, ByteTokenizer())
    (run / "config.toml").write_text(to_toml(cfg))
    shutil.rmtree(base)
    assert any("base" in problem for problem in RlExtension().check_files(cfg, 0, False, False))
    step = run / "checkpoints" / "step_00000002"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text(json.dumps({"parent": 0, "time": 0.0}))
    cfg = load_config([], words)
    assert RlExtension().check_files(cfg, 0, True, False) == []
    after = open_parts(cfg)[1]
    assert after.tokenizer.vocab_size == (257 if data else before.tokenizer.vocab_size)
    assert after.ends == before.ends
    assert after.folder == (run if data else run / "hf")
    files = sorted(run.rglob("*"))
    keep_words(cfg, run)
    assert sorted(run.rglob("*")) == files
