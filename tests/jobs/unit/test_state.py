"""The state of a run: one table of run directories, on which report.py, status.py and the batch
script have to agree."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kempner.jobs.records import events
from kempner.jobs.records.attempts import ENDS
from kempner.jobs.records.events import DecisionEvent, End, Event, FaultEvent, FirstStep, StartEvent
from kempner.jobs.records.run_history import load_history
from kempner.jobs.report import summary
from kempner.jobs.slurm import SlurmJob, cluster_name
from kempner.jobs.system.process import birth_ticks
from kempner.jobs.this_job import host_name
from tests.cluster import SCRIPTS
from tests.conftest import load_program
from tests.waiting import LIMIT_S

STATUS = load_program("status")
NOW = time.time()
HEAD: dict[str, Any] = {"job": "7", "attempt_id": "7.0", "attempt": 0}
AGO = {"time": NOW - 6000, **HEAD}
START = StartEvent(**AGO, step=0, nodes=("n1",), world_size=1)
BEGUN = (START, FirstStep(**AGO, step=1))
CRASH = FaultEvent(time=NOW - 60, **HEAD, step=5, reason="rank 0 on n1: RuntimeError: boom")
HANG = FaultEvent(time=NOW - 60, **HEAD, step=5, kind="hang", reason="no step for 120 s")
OOM = FaultEvent(time=NOW - 60, **HEAD, step=5, kind="oom", final=True, reason="out of memory")
END = {**HEAD, "attempt": None}
REFUSED = DecisionEvent(time=NOW - 50, **END, decision="end", why="3 attempts without progress")
BAD_INPUT = DecisionEvent(
    time=NOW - 30, job="8", attempt_id="8.0", why="bad input: dim is 128 there"
)
CANCELLED = DecisionEvent(time=NOW - 30, job="8", attempt_id="8.0", decision="leave",
                     why="Slurm is ending the job (COMPLETING), and decides")  # fmt: skip
SCANCELLED = DecisionEvent(time=NOW - 30, **END, decision="leave", why="the job was cancelled (x)")
LEFT = DecisionEvent(time=NOW - 30, **END, decision="leave", why="Slurm is ending the job (x)")
ENDING = SlurmJob("7", "COMPLETING", "0:00", "None", "N/A")
REQUEUED = DecisionEvent(time=NOW - 50, **END, decision="requeue", why="exit code 1")
PIDS = {"ALIVE": os.getpid(), "DEAD": 2**22 + 1}
RUNS, GONE = SlurmJob("7", "RUNNING", "1:02:03", "None", "N/A"), SlurmJob("7", "GONE")
QUEUED = SlurmJob("7", "PENDING", "24:00:00", "BeginTime", "2026-01-02T03:04:05")


def ended(state: str, reason: str) -> End:
    return End(time=NOW - 60, **HEAD, step=5, state=state, reason=reason)  # type: ignore[arg-type]


@dataclass
class Case:
    """A run directory, what Slurm says, and what is to be said of it: "! " before the reason where
    somebody has to look."""

    events: Sequence[Event]
    status: str  # of this attempt in status.json, "" without the file
    expected: str
    reason: str = ""
    lock: str = ""  # ALIVE or DEAD, a process of this host; BEATS or STALE, of another one
    job: SlurmJob | None = None  # None: no Slurm
    quiet: float = 5.0  # seconds since the last line


CASES = {
    "running": Case(BEGUN, "running", "running", lock="ALIVE"),
    "running elsewhere": Case(BEGUN, "running", "running", lock="BEATS"),
    "running in Slurm": Case(BEGUN, "running", "running", lock="BEATS", job=RUNS),
    "loading": Case((), "", "starting", lock="ALIVE"),
    "loading again": Case((*BEGUN, CRASH), "running", "starting", lock="ALIVE"),
    "loading again in Slurm": Case((*BEGUN, CRASH, REQUEUED), "running", "starting", job=RUNS),
    "silent": Case(BEGUN, "running", "silent", "! no line for 10 min", "ALIVE", quiet=600),
    "silent in Slurm": Case(BEGUN, "running", "silent", "! no line for 10", "", RUNS, quiet=600),
    "killed": Case(BEGUN, "running", "killed", "! no error recorded", lock="DEAD"),
    "killed elsewhere": Case(BEGUN, "running", "killed", "! no error recorded", lock="STALE"),
    "killed, no lock left": Case(BEGUN, "running", "killed", "! no error recorded"),
    "killed in Slurm": Case(BEGUN, "running", "killed", "! no error recorded; job 7 has left the "
                            "queue", job=GONE),
    "killed, given up": Case((*BEGUN, REFUSED), "running", "killed", "! no error recorded; not "
                             "requeued: 3 attempts without progress", job=GONE),
    "crashed": Case((*BEGUN, CRASH), "running", "crashed", "! rank 0 on n1: RuntimeError: boom"),
    "crashed, given up": Case((*BEGUN, CRASH, REFUSED), "running", "crashed", "! rank 0 on n1: "
                              "RuntimeError: boom; not requeued: 3 attempts", job=GONE),
    "crashed in an allocation": Case((*BEGUN, CRASH), "running", "crashed", "! rank 0", job=RUNS),
    "crashed, requeued": Case((*BEGUN, CRASH, REQUEUED), "running", "waiting",
                              "job 7: BeginTime, expected 2026-01-02T03:04:05", job=QUEUED),
    "crashed, held": Case((*BEGUN, CRASH, REQUEUED), "running", "waiting", "! job 7: JobHeld",
                              job=replace(QUEUED, why="JobHeldAdmin")),
    "waits its turn": Case((*BEGUN, CRASH, REQUEUED), "running", "waiting", "job 7: QOSMaxJobs",
                               job=replace(QUEUED, why="QOSMaxJobsPerUserLimit")),
    "crashed while loading": Case((CRASH,), "", "crashed", "! rank 0 on n1: RuntimeError: boom"),
    "hung": Case((*BEGUN, HANG), "running", "hung", "! no step for 120 s", lock="DEAD"),
    "out of memory": Case((*BEGUN, OOM), "failed", "failed", "! of status.json"),
    "died before the first step": Case((REFUSED,), "", "killed", "! died before it began; not "
                                       "requeued: 3 attempts without progress", job=GONE),
    "died, only a lock": Case((), "", "killed", "! died before it began", lock="DEAD"),
    "interrupted": Case((*BEGUN, ended("interrupted", "asked")), "interrupted", "interrupted",
                        "! asked"),
    "interrupted, requeued": Case((*BEGUN, ended("interrupted", "asked"), REQUEUED), "interrupted",
                                  "waiting", "job 7: BeginTime", job=QUEUED),
    "interrupted, given up": Case((*BEGUN, ended("interrupted", "asked"), REFUSED), "interrupted",
                                  "interrupted", "! asked; not requeued: 3 attempts", job=GONE),
    "done": Case((*BEGUN, ended("done", "last step")), "done", "done"),
    "done, then lost a peer": Case((*BEGUN, ended("done", "last step"), CRASH), "done", "done"),
    "stopped": Case((*BEGUN, ended("stopped", "by the user")), "stopped", "stopped", quiet=5000),
    "failed": Case((*BEGUN, ended("failed", "no checkpoint")), "failed", "failed",
                   "! no checkpoint"),
    "disk full at the end": Case(BEGUN, "failed", "failed", "! of status.json", lock="DEAD"),
    "done, then refused": Case((*BEGUN, ended("done", "last step"), BAD_INPUT), "done", "done",
                               "a later start was refused: dim is 128 there", quiet=5000),
    "done, then cancelled": Case((*BEGUN, ended("done", "last step"), CANCELLED), "done", "done",
                                 "a later start was cancelled: before the run began", quiet=5000),
    "crashed, then refused": Case((*BEGUN, CRASH, BAD_INPUT), "running", "crashed", "! rank 0 on "
                                  "n1: RuntimeError: boom; a later start was refused: dim is 128",
                                  quiet=5000),
    "running, another one refused": Case((*BEGUN, BAD_INPUT), "running", "running", lock="ALIVE"),
    "refused at once": Case((BAD_INPUT,), "", "refused", "! dim is 128 there"),
    "refused, loads again": Case((BAD_INPUT,), "", "starting", lock="ALIVE"),
    "cancelled at once, and requeued": Case((CANCELLED,), "", "waiting", "job 8: BeginTime",
                                            job=SlurmJob("8", "PENDING", "", "BeginTime", "N/A")),
    "cancelled": Case((*BEGUN, SCANCELLED), "running", "cancelled", "the job was", job=ENDING),
    "cancelled, and gone": Case((*BEGUN, SCANCELLED), "running", "cancelled", "the job", job=GONE),
    "cancelled, and saved": Case((*BEGUN, ended("interrupted", "SIGTERM"), SCANCELLED), "",
                                 "interrupted", "! SIGTERM; the job was cancelled", job=ENDING),
    "cancelled, and requeued": Case((*BEGUN, SCANCELLED), "running", "starting", job=RUNS),
    "requeued by Slurm": Case((*BEGUN, LEFT), "running", "starting", job=ENDING),
    "cancelled at once": Case((CANCELLED,), "", "cancelled", "before the run began",
                              job=SlurmJob("8", "GONE")),
    "no status.json": Case((*BEGUN, CRASH), "", "crashed", "! rank 0 on n1"),
}  # fmt: skip


def make(run: Path, case: Case) -> Path:
    (run / "logs").mkdir(parents=True)
    for event in case.events:
        events.append_event(run / "attempts.jsonl", event)
    if case.status:
        known = {"state": case.status, "reason": "of status.json", "time": NOW - 50, "step": 5}
        (run / "status.json").write_text(json.dumps({**known, **HEAD, "max_steps": 2000}))
    if len(case.events) > 1:
        times = (NOW - case.quiet - 10 * i for i in reversed(range(5)))
        metrics = {"attempt": 0, "loss": 2.5, "tokens_per_s": 9.0, "step_time": 10.0, "tokens": 1,
                   "lr": 0.1, "memory_gib": 0.5}  # fmt: skip
        lines = ({"step": i + 1, "time": at, **metrics} for i, at in enumerate(times))
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if case.lock:
        here = case.lock in PIDS
        pid = PIDS.get(case.lock, 1)
        holder = {"host": socket.gethostname() if here else "elsewhere", "pid": pid}
        born = birth_ticks(pid) or "1"
        (run / "lock").write_text(json.dumps({**holder, "born": born}))
        beat = NOW - (600 if case.lock == "STALE" else 1)
        os.utime(run / "lock", (beat, beat))
    return run


@pytest.fixture(autouse=True)
def outside_slurm_and_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases were made when this file was collected: perhaps half an hour ago."""
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.setenv("COLUMNS", "400")


@pytest.mark.parametrize("name", CASES)
def test_all_say_the_same(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    run = make(tmp_path / "run", case)
    jobs = None
    if case.job is not None:
        jobs = {} if case.job is GONE else {case.job.number: case.job}
    row = STATUS.status_row(load_history(run, jobs))
    state, reason = row[1], row[-1]
    assert state == case.expected
    assert reason.startswith(case.reason) and bool(reason) == bool(case.reason)
    history = load_history(run, jobs)
    assert summary.state_words(history).split(",")[0] == state
    if history.attempts and state in ("running", *ENDS, "crashed", "hung", "killed"):
        assert history.attempts[-1].state == state  # its row in report.py's table


def test_the_batch_script_says_why_a_job_was_given_back(tmp_path: Path) -> None:
    (requeue,) = SCRIPTS.rglob("requeue.sh")
    why = "idle for 30 min, without a batch (KEMPNER_IDLE_LIMIT)"
    said = []
    for reason in (why, "asked to make room"):
        state = {"state": "interrupted", "attempt_id": "7.0", "reason": reason}
        (tmp_path / "status.json").write_text(json.dumps(state))
        script = f'source "{requeue}"; KP_RUN_DIR={tmp_path}; kp_idle_reason'
        env = {**os.environ, "KEMPNER_ATTEMPT_ID": "7.0"}
        said.append(subprocess.check_output(["bash", "-euc", script], env=env, text=True).strip())
    assert said == [f": {why}", ""]


def test_the_batch_script_says_the_same(tmp_path: Path) -> None:
    """It takes its verdict from status.json alone, and only an orderly end."""
    (requeue,) = SCRIPTS.rglob("requeue.sh")
    ask = 'KP_RUN_DIR=$1; kp_verdict; echo "$KP_STATE"'
    script = f'source "{requeue}"; while (($# > 0)); do {ask}; shift; done'
    in_slurm = {name: case for name, case in CASES.items() if case.status}
    runs = [make(tmp_path / name, case) for name, case in in_slurm.items()]
    done = subprocess.run(
        ["bash", "-euc", script, "bash", *map(str, runs)],
        env={**os.environ, "KEMPNER_ATTEMPT_ID": "7.0"},
        capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    for run, verdict in zip(runs, done.stdout.splitlines(), strict=True):
        attempt = load_history(run).attempts[-1]  # what it was before Slurm had it in the queue
        ends_well = attempt.state in ENDS
        assert verdict == (attempt.state if ends_well else "running"), run.name


def test_a_run_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """squeue shows only my own jobs; of the others the lock tells."""
    run = make(tmp_path / "run", Case(BEGUN, "running", "", lock="BEATS"))
    for owner, state in ((os.getuid(), "killed"), (os.getuid() + 1, "running")):
        monkeypatch.setattr(os, "getuid", lambda owner=owner: owner)
        assert load_history(run, {}).state.word == state


@pytest.mark.parametrize(
    ("cluster", "beat", "word"),
    [("b", 0.0, "running"), ("a", 0.0, "killed"), ("b", 999.0, "killed"), ("", 0.0, "killed")],
)
def test_a_run_that_trains_on_another_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, beat: float, word: str
) -> None:
    """Its job is in no queue of this one, and its host may have the name of one of ours."""
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "a")
    cluster_name.cache_clear()
    run = make(tmp_path / "run", Case(BEGUN, "running", word))
    holder = {"host": host_name(), "pid": 1, "born": "1", "kernel": "another/1", "job": "7"}
    (run / "lock").write_text(json.dumps({**holder, "cluster": cluster}))
    os.utime(run / "lock", (NOW - beat,) * 2)
    assert load_history(run, jobs={}).state.word == word
    cluster_name.cache_clear()
