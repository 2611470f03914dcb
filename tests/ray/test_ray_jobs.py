"""ray.sh on a real Slurm with a real Ray: it comes up, runs, moves objects, and ends with the right
code and without a trace."""

from __future__ import annotations

import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import ROOT, Cluster, apptainer, program, pyxis
from tests.conftest import losses, status
from tests.ray.ray_job import DRIVER, SECRET, Submit, report


def driver(job_folder: Path, *words: str) -> str:
    return f"python '{DRIVER}' '{job_folder}/report.json' {' '.join(words)}"


def all_nodes_at(address: str, folder: Path) -> dict[str, str]:
    """A shim in front of the real scontrol: every node has this NodeAddr."""
    text = f"""#!/bin/bash
{shutil.which("scontrol")} "$@" | sed 's/NodeAddr=[^ ]*/NodeAddr={address}/'
"""
    return program(folder, "scontrol", text)


def check_everywhere(found: dict, names: list[str]) -> None:  # type: ignore[type-arg]
    """Every host has run a task, and has read an object that another host has made."""
    assert sorted(seen["host"] for seen in found["seen"]) == names
    assert sorted(there for _, there, _ in found["moved"]) == names
    assert all(made != there and size == 5 << 20 for made, there, size in found["moved"])


def test_a_batch_job_on_two_hosts(submit: Submit, tmp_path: Path) -> None:
    """Its exit code is the command's. No secret and no token is in a file; no variable of Slurm is
    in an actor; a long TMPDIR and a user's own tokens do no harm."""
    work, home = tmp_path / "work", tmp_path / "home"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray/auth_token").write_text("of another cluster")
    secrets = tmp_path / "secrets"
    secrets.write_text(f"HF_TOKEN={SECRET}\n")
    secrets.chmod(0o600)
    long = tmp_path / ("long" * 20)
    long.mkdir()
    job = submit(
        2,
        driver(work, "--exit 7"),
        HOME=str(home),
        SECRETS_FILE=str(secrets),
        WANDB_API_KEY=SECRET,
        RAY_AUTH_TOKEN="stale",
        TMPDIR=str(long),
        MARKER="a b",
        PMI_RANK="3",
        RANK="3",
        MASTER_ADDR="elsewhere",
        SLURM_LABELIO="1",
        DASHBOARD_PORT="8265",
        SETUP_COMMAND="""
            export MARKER="$MARKER c$*" PYTHONPATH=/mine
            name=x index=y
            echo prepared on $(uname -n)
        """,
    )
    assert job.end() == 7, job.all()
    found = report(work / "report.json")
    check_everywhere(found, ["node1", "node2"])
    for seen in found["seen"]:
        assert (seen["token"], seen["wandb"], seen["marker"]) == (SECRET, SECRET, "a b c")
        assert seen["foreign"] == [] and seen["gloo"] == "ib0"
        assert seen["pythonpath"] == f"{ROOT}/src:/mine"
        assert seen["auth"] == ["token", None]
    assert found["foreign"] == [] and found["job"] == job.job
    assert found["dashboard"] == [True, False]  # on the head's loopback alone
    assert found["resources"]["CPU"] == 4 and found["resources"]["GPU"] == 4
    text = job.text()
    assert re.search(r"ready: 2 node\(s\), 4 CPUs, 4 GPUs, after \d+\.\d s", text), text
    assert "head node1 (10.77." in text and "ephemeral range" in text
    assert re.search(r"ssh -N -L 8265:127\.0\.0\.1:8265 -J \S+ \S+@node1\n", text)
    logs = {str(f.relative_to(job.logs)) for f in job.logs.rglob("*") if f.is_file()}
    assert {"ray-driver.log", "ray-head.log", "ray-worker-1.log", "dashboard.log"} <= logs
    assert {"ray/node1/gcs_server.out", "ray/node1/raylet.out", "ray/node2/raylet.out"} <= logs
    raylet = (job.logs / "ray/node2/raylet.out").read_text()
    assert "received SIGTERM" in raylet and "draining before" not in raylet  # for up to 30 s
    assert "prepared on node2" in (job.logs / "ray-worker-1.log").read_text()
    files = [f for f in work.rglob("*") if stat.S_ISREG(f.lstat().st_mode)]
    files.remove(work / "report.json")
    assert len(files) > 10
    assert [f for f in files if SECRET.encode() in f.read_bytes()] == []
    assert list(long.iterdir()) == []


def test_a_batch_job_on_four_hosts(submit: Submit, tmp_path: Path) -> None:
    """Each node of a host could have ports of its own; uv has its cache where one wants it."""
    uv = str(tmp_path / "cache/uv")
    job = submit(4, driver(tmp_path / "work"), PORT_STRIDE="20", UV_CACHE_DIR_OVERRIDE=uv)
    assert job.end() == 0, job.all()
    found = report(tmp_path / "work/report.json")
    check_everywhere(found, ["node1", "node2", "node3", "node4"])
    assert sorted(found["ports"]) == [53001, 53021, 53041, 53061]
    assert {seen["uv"] for seen in found["seen"]} == {uv} and Path(uv).is_dir()


def test_kill_9(submit: Submit, tmp_path: Path) -> None:
    """On a host that calls itself 127.0.0.1, which Ray would make into something else."""
    job = submit(1, "echo here; kill -9 $$", **all_nodes_at("localhost", tmp_path / "bin"))
    assert job.end() == 137, job.all()
    assert re.search(r"head node1 \(10\.7[78]\.", job.text())
    assert (job.logs / "ray-driver.log").read_text().startswith("here\n")


def test_an_interactive_job(submit: Submit, tmp_path: Path) -> None:
    """Shells and commands on its nodes, in the job's environment; its end by a file."""
    work = tmp_path / "work"
    work.mkdir()
    (work / ".bashrc").write_text("export PATH=/nowhere:/usr/bin:/bin; export FROM_BASHRC=1\n")
    more = {"DEDICATED_RAY_HEAD": "1", "GPUS_PER_NODE": "1", "HF_TOKEN": SECRET}
    more["RAY_LOG_SYNC_FREQUENCY"] = "1"
    job = submit(3, MARKER="the job's", **more)
    text = job.until("interactive: ")
    assert "3 node(s), 4 CPUs, 2 GPUs" in text
    assert stat.S_IMODE((job.logs / ".ray-token").stat().st_mode) == 0o600
    token = (job.logs / ".ray-token").read_text()
    assert len(token) == 64 and token not in job.attach.read_text()
    assert SECRET not in job.attach.read_text()
    done = job.run("--", "bash", "-c", "uname -n; exit 9", env={"SLURM_JOB_ID": "1"})
    assert (done.returncode, done.stdout) == (9, "node1\n"), done.stderr
    assert job.run("node2", "--", "uname", "-n", env={"SLURM_CONF": ""}).stdout == "node2\n"
    third = job.run("2", "--", "python", str(DRIVER), str(work / "report.json"))
    assert third.returncode == 0, third.stdout + third.stderr
    check_everywhere(report(work / "report.json"), ["node2", "node3"])  # the head only leads
    assert (job.logs / "ray/node2/raylet.out").exists()  # while it runs
    wrong = job.run("7")
    assert wrong.returncode == 2 and "give 0 to 2, or one of node1 node2 node3" in wrong.stderr
    # Whoever has no token, or another one, is not let in.
    join = "import ray; ray.init(); print('inside')"
    for other in ("RAY_AUTH_MODE=disabled", "RAY_AUTH_TOKEN=" + "0" * 64):
        stranger = job.run("--", "env", other, "timeout", "5", "python", "-c", join)
        assert stranger.returncode != 0 and "inside" not in stranger.stdout, stranger.stdout
        assert "InvalidAuthToken" in stranger.stderr, stranger.stderr
    shell = f"cd /; bash '{job.attach}' node2"
    typed = "echo [$MARKER] [$FROM_BASHRC] $(uname -n) $PWD; command -v python; exit 5\n"
    pty = subprocess.run(
        ["script", "-qec", shell, "/dev/null"],
        input=typed, env={**job.cluster.env, "MARKER": "mine"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert pty.returncode == 5, pty.stdout
    assert f"[the job's] [1] node2 {work}" in pty.stdout
    assert f"\n{Path(sys.executable).parent}/python\n" in pty.stdout.replace("\r", "")
    (job.logs / "ENDED").touch()
    assert job.end() == 0, job.all()
    assert "somebody has asked for the end" in job.text()
    files = [f for f in work.rglob("*") if stat.S_ISREG(f.lstat().st_mode)]
    texts = [(f, f.read_bytes()) for f in files if f.name != "report.json"]
    assert [f for f, text in texts if token.encode() in text or SECRET.encode() in text] == []


@pytest.mark.parametrize("how", ["scancel", pytest.param("limit", marks=pytest.mark.soak)])
def test_the_end_comes_from_slurm(submit: Submit, tmp_path: Path, how: str) -> None:
    """Actors that ignore SIGTERM, and their children, end with the job: within KillWait (5 s)."""
    job = submit(2, driver(tmp_path / "work", "--stay"), options="--time=2")
    job.cluster.wait_for("stubborn", tmp_path / "work/report.json", 90)
    if how == "scancel":
        job.cluster.ask("scancel", job.job)
    else:
        job.cluster.ask("scontrol", "update", f"JobId={job.job}", "EndTime=now")
    assert job.end() != 0
    state = {"scancel": "CANCELLED", "limit": "TIMEOUT"}[how]
    assert job.cluster.state(job.job) == state
    assert "SIGTERM: ending the cluster" in job.text()
    assert "end: exit code 143" in job.text()  # not killed before
    assert (job.logs / "ray/node2/raylet.out").exists()


def test_a_warning_ends_it_with_128_and_the_signal(submit: Submit, tmp_path: Path) -> None:
    """The command has some seconds to save; then its exit code 0 does not count."""
    save = "import signal, sys, time; signal.signal(15, lambda *_: (print('saved'), sys.exit(0)))"
    job = submit(1, f'python -c "{save}; print(1); time.sleep(600)"')
    job.cluster.wait_for("1\n", job.logs / "ray-driver.log", 90)
    job.cluster.ask("scancel", "--batch", "--signal=USR1", job.job)  # --signal=B:USR1@60
    assert job.end() == 128 + signal.SIGUSR1, job.all()
    assert "saved" in (job.logs / "ray-driver.log").read_text()


def test_a_signal_to_the_steps_alone(submit: Submit) -> None:
    """As preemption with a grace time does it, and --signal without B: the batch shell gets none;
    a command that saves and ends with 0 has not done its work."""
    save = "import signal, sys, time; signal.signal(15, lambda *_: (print('saved'), sys.exit(0)))"
    job = submit(2, f'python -c "{save}; print(1); time.sleep(600)"')
    job.cluster.wait_for("1\n", job.logs / "ray-driver.log", 90)
    job.cluster.ask("scancel", "--signal=TERM", job.job)
    assert job.end() == 128 + signal.SIGTERM, job.all()
    assert "SIGTERM: ending the cluster" in job.text()
    assert "saved" in (job.logs / "ray-driver.log").read_text()


def test_a_log_directory_that_is_gone(submit: Submit) -> None:
    """Nobody can be told there of the end, and it comes all the same; nor does it matter that
    something cannot be removed."""
    names = '"$SLURM_JOB_ID"-logs "$SLURM_JOB_ID"-attach.sh'
    job = submit(1, f'rm -rf {names}; mkdir "$SLURM_JOB_ID"-attach.sh; exit 7')
    assert job.cluster.wait(job.job) == 7, job.all()
    job.attach.rmdir()
    job.nothing_is_left()


def test_requeue(submit: Submit) -> None:
    job = submit(1)
    job.until("interactive: ")
    job.cluster.ask("scontrol", "requeue", job.job)
    end = time.monotonic() + 60
    second = job.folder / f"{job.job}-logs-r1"
    while job.text().count("interactive: ") < 2:
        assert time.monotonic() < end, job.text()
        if job.cluster.state(job.job) == "PENDING":
            job.cluster.run("scontrol", "update", f"JobId={job.job}", "StartTime=now")
        time.sleep(0.5)
    assert f"touch {second}/ENDED" in job.text()
    assert job.run("--", "true").returncode == 0
    (second / "ENDED").touch()
    assert job.end() == 0, job.all()
    assert (second / "ray/node1/raylet.out").exists() and (job.logs / "ray-head.log").exists()


@pytest.mark.parametrize(
    ("node", "kill", "what"),
    [
        ("node2", "TERM", "raylet"),
        pytest.param("node2", "KILL", "raylet", marks=pytest.mark.soak),
        pytest.param("node1", "KILL", "raylet", marks=pytest.mark.soak),
        pytest.param("node1", "KILL", "gcs_server", marks=pytest.mark.soak),
    ],
)
def test_ray_dies_under_the_driver(
    submit: Submit, tmp_path: Path, node: str, kill: str, what: str
) -> None:
    """`ray start --block` goes on blocking after SIGTERM to its raylet; the job ends all the
    same."""
    job = submit(2, driver(tmp_path / "work", "--stay"))
    job.cluster.wait_for("stubborn", tmp_path / "work/report.json", 90)
    began = time.monotonic()
    job.run(node, "--", "pkill", f"-{kill}", "-x", what)  # a host has processes of its own
    code = job.cluster.wait(job.job, 30)
    assert code == 70 and time.monotonic() - began < 15, job.all()
    job.nothing_is_left()
    assert f"{node}: Ray's " in job.text() or f"{node}: ray start has ended" in job.text()


@pytest.mark.parametrize("how", ["crash", pytest.param("unplug", marks=pytest.mark.soak)])
def test_a_host_is_gone(submit: Submit, tmp_path: Path, how: str) -> None:
    """Nothing on it can say so: the head does, long before Slurm notices. A host that is silent
    has 10 s."""
    job = submit(2, driver(tmp_path / "work", "--stay"))
    cluster = job.cluster
    cluster.wait_for("stubborn", tmp_path / "work/report.json", 90)
    began, plug = time.monotonic(), ("ip", "link", "set", f"m{cluster.number}-2")
    cluster.testbed("crash", "node2") if how == "crash" else cluster.ask(*plug, "down")
    try:
        cluster.wait_for("end: exit code 70", job.log, 40)
        took = time.monotonic() - began  # Slurm waits longer for the host's own word
    finally:
        cluster.testbed("revive", "node2") if how == "crash" else cluster.ask(*plug, "up")
    said = {"crash": "node2: Ray's raylet is gone: port 53001", "unplug": "node2: no answer from"}
    assert said[how] in job.text(), job.all()
    assert took < {"crash": 15, "unplug": 25}[how], job.all()
    assert cluster.wait(job.job) == 70
    end = time.monotonic() + 60
    while "idle" not in cluster.ask("sinfo", "-h", "-p", "gpu", "-n", "node2", "-o", "%t").split():
        assert time.monotonic() < end, cluster.ask("sinfo", "-N")
        time.sleep(0.5)
    for folder in Path("/tmp").glob(f"ray-{job.job}.1-*") if how == "crash" else ():
        shutil.rmtree(folder)  # the disk of a host outlives it
    job.nothing_is_left()


def test_a_busy_port(submit: Submit) -> None:
    """A stranger has the head's port: nobody talks to it, and the user reads which one it is."""
    busy = "import socket as s, time; k = s.create_server(('', 54514)); time.sleep(600)"
    here = f'[[ $(uname -n) != node1 ]] || {{ python3 -c "{busy}" & sleep 1; }}'
    job = submit(2, "true", SETUP_COMMAND=here)
    assert job.end() == 75, job.all()
    assert "node1: PORT=54514: in use on this host" in job.text()
    assert not (job.logs / "ray").exists()


def test_a_node_that_never_joins(submit: Submit) -> None:
    late = "[[ $(uname -n) != node2 ]] || sleep 600"
    job = submit(2, "touch ran", SETUP_COMMAND=late, START_TIMEOUT="12")
    assert job.end() == 75, job.all()
    assert "not complete after 12 s (START_TIMEOUT); missing: node2" in job.text()
    assert not (job.folder / "ran").exists()


def test_a_setup_command_that_fails(submit: Submit) -> None:
    job = submit(2, "true", SETUP_COMMAND="[[ $(uname -n) != node2 ]] || exit 3")
    assert job.end() == 75, job.all()
    assert "node2: SETUP_COMMAND has ended this node with exit code 3" in job.text()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"PORT": "http"}, "PORT=http: give a whole number from 1024 to 65535"),
        ({"GPUS_PER_NODE": "9"}, "GPUS_PER_NODE=9: give a whole number from 0 to 2"),
        ({"OBJECT_STORE_MEMORY": "1000"}, "give a whole number from 78643200"),
        ({"PORT_STRIDE": "2"}, "is NODE_MANAGER_PORT's: give another, or another PORT_STRIDE"),
        ({"METRICS_EXPORT_PORT": "54200"}, "is a worker's"),
        ({"SECRETS_FILE": "open"}, "may be read by others (mode 644): chmod 600"),
        ({"CONTAINER": "/images/a.sif"}, "no apptainer here"),
        ({"DEDICATED_RAY_HEAD": "1", "options": "--nodes=1"}, "give --nodes=2"),
    ],
)
def test_bad_input(submit: Submit, tmp_path: Path, wrong: dict[str, str], message: str) -> None:
    """One message, exit code 2, no step, nothing made."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work/open").touch(0o644)
    job = submit(2, "true", **wrong)
    assert job.end() == 2
    assert message in job.text() and job.text().count("error: ") == 1, job.text()
    assert job.cluster.steps(job.job) == 0 and not job.logs.exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"PORT_STRIDE": "0"}, "PORT_STRIDE=0: node2 and node1 are the same host (10.1.1.1)"),
        ({"METRICS_EXPORT_PORT": "53021"}, "port 53021 of node 0 is NODE_MANAGER_PORT's"),
    ],
)
def test_two_nodes_on_one_host(
    submit: Submit, tmp_path: Path, given: dict[str, str], message: str
) -> None:
    """Their ports differ by 20, unless somebody says otherwise."""
    job = submit(2, "true", **all_nodes_at("10.1.1.1", tmp_path / "bin"), **given)
    assert job.end() == 2 and message in job.text(), job.text()


def test_two_jobs_on_the_same_hosts(submit: Submit, tmp_path: Path) -> None:
    """The end of one leaves the other alone; `ray stop` would not."""
    shared = "--exclusive=oversubscribe --cpus-per-task=2 --mem=1G --nodelist=node1,node2"
    moved = {
        "PORT": "44514", "RAY_CLIENT_SERVER_PORT": "11001", "DASHBOARD_AGENT_LISTEN_PORT": "42365",
        "NODE_MANAGER_PORT": "43001", "OBJECT_MANAGER_PORT": "43003",
        "RUNTIME_ENV_AGENT_PORT": "43005", "DASHBOARD_AGENT_GRPC_PORT": "43007",
        "METRICS_EXPORT_PORT": "43009", "MIN_WORKER_PORT": "44001", "MAX_WORKER_PORT": "44513",
        "GPUS_PER_NODE": "0",
    }  # fmt: skip
    first = submit(2, folder="first", options=shared, GPUS_PER_NODE="0")
    first.until("interactive: ")
    second = submit(2, driver(tmp_path / "second"), folder="second", options=shared, **moved)
    assert second.end() == 0, second.all()
    check_everywhere(report(tmp_path / "second/report.json"), ["node1", "node2"])
    inside = first.run("1", "--", "python", str(DRIVER), str(tmp_path / "first/report.json"))
    assert inside.returncode == 0, inside.stderr
    (first.logs / "ENDED").touch()
    assert first.end() == 0, first.all()


def test_the_trainer_from_a_ray_program(
    submit: Submit, four_hosts: Cluster, tmp_path: Path
) -> None:
    """Two ranks on two hosts, started by actors: the losses are those of one process."""
    words = ["--train.max_steps=10", "--train.deterministic"]
    run = tmp_path / "work/run"
    arguments = " ".join(map(str, four_hosts.debug_run(run, *words)))
    job = submit(2, f"python '{ROOT}/scripts/ray_train.py' {arguments}", GPUS_PER_NODE="0")
    assert job.end() == 0, job.all()
    assert status(run)["state"] == "done"
    assert "world size 2" in (job.logs / "ray-driver.log").read_text()
    one = tmp_path / "one"
    four_hosts.ask(sys.executable, ROOT / "scripts/train.py", *four_hosts.debug_run(one, *words))
    assert losses(run) == pytest.approx(losses(one), 1e-5)


def test_apptainer(submit: Submit, tmp_path: Path) -> None:
    """For a user without rights it makes a user namespace, with each call. Ray, the driver and the
    shells are inside, and none sees another's environment."""
    enter = "IN_CONTAINER=1 exec unshare --user --map-root-user"
    env = {**apptainer(tmp_path / "bin", enter), "CONTAINER": "/images/a.sif"}
    job = submit(1, MARKER="the job's", HF_TOKEN=SECRET, MOUNTS="/scratch:/scratch", **env)
    job.until("interactive: ")
    inside = job.run("--", "python", "-c", "import ray; ray.init(); print('it runs')")
    assert inside.stdout.endswith("it runs\n"), inside.stderr
    shown = "echo $MARKER, $IN_CONTAINER, $PWD, ${KEMPNER_ENVIRON:-none}; exit 4"
    done = job.run("--", "bash", "-c", shown, env={"MARKER": "mine"})
    assert (done.returncode, done.stdout) == (4, f"the job's, 1, {job.folder}, none\n")
    typed = job.run(input="echo $MARKER, $IN_CONTAINER; exit 5\n")
    assert typed.returncode == 5 and "the job's, 1\n" in typed.stdout, typed.stderr
    (job.logs / "ENDED").touch()
    assert job.end() == 0, job.all()
    calls = (tmp_path / "calls").read_text().replace("\\,", ",").splitlines()
    assert len(calls) == 4 and "ray_node.sh" in calls[0] and "ray_enter.sh" in calls[1]
    assert all(f"{job.logs}:{job.logs},/scratch:/scratch" in line for line in calls)
    assert SECRET not in str(calls)


def test_pyxis(submit: Submit, tmp_path: Path) -> None:
    """The container has no name, so that it goes with its step, and is entered by its process."""
    env = {**pyxis(tmp_path / "bin"), "CONTAINER": "registry/image:1"}
    enroot = f"""#!/bin/bash
[[ $1 == exec && -e /proc/$2 ]] && printf '%s ' "$@" >>{tmp_path}/entered && exec "${{@:3}}"
"""
    program(tmp_path / "more", "enroot", enroot)
    env["PATH"] = f"{tmp_path}/more:{env['PATH']}"
    job = submit(1, "python -c 'import ray; ray.init()'", **env)
    assert job.end() == 0, job.all()
    _, first, second = (tmp_path / "calls").read_text().split("srun\n")
    assert "--container-image=registry/image:1" in first
    assert "--container-name" not in first and "--container-" not in second
    assert "ray_enter.sh" in (tmp_path / "entered").read_text()
