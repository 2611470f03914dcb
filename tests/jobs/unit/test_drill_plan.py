"""The drill's command line, what it takes for a kept promise, and how a job could be preempted."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kempner.config.option import ConfigError
from kempner.jobs.drill import conduct, site
from kempner.jobs.drill.cases import CASES, DRILL_STEPS, OWN, CaseOutcome, judge_all
from kempner.jobs.drill.conduct import Drill
from kempner.jobs.drill.plan import parse_plan

BY_NAME = {case.name: case for case in CASES}


def make_run(
    path: Path, *, state: str, starts: list[int], lost: int = 0, loss: float = 5.0
) -> Path:
    """A run that has started at these steps, and has lost so many steps at each restart."""
    path.mkdir()
    events: list[dict[str, Any]] = []
    lines = []
    for number, first in enumerate(starts):
        at, name = 100.0 * (number + 1), f"7.0.1.{number}"
        last = starts[number + 1] + lost if number + 1 < len(starts) else DRILL_STEPS
        both = {"attempt": number, "attempt_id": name, "job": "7"}
        events.append({"event": "start", "time": at, "step": first, "world_size": 2, **both})
        events.append({"event": "first_step", "time": at + 1, "step": first + 1, **both})
        if number + 1 < len(starts):
            why = {"decision": "requeue", "why": "interrupted", "job": "7", "attempt_id": name}
            events.append({"event": "decision", "time": at + 50, "step": last, **why})
        else:
            events.append({"event": "end", "time": at + 50, "step": last, "state": state, **both})
        lines += [
            {"time": at + 1 + step - first, "step": step, "loss": loss - step / 8,
             "step_time": 1.0, "attempt": number}
            for step in range(first + 1, last + 1)
        ]  # fmt: skip
    (path / "attempts.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "status.json").write_text(
        json.dumps({"state": state, "step": DRILL_STEPS, "attempt": len(starts) - 1, "reason": "x"})
    )
    return path


def outcome(name: str, run: Path, struck: float | None = 150.0, **more: Any) -> CaseOutcome:
    return CaseOutcome(BY_NAME[name], run, struck, started=True, **more)


def test_what_counts_as_kept(tmp_path: Path) -> None:
    first = outcome("unbroken", make_run(tmp_path / "unbroken", state="done", starts=[0]), None)
    other = make_run(tmp_path / "other", state="done", starts=[0, 10], loss=5.5)
    cases = [
        (outcome("kill", make_run(tmp_path / "a", state="done", starts=[0, 10], lost=4)), True,
         "2 starts, again by a requeue, 4 steps done again"),
        (outcome("kill", other), False, "40 losses are not those of the unbroken run"),
        (outcome("kill", make_run(tmp_path / "b", state="failed", starts=[0])), False, "at step"),
        (outcome("kill", make_run(tmp_path / "c", state="done", starts=[0]), None), None,
         "the run was over before the fault could strike"),
        (outcome("limit", make_run(tmp_path / "d", state="done", starts=[0, 10], lost=4)), False,
         "the save before the limit came too late: 4 steps were done again"),
        (outcome("limit", make_run(tmp_path / "e", state="done", starts=[0, 10])), True,
         "2 starts"),
        (outcome("requeue", make_run(tmp_path / "f", state="done", starts=[0])), False,
         "without another start"),
        (outcome("disk", make_run(tmp_path / "g", state="done", starts=[0, 10])), False,
         "the run has started 2 times"),
        (outcome("disk", make_run(tmp_path / "j", state="done", starts=[0])), None,
         "no save has hit the quota"),
        (outcome("preempt", tmp_path / "h", not_tried="this site preempts no job"), None,
         "this site preempts no job"),
        (outcome("requeue", tmp_path / "i", broken="scontrol requeue: denied"), False,
         "scontrol requeue: denied"),
    ]  # fmt: skip
    (tmp_path / "g.out").write_text("WARNING: the checkpoint of step 20 failed: full\n")
    rows = judge_all([first, *(seen for seen, _, _ in cases)])
    assert rows[0].holds and rows[0].because == "1 start"
    for row, (_, holds, because) in zip(rows[1:], cases, strict=True):
        assert (row.holds, because in row.because) == (holds, True), row
        assert bool(row.ask) == (holds is False), row


def test_the_users_program(tmp_path: Path) -> None:
    run = make_run(tmp_path / "own", state="running", starts=[0, 10])
    rows = judge_all([CaseOutcome(OWN, run, 150.0), CaseOutcome(OWN, run, 250.0)])
    assert [row.holds for row in rows] == [True, False]
    assert "started again 50 s after the kill" in rows[0].because


def test_the_words() -> None:
    plan = parse_plan(["--minutes=5", "--only", "kill", "--nodes=1", "-pgpu"])
    assert (plan.minutes, [c.name for c in plan.cases]) == (5, ["unbroken", "kill"])
    assert plan.request == ("--nodes=1", "-pgpu") and plan.command == ()
    plan = parse_plan(["--only=own", "--", "python", "--only=x"])
    assert [c.name for c in plan.cases] == ["own"] and plan.command == ("python", "--only=x")
    with pytest.raises(ConfigError) as error:
        parse_plan(
            ["--minutes=0", "--only=kil", "--time=5", "-J", "x", "--export=NONE", "--run.dir=x"]
        )
    said = str(error.value)
    assert "--minutes=0: must be from 1 to 1440" in said and "no case 'kil'; choose" in said
    assert "--run.dir=x: is an option of the trainer" in said
    assert said.count("the drill sets this") == 3 and "'x' is not an option" in said


def test_a_requeue_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that does not answer is asked again."""
    plan = parse_plan(["--only=requeue"])
    trial = Drill(plan, tmp_path, lambda line: None).trials[-1]
    make_run(tmp_path / "requeue", state="running", starts=[0])
    trial.state, trial.number, asked = "RUNNING", "7", []
    answers = iter(["Socket timed out on send/recv operation", "Access/permission denied"])

    def tell(*words: str) -> site.SlurmAnswer:
        asked.append(words)
        return site.SlurmAnswer(False, next(answers))

    monkeypatch.setattr(conduct, "tell", tell)
    monkeypatch.setattr(conduct, "jobs_of", lambda name: [])
    drill = Drill(plan, tmp_path, lambda line: None, [trial])
    drill._strike(trial, {})
    assert not trial.seen.broken and trial.seen.struck is None
    drill._strike(trial, {})
    assert trial.seen.broken == "scontrol requeue: Access/permission denied"
    assert asked == [("scontrol", "requeue", "7")] * 2


CONFIG = "PreemptType = {kind}\nPreemptMode = REQUEUE\n"
PARTITIONS = (
    "PartitionName=gpu PreemptMode={mode} PriorityTier=1 State=UP\n"
    "PartitionName=urgent PreemptMode=OFF PriorityTier=9 State=UP\n"
)


@pytest.mark.parametrize(
    ("kind", "mode", "found"),
    [
        ("preempt/none", "OFF", ("", "this site preempts no job (PreemptType=preempt/none)")),
        ("preempt/partition_prio", "OFF", ("", "jobs of partition gpu are not preempted")),
        ("preempt/partition_prio", "REQUEUE", ("--partition=urgent", "")),
        ("preempt/qos", "", ("--qos=high", "")),
    ],
)
def test_how_a_job_could_be_preempted(
    monkeypatch: pytest.MonkeyPatch, kind: str, mode: str, found: tuple[str, str]
) -> None:
    answers = {
        "config": CONFIG.format(kind=kind),
        "partition": PARTITIONS.format(mode=mode),
        "qos": "low|\nother|low\nhigh|low,normal\n",
        "associations": "normal,high\n",
    }
    monkeypatch.setattr(
        site, "ask", lambda *words: next(answers[word] for word in words if word in answers)
    )
    monkeypatch.setattr(site, "job_fields", lambda job: {"Partition": "gpu", "QOS": "normal"})
    monkeypatch.setattr(site, "tell", lambda *words: site.SlurmAnswer(True, ""))
    assert site.preempting_option("7") == found


def test_a_job_without_a_qos_is_preempted_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A QOS that preempts nothing has an empty list."""
    answers = {
        "config": CONFIG.format(kind="preempt/qos"),
        "qos": "low|\n",
        "associations": "low\n",
    }
    monkeypatch.setattr(
        site, "ask", lambda *words: next(answers[word] for word in words if word in answers)
    )
    monkeypatch.setattr(site, "job_fields", lambda job: {})
    monkeypatch.setattr(site, "tell", lambda *words: site.SlurmAnswer(True, ""))
    assert site.preempting_option("7")[0] == ""


def test_sbatch_fails_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in (("sbatch", "exit 3"), ("squeue", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    drill = Drill(parse_plan(["--only=kill"]), tmp_path, print)
    drill._submit()
    assert drill.trials[0].seen.broken == "sbatch: exit code 3"


@pytest.mark.parametrize(("struck", "broken"), [(None, False), (10.0, False), (600.0, True)])
def test_a_drill_without_time_breaks_no_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, struck: float | None, broken: bool
) -> None:
    """A job is cancelled at the end of --minutes: that was no fault of the site, unless the fault
    has struck long ago."""
    monkeypatch.setattr(Drill, "cancel", lambda self: None)
    drill = Drill(parse_plan(["--minutes=1", "--only=freeze"]), tmp_path, print)
    [trial] = [trial for trial in drill.trials if trial.case.name == "freeze"]
    trial.over, trial.seen.not_tried, trial.seen.started = False, "", True
    if struck is not None:
        (tmp_path / "freeze.struck").touch()
        os.utime(tmp_path / "freeze.struck", 2 * (time.time() - struck,))
    drill._end_at(61.0)
    assert trial.over and bool(trial.seen.broken) == broken
    assert broken or "--minutes" in trial.seen.not_tried
