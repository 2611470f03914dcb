"""scripts/slurm/rl.sh on a real Slurm of three hosts, with stand-ins for its programs: what is lost
comes back, no task is trained twice or left out, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import SCRIPTS, Cluster, boot
from tests.conftest import status
from tests.extensions.fault.rl_run import FAKE, ROLES, THREE, RlRun
from tests.waiting import until

STEPS = 30


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with boot(3, 2, tmp_path_factory) as cluster:
        yield cluster


@pytest.fixture
def run(three: Cluster, tmp_path: Path) -> Iterator[RlRun]:
    found = RlRun(three, tmp_path)
    yield found
    found.end()


def assert_done(run: RlRun, decisions: tuple[str, ...] = ("end",)) -> None:
    """Each step trained the tasks that follow those of the step before."""
    assert status(run.dir)["state"] == "done", run.log
    counted = {line["step"]: line["tasks"] for line in run.lines()}
    assert counted == {n: [2 * n - 2, 2 * n - 1] for n in range(1, STEPS + 1)}
    assert tuple(run.decisions()) == decisions, run.log
    assert (run.dir / "evaluated").exists()
    run.assert_nothing_left()


def test_engines_come_back_and_the_end_is_orderly(run: RlRun) -> None:
    """Two engines are killed, one of them again; the trainer still saves when the orchestrator has
    ended, and the orchestrator evaluates when the trainer has."""
    more = {"FAKE_STEP_S": "0.2", "FAKE_EVALUATION_S": "2", "KEMPNER_CODE": "1"}
    run.start(f"--train.max_steps={STEPS}", **more)
    run.wait_for("engine 3 at http://")
    logs = run.dir / "logs/latest"
    until(lambda: (logs / "engine-3.log").exists())
    token = next(run.dir.glob("rl/*/token")).read_text()
    run.wait_for_step(3)
    pid = run.processes("trainer")[0]
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    run.strike("engine", 1)
    run.strike("engine", 2)
    run.wait_for(r"engine 1 is started again\n(.*\n)*.*engine 1 at http")
    run.strike("engine", 1)
    assert run.wait() == 0, run.log
    assert_done(run)
    assert run.log.count("engine 1 is started again") == 2
    assert run.log.count("engine 2 is started again") == 1
    assert "engines 2 to 3 (kit, 16 slots, 1 GPU(s) each): on node3" in run.log
    assert "the orchestrator has" not in run.log
    (copy,) = (run.dir / "code").glob("*/scripts/slurm/rl.sh")  # the code of the submission
    assert f"{copy.parents[2]}/.inputs{run.tiny()}" in words
    said = "".join(path.read_text() for path in logs.glob("*.log")) + run.log
    assert "batch 30" in said and "serve: here" in said and token not in said


@pytest.mark.parametrize(
    ("role", "step"),
    [
        ("orchestrator", 7),
        pytest.param("trainer", 7, marks=pytest.mark.soak),
        pytest.param("trainer", 1, marks=pytest.mark.soak),
        pytest.param("trainer", 20, marks=pytest.mark.soak),
        pytest.param("orchestrator", 1, marks=pytest.mark.soak),
        pytest.param("orchestrator", 20, marks=pytest.mark.soak),
    ],
)
def test_kill_of_trainer_and_orchestrator(run: RlRun, role: str, step: int) -> None:
    """The job is requeued, and both go on after the same step."""
    run.start(f"--train.max_steps={STEPS}", FAKE_STEP_S="0.1")
    run.wait_for_step(step)
    run.strike(role)
    assert run.wait() == 0, run.log
    assert_done(run, ("requeue", "end"))
    if role == "orchestrator":  # the trainer has saved
        steps = [line["step"] for line in run.lines()]
        assert len(steps) == len(set(steps)), steps


def test_no_engine_is_left(run: RlRun) -> None:
    """And cancelled afterwards: nothing stays on the nodes."""
    run.start(f"--train.max_steps={STEPS}", "--rl.inference.restarts=0", FAKE_STEP_S="0.1")
    run.wait_for("engine 3 at http://")
    run.wait_for_step(3)
    for engine in range(4):
        run.strike("engine", engine)
    until(lambda: run.decisions() == ["requeue"])
    assert "no engine is left" in run.log
    saved = int(os.readlink(run.dir / "checkpoints/latest").rpartition("_")[2])
    assert saved == run.lines()[-1]["step"]
    until(lambda: run.cluster.state(run.job) == "PENDING")
    run.cluster.ask("scancel", run.job)
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("at", "options"),
    [
        ("scancel", THREE),
        pytest.param(
            "time limit", (*THREE, "--time=1", "--signal=B:SIGTERM@20"), marks=pytest.mark.soak
        ),
        pytest.param("preemption", THREE, marks=pytest.mark.soak),
    ],
)
def test_the_end_of_a_job(run: RlRun, at: str, options: tuple[str, ...]) -> None:
    run.start(f"--train.max_steps={STEPS}", options=options, FAKE_STEP_S="2.5")
    run.wait_for_step(2)
    if at == "scancel":
        run.cluster.ask("scancel", run.job)
        run.cluster.wait(run.job)
        until(lambda: not any(map(run.processes, ("trainer", "orchestrator", "engine"))))
        assert run.decisions() in ([], ["leave"]) and run.cluster.field(run.job, "Restarts") == "0"
        return
    if at == "preemption":
        other = ["sbatch", "--parsable", "-p", "urgent", "--nodes=3", "--exclusive", "-o/dev/null"]
        run.cluster.ask(*other, "--wrap=sleep 3")
    assert run.wait() == 0, run.log
    assert_done(run, tuple(run.decisions()))
    assert len({line["step"] for line in run.lines()}) == len(run.lines()), "none is done twice"
    assert run.decisions()[0] in ("requeue", "leave")


@pytest.mark.soak
def test_a_request_to_leave(run: RlRun) -> None:
    """On one node, whose GPUs both share."""
    run.start(f"--train.max_steps={STEPS}", options=("--nodes=1",), FAKE_STEP_S="0.3")
    run.wait_for_step(3)
    run.cluster.ask("scancel", "--batch", "--signal=TERM", run.job)
    until(lambda: run.decisions() == ["requeue"])
    assert run.wait() == 0, run.log
    assert_done(run, ("requeue", "end"))
    steps = [line["step"] for line in run.lines()]
    assert len(steps) == len(set(steps)), "none is done twice"
    assert "engine 0 (kit, 16 slots, 1 GPU(s) each): on node1" in run.log


@pytest.mark.parametrize(
    "name", [pytest.param("FAKE_ENGINE", marks=pytest.mark.soak), "FAKE_ORCHESTRATOR"]
)
def test_bad_input_of_a_part(run: RlRun, name: str) -> None:
    """Ends the job, which is not started again."""
    run.start(options=("--nodes=1",), **{name: "2"})
    assert run.wait() == 2, run.log
    assert run.decisions() == ["end"] and run.cluster.field(run.job, "Restarts") == "0"
    run.assert_nothing_left()


def test_bad_requests(three: Cluster, tmp_path: Path) -> None:
    """Refused before a node is held."""
    words = [RlRun(three, tmp_path).tiny(), f"--run.dir={tmp_path}/run"]
    env = {"KEMPNER_TRAIN": str(FAKE / "rl.py")}
    for more, problem in (
        (["--nodes=2"], "the job has 2 node(s), and [rl.deployment] asks for 1"),
        (["--rl.deployment.num_infer_gpus=2"], "more than the 2 GPU(s) of the node"),
        (
            ["--rl.inference.tp=2", "--rl.inference.engine=vllm"],
            "cannot be shared by engines of rl.inference.tp = 2",
        ),
        (["--rl.deployment.num_train_nodes=2", "--nodes=2"], "no node is left for engines"),
    ):
        request = ["--dry-run", "--gpus-per-node=2"]
        done = three.run("bash", SCRIPTS / "rl.sh", *words, *request, *more, env=env)
        assert done.returncode == 2 and problem in done.stderr, done.stderr + done.stdout
    more = ["--rl.deployment.num_infer_nodes=2", "--nodes=3", "--gpus-per-node=2", "--dry-run"]
    done = three.run("bash", SCRIPTS / "rl.sh", *words, *more, env=env)
    assert done.returncode == 0, done.stderr
    assert "trainer: 2 task(s) on node1\n" in done.stdout
    assert "engines 0 to 1 (kit, 16 slots, 1 GPU(s) each): on node2\n" in done.stdout
    assert "--nodelist=node2" in done.stdout and not (tmp_path / "run").exists()
    done = three.run(
        "bash", SCRIPTS / "rl.sh", *words, *more, "--rl.inference.engine=vllm", env=env
    )
    assert "(vllm, 128 slots, 1 GPU(s) each): on node3\n" in done.stdout, done.stderr
    assert (
        "kempner.extensions.rl.engines.vllm_engine" in done.stdout and "--slots 128" in done.stdout
    )


def test_without_slurm(three: Cluster, tmp_path: Path) -> None:
    """All parts end with the script, also when it is killed; `--check` says what would run."""
    run = RlRun(three, tmp_path)
    words = [run.tiny(), f"--run.dir={run.dir}", "--distributed.device=cpu"]
    words += ["--train.max_steps=500"]
    env = {name: str(FAKE / file) for name, file in ROLES.values()}
    checked = three.run("bash", SCRIPTS / "rl.sh", *words, "--check", env=env)
    assert checked.stdout.splitlines()[0] == f"trainer: 1 task(s) on {os.uname().nodename}", (
        checked.stderr
    )
    script = subprocess.Popen(
        **three.typed(["bash", SCRIPTS / "rl.sh", *words], env, SCRIPTS.parents[1]),
        stdout=subprocess.DEVNULL,
    )
    run.wait_for_step(2)
    children = Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text().split()
    assert len(children) >= 3
    script.kill()
    script.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    assert status(run.dir)["state"] == "interrupted", "the trainer has saved"
    step = run.lines()[-1]["step"]
    done = three.run("bash", SCRIPTS / "rl.sh", *words, f"--train.max_steps={step + 3}", env=env)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in run.lines()] == list(range(1, step + 4))
    assert not (run.dir / "rl").exists()


@pytest.mark.soak
def test_an_engine_that_is_stopped(run: RlRun) -> None:
    """The others go on; it is ended, and started again."""
    run.start(f"--train.max_steps={STEPS}", FAKE_STEP_S="3")
    run.wait_for("engine 3 at http://")
    run.strike("engine", 2, signal.SIGSTOP)
    run.wait_for(r"engine 2 does not answer for 60 s")
    run.wait_for(r"engine 2 is started again\n(.*\n)*.*engine 2 at http")
    assert run.wait() == 0, run.log
    assert_done(run)


@pytest.mark.soak
@pytest.mark.parametrize("gpus", [2, 0])
def test_a_crashed_host_of_engines(run: RlRun, gpus: int) -> None:
    """The job goes on with the engines of the other host. One that dies there afterwards stays away
    until the next start if it needs a GPU: Slurm gives none to new steps of a job that has lost a
    host."""
    options = ("--nodes=3", f"--gpus-per-node={gpus}", "--ntasks-per-node=2")
    run.start(f"--train.max_steps={STEPS}", options=options, FAKE_STEP_S="2")
    run.wait_for("engine 3 at http://")
    try:
        run.cluster.testbed("crash", "node3")
        run.wait_for("node3 is lost")
        run.strike("engine", 0)
        if gpus:
            run.wait_for("engine 0 is not started again: the job has lost a node")
        else:
            run.wait_for(r"engine 0 is started again\n(.*\n)*.*engine 0 at http")
        assert run.wait() == 0, run.log
    finally:
        run.cluster.testbed("revive", "node3")
    assert_done(run)


@pytest.mark.soak
def test_a_crashed_host_of_the_trainer(run: RlRun) -> None:
    """With the batch script on it: Slurm starts the job again."""
    run.start(f"--train.max_steps={STEPS}", FAKE_STEP_S="0.5")
    run.wait_for_step(7)
    try:
        run.cluster.testbed("crash", "node1")
        until(lambda: run.cluster.state(run.job) != "RUNNING")
    finally:
        run.cluster.testbed("revive", "node1")
    assert run.wait() == 0, run.log
    assert status(run.dir)["state"] == "done", run.log
