"""The window between the warning signal and the end of the job; what programs under run.sh ask."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from kempner.jobs import slurm
from kempner.jobs.drill import site
from kempner.jobs.this_job import short_window, tasks_per_node


@pytest.mark.parametrize(
    ("lead", "save", "step", "enough"),
    [
        ("60", 30.0, 0.0, None),
        ("60", 30.1, 0.0, 120),
        ("10", 5.1, 0.0, 60),
        ("120", 300.0, 0.0, 630),
        ("120", 10.0, 33.0, None),
        ("120", 10.0, 40.0, 180),
        ("", 900.0, 40.0, None),
    ],
)
def test_the_window_holds_two_saves_and_three_steps(
    monkeypatch: pytest.MonkeyPatch, lead: str, save: float, step: float, enough: int | None
) -> None:
    monkeypatch.setenv("KEMPNER_SIGNAL_LEAD", lead)
    warning = short_window(save, step)
    if enough is None:
        assert warning is None
    else:
        assert warning is not None and f"SBATCH_SIGNAL=B:SIGTERM@{enough} " in warning
        assert f"takes {save:.1f} s" in warning and f"only {lead} s" in warning


def test_the_shell_of_the_user_does_not_answer_for_slurm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ("SQUEUE_STATES", "SINFO_FORMAT", "SACCT_FORMAT", "SCONTROL_ALL", "SLURM_TIME_FORMAT")
    for name in (*names, "SLURM_BITSTR_LEN", "SLURM_CONF"):
        monkeypatch.setenv(name, "relative")
    seen = slurm._ask("env") or ""
    assert "SLURM_CONF=relative" in seen and not [name for name in names if name in seen]


def test_the_jobs_of_a_large_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sacct").write_text(
        """#!/bin/bash
        IFS=,; while [[ $1 != -j ]]; do shift; done; printf '%s|FAILED\\n' $2
        """
    )
    (tmp_path / "sacct").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    jobs = [f"12345678_{task}" for task in range(20_000)]
    assert slurm.accounted_states(jobs) == dict.fromkeys(jobs, "FAILED")
    assert slurm.accounted_states([]) == {}


def test_a_name_in_another_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch --comment takes any bytes."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'JobState=RUNNING Comment=caf\\351\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert slurm.job_fields("7")["JobState"] == "RUNNING"
    said = site.tell("scontrol", "show", "job")
    assert said.ok and said.text.startswith("JobState=RUNNING")


@pytest.mark.parametrize(
    ("state", "end", "lead", "seconds"),
    [
        ("RUNNING", "1970-01-01T00:00:00", "60", None),
        ("RUNNING", "Unknown", "60", 90.0),  # it is not being ended, as far as one can tell
        ("RUNNING", "in 2 min", "", None),
        ("COMPLETING", "Unknown", "60", 30.0),
    ],
)
def test_the_time_that_a_job_has_left(
    monkeypatch: pytest.MonkeyPatch, state: str, end: str, lead: str, seconds: float | None
) -> None:
    told = f"JobId=7 JobState={state} EndTime={end} \n"
    monkeypatch.setenv("KEMPNER_SIGNAL_LEAD", lead)
    monkeypatch.setattr(slurm, "_ask", lambda *words: told if "job" in words else "KillWait = 30")
    left = slurm.seconds_to_live("7")
    assert left is not None and left < 0 if end.startswith("19") else left == seconds


def test_what_programs_ask_costs_nothing_outside_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each rank may ask in each step: under srun alone, too, nobody asks Slurm's controller."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for name in ("KEMPNER_STOP_FILE", "KEMPNER_HEARTBEAT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(slurm.subprocess, "run", lambda *_, **__: pytest.fail("Slurm is asked"))
    assert slurm.end_time() is None and slurm.seconds_left() is None
    slurm.beat(3)
    assert not slurm.stop_requested()
    monkeypatch.setenv("KEMPNER_STOP_FILE", str(tmp_path / "stop"))
    for text, end in (("", None), ("17.5", 17.5)):
        (tmp_path / "end").write_text(text)
        assert slurm.end_time() == end


def test_nobody_says_how_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEMPNER_SIGNAL_LEAD", raising=False)
    assert short_window(900.0, 40.0) is None


@pytest.mark.parametrize(
    ("told", "count"),
    [("4", 4), ("4(x2)", 4), ("8(x3),8", 8), ("4(x2),2", None), ("", None)],
)
def test_tasks_per_node(told: str, count: int | None) -> None:
    assert tasks_per_node({"SLURM_STEP_TASKS_PER_NODE": told}) == count


SINFO = """n1|idle|h100,ib|gpu:h100:8(S:0-1)
n2|alloc|h100,ib|gpu:h100:8(S:0-1)
n3|mix-|h100|gpu:h100:8
n4|down*|h100,ib|gpu:h100:8
n5|drain|h100,ib|gpu:h100:8
n6|idle|a100,ib|gpu:a100:8
n7|idle|h100,ib|gpu:h100:4
n8|idle|(null)|(null)
n9|inval|h100,ib|gpu:h100:8
n10|futr|h100,ib|gpu:h100:8
"""


def never_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question is asked again for seconds: they pass at once."""
    clock = itertools.count(step=2.0)
    monkeypatch.setattr(slurm.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)


@pytest.mark.parametrize(
    ("asks", "nodes"),
    [
        ("", ["n1", "n2", "n3", "n6", "n7", "n8"]),  # busy ones count, broken ones do not
        ("Features=h100", ["n1", "n2", "n3", "n7"]),
        ("Features=h100&ib", ["n1", "n2", "n7"]),
        ("Features=a100|h100", ["n1", "n2", "n3", "n6", "n7"]),
        ("Features=[a100*2&h100*2]", None),  # only Slurm knows
        ("TresPerNode=gres:gpu:8", ["n1", "n2", "n3", "n6"]),
        ("TresPerNode=gres/gpu:h100:4", ["n1", "n2", "n3", "n7"]),
        ("Features=ib TresPerNode=gres:gpu:h100:8", ["n1", "n2"]),
        ("ReqNodeList=n1,n4,n6", ["n1", "n6"]),
        ("Reservation=mine", ["n1", "n3"]),
        ("Reservation=mine ReqNodeList=n1,n2", ["n1"]),
        ("Reservation=gone", None),
        ("ExcNodeList=n1,n2", ["n3", "n6", "n7", "n8"]),
    ],
)
def test_nodes_that_could_take_the_job(
    monkeypatch: pytest.MonkeyPatch, asks: str, nodes: list[str] | None
) -> None:
    """Of those of the partition: four nodes with h100, of which one was excluded, and fifty others
    left a job that needs four of them pending for ever."""
    record = (
        "Partition=gpu Features=(null) ExcNodeList=(null) ReqNodeList=(null) Reservation=(null)"
    )
    given = dict(word.split("=", 1) for word in asks.split())
    fields = dict(word.split("=", 1) for word in record.split()) | given
    asked: list[tuple[str, ...]] = []

    def answer(*words: str) -> str | None:
        asked.append(words)
        if words[0] == "sinfo":
            return SINFO
        if words[:3] == ("scontrol", "show", "res"):
            return "ReservationName=mine Nodes=n1,n3 State=ACTIVE\n" if "mine" in words else None
        assert words[:3] == ("scontrol", "show", "hostnames")
        return words[3].replace(",", "\n")

    request = " ".join(f"{name}={value}" for name, value in fields.items())
    monkeypatch.setattr(slurm, "_ask", answer)
    never_patient(monkeypatch)
    assert slurm.other_nodes(request, []) == (None if nodes is None else len(nodes))
    assert ("-p", "gpu") in zip(*(words[i:] for words in asked[:1] for i in (0, 1)), strict=False)
    for out in nodes or []:  # that this and no other node is counted
        assert slurm.other_nodes(request, [out]) == len(nodes or []) - 1


def test_how_many_nodes_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    never_patient(monkeypatch)
    for silent in ("sinfo", "scontrol"):
        told = {"sinfo": SINFO, "scontrol": "n1\nn2"} | {silent: None}
        monkeypatch.setattr(slurm, "_ask", lambda *words, told=told: told[words[0]])
        assert slurm.other_nodes("Partition=gpu ReqNodeList=n[1-2]", []) is None
    assert slurm.other_nodes("", []) is None


def test_a_question_that_was_dropped_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in ten is, on a busy controller: a node with a fault stayed in the job."""
    never_patient(monkeypatch)
    answers = iter([None, None, SINFO])
    monkeypatch.setattr(slurm, "_ask", lambda *words: next(answers))
    assert slurm.other_nodes("Partition=gpu", ["n1"]) == 5
