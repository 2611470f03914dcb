"""Requests in all their words, arrays, heterogeneous jobs and parts of a node, on a real Slurm."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import FAKE_TRAINER, SCRIPTS, Cluster, boot

FAKE = {"KEMPNER_TRAIN": str(FAKE_TRAINER), "KEMPNER_RESTARTS": "0"}


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts of four GPUs whose type Slurm knows."""
    with boot(2, 4, tmp_path_factory, gpu="h100") as cluster:
        yield cluster


def submit(cluster: Cluster, folder: Path, *options: str, plan: str = "done") -> str:
    words = [f"--run.dir={folder / 'run'}", f"--plan={plan}"]
    return cluster.sbatch("multinode.sh", *words, options=options, cwd=folder, env=FAKE)


def log_of(folder: Path, job: str) -> str:
    return (folder / f"kempner-{job}.out").read_text()


@pytest.mark.parametrize(
    ("options", "tasks", "devices"),
    [
        (["--gres=gpu:h100:2"], 2, "0,1"),
        (["--gpus=h100:4"], 2, "0,1"),
        (["--gpus-per-task=h100:1", "--ntasks=4"], 2, None),
        (["--gpus-per-socket=h100:2", "--sockets-per-node=2"], 4, None),
        (["--exclusive=oversubscribe", "--gpus-per-task=1", "--ntasks=2", "--nodes=1"], 2, None),
    ],
)
def test_gpus_in_other_words(
    typed: Cluster, tmp_path: Path, options: list[str], tasks: int, devices: str | None
) -> None:
    """One task for each GPU that was asked for; `devices`: None where Slurm may choose."""
    job = submit(typed, tmp_path, *options)
    assert typed.wait(job) == 0, log_of(tmp_path, job)
    nodes = 1 if "--nodes=1" in options else 2
    text = f": {nodes} x {tasks} = world size {nodes * tasks}, one GPU each"
    assert text in log_of(tmp_path, job), log_of(tmp_path, job)
    env = json.loads((tmp_path / "run/seen.jsonl").read_text())["env"]
    assert env["SLURM_STEP_NUM_TASKS"] == str(nodes * tasks)
    assert devices in (None, env["CUDA_VISIBLE_DEVICES"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--gpus-per-socket=2", "--sockets-per-node=2", "--ntasks-per-node=2"],
            "2 task(s) per node, but 4 GPU(s) (--gpus-per-socket=2)",
        ),
        (["--gpus=3"], "--gpus=3 on 2 nodes: give --gpus-per-node=N instead"),
        (["--nodes=1", ":", "--nodes=1"], "a heterogeneous job"),
    ],
)
def test_requests_that_are_refused(
    typed: Cluster, tmp_path: Path, options: list[str], message: str
) -> None:
    """One message, exit code 2, before anything is started or made."""
    job = submit(typed, tmp_path, *options)
    assert typed.wait(job) == 2
    log = log_of(tmp_path, job)
    assert message in log and log.count("\n") == 1, log
    assert typed.steps(job) == 0 and not (tmp_path / "run").exists()


def test_parts_of_a_node_are_apart(typed: Cluster, tmp_path: Path) -> None:
    """Two jobs on one host at the same time: no GPU and no CPU is both jobs'."""
    options = ["--exclusive=oversubscribe", "--nodes=1", "--nodelist=node1", "--gpus-per-node=2"]
    options.append("--mem=2000")  # the header has all of it, where memory is a resource
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    jobs = [
        submit(typed, folder, *options, "--cpus-per-task=1", "--ntasks-per-node=2", plan="wait")
        for folder in folders
    ]
    for job, folder in zip(jobs, folders, strict=True):
        typed.wait_for("here is attempt 0", folder / f"kempner-{job}.out")
    shown = [typed.ask("scontrol", "show", "job", "-d", job) for job in jobs]
    for what in (r"CPU_IDs=(\S+)", r"IDX:([\d-]+)"):
        assert sorted(re.findall(what, "".join(shown))) == ["0-1", "2-3"]
    for job in jobs:
        typed.ask("scancel", "--signal=INT", job)
    assert [typed.wait(job) for job in jobs] == [0, 0]


def test_an_array_of_multinode(typed: Cluster, tmp_path: Path) -> None:
    """A task is a run, by its line of the file; the one that crashes is requeued alone."""
    plans = ("done", "crash,done")
    for k, plan in enumerate(plans):
        (tmp_path / f"{k}.txt").write_text(f"--run.dir={tmp_path}/runs/{k} --plan={plan}")
        (tmp_path / f"runs/{k}").mkdir(parents=True)
    (tmp_path / "all").write_text("".join(f"{tmp_path}/{k}.txt\n" for k in range(2)))
    options = ["--array=0-1", "--gpus-per-node=2", "--cpus-per-gpu=1"]
    options.append("--exclusive=oversubscribe")
    words = ["multinode.sh", f"@{tmp_path}/all"]
    job = typed.sbatch(*words, options=options, cwd=tmp_path, env=FAKE)
    assert [typed.wait(f"{job}_{k}") for k in range(2)] == [0, 0]
    assert [typed.field(f"{job}_{k}", "Restarts") for k in range(2)] == ["0", "1"]
    table = typed.ask("bash", SCRIPTS / "status.sh", tmp_path / "runs")
    assert [line.split()[0] for line in table.splitlines()[1:]] == [
        f"{tmp_path}/runs/0",
        f"{tmp_path}/runs/1",
    ]


def test_a_job_submitted_in_a_task_of_an_array(typed: Cluster, tmp_path: Path) -> None:
    """It has the variables of that task and its request, and those that the shell exports. It is
    requeued itself, not the task, and takes the GPUs of its own node."""
    child = f"{SCRIPTS / 'singlenode.sh'} --run.dir={tmp_path / 'run'} --plan=crash,done"
    parent = tmp_path / "parent.sh"
    parent.write_text(
        "#!/bin/bash\n#SBATCH --array=3 --ntasks=3 --requeue --output=parent.log\n"
        "export SQUEUE_STATES=PENDING SLURM_TIME_FORMAT=relative SINFO_FORMAT=%N\n"
        f"sbatch --parsable {child} >child.part && mv child.part child\n"
    )
    task = typed.sbatch(parent, cwd=tmp_path, env=FAKE)
    assert typed.wait(task) == 0
    job = (tmp_path / "child").read_text().strip()
    assert typed.wait(job) == 0, log_of(tmp_path, job)
    log = log_of(tmp_path, job)
    assert f"kempner: job {job} (kempner)" in log and "1 x 4 = world size 4" in log, log
    assert typed.field(job, "Restarts") == "1" and typed.field(task, "Restarts") == "0"
