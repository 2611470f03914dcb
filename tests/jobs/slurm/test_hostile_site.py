"""The hostile site of the test bed: each part does what it says, and what a run does there.

A finding that the kit does not survive yet is marked: its test goes through the front door, and who
mends it takes the mark away.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import ENDED, TESTBED, pyxis
from tests.conftest import status
from tests.site import Site, boot_site, decisions
from tests.waiting import until

PARTS = "noise,accounting,home,nodes,twin,clock,memory"
SEED = "56"  # of the first twenty calls the 4th, the 6th and the 11th fail, and none is late


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Five hosts of two GPUs, of which the last three are broken; Slurm answers."""
    with boot_site(5, 2, tmp_path_factory, PARTS) as site:
        yield site


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One host whose questions to Slurm fail one time in ten."""
    more = {"KEMPNER_TESTBED_SEED": SEED}
    with boot_site(1, 2, tmp_path_factory, "slow", **more) as site:
        yield site


# --- Slurm's clients ----------------------------------------------------------------------------


def test_one_call_in_ten_fails_as_slurm_fails(slow: Site) -> None:
    """With its words, and one that is carried out nevertheless."""
    job = slow.wrap("sleep 300", cwd=slow.folder("slow"))
    loop = f"""for i in {{1..12}}; do
        scontrol update JobId={job} Comment=$i && echo "$i ok"
        [[ $i != 6 ]] || scontrol -V >&2 # this one asks nobody
    done 2>&1"""
    said = slow.on("node1", "bash", "-c", loop).stdout
    told = "slurm_load_jobs error: "
    assert [line for line in said.splitlines() if not line.endswith("ok")] == [
        f"{told}Socket timed out on send/recv operation",
        f"{told}Socket timed out on send/recv operation",
        slow.ask("alice", "scontrol", "-V"),
        f"{told}Unable to contact slurm controller (connect failure)",
    ]
    calls = (slow.state / "slow/calls").read_text().splitlines()
    failed = [line.split()[:4] for line in calls if line.split()[2] != "ok"]
    assert failed == [
        ["4", "node1", "timeout", "scontrol"],
        ["6", "node1", "lost", "scontrol"],
        ["11", "node1", "away", "scontrol"],
    ]
    assert slow.cluster.field(job, "Comment") == "12"
    slow.cluster.ask("scancel", job)


def test_what_is_lost_was_done(slow: Site) -> None:
    """The sixth call of a seed, again: the job has its comment, and scontrol has failed."""
    job = slow.wrap("sleep 300", "--hold", cwd=slow.folder("lost"))
    (slow.state / "slow/calls").write_text("x\n" * 5)
    done = slow.on("node1", "scontrol", "update", f"JobId={job}", "Comment=lost")
    assert done.returncode == 1
    assert slow.cluster.field(job, "Comment") == "lost"
    slow.cluster.ask("scancel", job)


def test_the_controller_goes_away_and_keeps_its_jobs(slow: Site) -> None:
    job = slow.wrap("sleep 300", cwd=slow.folder("away"))
    slow.until(job, "RUNNING")
    command = ["bash", str(TESTBED), "away", "3"]
    away = subprocess.Popen(command, env=slow.cluster.env)
    until(lambda: slow.cluster.run("scontrol", "ping").returncode != 0, alive=(away,))
    assert away.wait(timeout=120) == 0
    assert slow.cluster.state(job) == "RUNNING"
    slow.cluster.ask("scancel", job)


# --- users, accounts, homes ---------------------------------------------------------------------


@pytest.mark.soak
def test_users_may_not(site: Site) -> None:
    """Alice is nobody on this machine, cannot write the repository, and can run its Python."""
    assert site.ask("alice", "id", "-un") == "alice"
    assert subprocess.run(["id", "alice"], capture_output=True).returncode == 1
    assert site.run("alice", "touch", site.kit / "README.md").returncode == 1
    python = site.state / "venv/bin/python"
    found = site.ask("alice", python, "-c", "import kempner, numpy; print(kempner.__file__)")
    assert found == f"{site.kit}/src/kempner/__init__.py"
    assert site.run("mallory", "touch", site.project / "x").returncode == 1
    down = site.cluster.root("bash", TESTBED, "as", "bob", "true")
    assert down.returncode == 2 and "no user 'bob' at this site: give one of alice" in down.stderr


def test_accounts_and_limits(site: Site) -> None:
    site.need("accounting")
    folder = site.folder("accounts")
    job = site.wrap("true", "--hold", cwd=folder)
    assert site.cluster.field(job, "Account") == "lab"
    assert site.ask("mallory", "sh", "-c", "SQUEUE_STATES=all squeue -h -o %i") == ""
    assert "Access" in site.run("mallory", "scancel", job).stderr
    for option, words in (
        ("--account=none", "Invalid account"),
        ("--qos=tight --time=40", "QOSMaxWallDurationPerJobLimit"),
    ):
        command = ["sbatch", "--hold", *option.split(), "--wrap=true"]
        done = site.run("alice", *command, cwd=folder)
        assert done.returncode == 1 and words in done.stderr, done.stderr
    tight = ["sbatch", "--parsable", "--hold", "--qos=tight", "--time=1", "--wrap=true"]
    codes = [site.run("alice", *tight, cwd=folder).returncode for _ in range(4)]
    assert codes == [0, 0, 0, 1]
    site.cluster.ask("scancel", "--account=lab")


def test_a_qos_preempts(site: Site) -> None:
    site.need("accounting")
    folder = site.folder("preempted")
    words = ["--exclusive", "--nodelist=node1", "--requeue", "--qos=scavenge"]
    job = site.wrap("trap 'exit 0' TERM; sleep 300 & wait", *words, cwd=folder)
    site.until(job, "RUNNING")
    urgent = ["--exclusive", "--nodelist=node1", "--qos=urgent"]
    other = site.wrap("true", *urgent, cwd=folder)
    until(lambda: site.cluster.field(job, "PreemptTime") != "None")
    site.cluster.ask("scancel", job, other)


def test_the_home_is_full_after_1_mb(site: Site) -> None:
    fill = site.run("alice", "sh", "-c", "head -c 2000000 /dev/zero >~/full; rm ~/full")
    assert "No space left on device" in fill.stderr


# --- noise --------------------------------------------------------------------------------------


def test_the_site_talks_and_sets(site: Site) -> None:
    folder = site.folder("noise")
    command = "printenv SITE_TASK_PROLOG SQUEUE_STATES; squeue -h | wc -l"
    job = site.wrap(command, cwd=folder)
    assert site.cluster.wait(job) == 0
    told = (folder / f"{job}.out").read_text().splitlines()
    welcome = "*** Welcome to this site: scratch is purged on Sunday ***"
    assert told == [welcome, "1", "PENDING", "0"]  # none, and it runs at this time
    assert site.cluster.field(job, "Features") == "any"
    again = site.wrap("true", "--hold", "--constraint=any", cwd=folder)
    assert site.cluster.field(again, "Features") == "any&any"
    assert "relative" not in site.cluster.ask("squeue", "-h", "-j", again)
    site.cluster.ask("scancel", again)


def test_no_variable_goes_with_a_job(site: Site) -> None:
    folder = site.folder("export")
    words = ["sbatch", "--parsable", "--output=%j.out", "--wrap=printenv MINE SQUEUE_STATES HOME"]
    job = site.ask("alice", *words, cwd=folder, env={"MINE": "1"})
    site.cluster.wait(job)
    told = (folder / f"{job}.out").read_text().splitlines()[1:]
    assert told == ["PENDING", f"{site.state}/home/alice"]


# --- hosts --------------------------------------------------------------------------------------


def test_broken_hosts_look_well_to_slurm(site: Site) -> None:
    site.need("nodes")
    assert site.cluster.ask("sinfo", "-h", "-p", "gpu", "-o", "%D", "-t", "idle,mix,alloc") == "5"
    (site.project / "seen").touch()
    see = ["ls", site.project]
    assert "seen" in site.on("node2", *see).stdout
    assert site.on("node3", *see).stdout == ""
    assert "Input/output error" in site.on("node4", *see).stderr
    python = [site.state / "venv/bin/python", "-c", "import torch"]
    assert "cannot open shared object file" in site.on("node5", *python).stderr
    assert site.on("node4", *python).returncode == 0


def test_a_host_is_broken_while_it_is_up(slow: Site) -> None:
    see = ["ls", slow.project]
    assert slow.on("node1", *see).returncode == 0
    slow.cluster.testbed("break", "node1", "eio")
    assert "Input/output error" in slow.on("node1", *see).stderr
    slow.cluster.testbed("revive", "node1")
    until(lambda: slow.on("node1", *see).returncode == 0)  # it boots


def test_two_clusters_with_the_same_names(site: Site) -> None:
    site.need("twin")
    twin = dict(site.cluster.env) | {"KEMPNER_TESTBED": (site.state / "twin").read_text().strip()}
    twin["SLURM_CONF"] = f"/run/kempner-testbed-{twin['KEMPNER_TESTBED']}/slurm.conf"
    hosts = ("sinfo", "-h", "-N", "-p", "gpu", "-n", "node[1-2]", "-o", "%N")
    there = site.cluster.run(*hosts, env=twin).stdout
    assert there.split() == ["node1", "node2"] == site.cluster.ask(*hosts).split()
    job = site.wrap("true", "--hold", cwd=site.folder("twin"))
    number = ""
    while number != job:
        words = ("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true")
        number = site.cluster.run(*words, env=twin).stdout.strip()
        site.cluster.run("scancel", number, env=twin)
        assert int(number) <= int(job)
    names = [site.cluster.run("scontrol", "show", "config", env=e).stdout for e in (None, twin)]
    here, other = (x.split("ClusterName")[1].split()[1] for x in names)
    assert here != other
    site.cluster.ask("scancel", job)


def test_clocks_are_90_s_apart(site: Site) -> None:
    folder = site.folder("clock")
    words = ["--nodes=2", "--nodelist=node1,node2"]
    command = (
        "srun --export=ALL --ntasks-per-node=1 --label python3 -c 'import time; print(time.time())'"
    )
    job = site.wrap(command, *words, cwd=folder)
    assert site.cluster.wait(job) == 0
    told = re.findall(r"^(\d): (\d+\.\d+)$", log(folder, job), re.M)
    times = {rank: float(text) for rank, text in told}
    assert 60 < times["1"] - times["0"] < 120, log(folder, job)


def test_memory_is_short(site: Site) -> None:
    """The kernel kills what takes more than its host has, and nothing else."""
    site.need("memory")
    folder = site.folder("memory")
    greedy = "python3 -c 'x = bytearray(3 << 30); x[::4096] = b\"1\" * (3 << 18)'"
    job = site.wrap(f"srun --export=ALL {greedy}; echo $?", "--nodelist=node1", cwd=folder)
    site.cluster.wait(job)
    assert (folder / f"{job}.out").read_text().splitlines()[-1] == "137"
    assert site.on("node1", "true").returncode == 0


# --- findings -----------------------------------------------------------------------------------


def fake(site: Site, plan: str, folder: Path, **env: str) -> str:
    """The stand-in for the trainer, alice's, in one job; its log is in `folder`."""
    words = [f"--run.dir={folder / 'run'}", f"--plan={plan}"]
    env = {"KEMPNER_TRAIN": str(site.trainer), **env}
    options = ["--gpus-per-node=1", f"--output={folder}/%j.out", "--nodelist=node1"]
    return site.sbatch("singlenode.sh", *words, options=options, cwd=folder, env=env)


def log(folder: Path, job: str) -> str:
    path = folder / f"{job}.out"
    return path.read_text() if path.exists() else "no log"


def assert_done(site: Site, folder: Path, job: str) -> None:
    """The job has come to its end, and the run is done."""
    site.cluster.wait(job)
    assert site.cluster.state(job) == "COMPLETED", log(folder, job)
    assert status(folder / "run")["state"] == "done", log(folder, job)


def test_a_run_of_alice_is_done(site: Site) -> None:
    """With a crash and a restart in place, among all of the noise."""
    folder = site.folder("well")
    assert_done(site, folder, fake(site, "crash,done", folder))
    assert decisions(folder / "run") == ["restart", "end"]


@pytest.mark.parametrize(
    "done", [pytest.param(False, id="lost"), pytest.param(True, id="carried out")]
)
def test_a_requeue_that_times_out(site: Site, done: bool) -> None:
    folder = site.folder(f"requeue-{done}")
    carry_out = f'{shutil.which("scontrol")} "$@" >/dev/null 2>&1;' if done else ""
    before = f"""[[ $1 != requeue ]] || ! mkdir {folder}/once 2>/dev/null || {{
        {carry_out} echo "Socket timed out on send/recv operation" >&2
        exit 1
    }}"""
    job = fake(site, "crash,crash,done", folder, **site.shim(folder, "scontrol", before))
    assert_done(site, folder, job)


@pytest.mark.soak
def test_a_controller_that_is_away_when_a_rank_dies(site: Site) -> None:
    folder = site.folder("away")
    job = fake(site, "crash-later,done", folder, KEMPNER_RESTARTS="0")
    site.cluster.wait_for("here is attempt 0", folder / f"{job}.out")
    site.cluster.testbed("away", 130)
    assert_done(site, folder, job)


def test_no_answer_when_a_rank_dies(site: Site) -> None:
    """As above, for 8 s, without the controller's own delays."""
    folder = site.folder("no-answer")
    before = f"""[[ ! -e {folder}/away ]] || {{
        echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
        exit 1
    }}"""
    job = fake(site, "wait,done", folder, **site.shim(folder, "scontrol", before))
    site.cluster.wait_for("here is attempt 0", folder / f"{job}.out")
    (folder / "away").touch()
    site.cluster.ask("scancel", "--signal=KILL", f"{job}.0")
    time.sleep(8)
    (folder / "away").unlink()
    assert_done(site, folder, job)


@pytest.mark.parametrize("later", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_no_answer_at_a_start(site: Site, later: bool) -> None:
    """Once the script has begun, at a first start and at a later one."""
    folder = site.folder(f"no-answer-{later}")
    before = f"""[[ ! -e {folder}/away || "$*" != 'show job -d '* && $2 != hostnames ]] || {{
        echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
        exit 1
    }}"""
    away = folder / "away"
    if not later:
        away.touch()
    plan = "wait,done" if later else "done"
    job = fake(site, plan, folder, **site.shim(folder, "scontrol", before))
    if later:
        site.cluster.wait_for("here is attempt 0", folder / f"{job}.out")
        site.cluster.ask("scancel", "--batch", "--signal=TERM", job)
        site.cluster.wait_for("requeue: interrupted", folder / f"{job}.out")
        away.touch()
        site.cluster.start_again(job)
    site.cluster.wait_for("Slurm does not answer", folder / f"{job}.out")
    time.sleep(2)
    away.unlink()
    assert_done(site, folder, job)


def test_a_batch_log_in_a_full_home(site: Site) -> None:
    folder, home = site.folder("home"), site.state / "home/alice"
    site.run("alice", "sh", "-c", "head -c 2000000 /dev/zero >~/full")
    try:
        words = [f"--run.dir={folder / 'run'}", "--plan=crash,done"]
        options = ["--gpus-per-node=1", "--nodelist=node1"]
        env = {"KEMPNER_TRAIN": str(site.trainer)}
        job = site.sbatch("singlenode.sh", *words, options=options, cwd=home, env=env)
        assert_done(site, folder, job)
    finally:
        (home / "full").unlink()


def test_the_end_of_the_job_is_known(site: Site) -> None:
    folder = site.folder("end")
    ask = """import time
from kempner.jobs.slurm import seconds_left
end = time.monotonic() + 20
while seconds_left() is None and time.monotonic() < end:
    time.sleep(0.2)
print("seconds left:", seconds_left())"""
    (folder / "ask.py").write_text(ask)
    words = [f"--run-dir={folder / 'run'}", "--", "python3", folder / "ask.py"]
    options = ["--time=10", f"--output={folder}/%j.out", "--nodes=1", "--nodelist=node1"]
    job = site.sbatch("run.sh", *words, options=options, cwd=folder)
    site.cluster.wait(job)
    told = log(folder, job).partition("seconds left: ")[2].split()
    assert told, log(folder, job)
    assert told[0] != "None"


def test_pyxis_under_a_task_prolog_that_prints(site: Site) -> None:
    folder = site.folder("pyxis")
    folder.chmod(0o777)
    env = {**pyxis(folder / "bin"), "KEMPNER_CONTAINER": "/images/a.sqsh"}
    env |= {"KEMPNER_CONTAINER_RUNTIME": "pyxis"}
    env |= {"KEMPNER_PYTHON": str(site.state / "venv/bin/python")}
    assert_done(site, folder, fake(site, "done", folder, **env))


def test_nodes_that_users_may_not_see(site: Site) -> None:
    conf = Path(site.cluster.env["SLURM_CONF"])
    whole = conf.read_text()
    folder = site.folder("private")
    try:
        conf.write_text(whole.replace("PrivateData=jobs\n", "") + "PrivateData=jobs,nodes\n")
        site.cluster.ask("scontrol", "reconfigure")
        assert_done(site, folder, fake(site, "done", folder))
    finally:
        conf.write_text(whole)
        site.cluster.ask("scontrol", "reconfigure")


# --- findings: two jobs on one run directory ----------------------------------------------------


def train(site: Site, folder: Path, user: str = "alice", **env: str) -> str:
    """The real trainer for a minute, in one process."""
    words = site.debug_run(folder / "run", "--train.max_steps=150", "--checkpoint.interval=10")
    env = {"KEMPNER_TRAIN": str(site.faulty_trainer), "FAULTS": "slow ms=400", **env}
    options = ["--nodes=1", "--gpus-per-node=1", f"--output={folder}/%j.out", "--exclude=node[3-5]"]
    options += ["--exclusive=oversubscribe", "--cpus-per-task=1", "--mem=1G"]
    return site.sbatch("multinode.sh", *words, options=options, cwd=folder, env=env, user=user)


def assert_refused(site: Site, folder: Path, first: str, second: str) -> None:
    """The second job leaves the run to the first one: no step of it is in the log."""
    refused = "is in use by"

    def decided() -> bool:
        ended = site.cluster.state(second) in ENDED
        return ended or any(words in log(folder, second) for words in (refused, "step  "))

    until(decided, lambda: log(folder, second))
    try:
        assert refused in log(folder, second), log(folder, second)
        assert site.cluster.state(first) == "RUNNING"
    finally:
        site.cluster.run("scancel", first, second)


@pytest.mark.soak
def test_a_second_job_of_a_user_with_squeue_states(site: Site) -> None:
    folder = site.folder("second")
    first = train(site, folder)
    site.cluster.wait_for("step  20/", folder / f"{first}.out")
    assert_refused(site, folder, first, train(site, folder))


@pytest.mark.soak
def test_a_second_job_of_a_teammate(site: Site) -> None:
    site.need("accounting")
    folder = site.folder("teammate")
    folder.chmod(0o777)
    quiet = {"SQUEUE_STATES": "", "SQUEUE_PARTITION": "", "SQUEUE_FORMAT": ""}
    first = train(site, folder, **quiet)
    site.cluster.wait_for("step  20/", folder / f"{first}.out")
    for path in (folder / "run", *(folder / "run").rglob("*")):
        os.chmod(path, 0o777, follow_symlinks=True) if path.exists() else None
    assert_refused(site, folder, first, train(site, folder, user="mallory", **quiet))


@pytest.mark.soak
def test_a_second_job_of_another_cluster(site: Site, tmp_path: Path) -> None:
    """Root's, on both clusters: their users are different ones."""
    site.need("twin")
    number = (site.state / "twin").read_text().strip()
    twin = {"KEMPNER_TESTBED": number, "SLURM_CONF": f"/run/kempner-testbed-{number}/slurm.conf"}
    words = site.cluster.debug_run(
        tmp_path / "run", "--train.max_steps=150", "--checkpoint.interval=10"
    )
    trainer = Path(__file__).parents[2] / "trainer/fault/faulty_train.py"
    env = {"KEMPNER_TRAIN": str(trainer), "FAULTS": "slow ms=400"}
    jobs = []
    for where, cluster in (("here", {}), ("there", twin)):
        options = ["--nodes=1", "--gpus-per-node=1", f"--output={tmp_path}/{where}.out"]
        options += ["--nodelist=node1"]
        more = {"cwd": tmp_path, "env": {**env, **cluster}}
        jobs.append(site.cluster.sbatch("multinode.sh", *words, options=options, **more))
        if where == "here":
            site.cluster.wait_for("step  20/", tmp_path / "here.out")
    there = tmp_path / "there.out"
    try:
        until(there.exists)
        until(lambda: any(words in there.read_text() for words in ("is in use by", "step   ")))
        assert "is in use by" in there.read_text()
        assert site.cluster.state(jobs[0]) == "RUNNING"
    finally:
        site.cluster.run("scancel", jobs[0])
        site.cluster.run("scancel", jobs[1], env=twin)
