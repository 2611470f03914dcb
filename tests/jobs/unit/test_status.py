"""scripts/status.py: the table of runs. What state each is in: test_state.py."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from kempner.jobs.records.facts import run_facts
from kempner.jobs.records.run_history import load_history
from kempner.jobs.report.idle import idle_share
from kempner.jobs.report.page.write import write_page
from tests.jobs.unit.test_report import BEGAN, step_line, write_run
from tests.jobs.unit.test_state import STATUS


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
    assert STATUS.main([str(tmp_path / "runs"), str(alone)]) == 1  # somebody has to look
    head, first, *rest = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "loss", "tokens/s", "attempts", "idle", "left"]
    state, *numbers, idle, left, mark, why = first.split()[1:]
    assert numbers == ["1,005/2,000", "2.5000", "12,346", "2"] and idle.endswith("%")
    assert (state, left, mark, why) == ("failed", "-", "!", "so")
    assert [line.split()[1] for line in rest] == ["stopped", "done"]


def test_a_long_reason_is_wrapped_below_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "the data of this run are others: " + " ".join(f"word{i}" for i in range(30))
    monkeypatch.chdir(make(tmp_path / "a", "failed", 1, reason).parent)
    monkeypatch.setenv("COLUMNS", "80")
    assert STATUS.main(["a"]) == 1
    _, row, *below = capsys.readouterr().out.splitlines()
    assert row.split()[:2] == ["a", "failed"] and max(map(len, below)) <= 80
    assert " ".join(" ".join(below).split()) == f"! {reason}"


def test_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert STATUS.main([str(tmp_path)]) == 2
    assert "no run in" in capsys.readouterr().err


def test_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert STATUS.main([str(make(tmp_path / "a", "done", 2000))]) == 0
    assert "!" not in capsys.readouterr().out


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One document, of every run, with why somebody has to look."""
    for name, state in (("a", "done"), ("b", "failed")):
        make(tmp_path / name, state, 1000)
    assert STATUS.main([str(tmp_path), "--json", "--nodes"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["attention"], told["nodes"]) == (1, 1, [])
    done, failed = told["runs"]
    assert (done["state"], done["attention"], done["progress"]) == ("done", False, 0.5025)
    assert (failed["state"], failed["attention"], failed["why"]) == ("failed", True, "so")
    assert (failed["step"], failed["max_steps"], failed["attempts"]) == (1005, 2000, 2)
    assert failed["eta_s"] is None and failed["loss"] == 2.5


def test_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A host's faults over all runs: its own, the batch script's blame where it left no record, and
    those of kinds that are not known here."""
    now = time.time()
    for name in ("a", "b"):
        head = {"attempt": 0, "attempt_id": "1.0", "time": now - 3600, "job": "1"}
        events = [
            {**head, "event": "start", "nodes": ["n1", "n2"]},
            {**head, "event": "fault", "kind": "hang", "hosts": ["n2"], "time": now},
            {**head, "event": "fault", "kind": "crash", "hosts": ["n1"], "lost_peer": True},
            {**head, "event": "decision", "decision": "requeue", "blamed": "n2", "excluded": "n2"},
            {**head, "event": "start", "attempt": 1, "attempt_id": "1.1", "nodes": ["n1"]},
            {**head, "event": "decision", "decision": "end", "blamed": "n1", "attempt_id": "1.1"},
            {**head, "event": "gpu", "kind": "xid 79", "host": "n1", "attempt_id": "1.1"},
            {**head, "event": "gpu", "kind": "xid 31", "host": "n2", "answer": "note"},
            {**head, "event": "gpu", "kind": "xid", "host": "n3", "answer": "end"},
            {**head, "event": "fault", "kind": "crash", "hosts": ["n3"]},
            {**head, "event": "decision", "decision": "restart", "blamed": "n3"},
        ]
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(event) + "\n" for event in events)
        (tmp_path / name / "attempts.jsonl").write_text(text)
    STATUS.main([str(tmp_path), "--json", "--nodes"])
    n1, n2, n3 = json.loads(capsys.readouterr().out)["nodes"]
    assert (n1["host"], n1["faults"], n1["excluded"]) == ("n1", {"died": 2, "gpu xid 79": 2}, 0)
    assert (n2["host"], n2["faults"], n2["excluded"]) == ("n2", {"hang": 2}, 2)
    assert (n3["host"], n3["faults"]) == ("n3", {"gpu xid": 2})
    assert (n1["runs"], n1["attempts"], n2["attempts"]) == (2, 4, 2)
    assert n2["hours"] == 2.0 and n2["last_fault"]["run"] in map(str, tmp_path.iterdir())
    STATUS.main([str(tmp_path), "--nodes"])
    head, first, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["host", "runs", "attempts", "hours", "excluded"]
    assert first.startswith("n1") and "2 died, 2 gpu xid 79" in first


def test_the_idle_share_of_a_long_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of its metrics is read: where that began with a save, all steps before counted as
    such saves."""
    clock, lines = BEGAN + 20.0, []
    for step in range(10, 20_001, 10):
        save = 60.0 if step % 500 == 0 else 0.0
        clock += 10 + save
        times = {"time": clock, "step_time": 1 + save / 10, "checkpoint_time": save / 10}
        lines.append(step_line(step, **times | {"eval_time": 0.0}))
    run = write_run(tmp_path / "a", "".join(lines), max_steps=20_000, time=clock)
    whole = load_history(run)
    monkeypatch.setattr(STATUS, "STATUS_TAIL_BYTES", sum(map(len, lines[-251:])))
    assert json.loads(lines[-251])["checkpoint_time"]
    STATUS.main([str(run), "--json"])
    assert json.loads(capsys.readouterr().out)["runs"][0]["idle"] == pytest.approx(
        idle_share(whole), abs=0.01
    )


def test_a_later_start_that_asked_for_fewer_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path / "a", "done", 1000)
    known = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**known, "max_steps": 500}))
    assert STATUS.main([str(run)]) == 0
    assert "1,005/1,005" in capsys.readouterr().out


def test_the_speed_is_the_median_of_the_last_lines(tmp_path: Path) -> None:
    run = make(tmp_path / "a", "done", 1000)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    with (run / "metrics.jsonl").open("a") as file:
        for step, rate in ((1010, 20_000.0), (1015, 21_000.0), (1020, 1.0)):
            line = {**last, "step": step, "time": last["time"] + step, "tokens_per_s": rate}
            file.write(json.dumps(line) + "\n")
    found = run_facts(load_history(run), time.time())
    assert found["tokens_per_s"] == pytest.approx((12345.6 + 20_000) / 2)


def test_one_run_needs_attention_and_two_need_it(tmp_path: Path) -> None:
    runs = [make(tmp_path / name, "failed", 1) for name in ("a", "b")]
    runs.append(make(tmp_path / "c", "done", 1))
    write_page(runs, tmp_path / "page.html", None)
    assert "2 need attention" in (tmp_path / "page.html").read_text()
    write_page(runs[1:], tmp_path / "page.html", None)
    assert "1 needs attention" in (tmp_path / "page.html").read_text()
