"""What a site brings: secrets, mail, a port with another name, other jobs beside."""

from __future__ import annotations

import contextlib
import json
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import FAKE_TRAINER, SCRIPTS, Cluster, program

FAKE = {"KEMPNER_TRAIN": str(FAKE_TRAINER)}
SECRET = "hf_neverseenanywhere"


def seen(run_dir: Path) -> dict[str, list[str]]:
    return json.loads((run_dir / "seen.jsonl").read_text().splitlines()[-1])


@pytest.mark.soak
def test_a_hostile_name_through_every_script(cluster: Cluster, tmp_path: Path) -> None:
    """The configuration's own path and the run directory, of the real trainer."""
    folder = tmp_path / 'it\'s "$HOME" `id` [a-z]* é'
    folder.mkdir()
    config = folder / "my 'cfg' $(id) [1].toml"
    arguments = cluster.debug_run(folder / "the \\ run", "--train.max_steps=2")
    config.write_text(Path(str(arguments[0])).read_text())
    arguments[0] = config
    options = ["--nodes=1", "--gpus-per-node=1"]
    for script in ("multinode.sh", "singlenode.sh"):
        job = cluster.sbatch(
            script, *arguments, options=options, cwd=folder, env={"KEMPNER_PREFLIGHT": "1"}
        )
        assert cluster.wait(job) == 0, (folder / f"kempner-{job}.out").read_text()
        dry = cluster.run("bash", SCRIPTS / script, *arguments, "--dry-run", *options, cwd=folder)
        assert dry.returncode == 0, dry.stderr
    job = cluster.ask("sbatch", "--parsable", *options, "--output=/dev/null", "--wrap=sleep 60")
    try:
        while cluster.state(job) != "RUNNING":
            time.sleep(0.1)
        more = [*arguments, "--train.max_steps=4"]
        interactive = ["bash", SCRIPTS / "interactive.sh", job, *more]
        done = cluster.run(*interactive, cwd=folder, env={"KEMPNER_PREFLIGHT": "1"})
        assert done.returncode == 0 and "preflight took" in done.stdout, done.stdout + done.stderr
    finally:
        cluster.ask("scancel", job)
    assert json.loads((folder / "the \\ run/status.json").read_text())["step"] == 4
    assert cluster.ask("bash", SCRIPTS / "status.sh", folder / "the \\ run").count("done") == 1
    (folder / "$(x) y").mkdir()
    job = cluster.sbatch(
        "preflight.sh", "--device", "cpu", "--dir", folder / "$(x) y", options=options, cwd=folder
    )
    assert cluster.wait(job) == 0, (folder / f"preflight-{job}.out").read_text()
    assert (folder / "$(x) y").is_dir()


def test_a_container_runtime_that_is_not_there(cluster: Cluster, tmp_path: Path) -> None:
    env = {**FAKE, "KEMPNER_CONTAINER": "/images/a.sif"}
    job = cluster.sbatch("singlenode.sh", f"--run.dir={tmp_path}", cwd=tmp_path, env=env)
    assert cluster.wait(job) == 2
    assert "no apptainer here; load its module" in (tmp_path / f"kempner-{job}.out").read_text()


def test_a_secret_is_in_no_file(cluster: Cluster, tmp_path: Path) -> None:
    """The real trainer, with a crash and its traceback too: the token is in its environment, and
    nowhere else."""
    secrets = tmp_path / "secrets"
    secrets.write_text(f"HF_TOKEN={SECRET}\nWANDB_API_KEY={SECRET}\n")
    secrets.chmod(0o600)
    env = {"KEMPNER_SECRETS": str(secrets), "MY_PASSWORD": SECRET}
    work = tmp_path / "work"
    work.mkdir()
    arguments = cluster.debug_run(work / "run", "--train.max_steps=3")
    options = ["--nodes=1", "--gpus-per-node=1", "--no-requeue"]
    job = cluster.sbatch("multinode.sh", *arguments, options=options, cwd=work, env=env)
    assert cluster.wait(job) == 0
    crash = cluster.debug_run(work / "crash", "--train.max_steps=3", "--eval.interval=1")
    bad = {**env, "KEMPNER_TRAIN": str(Path(__file__).parents[2] / "trainer/fault/faulty_train.py")}
    bad |= {"FAULTS": "fail at=kempner.train.evaluate:validate:before", "KEMPNER_RESTARTS": "0"}
    job = cluster.sbatch("multinode.sh", *crash, options=options, cwd=work, env=bad)
    assert cluster.wait(job) == 1
    dry = cluster.run("bash", SCRIPTS / "multinode.sh", *arguments, "--dry-run", cwd=work, env=env)
    assert dry.returncode == 0, dry.stderr
    assert "HF_TOKEN=***" in dry.stdout and "WANDB_API_KEY=***" in dry.stdout
    (work / "dry.out").write_text(dry.stdout + dry.stderr)
    env_seen = cluster.sbatch(
        "singlenode.sh", f"--run.dir={tmp_path / 'fake'}", cwd=tmp_path, env={**FAKE, **env}
    )
    assert cluster.wait(env_seen) == 0
    assert seen(tmp_path / "fake")["env"]["HF_TOKEN"] == SECRET  # type: ignore[call-overload]
    files = list(everything(work))
    assert len(files) > 20
    assert [f for f in files if SECRET.encode() in f.read_bytes()] == []


def everything(folder: Path) -> Iterator[Path]:
    return (f for f in folder.rglob("*") if stat.S_ISREG(f.lstat().st_mode))


def test_mail_when_the_run_has_ended(cluster: Cluster, tmp_path: Path) -> None:
    """One mail, at the end and not at each requeue."""
    shim = f'#!/bin/sh\nprintf "%s\\n" "$*" >>{tmp_path}/sent; cat >>{tmp_path}/sent\n'
    env = {**FAKE, **program(tmp_path / "bin", "mail", shim), "KEMPNER_MAIL": "me@site"}
    run_dir = tmp_path / "run"
    arguments = [f"--run.dir={run_dir}", "--plan=save,done"]
    job = cluster.sbatch("singlenode.sh", *arguments, cwd=tmp_path, env=env)
    assert cluster.wait(job) == 0
    sent = (tmp_path / "sent").read_text()
    assert sent.splitlines() == [
        f"-s job {job} (kempner): the run is done me@site",
        "the run is done",
        f"run directory {run_dir}",
    ]


def test_a_node_that_names_its_port_differently(cluster: Cluster, tmp_path: Path) -> None:
    """Two real trainers find each other although one calls it ib0 and the other ibp12s0."""

    def rename(old: str, new: str) -> None:
        for words in (["down"], ["name", new]):
            cluster.testbed("exec", "node2", "ip", "link", "set", old, *words)
        cluster.testbed("exec", "node2", "ip", "link", "set", new, "up")

    rename("ib0", "ibp12s0")
    try:
        arguments = cluster.debug_run(tmp_path / "run", "--train.max_steps=3")
        options = ["--gpus-per-node=1"]
        job = cluster.sbatch("multinode.sh", *arguments, options=options, cwd=tmp_path)
        assert cluster.wait(job) == 0
    finally:
        rename("ibp12s0", "ib0")
    log = (tmp_path / f"kempner-{job}.out").read_text()
    assert "network of node1: ib0 " in log and "network of node2: ibp12s0 " in log


@pytest.mark.soak
@pytest.mark.parametrize("times", [2, 20])
def test_three_jobs_on_the_same_hosts(cluster: Cluster, tmp_path: Path, times: int) -> None:
    """They start at once, and every rank meets the ranks of its own job."""
    env = {"KEMPNER_TRAIN": str(Path(__file__).parent / "meet.py")}
    options = ["--exclusive=oversubscribe", "--gpus-per-node=1", "--cpus-per-task=1", "--mem=1G"]
    for k in range(times):
        jobs = [
            cluster.sbatch(
                "multinode.sh",
                f"--run.dir={tmp_path}/{k}-{n}",
                options=options,
                cwd=tmp_path,
                env=env,
            )
            for n in range(3)
        ]
        for job in jobs:
            code = cluster.wait(job)
            log = (tmp_path / f"kempner-{job}.out").read_text()
            assert code == 0 and f"met {job} {job}\n" in log, log
            assert cluster.field(job, "Restarts") == "0"


def test_a_full_home_directory(cluster: Cluster, tmp_path: Path) -> None:
    """The batch log is there, and nothing else of the run: it ended each start at its first line.
    Now it trains, is requeued, trains again, and says so in its own directory."""
    home, run_dir = cluster.small_disk / "home", tmp_path / "run"
    home.mkdir()
    try:
        with contextlib.suppress(OSError), open(home / "full", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        words = [f"--run.dir={run_dir}", "--plan=save,done"]
        env = {**FAKE, "KEMPNER_RESTARTS": "0"}
        job = cluster.sbatch("singlenode.sh", *words, cwd=home, env=env)
        assert cluster.wait(job) == 0
        assert (home / f"kempner-{job}.out").stat().st_size == 0
    finally:
        shutil.rmtree(home)
    log = (run_dir / "logs/batch-no-room.log").read_text()
    assert "requeue: " in log and "end: the run is done" in log
    assert cluster.field(job, "Restarts") == "1"
