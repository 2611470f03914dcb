"""Forks through the real trainer: what they keep, what they may change, and until when they need
the other run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kempner.checkpoint.format.reader import read_tensors
from tests.conftest import ROOT, TINY, Train, losses, start_train
from tests.waiting import LIMIT_S, until

# A learning rate that depends on no step.
CONSTANT = ("--schedule.name=constant", "--schedule.warmup_steps=0")
OTHER_LENGTH = ("--train.seq_len=16", "--model.max_seq_len=512", "--model.rope_theta=20000")


@pytest.fixture(scope="module")
def base(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run to be forked, of 8 steps: its checkpoints are of steps 3, 6 and 8."""
    run = tmp_path_factory.mktemp("base") / "base"
    words = ["--checkpoint.interval=3", "--checkpoint.keep_last_n=9", *CONSTANT]
    process = start_train(*TINY, f"--data.dataset_path={data_dir}", f"--run.dir={run}", *words)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    return run


@pytest.fixture(scope="module")
def other_data(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another data set: the held-out split of the first one."""
    path = Path(shutil.copytree(data_dir, tmp_path_factory.mktemp("other") / "data"))
    sidecar = json.loads((path / "dataset.json").read_text())
    sidecar["splits"]["train"] = sidecar["splits"]["val"]
    (path / "dataset.json").write_text(json.dumps(sidecar))
    return path


def manifest(run: Path, name: str = "latest") -> dict[str, Any]:
    return json.loads((run / "checkpoints" / name / "manifest.json").read_text())


def test_a_fork_with_the_same_data_goes_on_as_the_other_run_would(
    base: Path, train: Train, tmp_path: Path
) -> None:
    words = (f"--run.fork={base}@3", "--train.max_steps=5", *CONSTANT)
    done = train(tmp_path / "kept", *words)
    assert f"a fork of {base}@3: the weights, the optimizer's state, the same data" in done.stdout
    before = losses(base)
    assert losses(tmp_path / "kept") == {step - 3: before[step] for step in range(4, 9)}
    assert manifest(tmp_path / "kept")["samples"] == 8 * 8  # of the run and its fork together
    assert (tmp_path / "kept/id").read_text() != (base / "id").read_text()
    done = train(tmp_path / "fresh", *words, "--run.fork_optimizer=fresh")
    assert "the weights, a fresh optimizer, the same data" in done.stdout
    fresh = losses(tmp_path / "fresh")
    assert fresh[1] == before[4] and fresh[3] != before[6]
    origin = {"step": 3, "samples": 24, "tokens": 24 * 32, "from": f"{base}@3", "dir": str(base)}
    for name, optimizer in (("kept", "keep"), ("fresh", "fresh")):
        about = {**origin, "id": manifest(base)["run"], "optimizer": optimizer}
        assert manifest(tmp_path / name)["lineage"] == [about]
        assert manifest(tmp_path / name, "step_00000000")["lineage"] == [about]


def test_other_data_and_length_and_a_fork_of_the_fork(
    base: Path, other_data: Path, train: Train, tmp_path: Path
) -> None:
    """Resumed, it equals the unbroken fork bit for bit; then it is forked on two processes."""
    words = (f"--run.fork={base}", f"--data.dataset_path={other_data}", *OTHER_LENGTH, *CONSTANT)
    done = train(tmp_path / "unbroken", *words)
    assert "its own train.seq_len, data.sources: from sample 0 on" in done.stdout
    first = train(tmp_path / "resumed", *words, "--train.max_steps=3")
    assert f"run {tmp_path / 'resumed'} starts" in first.stdout
    again = train(tmp_path / "resumed", *words)
    assert f"run {tmp_path / 'resumed'} continues after step 3" in again.stdout
    assert losses(tmp_path / "resumed") == losses(tmp_path / "unbroken")
    same, mine = (
        read_tensors(tmp_path / name / "checkpoints/latest") for name in ("unbroken", "resumed")
    )
    assert list(same) == list(mine) and all(torch.equal(same[name], mine[name]) for name in same)

    second = (f"--run.fork={tmp_path / 'unbroken'}@8", "--train.max_steps=2", *CONSTANT)
    train(tmp_path / "second", *second, "--run.fork_optimizer=fresh", nproc=2)
    lineage = manifest(tmp_path / "second")["lineage"]
    names = [f"{tmp_path / 'unbroken'}@8", f"{base}@8"]
    assert [parent["from"] for parent in lineage] == names
    assert [parent["optimizer"] for parent in lineage] == ["fresh", "keep"]
    report = [sys.executable, "scripts/report.py", str(tmp_path / "second")]
    told = subprocess.run(report, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S).stdout
    assert f"fork of                         {names[0]} <- {names[1]}" in told


def test_a_fork_needs_the_other_run_until_its_first_checkpoint(
    base: Path, data_dir: Path, train: Train, tmp_path: Path
) -> None:
    """Killed in its first steps, it starts from its own checkpoint of step 0, even though the other
    run is gone by then; without that one it is forked again."""
    other, run = Path(shutil.copytree(base, tmp_path / "other", symlinks=True)), tmp_path / "run"
    words = (f"--run.fork={other}@6", *CONSTANT, "--data.seed=1")
    unbroken = train(tmp_path / "unbroken", *words).stdout
    assert "its own data.seed: from sample 0 on" in unbroken
    process = start_train(
        *TINY,
        f"--data.dataset_path={data_dir}",
        f"--run.dir={run}",
        *words,
        "--train.max_steps=9999",
    )
    own = run / "checkpoints/latest"
    until(own.exists, alive=(process,))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)
    assert own.readlink() == Path("step_00000000")
    shutil.rmtree(other)
    assert "a fork of" not in train(run, *words).stdout
    assert losses(run) == pytest.approx(losses(run) | losses(tmp_path / "unbroken"))
    shutil.rmtree(run / "checkpoints")
    told = train(run, *words, code=2)
    assert f"run.fork = {other}@6: no such directory {other}" in told.stderr
    shutil.copytree(base, other, symlinks=True)
    (run / "checkpoints/step_00000000.partial").mkdir(parents=True)
    assert f"a fork of {other}@6" in train(run, *words).stdout
    assert losses(run) == pytest.approx(losses(run) | losses(tmp_path / "unbroken"))


def refused(train: Train, run: Path, *words: str) -> str:
    """The one problem of a start that must be refused."""
    (problem,) = [x for x in train(run, *words, code=2).stderr.splitlines() if "run.fork" in x]
    return problem


def test_what_is_refused(base: Path, train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    nowhere = refused(train, run, f"--run.fork={tmp_path / 'nowhere'}@3")
    assert f"no such directory {tmp_path / 'nowhere'}; name the run.dir" in nowhere
    (tmp_path / "empty").mkdir()
    assert "has no complete checkpoint yet" in refused(
        train, run, f"--run.fork={tmp_path / 'empty'}"
    )
    missing = refused(train, run, f"--run.fork={base}@5")
    assert "no complete checkpoint of step 5, only of steps 3, 6, 8" in missing
    assert "is this run itself" in refused(train, base, f"--run.fork={base}@3")
    assert not run.exists()
    shape = refused(train, run, f"--run.fork={base}", "--model.dim=32", "--train.seq_len=16")
    assert "model.dim is 64 there, 32 here. Use the values there" in shape
    assert "seq_len is" not in shape  # a fork may
    assert not (run / "status.json").exists() and not list(run.glob("checkpoints/step*"))


def test_samples_that_the_other_run_has_used_are_counted(
    base: Path, data_dir: Path, train: Train, tmp_path: Path
) -> None:
    once = [f"--data.sources=[{{path = '{data_dir}', max_epochs = 1}}]", "--data.dataset_path="]
    words = [*once, f"--run.fork={base}@8", "--check"]
    told = train(tmp_path / "run", *words, "--train.max_steps=99999999", code=2).stderr
    (size,) = map(int, re.findall(r"have (\d+); raise max_epochs", told))
    train(tmp_path / "run", *words, f"--train.max_steps={size // 8 - 8}")
    told = train(tmp_path / "run", *words, f"--train.max_steps={size // 8 - 7}", code=2).stderr
    assert f"have {size}; raise max_epochs" in told


def test_a_run_with_checkpoints_is_no_fork_of_another(
    base: Path, train: Train, tmp_path: Path
) -> None:
    """The fork is that of docs/guide/fork.md."""
    block = (ROOT / "docs/guide/fork.md").read_text().split("    python scripts/train.py ")[1]
    command = block.split("\n\n")[0].replace("\\\n", "")
    config, run_dir, *words = shlex.split(command.replace("runs/debug", str(base)))
    assert (config, run_dir) == (TINY[0], "--run.dir=runs/long")
    train(tmp_path / "run", *words, "--train.max_steps=1", "--schedule.warmup_steps=0")
    other = refused(train, tmp_path / "run", f"--run.fork={base}@3")
    assert f"belongs to a run that is a fork of {base}@8" in other and "--run.dir" in other
    mine = refused(train, base, f"--run.fork={tmp_path / 'run'}")
    assert "belongs to a run that is not a fork" in mine and "leave out run.fork" in mine
    resumed = train(tmp_path / "run", "--train.seq_len=16", code=2).stderr
    assert "train.seq_len is 256 there, 16 here" in resumed and "--run.fork=RUN_DIR" in resumed


def test_a_damaged_checkpoint_of_another_run_is_left_alone(
    base: Path, train: Train, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(base, tmp_path / "other", symlinks=True))
    shard = other / "checkpoints/step_00000006/ranks-000/__0_0.distcp"
    shard.write_bytes(b"short")
    problem = refused(train, tmp_path / "run", f"--run.fork={other}@6")
    assert "damaged or has just been deleted" in problem and "run.fork=RUN@STEP" in problem
    assert shard.read_bytes() == b"short"
