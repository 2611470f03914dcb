"""Starts that never become attempts: what a run is called stays as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cluster import FAKE_TRAINER, SCRIPTS, Cluster
from tests.trainer.distributed.test_other_peoples_files import snapshot

# A trainer that is still loading when the job is cancelled.
SLOW = """
import sys, time
if "--check" in sys.argv:
    sys.exit(print('[run]\\ndir = "{run_dir}"'))
print("loads", flush=True)
time.sleep(600)
"""
# One that finds out by itself what --check should have said.
CARELESS = """
import runpy, sys
if "--check" in sys.argv:
    sys.exit(print('[run]\\ndir = "{run_dir}"'))
sys.argv[0] = "{train}"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
OPTIONS = ["--nodes=1", "--gpus-per-node=1"]


def told(cluster: Cluster, *runs: Path) -> tuple[int, list[dict[str, Any]]]:
    done = cluster.run("bash", SCRIPTS / "status.sh", "--json", *runs)
    return done.returncode, json.loads(done.stdout)["runs"]


def test_a_refused_start_leaves_a_finished_run_done(cluster: Cluster, tmp_path: Path) -> None:
    """The check refuses it, and nothing is written; where it does not, the trainer does: the run
    keeps its state, its attempts and its times, and the reason is shown."""
    run_dir = tmp_path / "run"
    arguments = cluster.debug_run(run_dir, "--train.max_steps=3")
    job = cluster.sbatch("singlenode.sh", *arguments, options=OPTIONS, cwd=tmp_path)
    assert cluster.wait(job) == 0
    _, (before,) = told(cluster, run_dir)
    files = snapshot(run_dir)
    words = ["singlenode.sh", *arguments, "--model.dim=64"]
    job = cluster.sbatch(*words, options=OPTIONS, cwd=tmp_path)
    assert cluster.wait(job) == 2 and snapshot(run_dir) == files
    log = (tmp_path / f"kempner-{job}.out").read_text()
    assert log.count("model.dim is 128 there, 64 here") == 1 and "not started: " in log
    careless = tmp_path / "careless.py"
    train = SCRIPTS.parent / "train.py"
    careless.write_text(CARELESS.format(run_dir=run_dir, train=train))
    env = {"KEMPNER_TRAIN": str(careless), "PYTHONPATH": str(train.parent)}
    job = cluster.sbatch(*words, options=OPTIONS, cwd=tmp_path, env=env)
    assert cluster.wait(job) == 2
    log = (tmp_path / f"kempner-{job}.out").read_text()
    assert "end: bad input: " in log and "model.dim is 128 there, 64 here" in log
    code, (after,) = told(cluster, run_dir)
    assert (code, after["state"], after["attempts"]) == (0, "done", 1)
    assert "a later start was refused: " in after["why"] and "dim is 128 there" in after["why"]
    same = ("attention", "began", "last_sign", "last_end", "step", "hosts")
    assert [after[key] for key in same] == [before[key] for key in same]
    report = cluster.run(cluster.env["KEMPNER_PYTHON"], SCRIPTS.parent / "report.py", run_dir)
    assert f"(job {job}) was refused: " in report.stdout
    assert not (run_dir / "timeline.png").exists()  # it has one attempt


def test_starts_that_never_began(cluster: Cluster, tmp_path: Path) -> None:
    """One that was refused, one that was cancelled while it loaded; a site.env that ends the script
    starts nothing."""
    site = tmp_path / "site.env"
    site.write_text("X=1\nexit 0\n")
    env = {"KEMPNER_SITE": str(site)}
    fake = {"KEMPNER_TRAIN": str(FAKE_TRAINER)}
    words = [f"--run.dir={tmp_path}/refused", "--plan=input"]
    slow = tmp_path / "slow.py"
    slow.write_text(SLOW.format(run_dir=tmp_path / "cut"))
    broken = cluster.sbatch("multinode.sh", *words, options=OPTIONS, cwd=tmp_path, env=env)
    refused = cluster.sbatch("multinode.sh", *words, options=OPTIONS, cwd=tmp_path, env=fake)
    load = {"KEMPNER_TRAIN": str(slow)}
    loads = cluster.sbatch("multinode.sh", "-", options=OPTIONS, cwd=tmp_path, env=load)
    cluster.wait_for("loads", tmp_path / f"kempner-{loads}.out")
    cluster.ask("scancel", loads)
    assert [cluster.wait(job) for job in (broken, refused)] == [2, 2]
    cluster.wait(loads)
    assert (tmp_path / f"kempner-{broken}.out").read_text() == (
        f"kempner: error: {site}, line 2: 'exit 0': ends the script that reads the file: remove "
        "it; 'return' leaves the file\n"
    )
    code, (first, second) = told(cluster, tmp_path / "refused", tmp_path / "cut")
    assert (first["state"], first["attention"]) == ("refused", True)
    assert (second["state"], second["attention"]) == ("cancelled", False)
    assert code == 1
