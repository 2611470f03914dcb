"""Pipeline parallelism in the real trainer: the losses, gradients and weights of one process, on
every mesh and from one to another; and what happens in one stage alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kempner.config.option import ConfigError
from kempner.data.config import DataConfig
from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.preference.config import PreferenceConfig
from kempner.model.config import ModelConfig
from kempner.parallel.config import DistributedConfig
from kempner.parallel.pipeline import split_blocks
from kempner.train.axis_checks import check_pipeline
from kempner.train.checks import combination_problems
from kempner.train.sections import RunConfig, TrainConfig
from tests import zygote
from tests.conftest import ROOT, TINY, clean_env, losses, start_train, status
from tests.trainer.distributed.runs import begun, numbers, state
from tests.waiting import until

PP = "--distributed.pp=2"
# Two stages on each of two ranks, each over two ranks.
FOUR = (PP, "--distributed.pp_stages_per_rank=2", "--train.micro_batch=1", "--train.recompute=full")
SHAPE = ["--model.n_layers=4", "--train.max_steps=20", "--eval.interval=20", "--eval.samples=20",
         "--schedule.name=constant", "--optimizer.name=muon",
         "--checkpoint.interval=1", "--checkpoint.keep_last_n=99",
         '--optimizer.groups=[{names=["output*"], lr_scale=0.5}]']  # fmt: skip


def start(data_dir: Path, run: Path, *args: str, nproc: int = 1) -> subprocess.Popen[str]:
    words = [*TINY, *SHAPE, f"--data.dataset_path={data_dir}", f"--run.dir={run}", *args]
    return start_train(*words, nproc=nproc)


def train(data_dir: Path, run: Path, *args: str, nproc: int = 1) -> None:
    process = start(data_dir, run, *args, nproc=nproc)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err


@pytest.fixture(scope="module")
def place(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline")
    train(data_dir, path / "one")
    train(data_dir, path / "four", *FOUR, nproc=4)
    return path


def test_losses_are_those_of_one_process(place: Path) -> None:
    one, four = place / "one", place / "four"
    assert len(losses(one)) == 20
    for name in ("loss", "grad_norm", "val_loss"):
        assert numbers(four, name) == pytest.approx(numbers(one, name), rel=1e-5), name
    assert numbers(four, "val_tokens") == numbers(one, "val_tokens")


def test_a_checkpoint_has_the_tensors_of_one_process(place: Path) -> None:
    one, four = state(place / "one", 1), state(place / "four", 1)
    four = {name: x for name, x in four.items() if not name.startswith("rng.")}
    assert four.keys() == {name for name in one if not name.startswith("rng.")}
    for name in four:
        assert torch.dist(one[name], four[name]) <= 1e-5 * one[name].norm(), name


def test_a_checkpoint_of_one_mesh_continues_on_another(
    place: Path, data_dir: Path, tmp_path: Path
) -> None:
    """One process -> two stages x tensor parallelism -> one process."""
    run = begun(place, "one", tmp_path / "run", 5)
    stages = (PP, "--distributed.tp=2", "--train.micro_batch=2", "--train.loss_chunk=16")
    for steps, nproc, mesh in ((10, 4, stages), (20, 1, ())):
        train(data_dir, run, f"--train.max_steps={steps}", *mesh, nproc=nproc)
    assert losses(run) == pytest.approx(losses(place / "one"), rel=1e-5)


def test_resumed_equals_unbroken_bit_for_bit(place: Path, data_dir: Path, tmp_path: Path) -> None:
    run = begun(place, "four", tmp_path / "run", 15)
    train(data_dir, run, *FOUR, nproc=4)
    assert losses(run) == losses(place / "four")
    resumed, unbroken = state(run, 20), state(place / "four", 20)
    assert all(torch.equal(resumed[name], unbroken[name]) for name in unbroken)


def test_adapters_on_weights_that_each_stage_loads(
    place: Path, data_dir: Path, tmp_path: Path
) -> None:
    more = [f"--model.init_from={place / 'one'}@20", "--lora.rank=2", "--optimizer.groups=[]",
            "--train.max_steps=3", "--eval.interval=0"]  # fmt: skip
    train(data_dir, tmp_path / "one", *more)
    train(data_dir, tmp_path / "two", *more, PP, "--train.micro_batch=4", nproc=2)
    assert len(losses(tmp_path / "one")) == 3
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_a_stop_and_a_step_that_is_not_finite_on_one_rank(
    place: Path, data_dir: Path, tmp_path: Path
) -> None:
    """The last stage alone has the loss, and the first one alone gets the signal."""
    run, more = tmp_path / "run", (PP, "--train.micro_batch=2", "--checkpoint.interval=0")
    faulty = ROOT / "tests/trainer/fault/faulty_train.py"
    words = [*TINY, *SHAPE, f"--data.dataset_path={data_dir}", f"--run.dir={run}", *more]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = clean_env(FAULTS="nan from=64 to=72\nslow ms=200", PYTHONPATH=str(ROOT / "src"))
    process = subprocess.Popen([*launcher, str(faulty), *words], cwd=ROOT, env=env)
    until((run / "metrics.jsonl").exists, alive=(process,))
    until(lambda: max(losses(run), default=0) >= 10, alive=(process,))
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[0]), signal.SIGTERM)
    assert process.wait(120) == 0
    assert status(run)["state"] == "interrupted" and 10 <= status(run)["step"] < 20
    train(data_dir, run, *more, nproc=2)
    assert status(run)["state"] == "done"
    found, one = losses(run), losses(place / "one")
    assert [step for step in found if found[step] is None] == [9]
    assert [found[i] for i in range(1, 9)] == pytest.approx([one[i] for i in range(1, 9)], rel=1e-5)


def test_a_stage_that_cannot_save_does_not_stop_the_others(data_dir: Path, tmp_path: Path) -> None:
    """They wait for its table, and a save that fails is only missing."""
    run, fault = tmp_path / "run", "fail at=kempner.checkpoint.checkpointer:collect_state:before"
    words = (*TINY, *SHAPE, PP, "--train.micro_batch=2", "--eval.interval=0")
    process = start_train(
        *words, f"--data.dataset_path={data_dir}", f"--run.dir={run}", "--train.max_steps=8",
        "--checkpoint.interval=4", nproc=2, program="tests/trainer/fault/faulty_train.py",
        FAULTS=f"{fault} rank=1 nth=3",
    )  # fmt: skip
    said, err = process.communicate(timeout=240)
    assert process.returncode == 0, said + err
    assert "the checkpoint of step 4 failed" in said and "the test has broken this call" in said
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == ["step_00000008"]


# --- Loss and every gradient ---------------------------------------------------------------------

MANY = ["--model.n_layers=5", "--distributed.pp_stages_per_rank=2"]
CASES = {
    "shard": [],
    "interleaved": [*MANY, "--train.recompute=selective"],
    "copies": ["--distributed.dp_replicate=2"],
    "copies-once": ["--distributed.dp_replicate=2", "--distributed.sync_once"],
    "interleaved-once": [*MANY, "--distributed.sync_once"],
    "offload": [*MANY, "--train.offload_activations=1", "--distributed.prefetch_blocks=1"],
    "cpu": ["--distributed.fsdp_cpu_offload", "--no-distributed.reshard_after_forward"],
}


def test_loss_and_every_gradient_are_those_of_the_plain_model() -> None:
    """In one world of four ranks that go through all cases; test_products.py has more."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    words = json.dumps({name: [PP, *more] for name, more in CASES.items()})
    done = zygote.run(
        [sys.executable, *launcher, "-m", "tests.trainer.distributed.gradients", words],
        cwd=ROOT,
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == CASES.keys()
    for case, each in found.items():
        assert each["loss"] < 1e-5 and each["gradient"] < 1e-5, (case, each)
    # Rank 0 has the embedding and two blocks, whose gradients it reduces once; and the numbers.
    assert found["copies"]["calls"]["c10d::allreduce_"] == 3 + 1
    assert found["interleaved-once"]["calls"]["c10d::_reduce_scatter_base_"] <= 2 * 3


# --- Who has what --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "stages", "expected"),
    [
        ({"n_layers": 80, "vocab_size": 128_256, "dim": 8192, "ffn_dim": 28_672, "n_heads": 64,
          "n_kv_heads": 8}, 4, [20, 20, 21, 19]),
        ({"n_layers": 7}, 3, [2, 3, 2]),
        ({"n_layers": 4, "vocab_size": 8192}, 2, [3, 1]),
        ({"n_layers": 4, "vocab_size": 8192}, 4, [1, 1, 1, 1]),
        ({"n_layers": 5}, 1, [5]),
    ],
)  # fmt: skip
def test_blocks_of_each_stage(shape: dict[str, int], stages: int, expected: list[int]) -> None:
    found = split_blocks(ModelConfig(**shape), stages)
    assert [len(blocks) for blocks in found] == expected
    assert [i for blocks in found for i in blocks] == [*range(shape["n_layers"])]


def test_a_step_has_a_micro_batch_for_each_stage() -> None:
    one, two = DistributedConfig(pp=4), DistributedConfig(pp=4, pp_stages_per_rank=2)
    cfg = TrainConfig(global_batch=24, micro_batch=2)
    check_pipeline(cfg, one, 2)  # 6 micro-batches
    arithmetic = r"24 sequences / \(2 data ranks x micro_batch 2\) = 6 micro-batches a step"
    with pytest.raises(ConfigError, match=arithmetic + ".* need a multiple of them"):
        check_pipeline(cfg, two, 2)
    check_pipeline(replace(cfg, micro_batch=1), two, 2)
    with pytest.raises(ConfigError, match=r"= 3 micro-batches .* need at least as many"):
        check_pipeline(cfg, one, 4)
    with pytest.raises(ConfigError, match=r"8 sequences .* = 2 micro-batches"):
        check_pipeline(replace(cfg, batch_ramp=(8, 8, 100)), one, 2)
    check_pipeline(TrainConfig(global_batch=1), DistributedConfig(), 1)


SMALL = ModelConfig(n_layers=4)
REFUSED: dict[str, tuple[ModelConfig, dict[str, Any], str]] = {
    "layers": (replace(SMALL, n_layers=3), {}, "4 x pp_stages_per_rank 1 = 4 stages"),
    "tied": (replace(SMALL, tie_embeddings=True), {}, "would be on two stages"),
    "preferences": (
        SMALL,
        {"more": (("preference", PreferenceConfig(loss="reward")),)},
        "loss = reward",
    ),
    "compilation": (
        SMALL,
        {"train": TrainConfig(compile=True, compile_scope="model")},
        "a stage is not the whole model",
    ),
    "fp8": (SMALL, {"train": TrainConfig(fp8="rowwise")}, "train.fp8 = rowwise"),
    "replicas": (SMALL, {"more": (("lowcomm", LowcommConfig(replicas=2)),)}, "replicas of lowcomm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_pipeline_cannot_do_is_refused(name: str) -> None:
    model, more, words = REFUSED[name]
    cfg = RunConfig(model=model, distributed=DistributedConfig(pp=4), **more)
    found = [each for each in combination_problems(cfg) if each.startswith("distributed.pp = 4: ")]
    assert any(words in each for each in found), combination_problems(cfg)
    whole = RunConfig(model=model, distributed=DistributedConfig(pp=1), **more)
    assert not any("distributed.pp" in each for each in combination_problems(whole))
    fine = RunConfig(model=SMALL, data=DataConfig("x"), distributed=DistributedConfig(pp=4))
    assert not combination_problems(fine)


def test_stages_without_a_pipeline_have_no_effect() -> None:
    (problem,) = DistributedConfig(pp_stages_per_rank=2).problems()
    assert "has no effect without a pipeline" in problem
