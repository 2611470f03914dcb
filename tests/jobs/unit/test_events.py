"""The schema of attempts.jsonl: what is written is read again, by whomever it was written."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from kempner.jobs.records import event_reader, events
from kempner.jobs.records.events import (
    DecisionEvent,
    End,
    Event,
    FaultEvent,
    FirstStep,
    GoBack,
    StartEvent,
)
from kempner.jobs.records.run_records import RunRecords
from kempner.jobs.system.background import Background
from kempner.jobs.system.reading import read_jsonl
from tests.cluster import SCRIPTS
from tests.waiting import LIMIT_S

HEAD = {"time": 1.5, "job": "12_3", "restart": 2, "attempt_id": "12.2", "attempt": 4, "step": 7}
EVENTS: list[Event] = [
    StartEvent(**HEAD, nodes=("n1", "n2"), world_size=8, process_began=1.0),  # type: ignore[arg-type]
    FirstStep(**HEAD),  # type: ignore[arg-type]
    GoBack(**HEAD, to=5, skip=(16, 32), reason="not finite"),  # type: ignore[arg-type]
    FaultEvent(**HEAD, kind="oom", ranks=(3,), hosts=("n2",), final=True),  # type: ignore[arg-type]
    End(**HEAD, state="done", reason="the last step"),  # type: ignore[arg-type]
    DecisionEvent(**HEAD, decision="requeue", no_progress=1),  # type: ignore[arg-type]
]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    for event in EVENTS:
        events.append_event(path, event)
    assert event_reader.read_events(path) == EVENTS


def test_a_torn_line_costs_one_event(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    path.write_text('{"event": "start", "ti')
    events.append_event(path, EVENTS[1])
    assert event_reader.read_events(path) == [EVENTS[1]]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({}, None),
        ({"event": "start"}, None),  # no time
        ({"event": ["start"], "time": 1}, None),
        ({"event": "of another version", "time": 1}, None),
        ({"event": "first_step", "time": 1, "step": "2", "more": 3}, FirstStep(time=1)),
        ({"event": "start", "time": 1, "nodes": [1], "world_size": True}, StartEvent(time=1)),
        ({"event": "end", "time": 1, "state": "well"}, End(time=1)),
    ],
)
def test_what_does_not_fit_has_its_default(
    record: dict[str, object], expected: Event | None
) -> None:
    assert event_reader.parse_event(record) == expected


def test_a_decision_of_the_batch_script(tmp_path: Path) -> None:
    """kp_record of requeue.sh has no look at the schema."""
    (library,) = SCRIPTS.rglob("all.sh")
    script = f"""
        source {library}
        kp_log() {{ :; }}
        kp_job_id() {{ echo 12; }}
        kp_notify() {{ :; }}
        kp_set_decision no_progress=2 blamed=n2 excluded=n2
        kp_record requeue "the step ended with exit code 1"
    """
    given = {"KP_RUN_DIR": str(tmp_path), "KP_COMMITTED": "20"}
    given |= {"KEMPNER_ATTEMPT_ID": "12.1", "SLURM_RESTART_COUNT": "1"}
    done = subprocess.run(
        ["bash", "-euc", script],
        env=os.environ | given | {"KEMPNER_BATCH_BEGAN": "1700000000"},
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (decision,) = event_reader.read_events(tmp_path / "attempts.jsonl")
    assert decision == DecisionEvent(
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
        committed=20,
    )
    record = json.loads((tmp_path / "attempts.jsonl").read_text())
    fields = {field.name for field in dataclasses.fields(DecisionEvent)} - {"attempt"} | {"event"}
    assert set(record) == fields  # none is missing, none is unknown


def decided(time: float, **values: object) -> dict[str, object]:
    return {"event": "decision", "time": time, **values}


def test_what_other_hosts_have_written_is_among_the_events_of_its_attempt(tmp_path: Path) -> None:
    """Before the decision, even by a clock that is 90 s ahead."""
    path = tmp_path / "attempts.jsonl"
    a, b = {"attempt_id": "7.0.1"}, {"attempt_id": "7.0.1.1"}
    lines = [
        {"event": "start", "time": 10, **a},
        {"event": "fault", "time": 30, **a},
        decided(40, **a),
        {"event": "start", "time": 50, **b},
        {"event": "end", "time": 90, **b},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [r["time"] for r in event_reader.read_records(path)] == [10, 30, 40, 50, 90]
    (tmp_path / "attempts").mkdir()
    (tmp_path / "attempts/n1.jsonl").write_text(
        json.dumps({"event": "gpu", "time": 20, **a}) + "\n" + '{"event": "fa'
    )
    (tmp_path / "attempts/n2.jsonl").write_text(
        json.dumps({"event": "fault", "time": 120, **a})
        + "\n"
        + json.dumps({"event": "fault", "time": 60, **b})
        + "\n"
        + json.dumps({"event": "gpu", "time": 95, "attempt_id": "8.0.3"})
        + "\n"
    )
    assert [r["time"] for r in event_reader.read_records(path)] == [
        10,
        20,
        30,
        120,
        40,
        50,
        60,
        90,
        95,
    ]
    path.unlink()  # rank 0 has not come so far
    assert [r["time"] for r in event_reader.read_records(path)] == [20, 60, 95, 120]


def test_each_host_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for rank 0 and the batch script, which are never there together."""
    path = tmp_path / "attempts.jsonl"
    for host in ("n1", "n2"):
        monkeypatch.setenv("SLURMD_NODENAME", host)
        for first in (True, False):
            records = RunRecords(tmp_path, 0, Background(print), first=first)
            records.event(FaultEvent(**records.head(1), reason=f"{host} {first}"))
            assert records._background.flush(60)
        records.last_event(FaultEvent(**records.head(1), reason="lost"))
    files = [path, *sorted(tmp_path.glob("attempts/*"))]
    told = [[record["reason"] for record in read_jsonl(file)] for file in files]
    assert told == [["n1 True", "n2 True"], ["n1 False", "lost"], ["n2 False", "lost"]]
    assert len(event_reader.read_events(path)) == 6
