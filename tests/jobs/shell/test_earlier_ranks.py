"""task.sh: a task begins when the ranks of earlier attempts of its job are gone from its node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kempner.jobs.system.process import birth_ticks

TASK = Path(__file__).parents[3] / "scripts/slurm/lib/task.sh"
LEFT = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}
NOW = {**LEFT, "SLURM_STEP_ID": "5", "KEMPNER_ATTEMPT_ID": "12.1.77.2"}
Leave = Callable[..., int]
WAIT = "import sys, time; print(flush=True); time.sleep(1000)"


@pytest.fixture
def leave() -> Iterator[Leave]:
    """Leaves a process with these variables behind; its id."""
    left = []

    def start(**env: str) -> int:
        words = [sys.executable, "-c", WAIT]
        left.append(subprocess.Popen(words, env={**LEFT, **env}, stdout=subprocess.PIPE))
        assert left[-1].stdout is not None
        left[-1].stdout.readline()
        return left[-1].pid

    yield start
    for process in left:
        process.kill()
        process.communicate()


def task(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    words = ["bash", TASK, *command]
    env = {"PATH": os.environ["PATH"], **NOW, **env}
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)


def test_a_task_ends_the_ranks_of_earlier_attempts(leave: Leave) -> None:
    earlier = ["12.1.77", "12.1.77.1", "12.0.99", "12.0.99.7"]
    ours = [leave(KEMPNER_RANK_OF=name) for name in earlier]
    others = [
        leave(KEMPNER_RANK_OF="12.1.77.2"),  # another task of this step
        leave(KEMPNER_RANK_OF="12.1.99"),  # another run of this job: pack.sh, interactive.sh
        leave(KEMPNER_RANK_OF="12.2.77"),  # a later start
        leave(KEMPNER_RANK_OF="112.0.99"),
        leave(KEMPNER_RANK_OF="12.0.99", SLURM_JOB_ID="13"),  # a job that a rank has submitted
        leave(KEMPNER_ATTEMPT_ID="12.1.77"),  # the batch script, and what runs beside the ranks
    ]
    done = task("bash", "-c", "echo mark=$KEMPNER_RANK_OF")
    assert "mark=12.1.77.2" in done.stdout and done.returncode == 0, done
    assert "ends what an earlier attempt has left: " in done.stdout
    assert [birth_ticks(pid) for pid in ours] == [None] * len(ours), "gone before the task begins"
    assert all(birth_ticks(pid) for pid in others)


def test_interactive_is_of_the_start_beside_which_it_runs(tmp_path: Path) -> None:
    """In a job that was requeued. Else a restart in place would take its ranks for earlier ones."""
    for name in ("sbatch", "scontrol"):
        text = "JobId=12 JobState=RUNNING Restarts=2 BatchFlag=1"
        (tmp_path / name).write_text(f"#!/bin/bash\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)
    script = f"source {TASK.with_name('all.sh')}; kp_use_job 12; kp_begin; echo $KEMPNER_ATTEMPT_ID"
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "KEMPNER_SITE": "/dev/null"}
    env |= {"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "7"}  # inside another job
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout.startswith("12.2."), done


@pytest.mark.parametrize(
    "env", [{"KEMPNER_ATTEMPT_ID": "12.0.77"}, {"SLURM_STEP_ID": ""}, {"KEMPNER_ATTEMPT_ID": ""}]
)
def test_the_first_attempt_of_all_and_what_is_no_step_end_nothing(
    leave: Leave, env: dict[str, str]
) -> None:
    pids = [leave(KEMPNER_RANK_OF=name) for name in ("12.0.77", "12.0.66", "12.0.66.1")]
    assert task("true", **env).returncode == 0
    assert all(birth_ticks(pid) for pid in pids)


def test_what_does_not_end_is_not_trained_beside(tmp_path: Path) -> None:
    """The process of a hung GPU: here one that is not there to be ended, in a tree for /proc."""
    (tmp_path / "4194399").mkdir()
    text = "SLURM_JOB_ID=12\0KEMPNER_RANK_OF=12.1.77.1\0"
    (tmp_path / "4194399/environ").write_text(text)
    done = task("echo", "began", KEMPNER_PROC=str(tmp_path), KEMPNER_GONE_S="1")
    assert done.returncode == 1 and "began" not in done.stdout
    assert "ranks of an earlier attempt do not end: 4194399" in done.stderr


def test_a_task_begins_when_they_are_gone(tmp_path: Path) -> None:
    """One whose memory is large takes a while to end after the kill."""
    rank = tmp_path / "4194399"
    rank.mkdir()
    (rank / "environ").write_text("SLURM_JOB_ID=12\0KEMPNER_RANK_OF=12.1.77.1\0")
    ends = threading.Timer(1.0, shutil.rmtree, [rank])
    ends.start()
    done = task("ls", str(tmp_path), KEMPNER_PROC=str(tmp_path))
    ends.join()
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.count("4194399") == 1, "the line that it is ended; then it is gone"


@pytest.mark.parametrize(
    ("line", "answer"), [("n1: ranks of an earlier attempt do not end: 7", "no"), ("", "yes")]
)
def test_then_the_job_is_requeued(tmp_path: Path, line: str, answer: str) -> None:
    (tmp_path / "log").write_text(f"kempner: error: {line}\n")
    script = f"""
        source {TASK.with_name("all.sh")}
        SLURM_JOB_ID=7 KEMPNER_ATTEMPT_ID=7.0.1 KP_RUN_DIR={tmp_path}
        KP_STATE='' KP_COMMITTED=-1 KP_COMMITTED_BEFORE=-1 KP_RESTARTS=1 KP_BESIDE=''
        KP_JOB='JobState=RUNNING Requeue=1 BatchFlag=1' KP_JOB_STATE=RUNNING
        KP_SRUN_LOG={tmp_path}/log
        kp_hosts() {{ :; }}
        kp_facts "the step has ended"
        [[ " ${{facts[*]}} " == *" room=1 "* ]] || echo "no room"
        if [[ " ${{facts[*]}} " == *" not_created=1 "* ]]; then echo no; else echo yes; fi
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout == f"{answer}\n", done
