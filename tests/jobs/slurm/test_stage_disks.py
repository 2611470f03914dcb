"""KEMPNER_STAGE on a real Slurm: each host has a disk of its own, which the others do not see."""

from __future__ import annotations

import os
import signal
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cluster import AS_USER, USER_ID, Cluster
from tests.conftest import status
from tests.containers import container, image
from tests.waiting import until

HOSTS = ("node1", "node2")


@pytest.fixture
def disk(cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty disk at the same place on each host."""
    path = tmp_path / getattr(request, "param", "local disk")
    path.mkdir()
    for host in HOSTS:
        cluster.testbed("exec", host, "mount", "-t", "tmpfs", "-o", "size=64m", "none", path)
    yield path
    for host in HOSTS:
        cluster.testbed("exec", host, "umount", "-l", path)


def on_disk(cluster: Cluster, host: str, disk: Path) -> set[str]:
    lines = cluster.testbed("exec", host, "find", disk, "-mindepth", "1").splitlines()
    return {line.removeprefix(f"{disk}/") for line in lines}


OWN_PYTHON = pytest.mark.as_root(
    "an environment or image here has this machine's Python, which may be in root's home"
)


def of_a_dead_job(cluster: Cluster, disk: Path) -> None:
    """What a job that was killed has left on node1."""
    text = """mkdir -p "$0/shards" && echo '{"is": "STAGE", "run": ""}' >"$0/.kempner\""""
    left = disk / "kempner-999999"
    cluster.testbed("exec", "node1", "bash", "-c", text, left)
    cluster.testbed("exec", "node1", "chown", "-R", USER_ID if AS_USER[0] else 0, left)


def readable(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def reads(job: str, rank: int) -> tuple[int, set[str]]:
    """The process of a rank, and the shards that it has mapped."""
    for folder in Path("/proc").glob("[0-9]*"):
        environment = readable(folder / "environ").split("\0")
        if {f"SLURM_JOB_ID={job}", f"SLURM_PROCID={rank}"} <= {*environment}:
            shards = [s for s in readable(folder / "maps").splitlines() if s.endswith(".npy")]
            if shards:
                return int(folder.name), {line.split(maxsplit=5)[5] for line in shards}
    return 0, set()


def test_data_are_copied_once_read_by_every_attempt_and_removed_at_the_end(
    cluster: Cluster, tmp_path: Path, disk: Path
) -> None:
    """node2's disk is full: it reads the original. What a dead job has left on node1 is removed."""
    of_a_dead_job(cluster, disk)
    cluster.testbed("exec", "node2", "fallocate", "-l", "64M", disk / "full")
    assert on_disk(cluster, "node2", disk) == {"full"} and os.listdir(disk) == []
    words = cluster.debug_run(tmp_path / "run", "--train.max_steps=100000")
    options = ["--ntasks-per-node=1", "--gpus-per-node=1"]
    env = {"KEMPNER_STAGE": str(disk), "KEMPNER_RESTARTS": "0"}
    job = cluster.sbatch("multinode.sh", *words, options=options, cwd=tmp_path, env=env)
    log = tmp_path / f"kempner-{job}.out"
    cluster.wait_for("3/100000", log)
    _, copies = reads(job, 0)
    pid, originals = reads(job, 1)
    assert copies and all(path.startswith(f"{disk}/kempner-{job}/") for path in copies)
    assert originals and all(path.startswith(f"{cluster.data}/") for path in originals)
    os.kill(pid, signal.SIGKILL)
    cluster.wait_for("requeue: ", log)
    assert {path.split("/")[0] for path in on_disk(cluster, "node1", disk)} == {f"kempner-{job}"}
    assert on_disk(cluster, "node2", disk) == {"full", f"kempner-{job}"}
    (tmp_path / "run/STOP").touch()  # the next attempt ends at once
    assert cluster.wait(job) == 0, log.read_text()
    assert status(tmp_path / "run")["state"] == "stopped"
    said = log.read_text()
    assert said.count(f"stage: node1: {cluster.data}: copied to {disk}/kempner-{job}/") == 1
    assert said.count("stage: node1: ") == 2 and "is kept" in said
    assert said.count("stage: WARNING: node2: ") == 2 and "it is read from" in said
    assert on_disk(cluster, "node1", disk) == set()


TRAINER = """
import json, os, sys
from pathlib import Path
run = Path(sys.argv[1].removeprefix("--run.dir="))
if "--check" in sys.argv:
    print(f"[run]\\ndir = {json.dumps(str(run))}")
    if "DATA" in os.environ:
        print(f"[data]\\ndataset_path = {json.dumps(os.environ['DATA'])}")
else:
    import only_here
    if os.environ.get("CRASH") and "KEMPNER_CHAIN_LINK" not in os.environ:
        sys.exit(1)  # all ranks of the chain's first job
    (run / f"rank-{os.environ['SLURM_PROCID']}").write_text(only_here.__file__)
    if "DATA" in os.environ:
        from kempner.data.prepare.stage import staged_dir
        (run / f"data-{os.environ['SLURM_PROCID']}").write_text(str(staged_dir(os.environ["DATA"])))
    if os.environ["SLURM_PROCID"] == "0":
        done = {"state": "done", "attempt_id": os.environ["KEMPNER_ATTEMPT_ID"]}
        (run / "status.json").write_text(json.dumps(done))
"""
ENVIRONMENT = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1"]


def environment(folder: Path) -> Path:
    """A virtual environment that finds this one's packages, and has one of its own."""
    venv.create(folder, symlinks=True, with_pip=False)
    (package,) = folder.glob("lib/python3*/site-packages")
    (package / "others.pth").write_text(str(Path(torch.__file__).parents[1]))
    (package / "only_here.py").write_text("")
    return folder


def job_with(cluster: Cluster, tmp_path: Path, disk: Path, **env: str) -> str:
    trainer = tmp_path / "trainer.py"
    trainer.write_text(TRAINER)
    env = {"KEMPNER_TRAIN": str(trainer), "KEMPNER_STAGE": str(disk), **env}
    env["KEMPNER_STAGE_ENVIRONMENT"] = "1"
    words = [f"--run.dir={tmp_path / 'run'}"]
    job = cluster.sbatch("multinode.sh", *words, options=ENVIRONMENT, cwd=tmp_path, env=env)
    log = tmp_path / f"kempner-{job}.out"
    assert cluster.wait(job) == 0, log.read_text()
    return log.read_text()


def ranks(tmp_path: Path) -> list[str]:
    return [(tmp_path / f"run/rank-{rank}").read_text() for rank in (0, 1)]


@OWN_PYTHON
@pytest.mark.parametrize("full", [False, True])
def test_the_environment_is_sent_to_each_node_as_one_file(
    cluster: Cluster, tmp_path: Path, disk: Path, full: bool
) -> None:
    """sbcast fails for all when one disk is full; then the others read the file themselves."""
    source = environment(tmp_path / "an env")
    of_a_dead_job(cluster, disk)
    if full:
        cluster.testbed("exec", "node2", "fallocate", "-l", "64M", disk / "full")
    python = str(source / "bin/python")
    said = job_with(cluster, tmp_path, disk, KEMPNER_PYTHON=python)
    first, second = ranks(tmp_path)
    assert first.startswith(f"{disk}/kempner-")
    assert second.startswith(f"{source}/" if full else f"{disk}/kempner-")
    assert ("sbcast of" in said) == full
    assert said.count("stage: WARNING: node2: ") == full
    assert on_disk(cluster, "node1", disk) == set()
    assert not list((tmp_path / "run").glob(".environment*"))


@OWN_PYTHON
@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
@pytest.mark.parametrize("disk", ["disk"], indirect=True)  # pyxis takes no blanks
def test_an_image_and_data_are_sent_to_each_node(
    cluster: Cluster, tmp_path: Path, disk: Path, runtime: str
) -> None:
    """The containers of the ranks are made of the copy of the image, and see that of the data."""
    of = image(tmp_path, archive=True)
    (tmp_path / "only_here.py").write_text("")
    env = {"PYTHONPATH": str(tmp_path), "DATA": str(cluster.data)}
    env |= container(runtime, tmp_path, of)
    env["KEMPNER_MOUNTS"] += f",{cluster.data}:{cluster.data}"
    said = job_with(cluster, tmp_path, disk, **env)
    assert said.count(f"{of}: copied to {disk}/kempner-") == 2, said
    assert said.count(f"{cluster.data}: copied to {disk}/kempner-") == 2, said
    for rank in (0, 1):
        assert (tmp_path / f"run/data-{rank}").read_text().startswith(f"{disk}/kempner-")
    made = (tmp_path / "entered").read_text().splitlines()
    copies = [line for line in made if line.startswith(f"{disk}/kempner-")]
    assert sorted(line.rpartition(" ")[2] for line in copies) == ["node1", "node2"], made
    assert [on_disk(cluster, host, disk) for host in HOSTS] == [set(), set()]


@OWN_PYTHON
def test_each_job_of_a_chain_leaves_nothing_behind(
    cluster: Cluster, tmp_path: Path, disk: Path
) -> None:
    """The next one, on other nodes perhaps, has a directory of its own; the archive is kept for
    it."""
    python = str(environment(tmp_path / "an env") / "bin/python")
    more = {"KEMPNER_CHAIN": "1", "KEMPNER_RESTARTS": "0", "CRASH": "1"}
    said = job_with(cluster, tmp_path, disk, KEMPNER_PYTHON=python, **more)
    assert "chain: the step ended" in said
    until(lambda: (tmp_path / "run/status.json").exists())
    until(lambda: cluster.ask("squeue", "--noheader") == "")
    assert [on_disk(cluster, host, disk) for host in HOSTS] == [set(), set()]
    assert not list((tmp_path / "run").glob(".environment*"))
