"""The run directory on a disk that is full, on a file system that does not answer, and after a
start that is refused."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kempner.jobs.records.faulty_host import final_reason, site_fault
from tests.conftest import TINY, Train, start_train, status
from tests.waiting import LIMIT_S, until


def has_step(run: Path, step: int) -> bool:
    path = run / "metrics.jsonl"
    return path.exists() and f'"step": {step},' in path.read_text()


# --- A full disk ----------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    if os.geteuid():
        pytest.skip("mounting a small disk needs root")
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", path], check=True)
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def fill(disk: Path) -> None:
    """To the last byte."""
    with open(disk / "ballast", "ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 16, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass


def test_a_disk_that_is_full_stops_no_step_and_the_end_is_recorded(
    disk: Path, data_dir: Path
) -> None:
    """Checkpoints are where they are by default, in the run directory."""
    run = disk / "run"
    words = ["--train.max_steps=100000", "--checkpoint.interval=20"]
    process = start_train(*TINY, f"--data.dataset_path={data_dir}", f"--run.dir={run}", *words)
    until(lambda: has_step(run, 3), alive=(process,))
    fill(disk)
    lines = iter(process.stdout.readline, "")  # type: ignore[union-attr]
    failed = next(line for line in lines if "of step" in line and "failed" in line)
    step = int(failed.split("of step ")[1].split()[0])
    assert any(re.match(rf"step +{step + 5}/", line) for line in lines)  # it trains on
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, out + err
    assert "Traceback" not in err and "No space left on device" in err
    told = status(run)
    assert told["state"] == "failed" and "checkpoint was not written" in str(told["reason"])


def test_a_disk_that_is_full_at_the_start(disk: Path, train: Train) -> None:
    (disk / "run").mkdir()
    fill(disk)
    done = train(disk / "run", code=2)
    assert "Traceback" not in done.stderr
    assert f"run.dir = {disk / 'run'}: cannot be written: " in done.stderr


# --- A file system that does not answer -----------------------------------------------------------


def test_a_file_system_that_does_not_answer_stops_no_step(tmp_path: Path, data_dir: Path) -> None:
    """metrics.jsonl is a pipe that nobody reads: a write to it blocks."""
    run = tmp_path / "run"
    run.mkdir()
    os.mkfifo(run / "metrics.jsonl")
    pipe = os.open(run / "metrics.jsonl", os.O_RDWR | os.O_NONBLOCK)
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
    words = ["--train.max_steps=100000"]
    process = start_train(*TINY, f"--data.dataset_path={data_dir}", f"--run.dir={run}", *words)
    until(lambda: (run / "status.json").exists(), alive=(process,))
    assert "metrics.jsonl: no answer from the file system" in process.stderr.readline()  # type: ignore[union-attr]
    text = b""
    process.send_signal(signal.SIGINT)
    while process.poll() is None:  # it answers again
        with contextlib.suppress(BlockingIOError):
            text += os.read(pipe, 1 << 16)
        time.sleep(0.001)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out + err
    assert "answers again" in err and status(run)["state"] == "stopped"
    with contextlib.suppress(BlockingIOError):
        text += os.read(pipe, 1 << 16)
    steps = [json.loads(line)["step"] for line in text.splitlines()]
    assert steps == list(range(1, status(run)["step"] + 1))  # type: ignore[operator]
    os.close(pipe)


# --- Out of memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", ["works", "fails", "hangs"])
def test_out_of_memory_is_recorded_whatever_the_planner_does(
    planner: str, tmp_path: Path, data_dir: Path
) -> None:
    run, step = tmp_path / "run", "kempner.data.loader:TrainLoader.__next__:before nth=2"
    at = "at=kempner.extensions.planner.out_of_memory:estimate_memory:before"
    faults = {"works": "", "fails": f"fail {at}", "hangs": f"hold {at} s={2 * LIMIT_S}"}[planner]
    process = start_train(
        *TINY, f"--data.dataset_path={data_dir}", f"--run.dir={run}", "--train.max_steps=9",
        program="tests/trainer/fault/faulty_train.py", FAULTS=f"out_of_memory at={step}\n{faults}",
    )  # fmt: skip
    reason = ": OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB."
    if planner == "hangs":
        state = run / "status.json"  # is written after the fault
        until(lambda: state.exists() and status(run)["state"] == "failed", alive=(process,))
        process.kill()
    _, err = process.communicate(timeout=120)
    events = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    (fault,) = (event for event in events if event["event"] == "fault")
    assert fault["kind"] == "oom" and fault["final"] and fault["reason"].endswith(reason)
    assert status(run)["state"] == "failed" and reason in str(status(run)["reason"])
    advice = "the planner estimates"
    assert (advice in err) == (advice in str(status(run)["reason"])) == (planner == "works")
    if planner == "fails":  # why there is no advice
        assert "the test has broken this call" in next(run.glob("logs/*/rank-0.log")).read_text()


# --- The data -------------------------------------------------------------------------------------


def test_a_shard_that_cannot_be_read_once_the_run_has_begun(tmp_path: Path, data_dir: Path) -> None:
    """The batch script starts the run again: it blames the host, or the file system if several
    hosts say so."""
    run, checked = tmp_path / "run", len(list(data_dir.glob("train_*.npy")))
    at = f"at=kempner.data.formats.dataset:_read_header:before nth={checked + 1}"
    process = start_train(
        *TINY, f"--data.dataset_path={data_dir}", f"--run.dir={run}",
        program="tests/trainer/fault/faulty_train.py", FAULTS=f"fail {at} errno={errno.EIO}",
    )  # fmt: skip
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    assert status(run)["state"] == "running"
    events = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    (fault,) = (event for event in events if event["event"] == "fault")
    assert fault["kind"] == "crash" and not final_reason([fault]) and not fault["lost_peer"]
    assert re.search(r"OSError: \[Errno 5\] Input/output error: .*/train_00\d+\.npy", err)
    assert not site_fault([fault]) and site_fault([fault, {**fault, "hosts": ["another"]}])


# --- A start of a run that is there already -------------------------------------------------------


def test_a_refused_start_leaves_the_records_as_they_were(tmp_path: Path, train: Train) -> None:
    run = tmp_path / "run"
    words = ["--train.max_steps=2", "--checkpoint.interval=2"]
    train(run, *words)
    names = ("status.json", "attempts.jsonl", "config.toml", "metrics.jsonl")
    before = [(run / name).read_text() for name in names]
    done = train(run, *words, "--model.dim=32", code=2)
    assert "model.dim" in done.stderr
    assert [(run / name).read_text() for name in names] == before
    assert not (run / "lock").exists()


def test_a_resume_says_what_has_changed(tmp_path: Path, train: Train) -> None:
    run = tmp_path / "run"
    words = ["--checkpoint.interval=2", "--schedule.name=cosine", "--schedule.warmup_steps=0"]
    train(run, *words, "--train.max_steps=2")
    done = train(run, *words, "--train.max_steps=3", "--optimizer.weight_decay=0.2")
    said = [line for line in done.stdout.splitlines() if line.startswith("changed")]
    assert said[:2] == [
        "changed since the last attempt: train.max_steps: 2 -> 3",
        "changed since the last attempt: optimizer.weight_decay: 0.1 -> 0.2",
    ]
    assert "learning rate after step 2: " in said[2] and "is stretched" in said[2]
