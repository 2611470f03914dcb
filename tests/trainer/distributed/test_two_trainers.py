"""Two trainers on one run directory: one of them trains, and nothing of what it does is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kempner.checkpoint import history
from kempner.jobs.lock import LOST_LOCK_EXIT
from kempner.jobs.records import event_reader, events
from kempner.jobs.system.reading import read_jsonl
from tests.conftest import TINY, start_train, status
from tests.waiting import LIMIT_S, until

BEAT_S = 0.5
LOCK = f"LOCK_HEARTBEAT_S={BEAT_S} MISSED_S=8 DEAD_S=15 LOCK_POLL_S=0.1"
SQUEUE = """#!/bin/bash
[[ $* == *--me* ]] && exit
echo 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2
exit 1
"""


class Trainer:
    """A process of scripts/train.py on a host of its own, in job 12 of cluster a."""

    def __init__(self, run_dir: Path, data: Path, host: str, **env: str) -> None:
        self.run_dir = run_dir
        words = [*TINY, "--train.max_steps=100000", "--checkpoint.interval=5"]
        words += [f"--data.dataset_path={data}", f"--run.dir={run_dir}"]
        words += ["--checkpoint.keep_last_n=100000", "--checkpoint.keep_every=5"]
        place = {"SLURM_CLUSTER_NAME": "a", "SLURM_JOB_ID": "12", "SLURMD_NODENAME": host}
        env = {**place, "KERNEL": host, "LOCK": LOCK, "FAULTS": "slow ms=100", **env}
        self.process = start_train(
            *words, program="tests/trainer/distributed/trainer_of_a_host.py", **env
        )

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it has said."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out + err

    def wait_for_lines(self, attempt: int, count: int) -> None:
        """Until this attempt has trained so many steps."""
        until(lambda: len(lines(self.run_dir, attempt)) >= count, alive=(self.process,))

    def stop(self) -> None:
        """In order, and it saves."""
        (self.run_dir / "STOP").touch()
        code, said = self.end()
        assert code == 0 and status(self.run_dir)["state"] == "stopped", said


def lines(run_dir: Path, attempt: int | None = None) -> list[dict[str, Any]]:
    found = [line for line in read_jsonl(run_dir / "metrics.jsonl") if "loss" in line]
    return [line for line in found if attempt in (None, line["attempt"])]


Start = Callable[..., Trainer]


@pytest.fixture
def start(tmp_path: Path, data_dir: Path) -> Iterator[Start]:
    started = []

    def begin(host: str, **env: str) -> Trainer:
        started.append(Trainer(tmp_path / "run", data_dir, host, **env))
        return started[-1]

    yield begin
    for trainer in started:
        trainer.process.kill()
        trainer.process.communicate()


def assert_nothing_is_lost(run_dir: Path) -> None:
    """All steps are there, one after the other in each attempt, and so are all checkpoints."""
    found = lines(run_dir)
    last = max(line["step"] for line in found)
    assert {line["step"] for line in found} == set(range(1, last + 1))
    for attempt in {line["attempt"] for line in found}:
        steps = [line["step"] for line in lines(run_dir, attempt)]
        assert steps == list(range(steps[0], steps[-1] + 1))
    latest = history.latest_checkpoint(run_dir / "checkpoints")
    assert latest is not None and history.read_manifest(latest)["step"] == last
    branch, left = history.run_branches(run_dir / "checkpoints")
    assert len(branch) >= last // 5 and not left


def test_a_trainer_that_lives_goes_on(start: Start, tmp_path: Path) -> None:
    """Whatever Slurm, the kernel or the file system say of it to others."""
    (tmp_path / "squeue").write_text(SQUEUE)
    (tmp_path / "squeue").chmod(0o755)
    first = start("node1")
    first.wait_for_lines(0, 3)
    path = f"{tmp_path}:/usr/bin:/bin"
    others = {
        "one question is not answered": start("node2", SLURM_JOB_ID="13", PATH=path),
        "another cluster": start("node1", SLURM_CLUSTER_NAME="b", SLURM_JOB_ID="8"),
        "its job there has our number": start(
            "node1", SLURM_CLUSTER_NAME="b", SLURM_RESTART_COUNT="1"
        ),
        "NFS answers out of its cache": start("node2", SLURM_JOB_ID="13", SEES="cached"),
        "EIO": start("node2", SLURM_JOB_ID="13", SEES="nothing"),
    }
    for why, other in others.items():
        code, said = other.end()
        assert code == 2 and "is in use by job 12 on node1" in said, (why, code, said)
    first.wait_for_lines(0, len(lines(first.run_dir)) + 3)
    first.stop()
    assert {line["attempt"] for line in lines(first.run_dir)} == {0}
    assert_nothing_is_lost(first.run_dir)


def test_a_later_start_of_the_job_goes_on_once_the_earlier_one_has_left(start: Start) -> None:
    """Requeued while it lived, on a host that Slurm believed to be lost; then a restart in place
    whose rank 0 before is not gone yet."""
    script = {"SLURM_RESTART_COUNT": "1", "KEMPNER_ATTEMPT_ID": "12.1.77", "SLURM_STEP_ID": "0"}
    in_place = {**script, "KEMPNER_ATTEMPT_ID": "12.1.77.1", "SLURM_STEP_ID": "4"}
    trainers = [start("node1", SLURM_RESTART_COUNT="0")]
    trainers[0].wait_for_lines(0, 12)
    for attempt, env in enumerate((script, in_place), 1):
        trainers.append(start("node2", **env))
        code, said = trainers[-2].end()
        assert code == LOST_LOCK_EXIT and "is in use by job 12 on node2" in said, said
        trainers[-1].wait_for_lines(attempt, 7)
    trainers[-1].stop()
    run_dir = trainers[0].run_dir
    faults = event_reader.read_kind(run_dir / "attempts.jsonl", events.FaultEvent)
    assert [fault.lost_peer for fault in faults] == [True, True], "no host is to blame"
    for attempt in (0, 1):
        overlap = lines(run_dir, attempt)[-1]["time"] - lines(run_dir, attempt + 1)[0]["time"]
        assert overlap < BEAT_S
    assert_nothing_is_lost(run_dir)


@pytest.mark.soak
def test_one_of_two_newcomers_trains(start: Start, tmp_path: Path) -> None:
    """On a lock that a dead trainer has left, on another host of another cluster."""
    (tmp_path / "run").mkdir()
    dead = {"cluster": "b", "host": "node9", "kernel": "gone", "pid": 7, "born": "1", "job": "3"}
    (tmp_path / "run/lock").write_text(json.dumps(dead))
    both = [start(f"node{k}", SLURM_JOB_ID=f"1{k}") for k in (2, 3)]
    until(lambda: any(each.process.poll() is not None for each in both))
    (refused,) = [each for each in both if each.process.poll() is not None]
    (other,) = [each for each in both if each is not refused]
    code, said = refused.end()
    assert code == 2 and "is in use by job 1" in said, said
    other.wait_for_lines(0, 6)
    other.stop()
    assert {line["attempt"] for line in lines(other.run_dir)} == {0}
    assert_nothing_is_lost(other.run_dir)
