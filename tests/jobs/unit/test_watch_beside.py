"""The process beside the ranks: it tells of a stall, once, writes the page, and ends with the batch
script. The clock is the test's, and each look is one turn of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kempner.jobs.records import watch
from kempner.jobs.report import notify
from tests.jobs.unit.test_report import hold_lock, write_run

PARENT = 4321
Turns = Callable[..., None]


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """turns(run, every, *acts): one act before each turn of the loop; then its parent is gone."""
    for name in ("KEMPNER_MAIL", "KEMPNER_NOTIFY", "KEMPNER_WEBHOOK"):
        monkeypatch.delenv(name, raising=False)
    clock = [0.0]
    stand_in = SimpleNamespace(  # the module's own: threads of other tests sleep by time.sleep
        time=time.time,
        monotonic=lambda: clock[0],
        sleep=lambda seconds: clock.__setitem__(0, clock[0] + seconds),
    )
    monkeypatch.setattr(watch, "time", stand_in)

    def run(path: Path, every: int | None, *acts: Callable[[], object]) -> None:
        def parents() -> Iterator[int]:
            yield PARENT
            for act in acts:
                act()
                yield PARENT
            yield 1

        found = parents()
        monkeypatch.setattr(watch, "os", SimpleNamespace(getppid=lambda: next(found)))
        watch.main(path, every)
        assert next(found, None) is None, "it has ended before its parent"

    return run


def nothing() -> None:
    pass


class Run:
    """A run whose process lives. `lines`: ten, the last of them `ago` seconds ago."""

    def __init__(self, path: Path) -> None:
        self.path = write_run(path, "", " ", state="running", max_steps=1000)
        hold_lock(self.path)
        self.step = 0

    def lines(self, ago: float) -> None:
        now = time.time() - ago
        start = {"event": "start", "attempt": 0, "attempt_id": "7.0", "time": now - 20, "step": 0}
        (self.path / "attempts.jsonl").write_text(json.dumps(start) + "\n")
        with open(self.path / "metrics.jsonl", "w") as file:
            for k in range(10):
                self.step += 1
                line = {"step": self.step, "time": now - 9 + k, "attempt": 0, "loss": 2.0}
                file.write(json.dumps(line) + "\n")

    def end(self) -> None:
        end = {"event": "end", "attempt": 0, "attempt_id": "7.0", "time": time.time()}
        with open(self.path / "attempts.jsonl", "a") as file:
            file.write(json.dumps(end | {"state": "failed", "reason": "so"}) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_each_stall_is_told_once(
    run: Run, turns: Turns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run that goes on, or has ended, is none: its end is the batch script's to tell."""
    out = tmp_path / "told"
    monkeypatch.setenv("KEMPNER_NOTIFY", f"echo $KEMPNER_EVENT $KEMPNER_STEP >>'{out}'")
    first, well = lambda: run.lines(ago=600), lambda: run.lines(ago=1)
    turns(run.path, None, well, well, first, nothing, nothing, well, nothing, first, run.end)
    assert out.read_text().splitlines() == ["stall 30", "stall 50"]


def test_a_problem_is_said_once_and_tried_again(
    run: Run,
    turns: Turns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    works = tmp_path / "works"
    monkeypatch.setenv("KEMPNER_NOTIFY", f"test -e '{works}' && echo told >>'{works}'")
    run.lines(ago=600)
    turns(run.path, None, nothing, nothing, nothing, nothing, works.touch, nothing, nothing)
    assert capsys.readouterr().out == (
        "kempner: KEMPNER_NOTIFY was not told of stall: exit code 1\n"
    )
    assert works.read_text() == "told\n"


def test_a_stall_is_looked_for_once_a_minute_however_seldom_the_page_is_written(
    run: Run, turns: Turns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, pages = [], []
    monkeypatch.setenv("KEMPNER_NOTIFY", "true")
    monkeypatch.setattr(notify, "event_of", lambda *_: told.append(watch.time.monotonic()))
    monkeypatch.setattr(watch, "write_page", lambda *_: pages.append(watch.time.monotonic()))
    turns(run.path, 150, *[nothing] * 7)
    assert (told, pages) == ([60, 120, 180, 240, 300], [0, 150, 300])


def test_a_page_that_cannot_be_written_ends_nothing(
    run: Run, turns: Turns, capsys: pytest.CaptureFixture[str]
) -> None:
    page = run.path / "report.html"
    page.mkdir()
    run.lines(ago=1)
    turns(run.path, 5, nothing, nothing, nothing, page.rmdir, nothing)
    assert f"the page = {page} is an empty directory; " in capsys.readouterr().out
    assert "running" in page.read_text()
