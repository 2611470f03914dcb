"""Programs that are not the trainer, under run.sh: tests/jobs/slurm/foreign.py stands for them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kempner.jobs.records.event_reader import of_kind, read_events, read_kind
from kempner.jobs.records.events import DecisionEvent, Event, FaultEvent, StartEvent
from tests.cluster import ENDED, ROOT, SCRIPTS, Cluster, program
from tests.conftest import clean_env, status
from tests.waiting import LIMIT_S

FOREIGN = ROOT / "tests/jobs/slurm/foreign.py"
STEPS = r"--steps=step (\d+)"


class Here:
    """run.sh on this machine, without Slurm."""

    def __init__(
        self, folder: Path, *words: object, ranks: int = 2, script: object = FOREIGN, **env: str
    ):
        self.dir = folder / "runs/foreign"
        own = [str(word) for word in words[:-1]]
        command = words[-1] if isinstance(words[-1], list) else [sys.executable, script, words[-1]]
        own_env = {"KEMPNER_SITE": os.devnull, "KEMPNER_PYTHON": sys.executable}
        env = clean_env(**{"KEMPNER_NPROC": str(ranks)} | own_env | env)
        self.process = subprocess.Popen(
            ["bash", SCRIPTS / "run.sh", f"--run-dir={self.dir}", *own, "--", *map(str, command)],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.log = ""

    def wait_for(self, what: str) -> None:
        assert self.process.stdout
        while what not in self.log:
            line = self.process.stdout.readline()
            assert line, f"no {what!r} in\n{self.log}"
            self.log += line

    def wait(self, code: int = 0) -> Here:
        self.log += self.process.communicate(timeout=LIMIT_S)[0]
        assert self.process.returncode == code, self.log
        return self

    @property
    def events(self) -> list[Event]:
        return read_events(self.dir / "attempts.jsonl")

    @property
    def faults(self) -> list[FaultEvent]:
        return of_kind(self.events, FaultEvent)


# --- on Slurm ------------------------------------------------------------------------------------


def test_killed_then_asked_then_done(cluster: Cluster, tmp_path: Path) -> None:
    """A rank is killed, the next attempt is asked to leave, the third one ends: the first time the
    run is started again in place, then the job comes back, and all that reads a run reads this."""
    words = [STEPS, "--", sys.executable, FOREIGN, "kill@2,ask,done"]
    options = ["--nodes=2", "--gpus-per-node=2"]
    job = cluster.sbatch("run.sh", *words, options=options, cwd=tmp_path)
    log, run_dir = tmp_path / f"kempner-{job}.out", tmp_path / "runs/foreign"
    cluster.wait_for("[3] rank 3 of 4: wait", log)
    wait_until(cluster, job, lambda: "[3] rank 3 of 4: ask" in log.read_text())
    cluster.ask("scancel", "--batch", "--signal=TERM", job)  # what --signal=B:SIGTERM@N does
    assert cluster.wait(job) == 0, log.read_text()
    text = log.read_text()
    assert "[0] rank 0 leaves" in text and "[3] step 1\n" in text
    events = read_events(run_dir / "attempts.jsonl")
    story = [getattr(e, "state", getattr(e, "decision", e.kind_of_event)) for e in events]
    assert story == [
        *("start", "first_step", "fault", "restart"),
        *("start", "first_step", "interrupted", "requeue"),
        *("start", "first_step", "done", "end"),
    ], text
    (fault,) = of_kind(events, FaultEvent)
    assert fault.ranks == (2,) and fault.hosts == ("node2",) and "SIGKILL" in fault.reason
    first, second, third = of_kind(events, DecisionEvent)
    assert first.blamed == "node2" and "exit code 1" in first.why
    assert second.why.startswith("interrupted (progress ") and second.no_progress == 0
    assert third.why == "the run is done"
    assert "rank 3 of 4: done" in (run_dir / "logs/latest/rank-3.log").read_text()
    shown = cluster.ask("bash", SCRIPTS / "status.sh", run_dir)
    assert "done" in shown and " 3, 1 in place " in shown.splitlines()[1]
    report = cluster.run(sys.executable, ROOT / "scripts/report.py", run_dir)
    assert "killed by SIGKILL" in report.stdout and "restarted in place" in report.stdout, (
        report.stderr
    )


def test_a_suspended_job_is_no_hang(cluster: Cluster, tmp_path: Path) -> None:
    """Longer than its heartbeat's limit, as by gang scheduling."""
    words = ["--heartbeat=4", "--", sys.executable, FOREIGN, "beat"]
    job = cluster.sbatch("run.sh", *words, options=["--gpus-per-node=2"], cwd=tmp_path)
    log, run_dir = tmp_path / f"kempner-{job}.out", tmp_path / "runs/foreign"
    cluster.wait_for("[1] step 2\n", log)
    cluster.root("scontrol", "suspend", job).check_returncode()  # an operator alone may
    before = log.read_text().count("step")
    time.sleep(8)
    assert log.read_text().count("step") <= before + 4  # what was on its way
    cluster.root("scontrol", "resume", job).check_returncode()
    cluster.wait_for(f"[1] step {before + 20}\n", log)
    (run_dir / "STOP").touch()
    assert cluster.wait(job) == 0, log.read_text()
    events = read_events(run_dir / "attempts.jsonl")
    assert not of_kind(events, FaultEvent) and len(of_kind(events, StartEvent)) == 1, (
        log.read_text()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "python", "typo.py"], "no file 'typo.py' in "),
        (["python", "train.py"], "'python': the command comes after '--'"),
        (["--", "mpirun", "-np", "2", "true"], "write -- true;"),
    ],
)
def test_a_wrong_command_leaves_no_trace(tmp_path: Path, words: list[str], message: str) -> None:
    env = clean_env(KEMPNER_SITE=os.devnull, KEMPNER_PYTHON=sys.executable)
    done = subprocess.run(
        ["bash", SCRIPTS / "run.sh", *words], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("error:") == 1 and message in done.stderr
    assert not [*tmp_path.iterdir()]


def test_bad_input_holds_no_node(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.sbatch("run.sh", "--hartbeat=5", "--", "true", cwd=tmp_path)
    assert cluster.wait(job) == 2
    log = (tmp_path / f"kempner-{job}.out").read_text()
    assert "did you mean --heartbeat=SECONDS?" in log and cluster.steps(job) == 0
    words = [SCRIPTS / "run.sh", "--nodes=2", STEPS, "--dry-run", "--", "sleep", "a b", "--nodes=7"]
    shown = cluster.run("bash", *words, cwd=tmp_path).stdout
    assert "--steps=step" in shown and r"-- sleep a\ b --nodes=7" in shown
    assert "--nodes=2 " in shown and not (tmp_path / "runs").exists()


def test_a_short_job_is_asked_twice_then_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    """The first signal may be the warning, which comes too early; the second one is a wish. After
    scancel the run is not said to start, although the job is still there."""
    deaf = "trap '' TERM USR1; while :; do echo it runs; sleep 0.2; done"
    options = ["--nodes=1", "--gpus-per-node=1", "--time=3"]
    job = cluster.sbatch("run.sh", "--", "bash", "-c", deaf, options=options, cwd=tmp_path)
    log, run_dir = tmp_path / f"kempner-{job}.out", tmp_path / "runs/bash"
    cluster.wait_for("it runs", log)
    for said in ("s before it; a second one at once", "the program is asked to exit"):
        cluster.ask("scancel", "--batch", "--signal=TERM", job)
        cluster.wait_for(said, log)
    cluster.ask("scancel", job)
    cluster.wait_for('"decision": "leave"', run_dir / "attempts.jsonl")
    shown = cluster.run("bash", SCRIPTS / "status.sh", run_dir).stdout
    assert "cancelled" in shown and "the job was cancelled" in shown, shown
    cluster.wait(job)


SEVERAL = """#!/bin/bash
run() {{
    bash {run} --run-dir="$1" {steps} -- {python} {foreign} "$2"
    echo "$1 $2: exit code $?"
}}
run a done
run a done,exit=3,done
run b done
"""


def test_several_runs_in_a_script_of_the_users_own(cluster: Cluster, tmp_path: Path) -> None:
    """One after the other, in a directory of their own and in the same one: the end of one is not
    the end of the job, and what is done is not done again when the job comes back."""
    script = tmp_path / "several.sh"
    words = {"run": SCRIPTS / "run.sh", "python": sys.executable, "foreign": FOREIGN}
    script.write_text(SEVERAL.format(**words, steps=shlex.quote(STEPS)))
    options = ["--requeue", "--open-mode=append", "--gpus-per-node=1", f"--output={tmp_path}/log"]
    job = cluster.sbatch(script, options=options, cwd=tmp_path, env={"KEMPNER_RESTARTS": "0"})
    code = cluster.wait(job)
    log = (tmp_path / "log").read_text()
    assert code == 0, log
    assert re.findall(r"^(. .*): exit code (\d+)$", log, re.M) == [
        ("a done", "0"),
        ("a done", "0"),
        ("a done,exit=3,done", "0"),
        ("b done", "0"),
    ], log
    assert log.count("this command completed at an earlier start of the job: nothing runs") == 1
    decisions = [d.decision for d in read_kind(tmp_path / "a/attempts.jsonl", DecisionEvent)]
    assert decisions == ["end", "requeue", "end"] and "cannot be requeued" not in log, log


WARNED = """#!/bin/bash
#SBATCH --signal=URG@60
bash {run} --run-dir=a --checkpoints='out/ckpt-*' -- {python} {foreign} save
"""


def test_a_warning_in_a_script_of_the_users_own(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm signals all processes of the ranks. A program that handles nothing ignores SIGURG, and
    trains on until its next checkpoint."""
    script = tmp_path / "warned.sh"
    script.write_text(WARNED.format(run=SCRIPTS / "run.sh", python=sys.executable, foreign=FOREIGN))
    options = ["--requeue", "--time=2", f"--output={tmp_path}/log"]
    job = cluster.sbatch(script, options=options, cwd=tmp_path)
    cluster.wait_for("[0] step 2", tmp_path / "log")
    cluster.ask("scancel", "--signal=URG", job)
    cluster.wait_for("requeue: ", tmp_path / "log")
    wait_until(cluster, job, lambda: cluster.field(job, "Restarts") == "1")  # the order has come
    cluster.ask("scancel", job)
    cluster.wait(job)
    log = (tmp_path / "log").read_text()
    assert "SIGURG: the program is asked to exit" in log, log
    # On a busy machine the first one is complete before the warning comes.
    assert re.search("ended: its next checkpoint is complete: out/ckpt-[12]0", log), log
    assert "is passed on" not in log, log


ALL_REDUCE = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
gpus = os.environ["CUDA_VISIBLE_DEVICES"]
line = f"rank {dist.get_rank()}, local {os.environ['LOCAL_RANK']} of {gpus}: {total.item():.0f}\\n"
os.write(1, line.encode())  # at once: two ranks share torchrun's output
dist.destroy_process_group()
"""


def test_torchrun_is_one_job_on_all_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """A launcher for each node, with all of its GPUs, by the variables of torchrun's options. What
    cannot be one job is refused before it starts anywhere, and leaves no trace."""
    (tmp_path / "program.py").write_text(ALL_REDUCE)
    torchrun = Path(sys.executable).parent / "torchrun"
    options = ["--nodes=2", "--gpus-per-node=2", "--ntasks-per-node=1"]
    refused = ["--run-dir=refused", "--", torchrun, "--nnodes=1", "program.py"]
    jobs = [
        cluster.sbatch("run.sh", *words, options=options, cwd=tmp_path)
        for words in (["--", torchrun, "program.py"], refused)
    ]
    codes = [cluster.wait(job) for job in jobs]
    logs = [(tmp_path / f"kempner-{job}.out").read_text() for job in jobs]
    assert codes == [0, 2], logs
    found = sorted(re.findall(r"^\[(\d)\] rank (\d), local (\d) of (\S+): (\d)", logs[0], re.M))
    assert found == [
        ("0", "0", "0", "0,1", "4"),
        ("0", "1", "1", "0,1", "4"),
        ("1", "2", "0", "0,1", "4"),
        ("1", "3", "1", "0,1", "4"),
    ], logs[0]
    assert "2 x 1 = world size 2, 2 GPUs each" in logs[0]
    assert logs[1].count("error:") == 1 and "leave out --nnodes" in logs[1]
    assert not (tmp_path / "refused").exists() and cluster.steps(jobs[1]) == 0


LOSES_GPUS = """#!/bin/bash
text=$({scontrol} "$@") || exit
[[ $text == *Restarts=0* ]] || text=$(sed -E 's/( GRES=)gpu:.*/\\1/' <<<"$text")
printf '%s\\n' "$text"
"""


def test_a_job_that_came_back_without_its_gpus(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm can lose those of a job that was requeued: it is told, and nothing is trained."""
    scontrol = LOSES_GPUS.format(scontrol=shutil.which("scontrol"))
    env = program(tmp_path / "bin", "scontrol", scontrol) | {"KEMPNER_MAX_CRASHES": "1"}
    words = ["--", sys.executable, FOREIGN, "ask"]
    job = cluster.sbatch("run.sh", *words, options=["--nodes=2"], cwd=tmp_path, env=env)
    log, run_dir = tmp_path / f"kempner-{job}.out", tmp_path / "runs/foreign"
    cluster.wait_for("[7] rank 7 of 8: ask", log)
    cluster.ask("scancel", "--batch", "--signal=TERM", job)
    assert cluster.wait(job) == 1, log.read_text()
    events = read_events(run_dir / "attempts.jsonl")
    assert len(of_kind(events, StartEvent)) == 1, log.read_text()
    assert [d.decision for d in of_kind(events, DecisionEvent)] == ["requeue", "end"]
    said = f"this start has 1 task(s) and 0 GPU(s) on each node, the first one of job {job} had 4"
    assert said in log.read_text()


@pytest.mark.soak
def test_a_job_that_came_back_with_fewer_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """Where the request allows it, it trains on, and that is said."""
    options = ["--nodes=1-2", "--gpus-per-node=1"]
    words = ["--", sys.executable, FOREIGN, "ask,wait"]
    job = cluster.sbatch("run.sh", *words, options=options, cwd=tmp_path)
    log, run_dir = tmp_path / f"kempner-{job}.out", tmp_path / "runs/foreign"
    cluster.wait_for("[1] rank 1 of 2: ask", log)
    host = read_kind(run_dir / "attempts.jsonl", StartEvent)[0].nodes[1]
    cluster.run("scontrol", "update", f"NodeName={host}", "State=DRAIN", "Reason=test")
    try:
        cluster.ask("scancel", "--batch", "--signal=TERM", job)
        wait_until(cluster, job, lambda: "rank 0 of 1: wait" in log.read_text())
        shown = cluster.run("bash", SCRIPTS / "status.sh", run_dir).stdout
        cluster.ask("scancel", job)
        cluster.wait(job)
    finally:
        cluster.run("scontrol", "update", f"NodeName={host}", "State=RESUME")
    assert "restart with 1 of 2 tasks: this job's first start had 2 nodes" in log.read_text()
    told = f"1 of 2 tasks: the first start of job {job} had 2 nodes"
    report = [sys.executable, ROOT / "scripts/report.py", run_dir]
    assert " ".join(told.split()) in " ".join(shown.split()), shown
    assert f"attempt 1: {told}" in cluster.run(*report).stdout


PROGRAMS = {
    # arguments, options of run.sh, and what it prints where it begins, before the step
    "nano": ([], ["--checkpoints=out/ckpt.pt", r"--steps=iter (\d+)"], "resuming at iter "),
    "hf_trainer": ([], ["--checkpoints=out/checkpoint-*"], "resuming from out/checkpoint-"),
    "lightning_module": (
        ["2", "1"],
        ["--checkpoints=out/epoch*", "--signal=USR2"],
        "training from step ",
    ),
    "torchrun_style": ([], ["--checkpoints=out/step_*.pt", "--heartbeat=60"], "from step "),
}


def survive(cluster: Cluster, folder: Path, name: str, steps: int, timed: bool) -> str:
    """One of tests/jobs/slurm/programs on two hosts: a rank is killed; the next attempt is warned,
    by the real time limit or as it does; then it ends. Returns the batch log."""
    before, own, begins = PROGRAMS[name]
    script = ROOT / f"tests/jobs/slurm/programs/{name}.py"
    words = [*own, "--", sys.executable, script, *before, steps]
    options = ["--nodes=2", "--gpus-per-node=1"]
    options += ["--time=3", "--signal=B:SIGTERM@70"] if timed else []
    job = cluster.sbatch("run.sh", *words, options=options, cwd=folder)
    log, run_dir = folder / f"kempner-{job}.out", folder / f"runs/{name}"
    wait_until(cluster, job, lambda: progress(run_dir) >= 0)
    kill_rank(script, 1, folder)
    wait_until(cluster, job, lambda: len(starts(log, begins)) >= 2)  # it has resumed
    if not timed:
        made = progress(run_dir)
        wait_until(cluster, job, lambda: progress(run_dir) > made)
        cluster.ask("scancel", "--batch", "--signal=TERM", job)
    assert cluster.wait(job) == 0, log.read_text()
    events = read_events(run_dir / "attempts.jsonl")
    decisions = [event.decision for event in of_kind(events, DecisionEvent)]
    # Not in place where the warning is near.
    assert decisions[0] in ("restart", "requeue"), log.read_text()
    assert "requeue" in decisions and decisions[-1] == "end", log.read_text()
    assert of_kind(events, FaultEvent)[0].ranks == (1,)
    assert status(run_dir)["state"] == "done"
    begun = starts(log, begins)
    assert begun == sorted(begun) and begun[0] == 0 and begun[-1] > begun[1] > 0, begun
    return log.read_text()


def starts(log: Path, begins: str) -> list[int]:
    """The steps that the attempts began with; one that says nothing begins with 0."""
    text = log.read_text() if log.exists() else ""
    attempts = re.split(r"kempner: attempt \d+ in ", text)[1:]
    found = (re.search(rf"^\[0\] {re.escape(begins)}(\d+)", each, re.M) for each in attempts)
    return [int(each[1]) if each else 0 for each in found]


def progress(run_dir: Path) -> int:
    file = run_dir / "progress"
    return int(file.read_text().split()[-1]) if file.exists() else -1


def wait_until(cluster: Cluster, job: str, true: Callable[[], bool]) -> None:
    """As Cluster.wait(), in the middle of a job."""
    end = time.monotonic() + LIMIT_S
    while not true():
        state = cluster.state(job)
        assert time.monotonic() < end and state not in ENDED, state
        cluster.hasten(job)
        time.sleep(0.3)


def kill_rank(script: Path, rank: int, folder: Path) -> None:
    for pid in subprocess.run(["pgrep", "-f", script.name], capture_output=True).stdout.split():
        with contextlib.suppress(OSError):
            place = Path(f"/proc/{int(pid)}")
            environment = (place / "environ").read_bytes().split(b"\0")
            words = (place / "cmdline").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environment and os.fsencode(script) in words[:2]:
                assert Path(os.readlink(place / "cwd")) == folder
                os.kill(int(pid), signal.SIGKILL)
                return
    pytest.fail(f"no rank {rank} of {script}")


def test_a_foreign_program(cluster: Cluster, tmp_path: Path) -> None:
    """One that listens to nothing, and writes one file over and over: it is killed, warned, and
    then ended after its next checkpoint. What is done again has the same losses."""
    log = survive(cluster, tmp_path, "nano", 100, timed=False)
    assert "the program is ended: its next checkpoint is complete: out/ckpt.pt" in log
    found: dict[int, set[str]] = {}
    for step, loss in re.findall(r"^\[0\] iter (\d+): loss (\S+)", log, re.M):
        found.setdefault(int(step), set()).add(loss)
    assert sorted(found) == list(range(1, 101)) and all(len(each) == 1 for each in found.values())


@pytest.mark.soak
@pytest.mark.parametrize("name", PROGRAMS)
def test_foreign_programs(cluster: Cluster, tmp_path: Path, name: str) -> None:
    survive(cluster, tmp_path, name, 900, timed=True)  # in one attempt: longer than the limit


# --- how it leaves -------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["leave", "usr1", "ask"])
def test_a_program_that_listens_leaves_by_itself(tmp_path: Path, word: str) -> None:
    run = Here(tmp_path, word)
    run.wait_for("[1] step 2")
    run.process.send_signal(signal.SIGTERM)
    run.wait(75)
    assert run.log.count(" leaves") == 2 and status(run.dir)["state"] == "interrupted"
    assert "(progress 0)" not in run.log and (run.dir / "progress").read_text() == "0\n"


def test_a_program_that_does_not_listen_is_ended(tmp_path: Path) -> None:
    """Also one that ignores SIGTERM, and what it has started in the background."""
    script = "trap '' TERM; setsid sleep 7777.5 & echo it runs; while :; do sleep 0.1; done"
    run = Here(tmp_path, ["bash", "-c", script], ranks=1)
    run.wait_for("it runs")
    run.process.send_signal(signal.SIGTERM)
    run.wait(75)
    assert "the program is ended: it handles no signal" in run.log
    assert subprocess.run(["pgrep", "-f", "sleep 7777.5"]).returncode == 1


def test_a_program_that_is_ended_and_leaves_in_order_is_not_done(tmp_path: Path) -> None:
    """It handles SIGTERM, but was to be asked by another signal, as Lightning is."""
    script = "trap 'echo saved; exit 0' TERM; echo it runs; while :; do sleep 0.1; done"
    run = Here(tmp_path, "--signal=USR2", ["bash", "-c", script], ranks=1)
    run.wait_for("it runs")
    run.process.send_signal(signal.SIGTERM)
    run.wait(75)
    assert "[0] saved" in run.log and status(run.dir)["state"] == "interrupted"


@pytest.mark.soak
def test_the_callback_for_lightning(tmp_path: Path) -> None:
    """That of the page, in the program there: the step of the request is not lost."""
    page = (ROOT / "docs/start/any-program.md").read_text()
    callback = re.search(r"^(class Leave.*?)\n```", page, re.MULTILINE | re.DOTALL)
    assert callback
    program = (ROOT / "tests/jobs/slurm/programs/lightning_module.py").read_text()
    main = 'if __name__ == "__main__":'
    own = f"from kempner.jobs import slurm\n\n{callback[1]}\n\n{main}"
    program = program.replace(main, own).replace("callbacks=[saver]", "callbacks=[saver, Leave()]")
    script = tmp_path / "program.py"
    script.write_text(program)

    def run(steps: int) -> Here:
        return Here(tmp_path, "--checkpoints=out/*.ckpt", [sys.executable, script, "1", "2", steps])

    first = run(1000)
    first.wait_for("[0] step 23:")
    first.process.send_signal(signal.SIGTERM)
    first.wait(75)
    assert status(first.dir)["state"] == "interrupted", first.log
    done = max(int(step) for step in re.findall(r"\[0\] step (\d+):", first.log)) + 1
    assert progress(first.dir) == done
    second = run(done + 3).wait()
    assert f"training from step {done}" in second.log and f"at step {done + 3}" in second.log


def test_the_users_wish_to_stop(tmp_path: Path) -> None:
    run = Here(tmp_path, "ask")
    run.wait_for("[1] step 2")
    (run.dir / "STOP").touch()
    run.wait(0)
    assert status(run.dir)["state"] == "stopped" and not (run.dir / "STOP").exists()


IMAGE = """#!/bin/bash
# apptainer exec [OPTIONS] IMAGE COMMAND: the image has a Python, and no package of this machine's.
echo "$*" >>"$0.log"
while [[ $1 != *.sif ]]; do shift; done
[[ $4 != python* ]] || set -- "$1" "$2" "$3" "{python}" -S "${{@:5}}"
{before}"${{@:2}}"
"""


@pytest.mark.parametrize("where", ["KEMPNER_CONTAINER", "in the command"])
def test_a_container(tmp_path: Path, where: str) -> None:
    """Around the supervisors, which need nothing but Python; or around the program alone, which
    then needs nothing, and hears of requests although the container's process is before it."""
    shim, inside = tmp_path / "bin/apptainer", where == "in the command"
    shim.parent.mkdir()
    before = "env -u PYTHONPATH " if inside else "exec "
    shim.write_text(IMAGE.format(python=sys.executable, before=before))
    shim.chmod(0o755)
    leave = "trap 'echo saved; exit 0' TERM; echo it runs; while :; do sleep 0.1; done"
    command = ["bash", "-c", leave]
    env = {"PATH": f"{shim.parent}:{os.environ['PATH']}"}
    if inside:
        command = ["apptainer", "exec", "a.sif", *command]
    else:
        env |= {"KEMPNER_CONTAINER": "a.sif", "KEMPNER_PYTHON": "python3"}
    run = Here(tmp_path, command, **env)
    run.wait_for("[1] it runs")
    run.process.send_signal(signal.SIGTERM)
    run.wait(75)
    assert "[0] saved" in run.log and "[1] saved" in run.log, run.log
    assert status(run.dir)["state"] == "interrupted"
    started = (tmp_path / "bin/apptainer.log").read_text()
    assert started.count("exec a.sif bash") == 2 * inside
    assert ("inside.sh python3 " in started and "program.py --here 2" in started) == (not inside)


# --- faults --------------------------------------------------------------------------------------


def test_exit_codes(tmp_path: Path) -> None:
    """2 is bad input, as argparse has it, until there is progress; others are crashes, with the
    last line as the reason."""
    assert Here(tmp_path, "exit=2").wait(2).faults[-1].final
    fault = Here(tmp_path, STEPS, "exit=2@1").wait(1).faults[-1]  # 2 would end the job
    assert fault.ranks == (1,) and fault.reason.endswith("exit code 2: step 3") and not fault.final
    run = Here(tmp_path, "/no/such/program", script="-u")
    assert run.wait(2).faults[-1].final  # Python itself says 2


def test_exit_code_2_of_a_run_that_has_trained(tmp_path: Path) -> None:
    """It is a crash in a later attempt, too, which starts the same command; another command may be
    wrong, and so may one that has done nothing yet."""
    script = tmp_path / "program.py"
    script.write_text("import os, sys\nif not os.path.exists('no'): print('step 1')\nsys.exit(2)")
    for trained in (False, True):
        (tmp_path / "no").unlink(missing_ok=True) if trained else (tmp_path / "no").touch()
        run = Here(tmp_path, STEPS, "x", ranks=1, script=script).wait(1 if trained else 2)
        assert run.faults[-1].final == (not trained)
    (tmp_path / "no").touch()
    assert not Here(tmp_path, STEPS, "x", ranks=1, script=script).wait(1).faults[-1].final
    assert Here(tmp_path, STEPS, "typo", ranks=1, script=script).wait(2).faults[-1].final


def test_a_rank_that_fails_among_ranks_that_wait(tmp_path: Path) -> None:
    """The others catch SIGTERM, and are killed: the exit code is that of the one that failed."""
    fails = "if ((RANK == 2)); then echo 'ValueError: no'; exit 2; fi"
    waits = "trap 'echo caught' TERM; while :; do sleep 0.2; done"
    run = Here(tmp_path, ["bash", "-c", f"{fails}; {waits}"], ranks=3).wait(2)
    assert "[0] caught" in run.log and "[1] caught" in run.log
    (fault,) = run.faults
    assert fault.ranks == (2,) and fault.final and fault.reason.endswith("code 2: ValueError: no")


SLOW = """
import atexit, os, pathlib, sys, time
met, how = pathlib.Path("met"), sys.argv[1]
if os.environ["RANK"] == "1":
    atexit.register(time.sleep, 2)
    atexit.register(met.touch)
    sys.exit(3) if how == "silent" else int("x")
while not met.exists():
    time.sleep(0.05)
raise EOFError("no message") if how == "unknown" else ConnectionError("Connection closed by peer")
"""


@pytest.mark.parametrize("how", ["known", "unknown", "silent"])
def test_a_rank_that_takes_time_to_exit_is_the_one_that_failed(tmp_path: Path, how: str) -> None:
    """Its peer has lost it by then, and has exited before it."""
    run = Here(tmp_path, [sys.executable, "-c", SLOW, how]).wait(3 if how == "silent" else 1)
    assert "ranks=(1,)" in str(run.faults[0]) and not run.faults[0].lost_peer, run.log
    assert [fault.ranks for fault in run.faults if not fault.lost_peer] == [(1,)]
    word = "code 3" if how == "silent" else "code 1: ValueError: invalid literal"
    assert word in run.faults[0].reason and "rank 1 on" in run.log.splitlines()[-1]


def test_what_a_program_leaves_behind_is_named(tmp_path: Path) -> None:
    daemon = "setsid sleep 1000 </dev/null >/dev/null 2>&1 &"
    until = "until [[ $(</proc/$!/comm) == sleep ]]; do :; done"
    run = Here(tmp_path, ["bash", "-c", f"{daemon} {until}"], ranks=1).wait(0)
    assert re.search(
        r"^\[0\] kempner: ending what the program has left behind: sleep \(\d+\)$", run.log, re.M
    )


def test_rank_0_may_open_a_connection_for_each_rank(tmp_path: Path) -> None:
    """The usual limit is 1024 files, and there may be more ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    asks = "import resource; print('files', resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        run = Here(tmp_path, [sys.executable, "-c", asks], ranks=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert f"[0] files {hard}" in run.wait().log


def test_a_rank_that_ends_early_waits_for_the_others(tmp_path: Path) -> None:
    run = Here(tmp_path, "early@1").wait(0)
    assert status(run.dir)["state"] == "done" and "[0] step 3" in run.log


def test_a_frozen_rank_is_found_and_blamed(tmp_path: Path) -> None:
    run = Here(tmp_path, "--heartbeat=3", "stop@1").wait(70)
    (fault,) = run.faults
    assert fault.kind == "hang" and fault.ranks == (1,) and fault.step, run.log
    assert "Fatal Python error: Aborted" in run.log  # the stacks of those that wait


def test_two_at_once_in_one_directory(tmp_path: Path) -> None:
    first = Here(tmp_path, "ask")
    first.wait_for("[1] step 2")
    second = Here(tmp_path, "done").wait(2)
    assert f"{second.dir} is in use by process" in second.log and "--run-dir=" in second.log
    first.process.send_signal(signal.SIGTERM)
    first.wait(75)
    assert len(of_kind(first.events, FaultEvent)) == 0


# --- what it prints ------------------------------------------------------------------------------


def test_what_programs_print(tmp_path: Path) -> None:
    """Much, binary, without an end of line, with a progress bar: whole in the rank's log, as text
    behind the rank in the batch log."""
    script = tmp_path / "print.py"
    script.write_text(
        "import sys, time\n"
        "w = sys.stdout.buffer.write\n"
        "for _ in range(640): w(b'x' * 65535 + b'\\n')\n"
        "w(bytes(range(256)) + b'\\n')\n"
        "w(b'\\r 10 %\\r 20 %\\r 30 %\\n')\n"
        "w(b'no end of line')\n"
    )
    run = Here(tmp_path, "x", ranks=1, script=script).wait(0)
    lines = run.log.splitlines()
    assert sum(line == "[0] " + "x" * 65535 for line in lines) == 640
    assert "[0]  30 %" in lines and "[0] no end of line" in lines and "\0" not in run.log
    assert (run.dir / "logs/latest/rank-0.log").stat().st_size == 640 << 16 | 257 + 19 + 14


@pytest.fixture
def small_folder(cluster: Cluster) -> Iterator[Path]:
    """On a disk that other tests use, too."""
    folder = cluster.small_disk / "program"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_a_full_disk_loses_lines_and_no_more(small_folder: Path) -> None:
    script = "import sys; [print('y' * 1000) for _ in range(4000)]; print('the last line')"
    run = Here(small_folder, [sys.executable, "-c", script], ranks=1).wait(0)
    assert status(run.dir)["state"] == "done"
    assert "No space left on device" in run.log and "[0] the last line" in run.log
    records = (run.dir / "attempts.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["event"] == "end"
