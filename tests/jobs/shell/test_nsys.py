"""task.sh: ranks that KEMPNER_NSYS names run under Nsight Systems, here a program of its name."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from kempner.train.recording.config import ProfileConfig
from kempner.train.recording.profiling import Profiler
from tests.conftest import ROOT
from tests.waiting import LIMIT_S

TASK = ROOT / "scripts/slurm/lib/task.sh"


@pytest.mark.parametrize(("rank", "under"), [("0", True), ("8", True), ("1", False), ("80", False)])
def test_the_ranks_that_are_named(tmp_path: Path, rank: str, under: bool) -> None:
    nsys = tmp_path / "bin/nsys"
    nsys.parent.mkdir()
    nsys.write_text(
        '#!/bin/bash\necho "nsys $*"\nwhile [[ $1 != echo ]]; do shift; done\nexec "$@"\n'
    )
    nsys.chmod(0o755)
    env = {"PATH": f"{nsys.parent}:{os.environ['PATH']}", "KEMPNER_NSYS": "0,8"}
    env |= {"SLURM_PROCID": rank, "KP_RUN_DIR": str(tmp_path / "my run")}
    words = ["bash", str(TASK), "echo", "two words"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "two words", done
    assert ("nsys profile" in done.stdout) == under
    if under:
        assert f"--output={tmp_path}/my run/logs/nsys-rank-{rank}-%p echo" in done.stdout
        assert "--capture-range=cudaProfilerApi --capture-range-end=repeat" in done.stdout
        assert not (tmp_path / "my run").exists()  # a run's directory begins with its mark


def test_a_node_without_it(tmp_path: Path) -> None:
    """The rank runs, and says what is missing."""
    env = {"PATH": "/usr/bin:/bin", "KEMPNER_NSYS": "0", "SLURM_PROCID": "0", "KP_RUN_DIR": "run"}
    words = ["bash", str(TASK), "echo", "done"]
    done = subprocess.run(
        words, env=env, capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path
    )
    assert done.stdout.splitlines()[-1] == "done"
    assert "KEMPNER_NSYS=0: " in done.stderr and "has no nsys" in done.stderr


@pytest.mark.parametrize(
    ("ranks", "word"),
    [("-1", "must be numbers of ranks"), ("3-1", "must be"), ("a", "must be"), ("08", "must be"),
     ("0,", "must be"),
     ("0,9", "WARNING: KEMPNER_NSYS=0,9: there is no rank 9: the run has 8 rank(s)")],
)  # fmt: skip
def test_ranks_that_are_none(tmp_path: Path, ranks: str, word: str) -> None:
    script = f'source "{ROOT}/scripts/slurm/lib/all.sh"; kp_check_settings; KP_NODES=2 KP_TASKS=4'
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail; {script}; kp_nsys"],
        env={"PATH": "/usr/bin:/bin", "KEMPNER_NSYS": ranks, "KP_RUN_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == (0 if "WARNING" in word else 2), done
    assert word in done.stdout + done.stderr


@pytest.mark.parametrize("in_job", [True, False])
def test_outside_of_a_job_the_run_says_that_it_has_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_job: bool
) -> None:
    monkeypatch.setenv("KEMPNER_NSYS", "0")
    monkeypatch.setenv("KP_RUN_DIR", str(tmp_path))  # singlenode.sh exports it everywhere
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    if in_job:
        monkeypatch.setenv("SLURM_PROCID", "0")
    said: list[str] = []
    Profiler(ProfileConfig(), tmp_path, 0, torch.device("cpu"), said.append)
    assert [text.startswith("KEMPNER_NSYS=0: has no effect") for text in said] == [True] * (
        not in_job
    )
