"""What saves memory or communication changes no number: each lever, alone and with others, beside
the plain model in one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kempner.checkpoint.format.reader import read_tensors
from tests import zygote
from tests.conftest import ROOT, TINY, Train, clean_env, losses, start_train

RANKS = 4
SELECTIVE = "--train.recompute=selective"
ONCE = "--distributed.sync_once"
REPLICAS = "--distributed.dp_replicate=2"
CASES = {
    "shard": [],
    "kept": ["--no-distributed.reshard_after_forward"],
    "island": ["--distributed.reshard_island=2"],
    "once": [ONCE],
    "replicas": [REPLICAS],
    "replicas-once": [REPLICAS, ONCE],
    "copies-once": ["--distributed.dp_replicate=4", "--distributed.dp_shard=1", ONCE],
    "prefetch": ["--distributed.prefetch_blocks=2"],
    "tied": ["--model.tie_embeddings", ONCE, "--distributed.prefetch_blocks=1"],
    "cpu": ["--distributed.fsdp_cpu_offload", REPLICAS],
    "all": [SELECTIVE, "--train.recompute_every=2", "--train.offload_activations=2", ONCE],
    "all-cpu": [
        "--train.recompute=full",
        "--train.offload_activations=1",
        "--distributed.fsdp_cpu_offload",
        "--distributed.reshard_island=2",
        "--distributed.prefetch_blocks=1",
    ],
    "tensor": ["--distributed.tp=2", SELECTIVE, "--train.offload_activations=1", ONCE],
    "bf16": ["--distributed.reduce_dtype=bf16"],
}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Of one world of four ranks that go through all cases."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = zygote.run(
        [sys.executable, *launcher, "-m", "tests.trainer.distributed.gradients", json.dumps(CASES)],
        cwd=ROOT,
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient_are_those_of_the_plain_model(
    results: dict[str, Any], case: str
) -> None:
    found = results[case]
    assert found["loss"] < 1e-5
    if case == "bf16":
        assert 1e-4 < found["gradient"] < 1e-2
    else:
        assert found["gradient"] < 1e-5


def calls(results: dict[str, Any], case: str, what: str) -> int:
    return sum(count for name, count in results[case]["calls"].items() if what in name)


def test_collectives_of_a_step(results: dict[str, Any]) -> None:
    """Four micro-batches a rank and five groups of weights: the embedding, three blocks, and norm
    with output layer. Backward gathers the blocks again, nothing else."""
    assert calls(results, "shard", "reduce_scatter") == 4 * 5
    assert calls(results, "shard", "allgather") == 4 * (5 + 3)
    assert calls(results, "kept", "allgather") == 4 * 5
    assert calls(results, "once", "allgather") == 5
    assert calls(results, "once", "reduce_scatter") == 5
    # Two micro-batches more do not cost the replicas another all-reduce. One is that of the step's
    # own numbers.
    assert calls(results, "replicas", "allreduce") == 5 + 1
    assert calls(results, "replicas", "reduce_scatter") == 4 * 5
    assert calls(results, "replicas-once", "reduce_scatter") == 5
    assert calls(results, "copies-once", "allreduce") == 5 + 1
    # The embedding's weights, and with prefetch those of two blocks.
    assert (results["shard"]["ahead"], results["prefetch"]["ahead"]) == (1, 3)


MORE = ["--train.max_steps=20", "--schedule.name=constant"]
LEVERS = [
    *MORE,
    "--train.micro_batch=1",
    "--train.recompute=selective",
    "--train.offload_activations=1",
    "--distributed.sync_once",
]


@pytest.fixture(scope="module")
def two_ranks(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unbroken run of two ranks."""
    run_dir = tmp_path_factory.mktemp("two") / "run"
    words = [*TINY, *LEVERS, f"--data.dataset_path={data_dir}", f"--run.dir={run_dir}"]
    process = start_train(*words, nproc=2)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    return run_dir


def test_the_loss_curve_is_that_of_one_process(
    train: Train, tmp_path: Path, two_ranks: Path
) -> None:
    train(tmp_path / "one", *MORE)
    assert losses(two_ranks) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_resumed_equals_unbroken_bit_for_bit(train: Train, tmp_path: Path, two_ranks: Path) -> None:
    train(tmp_path / "run", *LEVERS, "--train.max_steps=7", nproc=2)
    train(tmp_path / "run", *LEVERS, nproc=2)
    assert losses(tmp_path / "run") == losses(two_ranks)
    paths = [folder / "checkpoints/latest" for folder in (two_ranks, tmp_path / "run")]
    first, second = (read_tensors(path) for path in paths)
    assert list(first) == list(second)
    assert all((first[name] == second[name]).all() for name in first)


def test_a_checkpoint_of_two_ranks_passes_through_one(
    train: Train, tmp_path: Path, two_ranks: Path
) -> None:
    """One rank alone has no FSDP: names and bytes stay those of two ranks, there and back."""
    source = two_ranks
    for name, ranks in (("one", 1), ("back", 2)):
        words = [*LEVERS, "--train.max_steps=1", f"--run.fork={source}"]
        train(tmp_path / name, *words, "--checkpoint.keep_last_n=5", nproc=ranks)
        stored = read_tensors(two_ranks / "checkpoints/latest")
        taken = read_tensors(min((tmp_path / name / "checkpoints").glob("step_*")))
        shared = [key for key in stored if not key.startswith("rng.")]
        assert shared == [key for key in taken if not key.startswith("rng.")]
        assert all((stored[key] == taken[key]).all() for key in shared)
        source = f"{tmp_path / name}@0"


FAULTY = "tests/trainer/fault/faulty_train.py"
TRIAL = "out_of_memory at=kempner.train.resilience.room:try_steps:before"
AUTO = [*TINY, "--train.recompute=auto", "--schedule.name=constant"]


def attempt(run: Path, data: Path, words: list[str], nproc: int = 1, **env: str) -> tuple[int, str]:
    """Exit code and console of one attempt that recomputes by need."""
    words = [*AUTO, f"--data.dataset_path={data}", f"--run.dir={run}", *words]
    process = start_train(*words, nproc=nproc, program=FAULTY, **env)
    out, err = process.communicate(timeout=240)
    return process.returncode, out + err


def test_recomputation_by_need(train: Train, tmp_path: Path, data_dir: Path) -> None:
    """Out of memory in its first trial, the run goes on with more recomputation, and so does the
    next attempt. Its losses are those of a run without any."""
    run, env = tmp_path / "run", {"KEMPNER_MEMORY_GIB": "100"}
    code, out = attempt(run, data_dir, ["--train.max_steps=4"], FAULTS=TRIAL, **env)
    assert code == 0 and "recomputation: selective (train.recompute = auto)" in out, out
    code, out = attempt(run, data_dir, [], FAULTS=f"{TRIAL} nth=0", **env)
    assert code == 0 and "recomputation: selective (train.recompute = auto)" in out, out
    train(tmp_path / "plain", "--schedule.name=constant")
    assert losses(run) == losses(tmp_path / "plain")


def test_a_rank_out_of_memory_ends_the_attempt_for_a_better_one(
    tmp_path: Path, data_dir: Path
) -> None:
    run, env = tmp_path / "run", {"KEMPNER_MEMORY_GIB": "100"}
    code, out = attempt(run, data_dir, [], 2, FAULTS=f"{TRIAL} rank=1", **env)
    assert code == 1 and "the next start takes more recomputation" in out, out
    assert not (run / "status.json").exists(), "the run has not failed, and is started again"
    code, out = attempt(run, data_dir, [], 2, FAULTS="", **env)
    assert code == 0 and "recomputation: selective (train.recompute = auto)" in out, out
