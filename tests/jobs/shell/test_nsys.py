"""task.sh: ranks that KEMPNER_NSYS names run under Nsight Systems, here a program of its name."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

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
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
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
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "done"
    assert "KEMPNER_NSYS=0: " in done.stderr and "has no nsys" in done.stderr
