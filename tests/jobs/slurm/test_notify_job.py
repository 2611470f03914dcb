"""Who the batch script tells of a run, and the page that it writes. The ways: test_notify.py."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cluster import FAKE_TRAINER, SCRIPTS, Cluster
from tests.jobs.slurm.test_site import everything

FAKE = {"KEMPNER_TRAIN": str(FAKE_TRAINER)}
URL = "http://127.0.0.1:9/hooks/neverseenanywhere"


def test_the_end_is_told_once(cluster: Cluster, tmp_path: Path) -> None:
    """Not at a requeue; a way that fails is one line; the page is written, and at the end for the
    last time; the URL appears nowhere."""
    run_dir, out = tmp_path / "a run", tmp_path / "told.jsonl"
    env = {**FAKE, "KEMPNER_NOTIFY": f"cat >>'{out}'", "KEMPNER_WEBHOOK": URL, "KEMPNER_PAGE": "5"}
    arguments = [f"--run.dir={run_dir}", "--plan=save,done"]
    job = cluster.sbatch("singlenode.sh", *arguments, cwd=tmp_path, env=env)
    assert cluster.wait(job) == 0
    (told,) = map(json.loads, out.read_text().splitlines())
    assert (told["event"], told["why"]) == ("done", "the run is done")
    assert told["decisions"] == {"restart": 1, "end": 1}
    assert told["job"]["number"] == job and told["attempts"] == 0  # the stand-in writes no start
    log = (tmp_path / f"kempner-{job}.out").read_text()
    assert log.count("KEMPNER_WEBHOOK was not told of done: Connection refused") == 1
    page = (run_dir / "report.html").read_text()
    assert "the run is done" in page and 'http-equiv="refresh"' not in page
    done = cluster.run("bash", SCRIPTS / "status.sh", run_dir, "--notify", env=env)
    assert done.returncode == 0, done.stderr
    assert len(out.read_text().splitlines()) == 1
    hidden = b"neverseenanywhere"
    found = [file.name for file in everything(tmp_path) if hidden in file.read_bytes()]
    assert found == ["seen.jsonl"]  # the stand-in's own: it writes down its whole environment


def test_a_crash_loop_is_told(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "told.jsonl"
    env = {**FAKE, "KEMPNER_NOTIFY": f"echo $KEMPNER_EVENT $KEMPNER_JOB >>'{out}'"}
    env["KEMPNER_MAX_CRASHES"] = "2"
    arguments = [f"--run.dir={tmp_path / 'run'}", "--plan=crash"]
    job = cluster.sbatch("singlenode.sh", *arguments, cwd=tmp_path, env=env)
    assert cluster.wait(job) == 1
    assert out.read_text() == f"crash_loop {job}\n"
    done = cluster.run("bash", SCRIPTS / "status.sh", tmp_path / "run", env=env)
    assert done.returncode == 1 and "attempts in a row without progress" in done.stdout


def test_a_job_that_ends_before_it_is_a_run_is_told(cluster: Cluster, tmp_path: Path) -> None:
    """Whoever has submitted it may not look at it for days. Nothing is written beside the log."""
    out = tmp_path / "told.jsonl"
    env = {**FAKE, "KEMPNER_NOTIFY": f"cat >>'{out}'", "KEMPNER_TRAIN": str(tmp_path / "none.py")}
    job = cluster.sbatch("singlenode.sh", "--run.dir=run", cwd=tmp_path, env=env)
    assert cluster.wait(job) == 2
    (told,) = map(json.loads, out.read_text().splitlines())
    log = tmp_path / f"kempner-{job}.out"
    assert (told["event"], told["run"]) == ("ended", f"job {job} (kempner)")
    assert told["why"].startswith("exit code 2 before the run") and str(log) in told["why"]
    assert {path.name for path in tmp_path.iterdir()} == {log.name, out.name}


BAD = {
    "KEMPNER_NOTIFY": ("no-such-command --now", "echo 'open"),
    "KEMPNER_WEBHOOK": ("ftp://hidden", "https://", "hidden"),
    "KEMPNER_PAGE": ("0", "4", "often", "-5", "5.5"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_makes_no_sense_is_refused(cluster: Cluster, tmp_path: Path, name: str) -> None:
    words = [f"--run.dir={tmp_path / 'run'}", "--dry-run"]
    for value in BAD[name]:
        env = {**FAKE, name: value}
        done = cluster.run("bash", SCRIPTS / "singlenode.sh", *words, cwd=tmp_path, env=env)
        assert done.returncode == 2 and f"kempner: error: {name}" in done.stderr, (value, done)
        assert "hidden" not in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["$HOME/bin/tell now", "'/a path/tell'", "(cat; echo) >/tmp/x"])
def test_a_command_that_only_bash_can_read(command: str) -> None:
    """Its first word is not looked for."""
    script = f'source "{SCRIPTS}/lib/all.sh"; kp_check_notify'
    done = subprocess.run(
        ["bash", "-euc", script], env={"PATH": "/usr/bin:/bin", "KEMPNER_NOTIFY": command}
    )
    assert done.returncode == 0


def test_a_dry_run_shows_no_webhook(cluster: Cluster, tmp_path: Path) -> None:
    """Nor does the script that it renders."""
    site = tmp_path / "site.env"
    site.write_text(f"KEMPNER_WEBHOOK={URL}\nKEMPNER_PAGE=60\n")
    words = [f"--run.dir={tmp_path / 'run'}", "--dry-run", f"--script={tmp_path / 'script'}"]
    env = {**FAKE, "KEMPNER_SITE": str(site)}
    done = cluster.run("bash", SCRIPTS / "singlenode.sh", *words, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "KEMPNER_WEBHOOK=***" in done.stdout and "KEMPNER_PAGE=60" in done.stdout
    env = {**FAKE, "KEMPNER_WEBHOOK": URL}
    words[-1] += "-2"
    done = cluster.run("bash", SCRIPTS / "singlenode.sh", *words, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    for file in ("script", "script-2"):
        assert "neverseen" not in (tmp_path / file).read_text()
    assert "neverseen" not in done.stdout
