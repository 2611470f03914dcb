"""scripts/slurm/drill.sh on real hosts: what holds, what does not, and whose jobs it touches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import SCRIPTS, TESTBED, Cluster
from tests.site import boot_site
from tests.waiting import until

SMALL = ("--nodes=1", "--gpus-per-node=2")  # a case on each of the two hosts
PROGRAM = "import time; [print('step', i, flush=True) or time.sleep(1) for i in range(3600)]"


def start_drill(cluster: Cluster, cwd: Path, *words: object) -> subprocess.Popen[str]:
    given = cluster.typed(["bash", SCRIPTS / "drill.sh", *words], cwd=cwd)
    pipe = subprocess.PIPE
    return subprocess.Popen(**given, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def drill(cluster: Cluster, cwd: Path, *words: object) -> tuple[int, str, dict[str, Any]]:
    """Conduct it; returns the exit code, what it has printed, and the rows by case."""
    process = start_drill(cluster, cwd, *words)
    out, err = process.communicate(timeout=2400)
    (table,) = cwd.glob("runs/drill-*/table.json")
    assert not err, err
    return (
        process.returncode,
        out,
        {row["name"]: row for row in json.loads(table.read_text())["rows"]},
    )


@pytest.mark.soak
def test_a_rank_that_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    other = cluster.sbatch(
        write(tmp_path, "sleep 300"), options=["--hold", "--job-name=drill-of-mine"], cwd=tmp_path
    )
    code, out, rows = drill(cluster, tmp_path, "--only=kill", *SMALL)
    assert code == 0, out
    assert "2 jobs of 1 node(s) with 2 GPU(s), 2 rank(s) on each: about 0.1 GPU hours" in out
    assert [row["holds"] for row in rows.values()] == [True, True], rows
    assert "again in place" in rows["kill"]["because"] and "all losses equal" in out
    assert "2 of 2 promises hold here" in out
    assert cluster.state(other) == "PENDING"
    cluster.ask("scancel", other)


def test_ctrl_c_cancels_its_jobs(cluster: Cluster, tmp_path: Path) -> None:
    process = start_drill(cluster, tmp_path, "--only=freeze", *SMALL)
    names = "squeue", "--noheader", "--format=%j"
    until(lambda: "-freeze" in cluster.ask(*names))
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "the jobs of the drill are cancelled" in out
    assert "0 of 2 promises hold here, 2 could not be tried" in out
    assert "drill-" not in cluster.ask(*names)


def write(folder: Path, text: str) -> Path:
    (folder / "job.sh").write_text(f"#!/bin/bash\n{text}\n")
    return folder / "job.sh"


@pytest.mark.soak
def test_all_of_it(cluster: Cluster, tmp_path: Path) -> None:
    """Every promise holds on the test bed, with the user's own program."""
    words = ["--minutes=40", "--gpus-per-node=1", "--", "python3", "-c", PROGRAM]
    code, out, rows = drill(cluster, tmp_path, *words)
    assert code == 0 and {row["holds"] for row in rows.values()} == {True}, out
    assert len(rows) == 9


@pytest.mark.soak
def test_a_promise_that_does_not_hold(cluster: Cluster, tmp_path: Path) -> None:
    """It is said with Slurm's words, and with the question for the staff."""
    code, out, rows = drill(cluster, tmp_path, "--only=requeue", "--no-requeue", *SMALL)
    assert code == 1 and rows["unbroken"]["holds"] is True, out
    assert rows["requeue"]["holds"] is False
    assert "scontrol requeue: " in rows["requeue"]["because"]
    assert "ask the site's staff:\n  requeue: may users requeue their own batch jobs" in out
    assert "1 of 2 promises hold here, 1 does not" in out


@pytest.mark.soak
def test_the_hostile_site(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It ends by itself, with a table, and leaves no job; alice has no rights there."""
    with boot_site(5, 1, tmp_path_factory, "hostile", KEMPNER_TESTBED_SEED="1") as site:
        folder, script = site.folder("drill"), site.kit / "scripts/slurm/drill.sh"
        words = ["bash", TESTBED, "as", "alice", "env", "-C", folder, "bash", script]
        done = subprocess.run(
            [*words, "--minutes=40"],
            env=site.cluster.env,
            capture_output=True,
            text=True,
            timeout=3000,
        )
        assert done.returncode == 1, done.stderr
        # Slurm ends the job of a host that cannot open its log, and no script could say so
        assert "hosts     DOES NOT HOLD  Each host can open" in done.stdout
        assert "node3: FAILED, exit code 0:53, and no batch log" in done.stdout
        assert "unbroken  holds" in done.stdout
        assert "drill-" not in site.ask("alice", "squeue", "--me", "--noheader", "--format=%j")
