"""The launch scripts on a real Slurm: what they start, where, over which network, and what they
refuse."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli

from tests.cluster import FAKE_TRAINER, ROOT, SCRIPTS, Cluster
from tests.conftest import losses

HOSTILE = [
    "--a=[0.9, 0.95]",
    "two words",
    "'single' \"double\"",
    "$HOME `id` $(id)",
    "*",
    "",
    "{a,b}",
    "\\",
    "é\ttab",
]
TWENTY = ("--train.max_steps=20", "--train.deterministic")
FAKE = {"KEMPNER_TRAIN": str(FAKE_TRAINER)}


def seen(run_dir: Path) -> dict[str, dict[str, str]]:
    """What rank 0 of the fake trainer was started with, the last time."""
    return json.loads((run_dir / "seen.jsonl").read_text().splitlines()[-1])


@pytest.fixture(scope="session")
def one_process(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of TWENTY in one process."""
    return train_here(cluster, tmp_path_factory.mktemp("one") / "run", [])


def train_here(cluster: Cluster, run_dir: Path, launcher: list[str]) -> list[float]:
    """TWENTY on this machine, without Slurm."""
    words = [*launcher, ROOT / "scripts/train.py", *cluster.debug_run(run_dir, *TWENTY)]
    cluster.ask(cluster.env["KEMPNER_PYTHON"], *words)
    return list(losses(run_dir).values())


@contextlib.contextmanager
def over_the_fast_network(cluster: Cluster) -> Iterator[None]:
    """Over 95 % of the bytes between the hosts go over ib0, and the training's are among them."""
    ends = [(node, nic) for node in ("node1", "node2") for nic in ("ib0", "em4")]
    before = {end: cluster.bytes(*end) for end in ends}
    yield
    moved = {end: cluster.bytes(*end) - count for end, count in before.items()}
    fast = sum(count for (_, nic), count in moved.items() if nic == "ib0")
    assert fast > 0.95 * sum(moved.values()), moved
    assert fast > 20e6, moved


def test_two_hosts_train_over_the_fast_network(
    cluster: Cluster, tmp_path: Path, one_process: list[float]
) -> None:
    """2 x 2 tasks of the real trainer; a run directory that a shell would take apart. The losses
    are those of one process, and of four by torchrun. A firewall leaves two ports to the kit."""
    run_dir = tmp_path / 'a "run" of $HOME [*]'
    arguments = cluster.debug_run(run_dir, *TWENTY, "--optimizer.betas=[0.9, 0.95]")
    with over_the_fast_network(cluster):
        options = ["--gpus-per-node=2", "--ntasks-per-node=2"]
        env = {"KEMPNER_PORTS": "24000-24001"}
        job = cluster.sbatch("multinode.sh", *arguments, options=options, cwd=tmp_path, env=env)
        assert cluster.wait(job) == 0
    log = (tmp_path / f"kempner-{job}.out").read_text()
    assert "world size 4 on node1, node2" in log, log  # the trainer's own words
    assert "nodes node1 node2: 2 x 2 = world size 4, one GPU each" in log
    for k, node in enumerate(("node1", "node2"), 1):
        said = f"network of {node}: ib0 (10.78.{cluster.number}.{k}): InfiniBand"
        assert log.count(said) == 1
    assert (run_dir / f"logs/batch-{job}.log").read_text() == log
    assert json.loads((run_dir / "status.json").read_text())["state"] == "done"
    assert tomli.loads((run_dir / "config.toml").read_text())["optimizer"]["betas"] == [0.9, 0.95]
    assert cluster.steps(job) == 2  # what other tests look for in vain
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    assert train_here(cluster, tmp_path / "torchrun", torchrun) == pytest.approx(one_process, 1e-5)
    assert list(losses(run_dir).values()) == pytest.approx(one_process, 1e-5)


@pytest.mark.soak
def test_whole_nodes_without_any_option(
    cluster: Cluster, tmp_path: Path, one_process: list[float]
) -> None:
    """The header alone gives two nodes with all that they have: 2 x 4 tasks."""
    arguments = cluster.debug_run(tmp_path / "run", *TWENTY)
    with over_the_fast_network(cluster):
        job = cluster.sbatch("multinode.sh", *arguments, cwd=tmp_path)
        assert cluster.wait(job) == 0
    assert "world size 8 on node1, node2" in (tmp_path / f"kempner-{job}.out").read_text()
    assert list(losses(tmp_path / "run").values()) == pytest.approx(one_process, 1e-5)


def test_arguments_arrive_untouched(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.sbatch("singlenode.sh", f"--run.dir={tmp_path}", *HOSTILE, cwd=tmp_path, env=FAKE)
    assert cluster.wait(job) == 0
    assert seen(tmp_path)["argv"] == [f"--run.dir={tmp_path}", *HOSTILE]


def test_tasks_have_their_share_of_the_cpus(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.sbatch(
        "multinode.sh",
        f"--run.dir={tmp_path}",
        options=["--gpus-per-node=2", "--export=ALL,OMP_NUM_THREADS="],
        cwd=tmp_path,
        env=FAKE,
    )
    assert cluster.wait(job) == 0
    env = seen(tmp_path)["env"]
    assert (env["SLURM_STEP_NUM_TASKS"], env["SLURM_STEP_NUM_NODES"]) == ("4", "2")
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert env["KEMPNER_SIGNAL_LEAD"] == "120" and int(env["KEMPNER_BATCH_BEGAN"]) > 0


def test_two_jobs_share_a_node(cluster: Cluster, tmp_path: Path) -> None:
    """Each has GPUs of its own: one that took GPU 0 by habit would disturb the other."""
    options = [
        "--exclusive=oversubscribe",
        "--gpus-per-node=2",
        "--cpus-per-gpu=1",
        "--mem=2000",  # the header's --mem=0 is all of it, where memory is a resource (--as-user)
        "--nodelist=node1",
    ]
    runs = [tmp_path / "a", tmp_path / "b"]
    jobs = []
    for run in runs:
        arguments = [f"--run.dir={run}", "--plan=wait"]
        jobs.append(
            cluster.sbatch("singlenode.sh", *arguments, options=options, cwd=tmp_path, env=FAKE)
        )
    for job in jobs:
        cluster.wait_for("here is attempt 0", tmp_path / f"kempner-{job}.out")
    for job in jobs:  # both are there now
        cluster.ask("scancel", "--signal=INT", job)
    assert [cluster.wait(job) for job in jobs] == [0, 0]
    assert [seen(run)["env"]["CUDA_VISIBLE_DEVICES"] for run in runs] == ["0,1", "2,3"]


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        (["--gpus-per-node=4", "--ntasks-per-node=2"], "--ntasks-per-node=4"),
        (["--gres=gpu:2", "--ntasks-per-node=3"], "--ntasks-per-node=2"),
        (["--gpus=8", "--ntasks=4"], "--ntasks-per-node=4"),
        (["--gpus-per-task=2", "--ntasks-per-node=2"], "--ntasks-per-node=4"),
    ],
)
def test_tasks_that_are_not_gpus_are_refused(
    cluster: Cluster, tmp_path: Path, options: list[str], tasks: str
) -> None:
    job = cluster.sbatch(
        "multinode.sh", f"--run.dir={tmp_path}/run", options=options, cwd=tmp_path, env=FAKE
    )
    assert cluster.wait(job) == 2
    log = (tmp_path / f"kempner-{job}.out").read_text()
    assert log.count("\n") == 1, log
    assert cluster.steps(job) == 0 and cluster.field(job, "Restarts") == "0"
    assert f"give {tasks}, or --gpus-per-node=" in log
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("script", "override", "message"),
    [
        ("singlenode.sh", "--train.max_stepss=3", "did you mean --train.max_steps?"),
        ("multinode.sh", "--train.max_stepss=3", "did you mean --train.max_steps?"),
        ("multinode.sh", "--optimizer.lr=ture", "lr=ture: must be a float"),
        ("multinode.sh", "nowhere.toml", "nowhere.toml: no such file"),
        ("multinode.sh", "not.toml", "not.toml: not a TOML file"),
        ("multinode.sh", "--distributed.dp_shard=3", "does not make the world of 4 ranks"),
        ("multinode.sh", "--data.dataset_path=nodata", "nodata: no such directory"),
        ("multinode.sh", "--data.dataset_path=wrong", "the sidecar says uint32"),
        ("multinode.sh", "--model.init_from=me/tiny", "scripts/convert.py prefetch me/tiny`"),
        ("multinode.sh", "--model.vocab_size=100", "model.vocab_size is 100"),
        ("multinode.sh", "--run.dir=not.toml/run", "is not a directory; give another --run.dir"),
    ],
)
def test_bad_input_ends_before_srun(
    cluster: Cluster, tmp_path: Path, script: str, override: str, message: str
) -> None:
    """One message, exit code 2, no step, nothing made, and the job does not come back."""
    (tmp_path / "not.toml").write_text("x = = 1\n")
    sidecar = shutil.copytree(cluster.data, tmp_path / "wrong") / "dataset.json"
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"dtype": "uint32"}))
    arguments = cluster.debug_run(tmp_path / "run", override)
    job = cluster.sbatch(script, *arguments, options=["--gpus-per-node=2"], cwd=tmp_path)
    assert cluster.wait(job) == 2
    log = (tmp_path / f"kempner-{job}.out").read_text()
    assert message in log and log.count("error: ") == 1 and "not started" in log, log
    assert "world size" not in log and not (tmp_path / "run").exists()
    assert cluster.field(job, "Restarts") == "0" and cluster.steps(job) == 0


def test_all_problems_are_reported_together(cluster: Cluster, tmp_path: Path) -> None:
    arguments = cluster.debug_run(tmp_path / "run", "--train.max_stepss=3", "--optimizer.lr=ture")
    job = cluster.sbatch("multinode.sh", *arguments, cwd=tmp_path)
    assert cluster.wait(job) == 2
    log = (tmp_path / f"kempner-{job}.out").read_text()
    assert "2 problems" in log and "max_stepss" in log and "lr=ture" in log


def test_a_network_that_is_not_there_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    env = {**FAKE, "NCCL_SOCKET_IFNAME": "ib7"}
    job = cluster.sbatch("multinode.sh", f"--run.dir={tmp_path}", cwd=tmp_path, env=env)
    assert cluster.wait(job) == 2
    assert "no interface 'ib7'; it has em4 ib0 lo" in (tmp_path / f"kempner-{job}.out").read_text()


def test_an_unplugged_network_is_not_taken(cluster: Cluster, tmp_path: Path) -> None:
    """The nodes may differ: one of them has its cable out."""
    cluster.testbed("cut", "node2")
    try:
        job = cluster.sbatch("multinode.sh", f"--run.dir={tmp_path}", cwd=tmp_path, env=FAKE)
        assert cluster.wait(job) == 0
    finally:
        cluster.testbed("join", "node2")
    log = (tmp_path / f"kempner-{job}.out").read_text()
    assert "network of node1: ib0 " in log and "network of node2: em4 " in log


def test_site_file_and_another_directory(cluster: Cluster, tmp_path: Path) -> None:
    """Submitted from a directory that is not the repository; paths are relative to it."""
    site = tmp_path / "my site.env"
    site.write_text('GREETING="hello world"\n: "${GLOO_SOCKET_IFNAME:=em4}"\n')
    (tmp_path / "here").mkdir()
    env = {**FAKE, "KEMPNER_SITE": str(site)}
    job = cluster.sbatch("singlenode.sh", "--run.dir=out", cwd=tmp_path / "here", env=env)
    assert cluster.wait(job) == 0
    there = seen(tmp_path / "here/out")["env"]
    assert there["GREETING"] == "hello world"
    assert (there["GLOO_SOCKET_IFNAME"], there["NCCL_SOCKET_IFNAME"]) == ("em4", "em4")
    assert there["PWD"] == str(tmp_path / "here")


def test_singlenode_refuses_several_nodes(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.sbatch("singlenode.sh", "x", options=["--nodes=2"], cwd=tmp_path, env=FAKE)
    assert cluster.wait(job) == 2
    assert "submit multinode.sh" in (tmp_path / f"kempner-{job}.out").read_text()


@contextlib.contextmanager
def started(
    cluster: Cluster, log: Path, *command: object, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A script that runs as if in a terminal, its output in a file; it ends with the block."""
    with log.open("wb") as out:
        script = subprocess.Popen(
            **cluster.typed(command, env, log.parent),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield script
    finally:
        for _ in range(2):  # the second Ctrl-C does not wait for a save
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    script.wait(10)
        if script.poll() is None:
            for pid in (*descendants(script.pid), script.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            script.wait()


def descendants(pid: int) -> list[int]:
    """The processes below one, which may be in sessions of their own."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [p for child in map(int, children) for p in (child, *descendants(child))]


def test_interactive_runs_beside_and_stops_on_ctrl_c(cluster: Cluster, tmp_path: Path) -> None:
    """Two steps in one job; Ctrl-C saves and stops the second and leaves the first alone."""
    job = cluster.sbatch(
        "multinode.sh",
        f"--run.dir={tmp_path}/first",
        "--plan=wait",
        options=["--gpus-per-node=2"],
        cwd=tmp_path,
        env=FAKE,
    )
    cluster.wait_for("here is attempt 0", tmp_path / f"kempner-{job}.out")
    log, run_dir = tmp_path / "second.log", tmp_path / "second run"
    arguments = cluster.debug_run(run_dir, "--train.max_steps=3000")
    with started(cluster, log, "bash", SCRIPTS / "interactive.sh", job, *arguments) as script:
        cluster.wait_for('"step": 3,', run_dir / "metrics.jsonl")
        os.killpg(script.pid, signal.SIGINT)  # what a terminal does
        assert script.wait(180) == 0, log.read_text()
    text = log.read_text()
    assert "world size 4 on node1, node2" in text and "network of node1: ib0" in text
    status = json.loads((run_dir / "status.json").read_text())
    assert status["state"] == "stopped" and (run_dir / "checkpoints/latest").exists()
    assert cluster.state(job) == "RUNNING"
    cluster.ask("scancel", "--signal=INT", job)  # the user's wish for the first: stop
    assert cluster.wait(job) == 0
    assert json.loads((tmp_path / "first/status.json").read_text())["state"] == "stopped"


def test_interactive_needs_a_running_job(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run("bash", SCRIPTS / "interactive.sh", "999999", "x.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "kempner: error: no job '999999': squeue --me lists yours\n",
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_plain_bash_trains_on_this_machine(
    cluster: Cluster, tmp_path: Path, processes: int
) -> None:
    """No Slurm anywhere; Ctrl-C saves and stops, also under torchrun."""
    env = {"KEMPNER_NPROC": str(processes), "SLURM_CONF": "/nowhere"}
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments = cluster.debug_run(run_dir, "--train.max_steps=3000")
    command = ["bash", SCRIPTS / "singlenode.sh", *arguments]
    with started(cluster, log, *command, env=env) as script:
        cluster.wait_for('"step": 3,', run_dir / "metrics.jsonl")
        os.killpg(script.pid, signal.SIGINT)
        assert script.wait(180) == 0, log.read_text()
    assert f"world size {processes}" in log.read_text()
    assert json.loads((run_dir / "status.json").read_text())["state"] == "stopped"


def test_salloc_shell(cluster: Cluster, tmp_path: Path) -> None:
    """In salloc's shell the script uses the allocation; nothing is requeued."""
    run_dir = f"--run.dir={tmp_path}"
    command = ["salloc", "--nodes=2", "--gpus-per-node=2", "--ntasks-per-node=2", "bash"]
    done = cluster.run(
        *command, SCRIPTS / "multinode.sh", run_dir, "--plan=crash", cwd=tmp_path, env=FAKE
    )
    assert done.returncode == 1
    assert "only a batch job is requeued" in done.stdout
    assert seen(tmp_path)["env"]["SLURM_STEP_NUM_TASKS"] == "4"


def test_repository_with_a_space_in_its_path(cluster: Cluster, tmp_path: Path) -> None:
    """sbatch runs a spool copy; the script finds its own repository, wherever that is."""
    clone = tmp_path / "my clone"
    (clone / "scripts").mkdir(parents=True)
    (clone / "scripts/slurm").symlink_to(SCRIPTS)
    (clone / "src").symlink_to(ROOT / "src")
    job = cluster.sbatch(
        clone / "scripts/slurm/singlenode.sh",
        f"--run.dir={tmp_path}/scripts/slurm/x",
        cwd=tmp_path,
        env=FAKE,
    )
    assert cluster.wait(job) == 0
