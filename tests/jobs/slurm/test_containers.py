"""Runs in containers: the image is another file system, with an environment of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import FAKE_TRAINER, ROOT, Cluster, program
from tests.conftest import TINY, start_train, status
from tests.containers import RUNTIMES, container, entered, image

pytestmark = pytest.mark.as_root(
    "an image here has this machine's Python, which may be in root's home"
)

HOSTILE = ["--a=[0.9, 0.95]", "two words", "$HOME `id`", "*", "", "{a,b}", "\\"]
SMALL = [str(ROOT / TINY[0]), *TINY[1:]]
FAKE = {"KEMPNER_TRAIN": str(FAKE_TRAINER)}
GREETING = '#!/bin/sh\necho "print *** Welcome to $(uname -n) ***"\n'


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A directory of the host that no image has, and that nobody mounts."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="kempner-test-") as name:
        yield Path(name)


def seen(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "seen.jsonl").read_text().splitlines()[-1])


def decisions(run_dir: Path) -> list[dict[str, object]]:
    records = map(json.loads, (run_dir / "attempts.jsonl").read_text().splitlines())
    return [record for record in records if record["event"] == "decision"]


def text(folder: Path, job: str) -> str:
    return (folder / f"kempner-{job}.out").read_text()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_the_tasks_see(
    cluster: Cluster, tmp_path: Path, elsewhere: Path, runtime: str
) -> None:
    """The arguments arrive; the job's variables win over the image's, whose PYTHONPATH stays behind
    the kit's; the run directory is the host's, also by way of a link; a TaskProlog's words are
    nobody's answer."""
    (elsewhere / "real").mkdir()
    (elsewhere / "link").symlink_to("real")
    run_dir = elsewhere / "link/run"
    prolog = tmp_path / "prolog"
    prolog.write_text(GREETING)
    prolog.chmod(0o755)
    of = image(tmp_path, run_dir, elsewhere / "real/run")
    env = container(runtime, tmp_path, of, writable=True)
    env |= {**FAKE, "NCCL_DEBUG": "INFO", "SLURM_TASK_PROLOG": str(prolog)}
    arguments = [f"--run.dir={run_dir}", *HOSTILE]
    options = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"]
    job = cluster.sbatch("multinode.sh", *arguments, options=options, cwd=tmp_path, env=env)
    assert cluster.wait(job) == 0, text(tmp_path, job)
    found = seen(run_dir)
    assert found["argv"] == arguments
    variables = found["env"]
    assert isinstance(variables, dict)
    assert variables["NCCL_DEBUG"] == "INFO" and variables["OMP_NUM_THREADS"] == "1"
    assert variables["PYTHONPATH"].split(":")[0] == f"{ROOT}/src"
    assert variables["PYTHONPATH"].split(":")[-1] == "/image/lib"
    assert not [name for name in variables if name.startswith(("KP_KE", "KP_MARK"))]
    assert status(run_dir)["state"] == "done"
    assert not [path for path in tmp_path.iterdir() if "Welcome" in path.name]


def repository(folder: Path) -> Path:
    """The launch scripts of a copy of this repository, whose host has no Python for the kit."""
    copy = folder / "repository"
    for name in ("scripts", "src"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy / "scripts/slurm"


def no_python(env: dict[str, str], folder: Path) -> dict[str, str]:
    """The same, with a python3 on the hosts that is too old."""
    program(folder / "old", "python3", "#!/bin/sh\nexit 1\n")
    return env | {"PATH": f"{folder}/old:{env['PATH']}"}


@pytest.mark.parametrize(
    "host",
    ["with Python", pytest.param("without", marks=pytest.mark.soak), "without, in a hurry"],
)
def test_a_container_that_takes_its_time(
    cluster: Cluster, tmp_path: Path, elsewhere: Path, host: str
) -> None:
    """The run crashes whenever it starts, and is given up after so many attempts without progress,
    also where nobody has the time to ask Python in the container. What the host's Python can answer
    unpacks no image: one container for each start of the ranks, and one for the first check."""
    run_dir = elsewhere / "run"
    env = container("pyxis", tmp_path, image(tmp_path), writable=True, delay=1.5)
    env |= {**FAKE, "KEMPNER_MAX_CRASHES": "2", "KEMPNER_CODE": "1"}
    script = ROOT / "scripts/slurm/singlenode.sh"
    if host != "without":  # else the container's Python judges and records
        env["KP_JUDGE_S"] = "1"
    if host != "with Python":
        script, env = repository(tmp_path) / "singlenode.sh", no_python(env, tmp_path)
        prolog = tmp_path / "prolog"
        prolog.write_text(GREETING)
        prolog.chmod(0o755)
        env |= {"SLURM_TASK_PROLOG": str(prolog)}
    arguments = [f"--run.dir={run_dir}", "--plan=crash"]
    job = cluster.sbatch(script, *arguments, options=["--gpus-per-node=1"], cwd=tmp_path, env=env)
    assert cluster.wait(job) == 1, text(tmp_path, job)
    said = text(tmp_path, job)
    made = re.findall(r"kempner: (restart|requeue|end): ", said)
    assert made == ["restart", "end"], said
    assert "2 attempts in a row without progress" in said
    assert not [path for path in tmp_path.iterdir() if "Welcome" in path.name]
    assert (run_dir / "code").is_dir()
    if host == "without, in a hurry":  # no question is answered in time, and none is recorded
        assert not (run_dir / "attempts.jsonl").exists()
        return
    assert [record["no_progress"] for record in decisions(run_dir)] == [1, 2], said
    assert [record["decision"] for record in decisions(run_dir)] == made
    if host == "with Python":
        assert len(entered(tmp_path)) == 2


def test_any_program(cluster: Cluster, tmp_path: Path, elsewhere: Path) -> None:
    """run.sh, where no Python of the host can check its command line."""
    prolog = tmp_path / "prolog"
    prolog.write_text(GREETING)
    prolog.chmod(0o755)
    env = container("pyxis", tmp_path, image(tmp_path), writable=True)
    env = no_python(env | {"SLURM_TASK_PROLOG": str(prolog)}, tmp_path)
    script, run_dir = repository(tmp_path) / "run.sh", elsewhere / "run"
    words = [f"--run-dir={run_dir}", "--", "sh", "-c", "test -d /image/bin && echo it is inside"]
    job = cluster.sbatch(script, *words, options=["--gpus-per-node=1"], cwd=tmp_path, env=env)
    assert cluster.wait(job) == 0, text(tmp_path, job)
    assert status(run_dir)["state"] == "done" and "it is inside" in text(tmp_path, job)
    assert not [path for path in tmp_path.iterdir() if "Welcome" in path.name]


def test_nothing_is_started_outside_of_jobs(cluster: Cluster, tmp_path: Path) -> None:
    """--dry-run and submit.sh check with the kit's own Python; training there is refused."""
    env = container("pyxis", tmp_path, image(tmp_path)) | FAKE
    arguments = [f"--run.dir={tmp_path}/run"]
    script = ROOT / "scripts/slurm/multinode.sh"
    before = jobs(cluster)
    dry = cluster.run("bash", script, *arguments, "--dry-run", cwd=tmp_path, env=env)
    assert dry.returncode == 0 and "--container-image=" in dry.stdout, dry.stderr
    assert not (tmp_path / "run").exists()
    refused = cluster.run("bash", script, *arguments, cwd=tmp_path, env=env)
    assert refused.returncode == 2 and "pyxis starts containers only in jobs" in refused.stderr
    assert jobs(cluster) == before and entered(tmp_path) == []
    words = ["bash", script.with_name("submit.sh"), "--parsable", "--nodes=1", script, *arguments]
    done = cluster.run(*words, cwd=tmp_path, env=env)
    assert done.returncode == 0 and jobs(cluster) == before + 1, done.stderr
    assert cluster.wait(done.stdout.split()[-1]) == 0
    old = cluster.run(
        "bash", repository(tmp_path) / "multinode.sh", *arguments, "--dry-run",
        cwd=tmp_path, env=no_python(env, tmp_path),
    )  # fmt: skip
    assert old.returncode == 2 and "pyxis starts containers only in jobs" in old.stderr
    assert jobs(cluster) == before + 1


def test_a_run_is_the_hosts_to_judge(
    cluster: Cluster, tmp_path: Path, elsewhere: Path, data_dir: Path
) -> None:
    """The image sees neither its directory, when the data are wrong, nor, at first, what a resume
    would change."""
    run = elsewhere / "run"
    process = start_train(*SMALL, f"--data.dataset_path={data_dir}", f"--run.dir={run}")
    assert process.wait(timeout=120) == 0
    env = container("apptainer", tmp_path, image(tmp_path))
    script, mounts = ROOT / "scripts/slurm/singlenode.sh", f"{env['KEMPNER_MOUNTS']},{data_dir}"
    for words, says in (
        (["--data.dataset_path=/nowhere"], "/nowhere: no such directory"),
        ([f"--data.dataset_path={data_dir}", "--train.seq_len=16"], "seq_len is 32 there, 16 here"),
    ):
        words = [script, *SMALL, f"--run.dir={run}", *words, "--dry-run"]
        more = {**env, "KEMPNER_MOUNTS": f"{mounts}:{data_dir}"}
        done = cluster.run("bash", *words, cwd=tmp_path, env=more)
        assert done.returncode == 2 and says in done.stderr, done
        assert "1 problem with the input" in done.stderr, done


def jobs(cluster: Cluster) -> int:
    """How many the controller has had."""
    log = Path(cluster.env["SLURM_CONF"]).parent / "log/slurmctld.log"
    submitted = ("_slurm_rpc_submit_batch_job: JobId", "sched: _slurm_rpc_allocate_resources JobId")
    return sum(any(word in line for word in submitted) for line in log.read_text().splitlines())


def test_interactive_stays_in_its_job(cluster: Cluster, tmp_path: Path) -> None:
    env = container("pyxis", tmp_path, image(tmp_path)) | FAKE
    options = ["--nodes=1", "--gpus-per-node=1", "--output=/dev/null", "--wrap=sleep 100"]
    job = cluster.ask("sbatch", "--parsable", *options)
    try:
        while cluster.state(job) != "RUNNING":
            time.sleep(0.1)
        before = jobs(cluster)
        words = ["bash", repository(tmp_path) / "interactive.sh", job, f"--run.dir={tmp_path}/run"]
        done = cluster.run(*words, "--x=1", cwd=tmp_path, env=no_python(env, tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        assert jobs(cluster) == before and len(entered(tmp_path)) == 2
    finally:
        cluster.ask("scancel", job)
    assert seen(tmp_path / "run")["argv"] == [f"--run.dir={tmp_path}/run", "--x=1"]


def test_a_signal_while_the_container_is_made(cluster: Cluster, tmp_path: Path) -> None:
    """Three preemptions during long creations are not three crashes."""
    env = container("pyxis", tmp_path, image(tmp_path), delay=4)
    env |= {**FAKE, "KEMPNER_MAX_CRASHES": "1"}
    arguments = [f"--run.dir={tmp_path}/run"]
    options = ["--gpus-per-node=1"]
    job = cluster.sbatch("singlenode.sh", *arguments, options=options, cwd=tmp_path, env=env)
    cluster.wait_for("on node", tmp_path / "entered")
    cluster.ask("scancel", "--batch", "--signal=TERM", job)
    assert cluster.wait(job) == 0, text(tmp_path, job)
    made = decisions(tmp_path / "run")
    assert [record["decision"] for record in made] == ["requeue", "end"], text(tmp_path, job)
    assert made[0]["no_progress"] == 0


def test_what_cannot_be_mounted_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """With one line, before anything starts, and without a trace."""
    of = image(tmp_path)
    bad = [
        ("pyxis", "/var/tmp/kempner a,b", "pyxis accepts no blanks, commas and colons in a path"),
        ("apptainer", "/var/tmp/kempner,b", "apptainer accepts no commas and colons in a path"),
        ("charliecloud", "/var/tmp/kempner-none", f"mkdir -p {of}/var/tmp/kempner-none, or"),
    ]
    for runtime, path, why in bad:
        env = container(runtime, tmp_path, of) | FAKE
        words = [ROOT / "scripts/slurm/multinode.sh", f"--run.dir={path}", "--dry-run"]
        done = cluster.run("bash", *words, cwd=tmp_path, env=env)
        assert done.returncode == 2 and why in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1 and not os.path.exists(path)
