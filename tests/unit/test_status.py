"""scripts/status.py: the table of runs. What state each is in: test_state.py."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.unit.test_state import STATUS


def make(run: Path, state: str, step: int, reason: str = "so") -> Path:
    run.mkdir(parents=True)
    status = {"state": state, "step": step, "max_steps": 2000, "reason": reason, "job": None}
    (run / "status.json").write_text(json.dumps(status | {"attempt": 0, "time": time.time()}))
    start = {"event": "start", "attempt": 0, "time": time.time() - 9}
    again = start | {"attempt": 1}
    text = json.dumps(start | {"attempt": 1}) + "\n" + json.dumps(again | {"attempt": 0}) + "\n"
    (run / "attempts.jsonl").write_text(text + '{"torn')
    line = {"step": step + 5, "time": time.time(), "loss": 2.5, "tokens_per_s": 12345.6}
    (run / "metrics.jsonl").write_text(9000 * '{"old": 1}\n' + json.dumps(line) + "\n")
    return run


@pytest.fixture(autouse=True)
def no_squeue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STATUS.slurm, "my_jobs", lambda: None)
    monkeypatch.setenv("COLUMNS", "200")


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, state in (("a", "done"), ("b", "failed")):
        make(tmp_path / "runs" / name, state, 1000)
    (tmp_path / "runs" / "no-run").mkdir()
    alone = make(tmp_path / "c", "stopped", 1)
    assert STATUS.main([str(tmp_path / "runs"), str(alone)]) == 0
    head, first, *rest = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "loss", "tokens/s", "attempts", "left"]
    assert first.split()[1:] == [
        "failed", "1,005/2,000", "2.5000", "12,346", "2", "-", "!", "so"
    ]  # fmt: skip
    assert [line.split()[1] for line in rest] == ["stopped", "done"]


def test_a_long_reason_is_wrapped_below_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "the data of this run are others: " + " ".join(f"word{i}" for i in range(30))
    monkeypatch.chdir(make(tmp_path / "a", "failed", 1, reason).parent)
    monkeypatch.setenv("COLUMNS", "80")
    assert STATUS.main(["a"]) == 0
    _, row, *below = capsys.readouterr().out.splitlines()
    assert row.split()[:2] == ["a", "failed"] and max(map(len, below)) <= 80
    assert " ".join(" ".join(below).split()) == f"! {reason}"


def test_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert STATUS.main([str(tmp_path)]) == 2
    assert "no run in" in capsys.readouterr().err
