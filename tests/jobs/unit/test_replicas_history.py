"""What report.py and status.py say of replicas, from the log of their judge."""

from __future__ import annotations

import json
from pathlib import Path

from kempner.jobs.report.replicas import replicas_of
from kempner.jobs.report.summary import replica_table


def write(run: Path) -> None:
    def told(number: int, name: str, members: list[str], sent: int) -> dict[str, object]:
        entry = number == 0
        line = {"event": "round", "time": 5.0, "name": name, "round": number, "entry": entry}
        return {**line, "members": members, "bytes": sent}

    first, left = ["0.1", "1.1"], ["0.1"]
    lines: list[dict[str, object]] = [
        {"event": "here", "time": 1.0, "name": "0.1", "reason": ""},
        {"event": "here", "time": 1.5, "name": "1.1", "reason": ""},
        told(0, "0.1", first, 0),
        told(0, "1.1", first, 0),
        told(1, "0.1", first, 1_000_000),
        told(1, "1.1", first, 1_000_000),
        {"event": "gone", "time": 6.0, "name": "1.1", "reason": "its process ended"},
        {"event": "here", "time": 7.0, "name": "1.2", "reason": ""},
        told(2, "0.1", left, 1_500_000),
        told(2, "1.2", left, 200_000),
        {"event": "gone", "time": 9.0, "name": "0.1", "reason": "left"},
    ]
    (run / "replicas.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_rounds_losses_and_bytes_of_each_replica(tmp_path: Path) -> None:
    write(tmp_path)
    found = replicas_of(tmp_path)
    assert found is not None and found.here == 1 and found.sent == 2_700_000
    rows = [(r.starts, r.rounds, r.lost) for r in found.by_number.values()]
    assert rows == [(1, 2, []), (2, 1, [(6.0, "its process ended")])]
    table = replica_table(found)
    assert "its process ended" in table and "2 rounds; 2.7 MB sent" in table


def test_the_bytes_of_all_starts_of_the_job_count(tmp_path: Path) -> None:
    """In each of them the judge counts the starts of a replica from 1 on."""
    write(tmp_path)
    log = tmp_path / "replicas.jsonl"
    log.write_text(log.read_text() * 2)
    found = replicas_of(tmp_path)
    assert found is not None and found.sent == 5_400_000


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    write(tmp_path)
    log = tmp_path / "replicas.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    whole = replicas_of(tmp_path)
    rounds = [line for line in lines if line["event"] == "round"][-1:]
    damaged = [{k: v for k, v in line.items() if k != key} for line in rounds for key in line]
    damaged += [{**line, key: None} for line in rounds for key in line]
    log.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *damaged]))
    found = replicas_of(tmp_path)
    assert whole and found and (found.sent, found.by_number) == (whole.sent, whole.by_number)
    assert replica_table(found) == replica_table(whole)


def test_a_run_without_replicas_has_none(tmp_path: Path) -> None:
    assert replicas_of(tmp_path) is None
