"""The batch log is for people: where it takes no more lines, as in a full home directory, the run
goes on, and says what it does in its own directory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import clean_env
from tests.jobs.shell.test_lib import LIB, ROOT

SCRIPTS = ROOT / "scripts/slurm"


def run(script: str, out: str, **env: str) -> int:
    words = ["bash", "-c", f'set -euo pipefail; source "{LIB}"\n{script}']
    with open(out, "w") as log:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"PATH": "/usr/bin:/bin", **env},
            timeout=120,
        )
    return done.returncode


def test_the_log_moves_into_the_run_directory(tmp_path: Path) -> None:
    moved = tmp_path / "run/logs/batch-no-room.log"
    script = f"""
kp_log before there is a run
KP_RUN_DIR={tmp_path}/run
kp_log first
printf 'of a rank\\n'
echo 'of srun' >&2
kp_log second
touch {tmp_path}/end
"""
    assert run(script, "/dev/full") == 0 and (tmp_path / "end").exists()
    lines = [line.partition("kempner: ")[2] or line for line in moved.read_text().splitlines()]
    assert lines == ["first", "of a rank", "of srun", "second"]


def test_nowhere_is_room(tmp_path: Path) -> None:
    """Neither in the run directory; nor is there one to be made."""
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "run/logs/batch-no-room.log").symlink_to("/dev/full")
    script = f"KP_RUN_DIR={tmp_path}/run; kp_log one; kp_log two; touch {tmp_path}/end; exit 7"
    assert run(script, "/dev/full") == 7 and (tmp_path / "end").exists()
    script = "KP_RUN_DIR=/proc/no/run; kp_log one; kp_log two; exit 8"
    assert run(script, "/dev/full") == 8


def test_an_error_keeps_its_exit_code() -> None:
    assert run("kp_die wrong", "/dev/full") == 2


def test_the_link_to_the_log_is_a_convenience(tmp_path: Path) -> None:
    """No inode is left in the run directory."""
    script = "ln() { return 1; }; KP_RUN_DIR=/proc SLURM_JOB_ID=7; kp_keep_log; exit 7"
    assert run(script, str(tmp_path / "log")) == 7


def test_whoever_reads_has_left(tmp_path: Path) -> None:
    script = f'source "{LIB}"; sleep 0.1; kp_log one; kp_log two; touch {tmp_path}/end; exit 7'
    words = ["bash", "-c", f"set -euo pipefail; bash -euc '{script}' | true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 7 and (tmp_path / "end").exists()
    assert not done.stderr


@pytest.mark.parametrize("out", ["/dev/full", "a log"])
def test_a_run_with_a_full_home(tmp_path: Path, out: str) -> None:
    """Through the front door: it trains, and what was said is in the run directory."""
    words = ["bash", SCRIPTS / "run.sh", f"--run-dir={tmp_path}/run", "--"]
    program = ["sh", "-c", f"echo of the program; touch {tmp_path}/done"]
    with open(tmp_path / "log" if out == "a log" else out, "w") as log:
        code = subprocess.run(
            [*words, *program],
            cwd=tmp_path,
            env=clean_env(KEMPNER_SITE=os.devnull),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=120,
        ).returncode
    assert code == 0 and (tmp_path / "done").exists()
    moved = tmp_path / "run/logs/batch-no-room.log"
    if out == "/dev/full":
        assert "done: the program has ended with exit code 0" in moved.read_text()
    assert moved.exists() == (out == "/dev/full")
