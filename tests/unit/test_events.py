"""The schema of attempts.jsonl: what is written is read again, by whomever it was written."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from kempner.history import events
from kempner.history.events import Decision, End, Event, Fault, FirstStep, GoBack, Start
from tests.cluster import SCRIPTS

HEAD = {"time": 1.5, "job": "12_3", "restart": 2, "attempt_id": "12.2", "attempt": 4, "step": 7}
EVENTS: list[Event] = [
    Start(**HEAD, nodes=("n1", "n2"), world_size=8, process_began=1.0),  # type: ignore[arg-type]
    FirstStep(**HEAD),  # type: ignore[arg-type]
    GoBack(**HEAD, to=5, skip=(16, 32), reason="not finite"),  # type: ignore[arg-type]
    Fault(**HEAD, kind="oom", ranks=(3,), hosts=("n2",), final=True),  # type: ignore[arg-type]
    End(**HEAD, state="done", reason="the last step"),  # type: ignore[arg-type]
    Decision(**HEAD, decision="requeue", no_progress=1),  # type: ignore[arg-type]
]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    for event in EVENTS:
        events.append(path, event)
    assert events.read(path) == EVENTS


def test_a_torn_line_costs_one_event(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    path.write_text('{"event": "start", "ti')
    events.append(path, EVENTS[1])
    assert events.read(path) == [EVENTS[1]]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({}, None),
        ({"event": "start"}, None),  # no time
        ({"event": ["start"], "time": 1}, None),
        ({"event": "of another version", "time": 1}, None),
        ({"event": "first_step", "time": 1, "step": "2", "more": 3}, FirstStep(time=1)),
        ({"event": "start", "time": 1, "nodes": [1], "world_size": True}, Start(time=1)),
        ({"event": "end", "time": 1, "state": "well"}, End(time=1)),
    ],
)
def test_what_does_not_fit_has_its_default(
    record: dict[str, object], expected: Event | None
) -> None:
    assert events.parse(record) == expected


def test_a_decision_of_the_batch_script(tmp_path: Path) -> None:
    """kp_record of requeue.sh writes it by printf."""
    (requeue,) = SCRIPTS.rglob("requeue.sh")
    script = f"""
        source {requeue}
        kp_log() {{ :; }}
        kp_job_id() {{ echo 12; }}
        kp_notify() {{ :; }}
        kp_record requeue "the step ended with exit code 1"
    """
    own = {"STEP": "20", "COMMITTED": "20", "STALLED": "2", "NO_PROGRESS": "2", "BLAMED": "n2"}
    given = {f"KP_{name}": value for name, value in own.items()} | {"KP_EXCLUDED": "n2"}
    given |= {"KP_RUN_DIR": str(tmp_path), "KEMPNER_ATTEMPT_ID": "12.1", "SLURM_RESTART_COUNT": "1"}
    done = subprocess.run(
        ["bash", "-euc", script],
        env=os.environ | given | {"KEMPNER_BATCH_BEGAN": "1700000000"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (decision,) = events.read(tmp_path / "attempts.jsonl")
    assert decision == Decision(
        time=decision.time,
        job="12",
        restart=1,
        attempt_id="12.1",
        step=20,
        decision="requeue",
        why="the step ended with exit code 1",
        no_progress=2,
        blamed="n2",
        excluded="n2",
        batch_began=1_700_000_000,
    )
    record = json.loads((tmp_path / "attempts.jsonl").read_text())
    fields = {field.name for field in dataclasses.fields(Decision)} - {"attempt"} | {"event"}
    assert set(record) == fields  # none is missing, none is unknown
