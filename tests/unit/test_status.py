"""scripts/status.py: what it says of runs in every state."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

SPEC = importlib.util.spec_from_file_location("status", ROOT / "scripts/status.py")
assert SPEC is not None and SPEC.loader is not None
program: Any = importlib.util.module_from_spec(SPEC)
sys.modules["status"] = program
SPEC.loader.exec_module(program)

RUNNING = program.Job("RUNNING", "1:02:03", "None", "N/A")
PENDING = program.Job("PENDING", "24:00:00", "BeginTime", "2026-01-02T03:04:05")
START = {"event": "start", "job": "7"}
REFUSED = {"event": "decision", "job": "7", "why": "3 attempts in a row without progress"}


def lines(ago: float, every: float = 10.0) -> list[dict[str, float]]:
    """Twenty lines, the last one so many seconds old."""
    return [{"time": time.time() - ago - every * i} for i in reversed(range(20))]


@pytest.mark.parametrize(
    ("status", "events", "silence", "job", "asked", "expected"),
    [
        ("running", [START], 5, RUNNING, True, ("running", "")),
        ("running", [START], 600, RUNNING, True, ("silent", "! no line for 10 min")),
        ("running", [START], (600, 300), RUNNING, True, ("running", "")),
        ("running", [START], None, RUNNING, True, ("running", "")),
        ("running", [START], 5, None, True,
         ("crashed", "! job 7 has left the queue: without a word")),
        ("running", [START, REFUSED], 5, None, True,
         ("crashed", f"! job 7 has left the queue: {REFUSED['why']}")),
        ("running", [START], 5, None, False, ("running", "")),
        ("interrupted", [START], 5, PENDING, True,
         ("waiting", "job 7: BeginTime, expected 2026-01-02T03:04:05")),
        ("interrupted", [START, REFUSED], 5, None, True,
         ("interrupted", f"! not requeued: {REFUSED['why']}")),
        ("failed", [START], 5, None, True, ("failed", "! it is so")),
        ("done", [START], 5, None, True, ("done", "")),
        ("stopped", [START], 5000, None, True, ("stopped", "")),
    ],
)  # fmt: skip
def test_judge(
    status: str, events: list[Any], silence: Any, job: Any, asked: bool, expected: Any
) -> None:
    told = {"state": status, "reason": "it is so"}
    record = lines(*(silence if isinstance(silence, tuple) else (silence,))) if silence else []
    assert program.judge(told, events, record, "7", job, asked) == expected


def make(run: Path, state: str, step: int) -> Path:
    run.mkdir(parents=True)
    status = {"state": state, "step": step, "max_steps": 2000, "reason": "so", "job": None}
    (run / "status.json").write_text(json.dumps(status))
    (run / "attempts.jsonl").write_text(2 * (json.dumps({"event": "start"}) + "\n") + '{"torn')
    line = {"step": step + 5, "time": time.time(), "loss": 2.5, "tokens_per_s": 12345.6}
    (run / "metrics.jsonl").write_text(9000 * '{"old": 1}\n' + json.dumps(line) + "\n")
    return run


def test_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "ask_squeue", lambda: None)
    for name, state in (("a", "done"), ("b", "failed")):
        make(tmp_path / "runs" / name, state, 1000)
    (tmp_path / "runs" / "no-run").mkdir()
    alone = make(tmp_path / "c", "running", 1)
    assert program.main([str(tmp_path / "runs"), str(alone)]) == 0
    head, first, *rest = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "loss", "tokens/s", "starts", "left"]
    assert first.split()[1:] == [
        "failed", "1,005/2,000", "2.5000", "12,346", "2", "-", "!", "so"
    ]  # fmt: skip
    assert [line.split()[1] for line in rest] == ["running", "done"]


def test_the_run_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """squeue tells of my own jobs, so that nothing is known of theirs."""
    run = make(tmp_path / "run", "running", 5)
    (run / "attempts.jsonl").write_text(json.dumps(START) + "\n")
    monkeypatch.setattr(program, "ask_squeue", dict)
    for owner, state in ((os.getuid(), "crashed"), (os.getuid() + 1, "running")):
        monkeypatch.setattr(program.os, "getuid", lambda owner=owner: owner)
        program.main([str(tmp_path)])
        assert capsys.readouterr().out.splitlines()[1].split()[1] == state


def test_a_line_that_is_too_long_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "ask_squeue", lambda: None)
    monkeypatch.chdir(make(tmp_path / "a", "failed", 1).parent)
    for columns, end in (("40", "..."), ("200", "! so")):
        monkeypatch.setenv("COLUMNS", columns)
        assert program.main(["a"]) == 0
        line = capsys.readouterr().out.splitlines()[1]
        assert line.endswith(end) and len(line) <= int(columns)


def test_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([str(tmp_path)]) == 2
    assert "no run in" in capsys.readouterr().err
