"""Resource profiles, site.d/NAME.env, and the script that --dry-run --script renders."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import FAKE_TRAINER, ROOT, SCRIPTS, Cluster

NAME = "of-a-test"


@pytest.fixture
def profile() -> Iterator[Path]:
    """A profile in the repository, for as long as the test runs."""
    file = ROOT / f"site.d/{NAME}.env"
    file.write_text(
        "SBATCH_PARTITION=urgent\nSBATCH_TIMELIMIT=30\nSBATCH_GPUS_PER_NODE=2\n"
        'GREETING="hello world"\nPATH=/greeting:$PATH\n'
    )
    yield file
    file.unlink()


def script(
    cluster: Cluster, cwd: Path, *words: object, **env: str
) -> subprocess.CompletedProcess[str]:
    env = {"KEMPNER_SITE": NAME, "KEMPNER_TRAIN": str(FAKE_TRAINER), **env}
    return cluster.run("bash", SCRIPTS / "singlenode.sh", *words, cwd=cwd, env=env)


def test_a_profile(cluster: Cluster, tmp_path: Path, profile: Path) -> None:
    """--dry-run says what comes from where, --submit does that, and what is explicit wins."""
    words = [f"--run.dir={tmp_path}/run", "--time=40"]
    given = {"SBATCH_GPUS_PER_NODE": "1", "GREETING": "mine"}
    told = script(cluster, tmp_path, *words, "--dry-run", **given)
    assert told.returncode == 0, told.stderr
    file = f"site.d/{NAME}.env"
    assert re.search(rf"--partition=urgent +{file}\n", told.stdout)
    assert re.search(rf"--time=40 +the command line \({file} has 30\)\n", told.stdout)
    where = rf"SBATCH_GPUS_PER_NODE \({file} has 2\)"
    assert re.search(rf"--gpus-per-node=1 +{where}\n", told.stdout)
    assert "1 node(s) x 1 task(s)" in told.stdout
    done = script(cluster, tmp_path, *words, "--submit", **given)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]
    assert cluster.wait(job) == 0, (tmp_path / f"kempner-{job}.out").read_text()
    assert cluster.field(job, "Partition") == "urgent"
    assert cluster.field(job, "TimeLimit") == "00:40:00"
    (line,) = (tmp_path / "run/seen.jsonl").read_text().splitlines()
    seen = json.loads(line)["env"]
    assert seen["GREETING"] == "mine" and seen["PATH"].startswith("/greeting:")
    assert seen["SLURM_NTASKS"] == "1"
    # sbatch itself reads no profile: the job says where it differs.
    env = {"KEMPNER_SITE": NAME, "KEMPNER_TRAIN": str(FAKE_TRAINER)}
    job = cluster.sbatch("singlenode.sh", f"--run.dir={tmp_path}/two", cwd=tmp_path, env=env)
    assert cluster.wait(job) == 0
    note = f"note: the job has Partition=gpu, and {file} urgent"
    assert note in (tmp_path / f"kempner-{job}.out").read_text()


@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        ("", "nosuch", "there is no site.d/nosuch.env, only example of-a-test: give one"),
        ("SBATCH_CPUS_PER_TASK=4", NAME, "sbatch does not read SBATCH_CPUS_PER_TASK"),
    ],
)
def test_a_profile_that_is_wrong(
    cluster: Cluster, tmp_path: Path, profile: Path, text: str, name: str, problem: str
) -> None:
    profile.write_text(text)
    done = script(cluster, tmp_path, f"--run.dir={tmp_path}/run", "--submit", KEMPNER_SITE=name)
    assert done.returncode == 2 and problem in done.stderr


def test_submit_in_a_job(cluster: Cluster, tmp_path: Path) -> None:
    """A job does not submit itself again."""
    env = {"KEMPNER_TRAIN": str(FAKE_TRAINER)}
    words = [f"--run.dir={tmp_path}/run", "--submit"]
    job = cluster.sbatch("singlenode.sh", *words, cwd=tmp_path, env=env)
    assert cluster.wait(job) == 2
    assert f"already inside job {job}" in (tmp_path / f"kempner-{job}.out").read_text()


def test_a_rendered_script(cluster: Cluster, tmp_path: Path, profile: Path) -> None:
    """One file with the request and all parts: sbatch FILE, from anywhere, without an option."""
    words = [f"--run.dir={tmp_path}/a run", "--dry-run", "--script"]
    told = script(cluster, tmp_path, *words, tmp_path / "job.sh", "--job-name=mine")
    assert told.returncode == 0, told.stderr
    text = (tmp_path / "job.sh").read_text()
    assert "#SBATCH --partition=urgent\n" in text and "#SBATCH --job-name=mine\n" in text
    assert "#SBATCH --signal=B:SIGTERM@120\n" in text and "kp_decide()" in text
    (tmp_path / "else").mkdir()
    job = cluster.ask("sbatch", "--parsable", f"--chdir={tmp_path}/else", tmp_path / "job.sh")
    assert cluster.wait(job) == 0, (tmp_path / f"else/mine-{job}.out").read_text()
    assert cluster.field(job, "Partition") == "urgent"
    (line,) = (tmp_path / "a run/seen.jsonl").read_text().splitlines()
    assert json.loads(line)["argv"] == words[:1]
    (tmp_path / "job.sh").write_text(f"{text}# mine\n")
    again = script(cluster, tmp_path, *words, tmp_path / "job.sh")
    assert again.returncode == 2 and "exists, and was not" in again.stderr


def test_a_rendered_script_of_replicas(tmp_path: Path) -> None:
    """The parts that a launch script sources by itself are in it, too."""
    words = [ROOT / "configs/train/lowcomm/steps.toml", f"--run.dir={tmp_path}/run"]
    words += [f"--data.dataset_path={ROOT}/data/stdlib", "--train.global_batch=64", "--nodes=4"]
    script = ["bash", SCRIPTS / "replicas.sh", *words, "--dry-run", "--script", tmp_path / "job.sh"]
    told = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    text = (tmp_path / "job.sh").read_text()
    assert "\nkp_run_replicas() {" in text and text.count("\nkp_take ") == 1
    subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)
