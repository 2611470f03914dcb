"""ray.sh on a real Slurm with a real Ray: it comes up, runs, moves objects, and ends with the right
exit code and without a trace."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster import ROOT, Cluster, apptainer, program, pyxis
from tests.conftest import losses, status
from tests.jobs.ray.ray_job import DRIVER, SECRET, RayJob, Submit, processes, report
from tests.waiting import LIMIT_S, until


def driver(base: Path, *words: str) -> str:
    return f"python '{DRIVER}' '{base}/report.json' {' '.join(words)}"


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


# --- jobs that run side by side: see conftest.py ------------------------------------------------


def a_dedicated_head(submit: Submit) -> RayJob:
    base = submit.base
    (base / "work").mkdir()
    bashrc = "export PATH=/nowhere:/usr/bin:/bin; export FROM_BASHRC=1\n"
    (base / "work/.bashrc").write_text(bashrc)
    more = {"DEDICATED_RAY_HEAD": "1", "GPUS_PER_NODE": "1", "HF_TOKEN": SECRET}
    # Not the ports of a test bed: its Slurm has two of 20010 to 22501.
    more["KEMPNER_PORTS"] = "24000-24999"
    return submit(3, MARKER="the job's", RAY_LOG_SYNC_FREQUENCY="1", **more)


@pytest.mark.soak
@pytest.mark.job(make=a_dedicated_head)
def test_the_trainer_from_a_ray_program(job: RayJob) -> None:
    """Two ranks on two hosts, started by actors: their losses are those of one process."""
    run, one = job.folder.parent / "run", job.folder.parent / "one"
    words = ("--train.max_steps=10", "--train.deterministic")
    alone = job.cluster.debug_run(one, *words)
    job.cluster.ask(sys.executable, ROOT / "scripts/train.py", *alone)
    job.until("interactive: ")
    program = ["python", ROOT / "scripts/ray_train.py", "--workers=2"]
    done = job.run("--", *program, *job.cluster.debug_run(run, *words))
    assert done.returncode == 0, done.stdout + done.stderr
    assert status(run)["state"] == "done" and "world size 2" in done.stdout + done.stderr
    assert losses(run) == pytest.approx(losses(one), 1e-5)


@pytest.mark.soak
@pytest.mark.job(make=a_dedicated_head)
def test_reinforcement_learning_from_a_ray_program(job: RayJob) -> None:
    """An engine, a trainer and the orchestrator as actors; the engine is killed in between."""
    run = job.folder.parent / "rl"
    job.until("interactive: ")
    config = ROOT / "configs/rl/arithmetic.toml"
    words = [f"--run.dir={run}", "--train.max_steps=4", "--rl.batch_samples=64"]
    words += ["--schedule.warmup_steps=0", "--rl.eval_interval=0", "--distributed.device=cpu"]
    program = ["python", ROOT / "scripts/ray_rl.py", config, *words]
    with ThreadPoolExecutor() as pool:
        driver = pool.submit(job.run, "--", *program)
        until(lambda: [*run.glob("rl/*/engines/engine-0")] or driver.done())
        assert not driver.done(), driver.result()
        [engine] = [p for p in processes(job.cluster, job.job) if "scripts/serve.py" in p]
        os.kill(int(engine.split()[0]), signal.SIGKILL)
    said = driver.result().stdout + driver.result().stderr
    assert driver.result().returncode == 0 and "starting it again" in said, said
    assert status(run)["state"] == "done" and len(losses(run)) == 4
    assert not (run / "rl").exists()


@pytest.mark.job(make=a_dedicated_head)
def test_an_interactive_job(job: RayJob) -> None:
    """Shells and commands on its nodes, in the job's environment; a file ends it."""
    text, work, nodes = job.until("interactive: "), job.folder, job.nodes
    assert "3 node(s), 4 CPUs, 2 GPUs" in text
    assert stat.S_IMODE((job.logs / ".ray-token").stat().st_mode) == 0o600
    token = (job.logs / ".ray-token").read_text()
    assert len(token) == 64 and token not in job.attach.read_text()
    assert SECRET not in job.attach.read_text()
    done = job.run("--", "bash", "-c", "uname -n; exit 9", env={"SLURM_JOB_ID": "1"})
    assert (done.returncode, done.stdout) == (9, f"{nodes[0]}\n"), done.stderr
    named = job.run(nodes[1], "--", "uname", "-n", env={"SLURM_CONF": ""})
    assert named.stdout == f"{nodes[1]}\n"
    third = job.run("2", "--", "python", str(DRIVER), str(work / "report.json"))
    assert third.returncode == 0, third.stdout + third.stderr
    check_everywhere(report(work / "report.json"), nodes[1:])  # the head runs no tasks
    assert (job.logs / f"ray/{nodes[1]}/raylet.out").exists()  # while it runs
    wrong = job.run("7")
    assert wrong.returncode == 2 and f"give 0 to 2, or one of {' '.join(nodes)}" in wrong.stderr
    # A client without the job's token is refused.
    join = "import ray; ray.init(); print('inside')"
    for other in ("RAY_AUTH_MODE=disabled", "RAY_AUTH_TOKEN=" + "0" * 64):
        stranger = job.run("--", "env", other, "timeout", "5", "python", "-c", join)
        assert stranger.returncode != 0 and "inside" not in stranger.stdout, stranger.stdout
        assert "InvalidAuthToken" in stranger.stderr, stranger.stderr
    shell = f"cd /; bash '{job.attach}' {nodes[1]}"
    typed = "echo [$MARKER] [$FROM_BASHRC] $(uname -n) $PWD; command -v python; exit 5\n"
    pty = subprocess.run(
        **job.cluster.typed(["script", "-qec", shell, "/dev/null"], {"MARKER": "mine"}),
        input=typed,
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert pty.returncode == 5, pty.stdout
    assert f"[the job's] [1] {nodes[1]} {work}" in pty.stdout
    assert f"\n{Path(sys.executable).parent}/python\n" in pty.stdout.replace("\r", "")
    (job.logs / "ENDED").touch()
    assert job.end() == 0, job.all()
    assert "ENDED: the end was requested by that file" in job.text()
    files = [f for f in work.rglob("*") if stat.S_ISREG(f.lstat().st_mode)]
    texts = [(f, f.read_bytes()) for f in files if f.name != "report.json"]
    assert [f for f, text in texts if token.encode() in text or SECRET.encode() in text] == []


@pytest.mark.job(
    make=lambda submit: submit(
        1, "echo here; kill -9 $$", **all_nodes_at("localhost", submit.base / "bin")
    )
)
def test_kill_9(job: RayJob) -> None:
    """On a host that calls itself 127.0.0.1, which Ray would replace by another address."""
    assert job.end() == 137, job.all()
    assert re.search(rf"head {job.nodes[0]} \(10\.7[78]\.", job.text())
    assert (job.logs / "ray-driver.log").read_text().startswith("here\n")


def hostile_surroundings(submit: Submit) -> RayJob:
    """Secrets, foreign tokens, a long TMPDIR, and variables of other launchers."""
    base = submit.base
    (base / "home/.ray").mkdir(parents=True)
    (base / "home/.ray/auth_token").write_text("of another cluster")
    secrets, long = base / "secrets", base / ("long" * 20)
    secrets.write_text(f"HF_TOKEN={SECRET}\n")
    secrets.chmod(0o600)
    long.mkdir()
    return submit(
        2,
        driver(base, "--exit 7"),
        HOME=str(base / "home"),
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


@pytest.mark.soak
@pytest.mark.job(make=hostile_surroundings)
def test_a_batch_job_on_two_hosts(job: RayJob) -> None:
    """Its exit code is the command's. No secret and no token is in a file; no variable of Slurm is
    in an actor; a long TMPDIR and a user's own tokens do no harm."""
    assert job.end() == 7, job.all()
    base, nodes = job.folder.parent, job.nodes
    found = report(base / "report.json")
    check_everywhere(found, nodes)
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
    assert f"head {nodes[0]} (10.77." in text and "ephemeral range" in text
    assert re.search(rf"ssh -N -L 8265:127\.0\.0\.1:8265 -J \S+ \S+@{nodes[0]}\n", text)
    logs = {str(f.relative_to(job.logs)) for f in job.logs.rglob("*") if f.is_file()}
    assert {"ray-driver.log", "ray-head.log", "ray-worker-1.log", "dashboard.log"} <= logs
    assert {f"ray/{nodes[0]}/gcs_server.out", f"ray/{nodes[0]}/raylet.out"} <= logs
    raylet = (job.logs / f"ray/{nodes[1]}/raylet.out").read_text()
    assert "received SIGTERM" in raylet and "draining before" not in raylet  # for up to 30 s
    assert f"prepared on {nodes[1]}" in (job.logs / "ray-worker-1.log").read_text()
    files = [f for f in job.folder.rglob("*") if stat.S_ISREG(f.lstat().st_mode)]
    assert len(files) > 10
    assert [f for f in files if SECRET.encode() in f.read_bytes()] == []
    assert list((base / ("long" * 20)).iterdir()) == []


def in_pyxis(submit: Submit) -> RayJob:
    base = submit.base
    env = {**pyxis(base / "bin"), "CONTAINER": "registry/image:1"}
    enroot = f"""#!/bin/bash
[[ $1 == exec && -e /proc/$2 ]] && printf '%s ' "$@" >>{base}/entered && exec "${{@:3}}"
"""
    program(base / "more", "enroot", enroot)
    env["PATH"] = f"{base}/more:{env['PATH']}"
    return submit(1, "python -c 'import ray; ray.init()'", **env)


@pytest.mark.job(make=in_pyxis)
def test_pyxis(job: RayJob) -> None:
    """The container has no name, so that it ends with its step; it is entered by its process."""
    assert job.end() == 0, job.all()
    base = job.folder.parent
    _, first, second = (base / "calls").read_text().split("srun\n")
    assert "--container-image=registry/image:1" in first
    assert "--container-name" not in first and "--container-" not in second
    assert "ray_enter.sh" in (base / "entered").read_text()


SAVE = "import signal, sys, time; signal.signal(15, lambda *_: (print('saved'), sys.exit(0)))"
SAVES = f'python -c "{SAVE}; print(1); time.sleep(600)"'


@pytest.mark.job(make=lambda submit: submit(1, SAVES))
def test_a_warning_ends_it_with_128_and_the_signal(job: RayJob) -> None:
    """The command has some seconds to save; its exit code 0 then does not count."""
    job.until("1\n", job.logs / "ray-driver.log")
    job.cluster.ask("scancel", "--batch", "--signal=USR1", job.job)  # --signal=B:USR1@60
    assert job.end() == 128 + signal.SIGUSR1, job.all()
    assert "saved" in (job.logs / "ray-driver.log").read_text()


def uv_cache(submit: Submit) -> RayJob:
    base = submit.base
    uv = str(base / "cache/uv")
    return submit(4, driver(base, "--hand-on"), PORT_STRIDE="20", UV_CACHE_DIR_OVERRIDE=uv)


@pytest.mark.soak
@pytest.mark.job(make=uv_cache)
def test_a_batch_job_on_four_hosts(job: RayJob) -> None:
    """Each node may have ports of its own; uv's cache is where the user wants it. The driver
    connects as those of NeMo RL do."""
    assert job.end() == 0, job.all()
    uv, found = job.folder.parent / "cache/uv", report(job.folder.parent / "report.json")
    check_everywhere(found, ["node1", "node2", "node3", "node4"])
    assert sorted(found["ports"]) == [53001, 53021, 53041, 53061]
    assert {seen["uv"] for seen in found["seen"]} == {str(uv)} and uv.is_dir()


ON_THE_SECOND = "((SLURM_NODEID != 1)) ||"


@pytest.mark.soak
@pytest.mark.job(
    make=lambda submit: submit(
        2, "touch ran", SETUP_COMMAND=f"{ON_THE_SECOND} sleep 600", START_TIMEOUT="40"
    )
)
def test_a_node_that_never_joins(job: RayJob) -> None:
    assert job.end() == 75, job.all()
    message = f"not complete after 40 s (START_TIMEOUT); missing: {job.nodes[1]}"
    assert message in job.text(), job.all()
    assert not (job.folder / "ran").exists()


BUSY = (
    "import socket as s, time; k = s.create_server(('', 54514)); open('up', 'w'); time.sleep(600)"
)
OCCUPY = f'python3 -c "{BUSY}" & until [[ -e up ]]; do sleep 0.1; done'


@pytest.mark.job(
    make=lambda submit: submit(
        2, "true", SETUP_COMMAND=f"[[ $SLURM_NODEID != 0 ]] || {{ {OCCUPY}; }}"
    )
)
def test_a_busy_port(job: RayJob) -> None:
    """Another program has the head's port: nobody talks to it, and the message says which port."""
    assert job.end() == 75, job.all()
    assert f"{job.nodes[0]}: PORT=54514: in use on this host" in job.text()
    assert not (job.logs / "ray").exists()


@pytest.mark.job(make=lambda submit: submit(2, "true", SETUP_COMMAND=f"{ON_THE_SECOND} exit 3"))
def test_a_setup_command_that_fails(job: RayJob) -> None:
    assert job.end() == 75, job.all()
    message = f"{job.nodes[1]}: SETUP_COMMAND has ended this node with exit code 3"
    assert message in job.text()


def bad_input(submit: Submit, wrong: dict[str, str], message: str) -> RayJob:
    base = submit.base
    (base / "work").mkdir()
    (base / "work/open").touch(0o644)
    return submit(2, "true", **wrong)


@pytest.mark.job(make=bad_input)
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
def test_bad_input(job: RayJob, wrong: dict[str, str], message: str) -> None:
    """One message, exit code 2, no step, nothing created."""
    assert job.end() == 2
    assert message in job.text() and job.text().count("error: ") == 1, job.text()
    assert job.cluster.steps(job.job) == 0 and not job.logs.exists()


def one_host(submit: Submit, given: dict[str, str], message: str) -> RayJob:
    return submit(2, "true", **all_nodes_at("10.1.1.1", submit.base / "bin"), **given)


@pytest.mark.job(make=one_host)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"PORT_STRIDE": "0"}, " are the same host (10.1.1.1)"),
        ({"METRICS_EXPORT_PORT": "53021"}, "port 53021 of node 0 is NODE_MANAGER_PORT's"),
    ],
)
def test_two_nodes_on_one_host(job: RayJob, given: dict[str, str], message: str) -> None:
    """Their ports are 20 apart by default."""
    assert job.end() == 2 and message in job.text(), job.text()


@pytest.mark.soak
@pytest.mark.job(make=lambda submit: submit(1))
def test_requeue(job: RayJob) -> None:
    job.until("interactive: ")
    job.cluster.ask("scontrol", "requeue", job.job)
    end = time.monotonic() + LIMIT_S
    second = job.folder / f"{job.job}-logs-r1"
    while job.text().count("interactive: ") < 2:
        assert time.monotonic() < end, job.text()
        job.cluster.hasten(job.job)
        time.sleep(0.2)
    assert f"touch {second}/ENDED" in job.text()
    assert job.run("--", "true").returncode == 0
    (second / "ENDED").touch()
    assert job.end() == 0, job.all()
    assert (second / f"ray/{job.nodes[0]}/raylet.out").exists()
    assert (job.logs / "ray-head.log").exists()


GONE = '"$SLURM_JOB_ID"-logs "$SLURM_JOB_ID"-attach.sh'


@pytest.mark.soak
@pytest.mark.job(
    make=lambda submit: submit(1, f'rm -rf {GONE}; mkdir "$SLURM_JOB_ID"-attach.sh; exit 7')
)
def test_a_log_directory_that_is_gone(job: RayJob) -> None:
    """ENDED cannot be created there, and the attach script cannot be removed: the job ends all the
    same."""
    assert job.cluster.wait(job.job) == 7, job.all()
    job.attach.rmdir()
    job.nothing_is_left()


def in_apptainer(submit: Submit) -> RayJob:
    """Without privileges apptainer makes a user namespace in each call."""
    base = submit.base
    enter = "IN_CONTAINER=1 exec unshare --user --map-root-user"
    env = {**apptainer(base / "bin", enter), "CONTAINER": "/images/a.sif"}
    return submit(1, MARKER="the job's", HF_TOKEN=SECRET, MOUNTS="/scratch:/scratch", **env)


@pytest.mark.soak
@pytest.mark.job(make=in_apptainer)
def test_apptainer(job: RayJob) -> None:
    """Ray, the driver and the shells are inside, although none can read another's environment."""
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
    text = (job.folder.parent / "calls").read_text()
    calls = text.replace("\\,", ",").splitlines()
    assert len(calls) == 4 and "ray_node.sh" in calls[0] and "ray_enter.sh" in calls[1]
    assert all(f"{job.logs}:{job.logs},/scratch:/scratch" in line for line in calls)
    assert SECRET not in str(calls)


@pytest.mark.soak
@pytest.mark.job(make=lambda submit: submit(2, SAVES))
def test_a_signal_to_the_steps_alone(job: RayJob) -> None:
    """As preemption with a grace time sends it, and --signal without B: the batch shell gets none.
    A command that saves and ends with 0 has not finished its work."""
    job.until("1\n", job.logs / "ray-driver.log")
    job.cluster.ask("scancel", "--signal=TERM", job.job)
    assert job.end() == 128 + signal.SIGTERM, job.all()
    assert "SIGTERM: ending the cluster" in job.text()
    assert "saved" in (job.logs / "ray-driver.log").read_text()


# --- jobs that have the machine to themselves ---------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("how", ["scancel", "limit"])
def test_the_end_comes_from_slurm(submit: Submit, tmp_path: Path, how: str) -> None:
    """Actors that ignore SIGTERM, and their children, end with the job: within KillWait (5 s)."""
    job = submit(2, driver(tmp_path, "--stay"), options="--time=2")
    job.until("stubborn", tmp_path / "report.json")
    if how == "scancel":
        job.cluster.ask("scancel", job.job)
    else:
        job.cluster.ask("scontrol", "update", f"JobId={job.job}", "EndTime=now")
    assert job.end() != 0
    state = {"scancel": "CANCELLED", "limit": "TIMEOUT"}[how]
    assert job.cluster.state(job.job) == state
    assert "SIGTERM: ending the cluster" in job.text()
    assert "end: exit code 143" in job.text()  # not killed before
    assert (job.logs / f"ray/{job.nodes[1]}/raylet.out").exists()


LATE_AGENT = """
import os, sys, time
mark = os.path.join({folder!r}, os.uname().nodename)
if any(word.endswith("dashboard/agent.py") for word in sys.orig_argv) and not os.path.exists(mark):
    open(mark, "w").close()
    time.sleep(40)
"""


@pytest.mark.soak
def test_agents_that_are_late(submit: Submit, tmp_path: Path) -> None:
    """As on a file system that is slow at the first imports: Ray's limit is 15 s."""
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(LATE_AGENT.format(folder=str(slow)))
    setup = f"export PYTHONPATH='{slow}'${{PYTHONPATH:+:$PYTHONPATH}}"
    job = submit(2, driver(tmp_path), SETUP_COMMAND=setup)
    assert job.end() == 0, job.all()
    check_everywhere(report(tmp_path / "report.json"), ["node1", "node2"])
    for name in ("ray-head.log", "ray-worker-1.log"):
        assert "starting Ray again" in (job.logs / name).read_text(), job.all()


@pytest.mark.soak
def test_two_jobs_on_the_same_hosts(submit: Submit, tmp_path: Path) -> None:
    """The end of one leaves the other alone; `ray stop` would not."""
    # From Slurm 23.02 on --oversubscribe contradicts the script's --exclusive.
    shared = "--exclusive=oversubscribe --cpus-per-task=2 --mem=1G --nodelist=node1,node2"
    moved = {
        "PORT": "44514", "RAY_CLIENT_SERVER_PORT": "11001", "DASHBOARD_AGENT_LISTEN_PORT": "42365",
        "NODE_MANAGER_PORT": "43001", "OBJECT_MANAGER_PORT": "43003",
        "RUNTIME_ENV_AGENT_PORT": "43005", "DASHBOARD_AGENT_GRPC_PORT": "43007",
        "METRICS_EXPORT_PORT": "43009", "MIN_WORKER_PORT": "44001", "MAX_WORKER_PORT": "44513",
        "GPUS_PER_NODE": "0",
    }  # fmt: skip
    first = submit(2, folder="first", options=shared, GPUS_PER_NODE="0")
    # It ends only when the other one is complete, too.
    both = f"until [[ -e '{tmp_path}/both' ]]; do sleep 0.1; done; {driver(tmp_path)}"
    second = submit(2, both, folder="second", options=shared, **moved)
    first.until("interactive: ")
    second.until("driver: ")
    (tmp_path / "both").touch()
    assert second.end() == 0, second.all()
    check_everywhere(report(tmp_path / "report.json"), ["node1", "node2"])
    inside = first.run("1", "--", "python", str(DRIVER), str(tmp_path / "first/report.json"))
    assert inside.returncode == 0, inside.stderr
    (first.logs / "ENDED").touch()
    assert first.end() == 0, first.all()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("node", "kill", "what"),
    [
        ("node2", "TERM", "raylet"),
        ("node2", "KILL", "raylet"),
        ("node1", "KILL", "raylet"),
        ("node1", "KILL", "gcs_server"),
    ],
)
def test_ray_dies_under_the_driver(
    submit: Submit, tmp_path: Path, node: str, kill: str, what: str
) -> None:
    """`ray start --block` keeps blocking after SIGTERM to its raylet; the job ends all the same."""
    job = submit(2, driver(tmp_path, "--stay"))
    job.until("stubborn", tmp_path / "report.json")
    began = time.monotonic()
    job.run(node, "--", "pkill", f"-{kill}", "-x", what)  # a host sees only its own processes
    code = job.cluster.wait(job.job)
    assert code == 70 and time.monotonic() - began < 15, job.all()
    job.nothing_is_left()
    assert f"{node}: Ray's " in job.text() or f"{node}: ray start has ended" in job.text()


@pytest.mark.soak
@pytest.mark.parametrize("how", ["crash", pytest.param("unplug", marks=pytest.mark.soak)])
def test_a_host_that_is_down(submit: Submit, four_hosts: Cluster, tmp_path: Path, how: str) -> None:
    """It cannot report that itself: the head does, long before Slurm notices. A host that is
    merely silent has 10 s."""
    until(  # back from the other case
        lambda: four_hosts.ask("sinfo", "-h", "-p", "gpu", "-o", "%t").split() == ["idle"],
        lambda: four_hosts.ask("sinfo", "-N"),
    )
    job = submit(2, driver(tmp_path, "--stay"))
    cluster = job.cluster
    job.until("stubborn", tmp_path / "report.json")
    began, plug = time.monotonic(), ("ip", "link", "set", f"m{cluster.number}-2")
    cluster.testbed("crash", "node2") if how == "crash" else cluster.ask(*plug, "down")
    try:
        cluster.wait_for("end: exit code 70", job.log)
        took = time.monotonic() - began  # Slurm itself waits longer for the host
    finally:
        cluster.testbed("revive", "node2") if how == "crash" else cluster.ask(*plug, "up")
    said = {"crash": "node2: Ray's raylet is gone: port 53001", "unplug": "node2: no answer from"}
    assert said[how] in job.text(), job.all()
    assert took < {"crash": 15, "unplug": 25}[how], job.all()
    assert cluster.wait(job.job) == 70
    for folder in Path("/tmp").glob(f"ray-{job.job}.1-*") if how == "crash" else ():
        shutil.rmtree(folder)  # the disk of a host outlives its crash
    job.nothing_is_left()
