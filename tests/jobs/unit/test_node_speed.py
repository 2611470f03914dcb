"""Figures of nodes over time, as docs/guide/preflight.md shows them: what preflight keeps, and what
report.py --nodes says of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kempner.jobs.preflight.history import keep_speeds
from kempner.jobs.preflight.verdict import Report
from kempner.jobs.records import node_speed
from kempner.jobs.records.node_speed import append_speed, is_worse, load_speed, load_speeds
from kempner.jobs.report.node_speeds import draw_bars
from scripts import report as program
from tests.jobs.unit.test_preflight_verdict import figure, node


def keep(folder: Path, speed: float, name: str = "n1", kind: str = "cuda", **more: Any) -> Report:
    """A preflight of two nodes, of which the second has this speed."""
    usual = {"device": "H100", "flops_per_s": 6e14, "copy_bytes_per_s": 3e12}
    nodes = [node("n0"), node(name, **more)]
    for one, share in zip(nodes, (1.0, speed), strict=True):
        one.devices = {0: usual | {"flops_per_s": share * 6e14}, 1: usual}
        one.pairs = {"other": figure(4e10)}
        one.storage = {"write_bytes_per_s": 1e9, "read_bytes_per_s": 2e9}
    report = Report(nodes, kind=kind)
    keep_speeds(report, folder)
    return report


def test_a_node_that_becomes_worse_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs/node-speeds"
    for speed in (1.0, 0.99, 1.01, 0.97):
        assert not any(one.notes for one in keep(folder, speed).nodes)
    report = keep(folder, 0.94)
    assert report.nodes[1].notes == ["matrix product: 6% under its own earlier median"]
    assert not report.nodes[0].notes and not report.faulty
    assert [len(lines) for lines in load_speeds(folder).values()] == [5, 5]

    assert program.main(["--nodes", str(tmp_path / "runs")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    slow, *others = [row for row in rows if row[:3] == ["n1", "matrix", "product"]]
    assert slow[-3:] == ["!", "6%", "worse"] and slow[5] == "5" and not others
    assert {"564", "597", "TFLOP/s"} <= set(slow)  # now, and the median before
    assert sum("worse" in row for row in rows) == 1
    assert sum(row[1:3] == ["run", "directory,"] for row in rows) == 4


def test_a_time_that_cannot_be_hides_no_other_line(tmp_path: Path) -> None:
    keep(tmp_path, 1.0)
    for time in ("1e18", "-1e18", "1" + 30 * "0", "6.7e16", "NaN"):
        with open(tmp_path / "n1.jsonl", "a") as file:
            file.write(f'{{"time": {time}, "kind": "cuda", "product": 1.0}}\n')
    assert [len(lines) for lines in load_speeds(tmp_path).values()] == [1, 1]


def test_a_file_that_cannot_be_written_hides_no_other_node(tmp_path: Path) -> None:
    for _ in range(3):
        keep(tmp_path, 1.0)
    (tmp_path / "n0.jsonl").unlink()
    (tmp_path / "n0.jsonl").mkdir()
    report = keep(tmp_path, 0.5)
    assert report.nodes[1].notes and len(report.notes) == 1
    assert (tmp_path / "n1.jsonl").stat().st_mode & 0o111 == 0, "no program"


def test_only_what_is_alike_is_compared(tmp_path: Path) -> None:
    for _ in range(3):
        keep(tmp_path, 1.0)
    for other in ({"packages": {"torch": "2.14.0"}}, {"kind": "cpu"}):
        assert not any(one.notes for one in keep(tmp_path, 0.5, **other).nodes)
    assert keep(tmp_path, 0.5).nodes[1].notes


def test_noise_of_a_cpu_and_of_the_network_is_not_worse() -> None:
    def lines(kind: str, key: str, *values: float) -> list[dict[str, Any]]:
        return [{"time": k, "kind": kind, key: value} for k, value in enumerate(values)]

    assert not is_worse(lines("cpu", "product", 4, 4, 4, 1), "product")
    assert is_worse(lines("cpu", "product", 4, 4, 4, 0.7), "product")
    assert not is_worse(lines("cuda", "pair", 4, 4, 4, 3), "pair")
    assert is_worse(lines("cuda", "pair", 4, 4, 4, 1.9), "pair")
    assert not is_worse(lines("cuda", "write", 4, 4, 4, 0.1), "write")
    assert not is_worse(lines("cuda", "product", 4, 4, 1), "product")  # two are no median
    assert not is_worse([], "product")


def test_a_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_speed, "MOST_BYTES", 2000)
    for k in range(300):
        append_speed(tmp_path, "n0", {"time": k, "product": 1.0})
    assert (tmp_path / "n0.jsonl").stat().st_size < 2100
    assert load_speed(tmp_path, "n0")[-1]["time"] == 299
    with open(tmp_path / "n0.jsonl", "ab") as file:
        file.write(b'{"time": 3')  # by a process that was killed
    append_speed(tmp_path, "n0", {"time": 300})
    assert load_speed(tmp_path, "n0")[-1] == {"time": 300}


def test_where_nothing_can_be_kept(tmp_path: Path) -> None:
    """It does no harm, and no link of another user's is followed."""
    aim, folder = tmp_path / "aim", tmp_path / "node-speeds"
    aim.write_text("mine\n")
    folder.mkdir()
    (folder / "n0.jsonl").symlink_to(aim)
    report = keep(folder, 1.0)
    assert not report.faulty and "the figures cannot be recorded" in report.notes[0]
    (folder / "n0.jsonl").unlink()
    os.mkfifo(folder / "n0.jsonl")
    assert "is not a file" in keep(folder, 1.0).notes[0]
    assert "cannot be recorded" in keep(aim / "below", 1.0).notes[0]
    (tmp_path / "link").symlink_to(folder)
    assert "cannot be recorded" in keep(tmp_path / "link", 1.0).notes[0]
    assert aim.read_text() == "mine\n"


def test_bars_show_five_percent_on_any_terminal() -> None:
    assert draw_bars([1.0, 1.0, 0.93, 0.4], "utf-8") == "██▇▁"
    assert draw_bars([1.0, 0.93, 0.4], "latin-1") == "871"
    assert draw_bars([0.0], "utf-8") == "▁"


def test_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(program.ConfigError, match="keeps them in node-speeds there"):
        program.main(["--nodes", str(tmp_path)])
    with pytest.raises(program.ConfigError, match="leave --out and --html out"):
        program.main(["--nodes", str(tmp_path), "--html"])
