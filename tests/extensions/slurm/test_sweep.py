"""A sweep on a real Slurm: submitted once whatever happens, each point an ordinary run, and the
failed ones alone again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kempner.jobs.system.directories import Kind, mark_directory
from tests.cluster import ROOT, TESTBED, Cluster, program
from tests.waiting import LIMIT_S

SWEEP = """
base = "{root}/configs/train/debug.toml"
max_running = {running}

[set]
data.dataset_path = "{data}"
distributed.device = "cpu"
model.dim = 32
model.n_layers = 1
model.ffn_dim = 64
train.seq_len = 32
train.global_batch = 4
train.max_steps = {steps}
checkpoint.interval = {steps}
eval.interval = {steps}
eval.samples = 4
metrics.log_interval = 1

[axes]
train.seed = {seeds}
optimizer.lr = {rates}

[resources]
gpus_per_node = 1
{resources}
"""
SLOW = """
[rules]  # one of the points takes some seconds
train.max_steps = "3 + 4000 * (train.seed == 2) * (optimizer.lr < 5e-3)"
"""
SHARE = 'share = true\ncpus_per_task = 1\nmem = "1G"'


class Sweep:
    """A sweep's file in a directory of its own, and its program."""

    def __init__(self, cluster: Cluster, folder: Path, **values: object) -> None:
        self.cluster, self.folder = cluster, folder
        given = {"root": ROOT, "data": cluster.data, "running": 8, "steps": 3, "resources": SHARE}
        given |= values
        (folder / "lr.toml").write_text(SWEEP.format(**given))
        self.others: set[str] = set()
        self.others = set(self.jobs)

    def __call__(self, *words: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "scripts/sweep.py", "lr.toml", *words]
        done = self.cluster.run(*command, cwd=self.folder, env=env)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def states(self) -> dict[str, str]:
        """By point: NAME without its hash -> word."""
        command = [sys.executable, ROOT / "scripts/sweep.py", "lr.toml", "status"]
        rows = self.cluster.run(*command, cwd=self.folder).stdout.splitlines()[1:-1]
        cells = [row.split() for row in rows if row.startswith("seed")]
        return {name.rpartition("-")[0]: state for name, state, *_ in cells}

    def until(self, holds: Callable[[dict[str, str]], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not holds(states := self.states()):
            assert time.monotonic() < end, states
            self.hurry()
            time.sleep(0.5)

    def hurry(self) -> None:
        """A requeued job waits for its old credential to expire: let it start now."""
        for job in self.cluster.ask("squeue", "-h", "-r", "-t", "PD", "-o", "%i %r").splitlines():
            if job.endswith("BeginTime"):
                self.cluster.hasten(job.split()[0])

    def run_dir(self, name: str) -> Path:
        (found,) = (self.folder / "runs/lr").glob(f"{name}-*")
        return found

    def block(self, path: str) -> Path:
        """A file in the way of a run, which therefore cannot write."""
        runs = self.folder / "runs/lr"
        mark_directory(runs / "sweep", Kind.SWEEP)
        (runs / path).parent.mkdir()
        (runs / path).write_text("in the way")
        return runs / path

    def events(self, name: str, kind: str) -> list[dict[str, object]]:
        lines = (self.run_dir(name) / "attempts.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    @property
    def jobs(self) -> list[str]:
        """Of all arrays that Slurm has taken for this sweep."""
        told = self.cluster.ask("squeue", "-h", "-t", "all", "-o", "%F %j")
        found = {line.split()[0] for line in told.splitlines() if " lr." in line}
        return sorted(found - self.others)

    def end(self) -> None:
        for job in self.jobs:
            self.cluster.run("scancel", job)


@pytest.fixture
def sweep(cluster: Cluster, tmp_path: Path) -> Callable[..., Sweep]:
    return lambda **values: Sweep(cluster, tmp_path, **values)


def settled(states: dict[str, str]) -> bool:
    return not set(states.values()) & {"waiting", "starting", "running", "unknown", "interrupted"}


def failing_sbatch(folder: Path, times: int, after: str = "") -> dict[str, str]:
    """sbatch that fails so often, then submits. `after`: bash that then runs."""
    text = f"""#!/bin/bash
count=$(cat {folder}/count 2>/dev/null || echo 0)
echo $((count + 1)) >{folder}/count
if ((count >= {times})); then
    {shutil.which("sbatch")} "$@"
    {after or "exit"}
fi
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1
"""
    return program(folder / "bin", "sbatch", text)


@pytest.mark.soak
def test_a_sweep_of_four(cluster: Cluster, sweep: Callable[..., Sweep], tmp_path: Path) -> None:
    """sbatch fails once, then takes the array, and sweep.py dies before it hears so: the next one
    finds it. One point fails by itself, and it alone is submitted again; twice is once."""
    run = sweep(seeds=[1, 2], rates=[1e-3, 1e-2])
    bad = run.folder / "runs/lr"
    plan = run("plan").stdout
    assert "4 points in runs/lr, 1 array(s)" in plan and not bad.exists()
    name = next(word for word in plan.split() if word.startswith("seed2-lr0.01-"))
    blocked = run.block(f"{name}/logs")
    run("submit", code=-9, **failing_sbatch(tmp_path, 1, after="kill -KILL $PPID"))
    assert "unknown" in run.states().values()
    assert "nothing to submit" in run("submit").stdout
    assert len(run.jobs) == 1
    run.until(settled)
    states = run.states()
    assert [states.pop("seed2-lr0.01")] != ["done"] and set(states.values()) == {"done"}
    blocked.unlink()
    assert "nothing to submit" in run("submit").stdout
    assert "1 point(s)" in run("resubmit").stdout
    assert "nothing to resubmit" in run("resubmit").stdout
    run.until(settled)
    assert set(run.states().values()) == {"done"}
    assert len(run.jobs) == 2
    rows = run("table").stdout.splitlines()[1:5]
    losses = [float(row.split()[2]) for row in rows]
    assert losses == sorted(losses) and len({row.split()[-1] for row in rows}) == 4
    assert all(row.split()[4] == "done" for row in rows)
    csv = (bad / "sweep/table.csv").read_text().splitlines()
    assert len(csv) == 5 and (bad / "sweep/table.png").stat().st_size > 1000


def test_points_that_follow_from_results(
    cluster: Cluster, sweep: Callable[..., Sweep]
) -> None:  # fmt: skip
    """Nobody has to be there: the end of a run submits the next one, as the user has submitted,
    even where sbatch exports nothing by default."""
    run = sweep(seeds=[1, 2], rates="{ log = [1e-3, 1e-2] }", running=1)
    file = run.folder / "lr.toml"
    file.write_text(file.read_text().replace("[axes]", "[propose]\npoints = 2"))
    run("submit", SBATCH_EXPORT="NONE")
    run.until(lambda states: list(states.values()) == ["done", "done"])
    assert "nothing to submit" in run("submit").stdout
    jobs = {event["job"] for name in run.states() for event in run.events(name, "start")}
    assert len(jobs) == 2


@pytest.mark.soak
def test_packed_points(cluster: Cluster, sweep: Callable[..., Sweep]) -> None:
    """Where Slurm gives whole nodes: two and two on a node. One fails, and its neighbour does not
    care; one is stopped by the warning of the time limit, and its job goes on with it alone."""
    run = sweep(seeds=[1, 2], rates=[1e-3, 1e-2], steps=4003, resources=f"pack = 2{SLOW}")
    file = run.folder / "lr.toml"
    file.write_text(file.read_text().replace("train.max_steps = 4003", ""))
    plan = run("plan").stdout
    assert "--array=0-1 --nodes=1 --gpus-per-node=2 pack.sh 2" in plan
    names = [word for word in plan.split() if word.startswith("seed")]
    last = run.folder / "runs/lr" / names[3]
    run.block(f"{names[1]}/logs")
    run("submit")
    (job,) = run.jobs
    cluster.wait_for('"decision": "end"', last / "attempts.jsonl")
    cluster.ask("scancel", "--batch", "--signal=TERM", f"{job}_1")
    run.until(settled)
    states = run.states()
    assert [states.pop("seed1-lr0.01")] != ["done"] and set(states.values()) == {"done"}
    starts = {point: len(run.events(point, "start")) for point in states}
    assert starts == {"seed1-lr0.001": 1, "seed2-lr0.001": 2, "seed2-lr0.01": 1}
    rows = run("table").stdout.splitlines()[1:5]
    assert [row.split()[4] for row in rows].count("done") == 3
    assert "1 point(s)" in run("resubmit").stdout and len(run.jobs) == 2
    run.end()


@pytest.mark.soak
def test_early_stop(cluster: Cluster, sweep: Callable[..., Sweep]) -> None:
    """The run that learns nothing is stopped by its own job, and saved; nobody has to be there."""
    run = sweep(seeds=[1], rates=[1e-3, 1.1e-3, 1.2e-3, 1e-9], steps=3000)
    file = run.folder / "lr.toml"
    text = file.read_text().replace("eval.interval = 3000", "eval.interval = 50")
    file.write_text(f"{text}\n[early_stop]\nafter = 100\nleast = 2\n")
    run("submit")
    run.until(settled)
    states = run.states()
    assert states.pop("seed1-lr1e-09") == "stopped"
    assert list(states.values()).count("done") >= 1
    assert "nothing to resubmit" in run("resubmit").stdout


@pytest.mark.soak
def test_cancel(cluster: Cluster, sweep: Callable[..., Sweep]) -> None:
    """What was cancelled has not failed: resubmit leaves it, and submit continues it."""
    run = sweep(seeds=[1, 2], rates=[1e-3], steps=100_000)
    run("submit")
    try:
        run.until(lambda states: set(states.values()) == {"running"})
        assert run("cancel").stdout == "2 point(s) cancelled\n"
        run.until(lambda states: set(states.values()) == {"cancelled"})
        assert "nothing to resubmit" in run("resubmit").stdout
        assert "2 point(s)" in run("submit").stdout
        assert len(run.jobs) == 2
    finally:
        run.end()


@pytest.mark.soak
def test_a_sweep_of_twelve(cluster: Cluster, sweep: Callable[..., Sweep], tmp_path: Path) -> None:
    """One point fails, some are preempted, a node crashes with those on it, slurmctld restarts,
    and sbatch fails for a while: all that is asked for is done once, and nothing twice."""
    run = sweep(seeds=[1, 2, 3, 4], rates=[1e-3, 3e-3, 1e-2], steps=2000)
    file = run.folder / "lr.toml"
    file.write_text(file.read_text().replace("interval = 2000", "interval = 500"))
    name = next(word for word in run("plan").stdout.split() if word.startswith("seed2-lr0.01-"))
    blocked = run.block(f"{name}/logs")
    began = time.monotonic()
    run("submit", **failing_sbatch(tmp_path, 2))
    assert time.monotonic() - began < 60
    run("submit")
    run.until(lambda states: list(states.values()).count("running") >= 6)
    try:
        cluster.testbed("crash", "head")
        assert set(run.states().values()) >= {"running"}  # by the run directories
    finally:
        owner = {"KEMPNER_TESTBED_OWNER": str(os.getpid())}
        done = cluster.root("bash", TESTBED, "revive", "head", env=owner)
        assert done.returncode == 0, done.stderr
    run("submit")
    assert len(run.jobs) == 1
    urgent = ["--partition=urgent", "--exclusive", "--nodes=1", "--output=/dev/null"]
    cluster.ask("sbatch", "--parsable", *urgent, "--wrap=sleep 5")  # takes a node away
    run.until(lambda states: "waiting" in states.values())
    run.until(lambda states: "running" in states.values())
    node = cluster.ask("squeue", "-h", "-t", "R", "-o", "%N").split()[0]
    try:
        cluster.testbed("crash", node)
        time.sleep(30)
    finally:
        cluster.testbed("revive", node)
    run.until(settled)
    states = run.states()
    assert [states.pop("seed2-lr0.01")] != ["done"] and set(states.values()) == {"done"}
    attempts = {point: len(run.events(point, "start")) for point in states}
    assert sum(attempts.values()) > len(attempts)
    blocked.unlink()
    assert "1 point(s)" in run("resubmit").stdout
    run.until(settled)
    assert set(run.states().values()) == {"done"} and len(run.jobs) == 2
    rows = run("table").stdout.splitlines()[1:13]
    assert {row.split()[4] for row in rows} == {"done"}
    for point in attempts:  # each step of each run once
        lines = (run.run_dir(point) / "metrics.jsonl").read_text().splitlines()
        assert {json.loads(line)["step"] for line in lines} == set(range(1, 2001))
