"""Bits that flip in what a rank computes or holds: found, the rank is named, and the losses are
those of a run in which nothing happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, losses, start_train, status
from tests.trainer.distributed.runs import numbers

SETTINGS = (
    "--train.max_steps=8",
    "--train.global_batch=12",
    "--train.micro_batch=2",
    "--checkpoint.interval=4",
    "--metrics.log_interval=1",
    "--eval.interval=0",
)
EACH_STEP = ("--resilience.replay_every=1", "--train.deterministic")
MEMORY = ("--resilience.checksum_every=1",)
SOAK = pytest.mark.soak
EXPERTS = (
    "--model.n_experts=4",
    "--model.ffn_dim=16",
    "--model.shared_experts=1",
    "--model.router_bias",
    "--model.router_z_loss=0.1",
    "--train.z_loss=0.1",
)
Runs = Callable[..., Path]


@pytest.fixture(scope="module")
def runs(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run of that name, done once."""
    place = tmp_path_factory.mktemp("integrity")

    def run(
        name: str, *words: str, nproc: int = 2, faults: str = "", code: int = 0, replay: str = ""
    ) -> Path:
        path: Path = place / name
        if path.exists():
            return path
        if replay:
            path.mkdir()
            (path / "REPLAY").write_text(replay)
        words = (*TINY, *SETTINGS, f"--data.dataset_path={data_dir}", f"--run.dir={path}", *words)
        process = start_train(
            *words, nproc=nproc, program="tests/trainer/fault/faulty_train.py", FAULTS=faults
        )
        out, err = process.communicate(timeout=240)
        assert process.returncode == code, out + err
        (path / "out").write_text(out)
        return path

    return run


def faults_of(run: Path) -> list[dict[str, Any]]:
    events = map(json.loads, (run / "attempts.jsonl").read_text().splitlines())
    return [e for e in events if e["event"] == "fault" and e["kind"] == "corruption"]


@pytest.mark.parametrize(
    ("nproc", "words"),
    [
        (1, ("--data.document_mask", *EXPERTS)),
        (2, ("--data.document_mask", *EXPERTS)),
        pytest.param(
            2, ("--distributed.sync_once", "--train.weights=bf16", "--train.dtype=bf16"), marks=SOAK
        ),
        pytest.param(2, ("--train.compile",), marks=SOAK),
        pytest.param(2, ("--train.recompute=full", "--model.tie_embeddings"), marks=SOAK),
        pytest.param(4, ("--distributed.dp_replicate=2", "--distributed.tp=2"), marks=SOAK),
        pytest.param(4, ("--distributed.ep=2", *EXPERTS, "--train.global_batch=16"), marks=SOAK),
        pytest.param(4, ("--distributed.pp=2", "--distributed.cp=2"), marks=SOAK),
    ],
)
def test_a_sound_run_is_what_it_is_without(
    runs: Runs, request: pytest.FixtureRequest, nproc: int, words: tuple[str, ...]
) -> None:
    """Every number of every step, to the bit."""
    name = request.node.callspec.id
    plain = runs(f"plain-{name}", *words, "--train.deterministic", nproc=nproc)
    twice = runs(f"twice-{name}", *words, *EACH_STEP, *MEMORY, nproc=nproc)
    for what in ("loss", "grad_norm", "experts"):
        assert numbers(twice, what) == numbers(plain, what)
    assert len(losses(plain)) == 8 and not faults_of(twice)
    assert "replay: costs" in (twice / "out").read_text()


@pytest.mark.parametrize(
    "what",
    [
        "activation",
        pytest.param("returning", marks=SOAK),
        "product",
        pytest.param("gradient", marks=SOAK),
        "message",
    ],
)
@pytest.mark.parametrize("step", [3, 4])  # computed again by itself alone, and by others, too
def test_a_bit_that_flips_once(runs: Runs, tmp_path: Path, what: str, step: int) -> None:
    once = f"rank=1 once={tmp_path / 'once'}"
    faults = f"flip of={what} from={12 * step - 12} to={12 * step} {once}"
    run = runs(f"{what} {step}", *EACH_STEP, nproc=3, faults=faults)
    assert (tmp_path / "once").exists()
    assert losses(run) == losses(runs("sound", "--train.deterministic", nproc=3))
    (fault,) = faults_of(run)
    assert (fault["ranks"], fault["step"]) == ([1], step - 1)
    assert f"wrong numbers in step {step} by rank 1 on " in fault["reason"]
    assert fault["reason"].endswith("; it was computed again, and is right")


@pytest.mark.parametrize(
    ("what", "place"),
    [
        pytest.param("activation", "the output of block 0", marks=SOAK),
        pytest.param("returning", "the gradient of block 1's output", marks=SOAK),
        ("product", "its own gradients of the weights"),
        pytest.param("gradient", "the sum of its gradients is not", marks=SOAK),
        ("message", "the sum of its gradients is not"),
    ],
)
def test_a_device_that_is_always_wrong(runs: Runs, what: str, place: str) -> None:
    """It is wrong from step 6 on; the checkpoint of step 4 is the last one."""
    faults = f"flip of={what} from=60 to=9999 rank=1"
    words = ("--resilience.replay_every=3", "--train.deterministic")
    run = runs(f"{what} always", *words, nproc=3, faults=faults, code=1)
    (fault,) = faults_of(run)
    assert fault["ranks"] == [1] and place in fault["reason"], fault
    assert fault["reason"].endswith(
        "; this attempt ends, and the next one goes on from the last checkpoint"
    )
    assert (run / "checkpoints/latest").readlink().name == "step_00000004"
    assert status(run)["state"] == "running", "not the end of the run: it is started again"
    sound = losses(runs("sound", "--train.deterministic", nproc=3))
    assert {step: sound[step] for step in range(1, 5)}.items() <= losses(run).items()


@pytest.mark.parametrize(("replay", "ranks"), [("1 0\n", [1]), ("1\n", [0, 1])])
def test_a_spare_decides_between_two(runs: Runs, replay: str, ranks: list[int]) -> None:
    """Without it either of them could be the one that is always wrong."""
    words = (
        "--resilience.replay_every=1000000",
        "--train.max_steps=100000",
        "--train.deterministic",
    )
    more = {"faults": "flip of=product from=0 to=9999999 rank=1", "replay": replay, "code": 1}
    (fault,) = faults_of(runs(f"asked {len(ranks)}", *words, "--checkpoint.interval=0", **more))
    assert fault["ranks"] == ranks and "its own gradients of the weights" in fault["reason"]


@pytest.mark.parametrize(
    ("what", "words", "text"),
    [
        ("weight", MEMORY, " has changed in memory"),
        ("moment", EACH_STEP, ".exp_avg has changed in memory"),
        pytest.param("weight", EACH_STEP, " has changed in memory", marks=SOAK),
        pytest.param("moment", MEMORY, ".exp_avg has changed in memory", marks=SOAK),
    ],
)
def test_memory_that_changes(
    runs: Runs, tmp_path: Path, what: str, words: tuple[str, ...], text: str
) -> None:
    faults = f"flip of={what} from=24 to=36 rank=1 once={tmp_path / 'once'}"
    run = runs(f"{what} {words[0]}", *words, faults=faults, code=1)
    (fault,) = faults_of(run)
    assert fault["ranks"] == [1] and text in fault["reason"]


def test_a_replica_that_differs_is_not_saved(runs: Runs) -> None:
    """Its weight has changed in a step that is not checked."""
    copies = ("--distributed.dp_replicate=3", "--resilience.checksum_every=1000")
    faults = "flip of=weight from=12 to=24 rank=1"
    run = runs("copies", *copies, nproc=3, faults=faults, code=1)
    (fault,) = faults_of(run)
    assert fault["ranks"] == [1] and fault["step"] == 4
    assert "the copies of weights and optimizer state differ" in fault["reason"]
    assert not list((run / "checkpoints").glob("step_*"))
