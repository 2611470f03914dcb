"""Replicas that meet once a round, through the real trainer: with shards and alone, resumed,
stopped in the middle of a round, and with other numbers of replicas."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kempner.checkpoint.format.reader import read_tensors
from kempner.jobs.records.run_history import load_history
from kempner.jobs.report.summary import summary_facts
from tests.conftest import TINY, Train, losses, start_train, status

ROUNDS = ("--train.max_steps=9", "--lowcomm.interval=3", "--checkpoint.interval=3")
BOTH = (*ROUNDS, "--lowcomm.replicas=2", "--eval.interval=3", "--eval.samples=4")
STREAM = (
    *("--train.max_steps=12", "--lowcomm.replicas=2", "--lowcomm.interval=4"),
    *("--lowcomm.fragments=2", "--lowcomm.tau=1", "--lowcomm.alpha=0.5", "--lowcomm.lr=0.4"),
    *("--lowcomm.compress=linear", "--lowcomm.bits=4", "--lowcomm.feedback=0.9"),
    *("--optimizer.name=muon", "--eval.interval=4", "--eval.samples=4"),
)


def records(run: Path, key: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if key in line]


def second(run: Path) -> Path:
    return run / "replicas/1"


def weights(run: Path, step: str = "latest") -> dict[str, torch.Tensor]:
    """The anchors."""
    found = read_tensors(run / "checkpoints" / step)
    return {name: x for name, x in found.items() if name.startswith("model.")}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def finished(run: Path, data: Path, *words: str, nproc: int, **faults: str) -> Path:
    paths = (f"--data.dataset_path={data}", f"--run.dir={run}")
    process = start_train(*TINY, *words, *paths, nproc=nproc, **faults)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    return run


@pytest.fixture(scope="module")
def two(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two replicas of one rank."""
    return finished(tmp_path_factory.mktemp("two") / "run", data_dir, *BOTH, nproc=2)


@pytest.fixture(scope="module")
def stream(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two replicas with Muon, fragments, and everything that a checkpoint has to keep of them."""
    words = (*STREAM, "--checkpoint.interval=4")
    return finished(tmp_path_factory.mktemp("stream") / "run", data_dir, *words, nproc=2)


@pytest.mark.parametrize("name", ["two", "stream"])
def test_all_replicas_have_one_anchor(name: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name)
    assert same(weights(run), weights(second(run)))
    assert losses(run) != losses(second(run))  # of different samples
    ours, theirs = records(run, "val_loss"), records(second(run), "val_loss")
    assert [r["val_loss"] for r in ours] == [r["val_loss"] for r in theirs]
    assert [r["round_loss"] for r in records(run, "round")] == [
        r["round_loss"] for r in records(second(run), "round")
    ]


def test_what_a_round_records(two: Path) -> None:
    found = records(two, "round")
    assert [(r["step"], r["round"], r["replicas"]) for r in found] == [
        (3, 1, 2),
        (6, 2, 2),
        (9, 3, 2),
    ]
    assert status(two)["state"] == status(second(two))["state"] == "done"
    parameters = sum(x.numel() for x in weights(two).values())
    assert [r["bytes_data_parallel"] for r in found] == [3 * 4 * parameters] * 3
    numbers = 4 * 7  # what has been asked, the loss, and who had weights that were not finite
    assert [r["bytes_sent"] for r in found] == [4 * parameters + numbers] * 3
    rows = summary_facts(load_history(two))
    assert rows["replicas"] == "2" and rows["rounds"].startswith("3, loss of all ")
    assert "33.3" in rows["sent by a replica"]
    # A sample is read once: each line counts those of all replicas.
    assert [r["samples"] for r in records(two, "samples")] == [8 * i for i in range(1, 10)]


def test_4_bits_are_an_eighth_and_the_scales(stream: Path) -> None:
    found = weights(stream)
    raw = {k: x for k, x in found.items() if x.ndim < 2 or "embed" in k}
    coded = {k: x for k, x in found.items() if k not in raw}
    payload = sum(4 * x.numel() for x in raw.values())
    payload += sum(x.numel() // 2 + 8 * x.shape[0] for x in coded.values())
    assert records(stream, "round")[-1]["bytes_sent"] == payload + 4 * 7


def test_a_replica_with_numbers_that_are_not_finite_is_named(
    data_dir: Path, tmp_path: Path
) -> None:
    """They count as unchanged, so that one replica does not spoil all: nobody was told."""
    faulty, fault = "tests/trainer/fault/faulty_train.py", "spoil rank=3 step=5"
    words = (*BOTH, "--train.max_steps=12")
    run = finished(tmp_path / "run", data_dir, *words, nproc=4, program=faulty, FAULTS=fault)
    for replica in (run, second(run)):
        assert [r["not_finite"] for r in records(replica, "round")] == [[], [], [1], []]
    log = (run / "logs/latest/rank-0.log").read_text()
    assert log.count("replica 1: had non-finite weights") == 1
    assert summary_facts(load_history(run))["  not finite"] == "replica 1 in 1 round"
    assert all(x.isfinite().all() for x in weights(run).values())


MESHES = {
    "FSDP": ((), 2),
    "copies": (("--distributed.dp_replicate=2", "--distributed.dp_shard=1"), 2),
    "HSDP": (("--distributed.dp_replicate=2",), 4),
    "tensor parallelism": (("--distributed.tp=2",), 2),
    "both": (("--distributed.tp=2", "--distributed.dp_shard=2"), 4),
    "context parallelism": (("--distributed.cp=2",), 2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.soak if x != "FSDP" else ()) for x in MESHES]
)
def test_any_mesh_within_a_replica(name: str, data_dir: Path, two: Path, tmp_path: Path) -> None:
    """Two replicas, with AdamW: as far from those of one rank as sums in another order. Single
    weights are further off, where a gradient is so near 0 that its sign depends on that order."""
    words, ranks = MESHES[name]
    run = finished(tmp_path / "run", data_dir, *BOTH, *words, nproc=2 * ranks)
    for ours, theirs in ((run, two), (second(run), second(two))):
        assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)
    expected = weights(two)
    for key, found in weights(run).items():
        assert (found - expected[key]).norm() <= 1e-4 * expected[key].norm(), key
    ours, theirs = records(run, "round"), records(two, "round")
    for x, y in zip(ours, theirs, strict=True):
        assert x["round_loss"] == pytest.approx(y["round_loss"], rel=1e-5)
        assert x["bytes_data_parallel"] == y["bytes_data_parallel"]
        assert x["bytes_sent"] == pytest.approx(y["bytes_sent"], rel=0.02)


@pytest.mark.soak
def test_experts_within_a_replica(data_dir: Path, tmp_path: Path) -> None:
    words = (*BOTH, "--model.n_experts=4", "--model.ffn_dim=32")
    one = finished(tmp_path / "one", data_dir, *words, nproc=2)
    run = finished(tmp_path / "run", data_dir, *words, "--distributed.ep=2", nproc=4)
    for ours, theirs in ((run, one), (second(run), second(one))):
        assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)


@pytest.mark.soak
def test_copies_of_fragments_in_codes(data_dir: Path, stream: Path, tmp_path: Path) -> None:
    copies = ("--distributed.dp_replicate=2", "--distributed.dp_shard=1", "--checkpoint.interval=4")
    run = finished(tmp_path / "run", data_dir, *STREAM, *copies, nproc=4)
    assert same(weights(run), weights(second(run)))
    assert losses(run) == pytest.approx(losses(stream), rel=1e-3)
    sent, expected = (records(x, "round")[-1]["bytes_sent"] for x in (run, stream))
    assert sent == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", ["two", "stream"])
def test_resumed_equals_unbroken_bit_for_bit(
    data_dir: Path, tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    """One replica has saved the last round, the other one has not: both go back to the one
    before."""
    before, words = request.getfixturevalue(name), (BOTH if name == "two" else STREAM)
    last, interval = (9, 3) if name == "two" else (12, 4)
    run = tmp_path / "run"
    shutil.copytree(before, run, symlinks=True)
    for each in (run, second(run)):
        (each / "metrics.jsonl").unlink()
    shutil.rmtree(second(run) / f"checkpoints/step_{last:08d}")
    finished(run, data_dir, *words, f"--checkpoint.interval={interval}", nproc=2)
    for now, then in ((run, before), (second(run), second(before))):
        assert sorted(losses(now)) == list(range(last - interval + 1, last + 1))
        assert losses(then) == losses(then) | losses(now)
    assert same(weights(run), weights(before))


def test_a_stop_waits_for_the_round(data_dir: Path, stream: Path, tmp_path: Path) -> None:
    """One replica is asked when its round has agreed. Both stop after the next, and go on as if
    nothing had happened."""
    run, faulty = tmp_path / "run", "tests/trainer/fault/faulty_train.py"
    at = "at=kempner.train.step:collect_garbage:after nth=2 rank=1"
    faults = f"hold {at} s=0.5\nkill {at} signal=SIGINT"
    finished(run, data_dir, *STREAM, nproc=2, program=faulty, FAULTS=faults)
    assert [(status(x)["state"], status(x)["step"]) for x in (run, second(run))] == [
        ("stopped", 8)
    ] * 2
    finished(run, data_dir, *STREAM, nproc=2)
    assert losses(run) == losses(stream)
    assert same(weights(run), weights(stream))


def test_other_numbers_of_replicas(data_dir: Path, two: Path, tmp_path: Path) -> None:
    """Anchor, outer momentum and position belong to the run. New replicas begin with another
    one's state; with one replica left the run goes on, too."""
    run, words = tmp_path / "run", (*ROUNDS, "--train.max_steps=12")
    shutil.copytree(two, run, symlinks=True)
    finished(run, data_dir, *words, "--lowcomm.replicas=4", nproc=4)
    runs = [run, *(run / f"replicas/{i}" for i in (1, 2, 3))]
    assert (
        "joins at step 9, with the state of replica 1"
        in (runs[3] / "logs/latest/rank-0.log").read_text()
    )
    assert all(same(weights(run), weights(each)) for each in runs[1:])
    assert [r["samples"] for r in records(runs[2], "samples")] == [80, 88, 96]
    alone = tmp_path / "alone"
    shutil.copytree(two, alone, symlinks=True)
    finished(alone, data_dir, *words, "--lowcomm.replicas=1", nproc=1)
    assert losses(alone)[10] == pytest.approx(losses(two)[9], rel=0.2)


def outer_state(run: Path, step: int, key: str) -> dict[str, torch.Tensor]:
    found = read_tensors(run / f"checkpoints/step_{step:08d}")
    return {k: x for k, x in found.items() if k.startswith("outer.") and k.endswith(key)}


def test_a_fork_keeps_the_outer_state_or_drops_it(
    data_dir: Path, stream: Path, tmp_path: Path
) -> None:
    """All replicas begin with the state of the one that is forked, but the errors of its
    compression are its own."""
    words = (*STREAM, "--train.max_steps=4")
    kept = finished(tmp_path / "kept", data_dir, *words, f"--run.fork={stream}@8", nproc=2)
    momentum = outer_state(stream, 8, ".momentum")
    assert momentum and losses(kept)[1] == losses(stream)[9]
    assert all(same(outer_state(x, 0, ".momentum"), momentum) for x in (kept, second(kept)))
    assert same(outer_state(kept, 0, ".error"), outer_state(stream, 8, ".error"))
    assert not any(x.any() for x in outer_state(second(kept), 0, ".error").values())
    dropped = (*words, f"--run.fork={second(stream)}@8", "--run.fork_optimizer=fresh")
    finished(tmp_path / "dropped", data_dir, *dropped, nproc=2)
    found = outer_state(tmp_path / "dropped", 0, "")
    assert len(found) > len(momentum) and not any(x.any() for x in found.values())


def test_one_replica_without_an_outer_optimizer_is_plain_training(
    train: Train, tmp_path: Path
) -> None:
    outer = ("--lowcomm.replicas=1", "--lowcomm.lr=1.0", "--lowcomm.momentum=0")
    train(tmp_path / "one", *ROUNDS, *outer)
    train(tmp_path / "plain", *ROUNDS)
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "plain"), rel=1e-6)


def test_bad_input(train: Train, tmp_path: Path) -> None:
    world = ("--check", "--nodes=2", "--gpus-per-node=2")
    done = train(tmp_path / "run", *ROUNDS, "--lowcomm.replicas=3", *world, code=2)
    assert done.stderr.count("  - ") == 1
    assert "lowcomm.replicas = 3: must divide the world of 4 ranks" in done.stderr


@pytest.mark.parametrize("tau", [0, 1])
def test_a_plain_run_goes_on_with_replicas_near_the_end_of_a_round(
    train: Train, tmp_path: Path, tau: int
) -> None:
    """Its first round has one step, in which the weights are averaged, but nothing is agreed."""
    run, rounds = tmp_path / "run", ("--lowcomm.replicas=1", "--lowcomm.interval=6")
    train(run, "--train.max_steps=5")
    train(run, "--train.max_steps=12", "--checkpoint.interval=6", *rounds, f"--lowcomm.tau={tau}")
    assert sorted(losses(run)) == list(range(1, 13)) and status(run)["state"] == "done"
    assert [(r["step"], r["round"]) for r in records(run, "round")] == [(12, 2)]
