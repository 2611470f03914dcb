"""The real trainer: what it records, what it resumes from, and that the number of processes does
not matter."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from kempner.checkpoint.format.reader import read_tensors
from tests.conftest import (
    ROOT,
    TINY,
    Train,
    cannot_train,
    losses,
    packages,
    start_train,
    status,
)
from tests.trainer.unit.test_data_dataset import write_data
from tests.waiting import LIMIT_S, until


def checkpoints(run_dir: Path) -> list[str]:
    names = (path.name for path in (run_dir / "checkpoints").iterdir())
    return sorted(name for name in names if not name.startswith("."))


def test_a_run_learns_and_leaves_its_records(train: Train, tmp_path: Path) -> None:
    done = train(
        tmp_path / "run",
        "--train.max_steps=30",
        "--optimizer.lr=1e-2",
        "--eval.interval=15",
        "--checkpoint.interval=5",
        "--checkpoint.keep_last_n=2",
        "--checkpoint.keep_every=10",
    )
    run_dir = tmp_path / "run"
    loss = losses(run_dir)
    assert list(loss) == list(range(1, 31))
    assert loss[1] == pytest.approx(5.5, abs=0.3)  # ln 257 for a model that knows nothing
    assert loss[30] < 3.8
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    validations = {r["step"]: r["val_loss"] for r in records if "val_loss" in r}
    assert sorted(validations) == [15, 30] and validations[30] < validations[15] < 5
    last = [r for r in records if "loss" in r][-1]
    assert last["samples"] == 30 * 8 and last["tokens"] == 30 * 8 * 32
    assert last["tokens_per_s"] > 0 and last["mfu"] is None and last["skipped"] == 0
    parts = sum(last[f"{k}_time"] for k in ("data", "compute", "checkpoint", "eval"))
    assert parts == pytest.approx(last["step_time"])
    assert status(run_dir)["state"] == "done" and status(run_dir)["step"] == 30
    kept = ["latest", "step_00000010", "step_00000020", "step_00000025", "step_00000030"]
    assert checkpoints(run_dir) == kept
    assert (run_dir / "checkpoints" / "latest").readlink() == Path("step_00000030")
    assert (run_dir / "logs" / "latest" / "rank-0.log").is_file()
    assert "step 30/30" in done.stdout


def test_a_complete_run_says_so(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "run")
    again = train(tmp_path / "run")
    assert "the run is complete: 8 of 8 steps" in again.stdout
    assert len(losses(tmp_path / "run")) == 8


def test_a_step_is_judged_before_its_validation(train: Train, tmp_path: Path) -> None:
    """A request to leave that ends the validation saves this step."""
    train(tmp_path / "run", "--eval.interval=3", "--eval.samples=8")
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    order = [(line["step"], key) for line in lines for key in ("loss", "val_loss") if key in line]
    for step in (3, 6):
        assert order.index((step, "loss")) < order.index((step, "val_loss"))


def test_a_validation_that_was_missed_is_made_up_for(train: Train, tmp_path: Path) -> None:
    """Once, and with the weights of that step."""

    def validations() -> list[tuple[int, float]]:
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        found = [record for record in map(json.loads, lines) if "val_loss" in record]
        return [(record["step"], record["val_loss"]) for record in found]

    words = ("--schedule.name=constant", "--eval.interval=4")
    train(tmp_path / "run", *words, nproc=2)
    unbroken = validations()
    assert [step for step, _ in unbroken] == [4, 8]
    shutil.rmtree(tmp_path / "run")
    train(tmp_path / "run", words[0], "--train.max_steps=4", nproc=2)
    assert not validations()
    for _ in range(2):
        train(tmp_path / "run", *words, nproc=2)
        assert validations() == unbroken


@pytest.mark.parametrize("saving", ["async", "sync"])
def test_resumed_equals_unbroken_bit_for_bit(train: Train, tmp_path: Path, saving: str) -> None:
    flag = f"--{'' if saving == 'async' else 'no-'}checkpoint.async_save"
    more = ("--checkpoint.interval=3", "--schedule.name=constant", flag)
    train(tmp_path / "unbroken", *more)
    train(tmp_path / "resumed", "--train.max_steps=5", *more)
    train(tmp_path / "resumed", *more)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "unbroken")
    assert same_tensors(
        *(tmp_path / name / "checkpoints/latest" for name in ("unbroken", "resumed"))
    )


def same_tensors(first: Path, second: Path) -> bool:
    """Do two checkpoints hold the same state, bit for bit?"""
    return list(read_tensors(first)) == list(read_tensors(second)) and all(
        torch.equal(a, b)
        for a, b in zip(read_tensors(first).values(), read_tensors(second).values(), strict=True)
    )


SYSTEM_PYTHON = "/usr/bin/python3"


def test_another_python_resumes(train: Train, data_dir: Path, tmp_path: Path) -> None:
    """Checkpoints of one Python are loaded by another, and the reverse: Python 3.11.2 pickles an
    enum in another way than 3.11.7, for one."""
    if problem := cannot_train(SYSTEM_PYTHON):
        pytest.skip(problem)
    more = ("--schedule.name=constant", f"--run.dir={tmp_path / 'run'}")
    train(tmp_path / "run", *more, "--train.max_steps=3")
    words = [*TINY, f"--data.dataset_path={data_dir}", *more, "--train.max_steps=5"]
    command = [SYSTEM_PYTHON, "scripts/train.py", *words]
    other = subprocess.run(command, cwd=ROOT, env=packages(), capture_output=True, text=True)
    assert "continues after step 3" in other.stdout, other.stderr
    assert "continues after step 5" in train(tmp_path / "run", *more).stdout
    assert checkpoints(tmp_path / "run") == ["latest", "step_00000005", "step_00000008"]


def test_an_async_save_holds_the_step_that_it_names(train: Train, tmp_path: Path) -> None:
    """Steps go on while the data is written: what is written must be the state of the save's
    step."""
    more = ("--checkpoint.interval=1", "--checkpoint.keep_last_n=99", "--schedule.name=constant")
    train(tmp_path / "all", *more)
    train(tmp_path / "one", "--train.max_steps=4", "--schedule.name=constant")
    assert same_tensors(*(tmp_path / x / "checkpoints/step_00000004" for x in ("all", "one")))


LAYOUTS = {
    "shard": (4, ()),
    "hybrid": (4, ("--distributed.dp_replicate=2", "--train.micro_batch=1")),
    "replicate": (2, ("--distributed.dp_replicate=2", "--distributed.dp_shard=1")),
    "recompute": (2, ("--train.recompute=full", "--train.micro_batch=2")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_losses_of_one_process(
    train: Train, tmp_path: Path, one_process: dict[int, float], layout: str
) -> None:
    nproc, more = LAYOUTS[layout]
    train(tmp_path / "run", *more, nproc=nproc)
    assert losses(tmp_path / "run") == pytest.approx(one_process, rel=1e-5)


@pytest.fixture(scope="module")
def one_process(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    run_dir = tmp_path_factory.mktemp("one") / "run"
    process = start_train(*TINY, f"--data.dataset_path={data_dir}", f"--run.dir={run_dir}")
    assert process.wait(timeout=120) == 0
    return losses(run_dir)


def test_world_size_may_change_at_every_resume(
    train: Train, tmp_path: Path, one_process: dict[int, float]
) -> None:
    """4 -> 2 -> 8 processes, on other meshes: the samples that are left, and the losses of the
    unbroken run."""
    for steps, nproc, replicas in ((3, 4, 2), (5, 2, 1), (8, 8, 4)):
        # The schedule looks at max_steps: a stop by file leaves it as it is.
        (tmp_path / "run").mkdir(exist_ok=True)
        more = () if steps == 8 else (f"--train.max_steps={steps}",)
        mesh = f"--distributed.dp_replicate={replicas}"
        train(tmp_path / "run", *more, mesh, "--schedule.name=constant", nproc=nproc)
    train(tmp_path / "unbroken", "--schedule.name=constant")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "unbroken"), rel=1e-5)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    samples = [json.loads(line)["samples"] for line in lines]
    assert samples == [8 * step for step in range(1, 9)]
    worlds = [
        json.loads(line)["world_size"]
        for line in (tmp_path / "run" / "attempts.jsonl").read_text().splitlines()
        if json.loads(line)["event"] == "start"
    ]
    assert worlds == [4, 2, 8]


@pytest.mark.parametrize(
    ("number", "state"),
    [(signal.SIGTERM, "interrupted"), (signal.SIGUSR1, "interrupted"), (signal.SIGINT, "stopped")],
)
def test_a_signal_saves_and_leaves(
    data_dir: Path, tmp_path: Path, number: signal.Signals, state: str
) -> None:
    run_dir = tmp_path / "run"
    words = [*TINY, "--train.max_steps=100000", f"--data.dataset_path={data_dir}"]
    process = start_train(*words, f"--run.dir={run_dir}")
    until((run_dir / "metrics.jsonl").exists, alive=(process,))
    process.send_signal(number)
    process.send_signal(number)  # the second of a kind changes nothing
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out + err
    ended = status(run_dir)
    assert ended["state"] == state
    latest = json.loads((run_dir / "checkpoints" / "latest" / "manifest.json").read_text())
    assert latest["step"] == ended["step"] == max(losses(run_dir))


def test_files_ask_for_a_save_and_for_a_stop(data_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "SAVE").touch()
    (run_dir / "REPLAY").touch()
    words = [*TINY, "--train.max_steps=100000", f"--data.dataset_path={data_dir}"]
    process = start_train(*words, f"--run.dir={run_dir}", nproc=2)
    until(lambda: list(run_dir.glob("checkpoints/step_*[0-9]")), alive=(process,))
    assert process.poll() is None, process.communicate()
    (run_dir / "STOP").touch()
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out + err
    assert status(run_dir)["state"] == "stopped"
    assert len(list(run_dir.glob("checkpoints/step_*"))) == 2
    assert not list(run_dir.glob("S*")) and not (run_dir / "REPLAY").exists()
    assert "REPLAY file: no effect without resilience.replay_every" in out


def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(train: Train, tmp_path: Path) -> None:
    more = ("--checkpoint.interval=3", "--schedule.name=constant", "--checkpoint.keep_last_n=9")
    train(tmp_path / "run", *more)
    root = tmp_path / "run" / "checkpoints"
    before = losses(tmp_path / "run")
    shard = root / "step_00000008" / "ranks-000" / "__0_0.distcp"
    flipped = bytearray(shard.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    shard.write_bytes(flipped)
    (root / "step_00000006" / "ranks-000" / "__0_0.distcp").write_bytes(b"short")
    (root / "step_00000009.partial").mkdir()
    done = train(tmp_path / "run", *more)
    assert "continues after step 3" in done.stdout
    assert checkpoints(tmp_path / "run") == [
        "latest", "step_00000003", "step_00000006", "step_00000006.corrupt", "step_00000008",
        "step_00000008.corrupt",
    ]  # fmt: skip
    assert losses(tmp_path / "run") == before


@pytest.mark.parametrize("target", ["step_00000099", "latest", ""])
def test_a_latest_that_names_nothing(train: Train, tmp_path: Path, target: str) -> None:
    """The newest checkpoint is loaded, which one line says; so where the link leads to itself, or
    is none."""
    run_dir = tmp_path / "run"
    train(run_dir, "--train.max_steps=2", "--checkpoint.interval=1")
    latest = run_dir / "checkpoints/latest"
    latest.unlink()
    latest.symlink_to(target) if target else latest.touch()
    done = train(run_dir, "--train.max_steps=3")
    what = f"names {target}, which is not a checkpoint" if target else "is not a link"
    text = f"WARNING: latest {what}: step_00000002 is loaded"
    assert done.stdout.count("WARNING") == 1 and text in done.stdout
    assert list(losses(run_dir)) == [1, 2, 3] and os.readlink(latest) == "step_00000003"


def test_when_no_checkpoint_is_left_the_run_stops(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "run")
    (tmp_path / "run/checkpoints/step_00000008/manifest.json").write_text("{}")
    failed = train(tmp_path / "run", code=1)
    assert "no checkpoint in" in failed.stderr and "step_00000008" in failed.stderr
    assert (tmp_path / "run/checkpoints/step_00000008.corrupt").is_dir()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("--model.dim=128", "model.dim is 64 there, 128 here"),
        ("--train.seq_len=16", "train.seq_len is 32 there, 16 here"),
        ("--data.seed=5", "data.seed is 0 there, 5 here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    train: Train, tmp_path_factory: pytest.TempPathFactory, change: str, word: str
) -> None:
    run_dir = tmp_path_factory.getbasetemp() / "refused"
    if not run_dir.exists():
        train(run_dir)
    refused = train(run_dir, "--train.max_steps=9", change, code=2)
    assert word in refused.stderr and "--run.dir" in refused.stderr
    assert (run_dir / "checkpoints/step_00000008/manifest.json").is_file()


def test_checkpoints_of_another_run_are_refused(train: Train, tmp_path: Path) -> None:
    """Two runs with one checkpoint.dir: the second must not continue the first."""
    shared = f"--checkpoint.dir={tmp_path / 'shared'}"
    train(tmp_path / "first", shared)
    refused = train(tmp_path / "second", shared, code=2)
    assert "belongs to another run" in refused.stderr and "--checkpoint.dir" in refused.stderr
    mine = (tmp_path / "first/id").read_text()
    assert not (tmp_path / "second").exists()
    (tmp_path / "second").mkdir()
    (tmp_path / "second/id").write_text(mine)  # as the message says, for a run that has moved
    assert "the run is complete: 8 of 8" in train(tmp_path / "second", shared).stdout
    names = [".kempner", ".reading", "latest", "step_00000008"]
    assert sorted(os.listdir(tmp_path / "shared")) == names


def test_a_run_that_went_back_ends_with_its_data(tmp_path: Path) -> None:
    """One epoch has the samples of 12 steps. Those of three are left out: steps 4 and 5 were bad,
    and step 6 had been read. It ends in order, again at the next start, and goes on with more."""
    web, run_dir = (
        write_data(tmp_path / "web", [np.arange(32 * 8 * 12 + 1) % 250]),
        tmp_path / "run",
    )
    words = (*TINY, "--train.max_steps=12", "--resilience.max_skipped=2", f"--run.dir={run_dir}")

    def start(epochs: int) -> str:
        source = f"--data.sources=[{{path = '{web}', max_epochs = {epochs}}}]"
        process = start_train(
            *words, source, "--data.dataset_path=", "--checkpoint.interval=3",
            program="tests/trainer/fault/faulty_train.py", FAULTS="nan from=24 to=40",
        )  # fmt: skip
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, out + err
        return out

    warning = "WARNING: the run ends after step 9, not 12: it leaves out 24 samples"
    for back in (1, 0):
        out = start(epochs=1)
        assert out.count("back to step 3, without the samples 24 to 47") == back
        assert out.count(warning) == 1 and "done after step 9: the last step is done" in out
        assert list(losses(run_dir)) == list(range(1, 10))
        assert checkpoints(run_dir)[-1] == "step_00000009"
    assert warning not in start(epochs=2) and status(run_dir)["step"] == 12


def test_weights_that_are_spoilt(train: Train, tmp_path: Path) -> None:
    """A learning rate that throws the weights to infinity: every update after it is skipped; the
    run goes back once, leaves those samples out, and fails at the second time. While steps are
    skipped nothing is saved: it would push out the checkpoints from before."""
    run_dir = tmp_path / "run"
    words = ("--optimizer.lr=1e30", "--train.max_steps=50", "--resilience.max_skipped=3")
    keep = ("--checkpoint.interval=1", "--checkpoint.keep_last_n=9")
    failed = train(run_dir, *words, *keep, code=1)
    assert status(run_dir)["state"] == "failed"
    back = "3 steps in a row were not finite (resilience.max_skipped): back to step 1, without the "
    assert failed.stdout.count(back + "samples 8 to 31") == 1, failed.stdout
    assert "again after going back once" in failed.stdout
    records = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["skipped"] >= 6 and records[-1]["loss"] is None
    names = sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))
    assert names == ["step_00000001"]
    skip = json.loads((run_dir / "checkpoints/skip.json").read_text())  # for a restart in between
    assert skip == {"checkpoint": "step_00000001", "skip": [[8, 32]]}
    failed = train(tmp_path / "other", *words, code=1)
    assert "no checkpoint to go back to" in failed.stdout
    assert status(tmp_path / "other")["state"] == "failed"
