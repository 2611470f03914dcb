"""When a save is due by the clock, and by Young's rule."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kempner.checkpoint import timer
from kempner.checkpoint.config import CheckpointConfig
from kempner.checkpoint.timer import (
    FIRST_S,
    GPU_SECONDS_PER_FAILURE,
    LONGEST_INTERVAL_S,
    SHORTEST_INTERVAL_S,
    SaveTimer,
    YoungTimer,
    failures_of,
    open_timer,
    young_interval,
)
from kempner.config.option import ConfigError
from kempner.train.configure import load_config
from kempner.train.resilience.requests import (
    ASKS_TIMED_SAVE,
    REQUEST_FLAGS,
    SAVE_DUE,
    requested_verdict,
)


class Time:
    """A clock that tests set."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(timer, "time", found)
    return found


def test_a_save_is_due_so_long_after_the_one_before(clock: Time, tmp_path: Path) -> None:
    first = open_timer(1200.0, True, tmp_path, 0, 8, print)
    other = open_timer(1200.0, False, tmp_path, 0, 8, print)  # of another rank: it never decides
    clock.now += 1199
    assert not first.is_due()
    clock.now += 1
    assert first.is_due() and not other.is_due()
    first.restart()  # whatever asked for that save
    assert not first.is_due()


def test_young_weighs_the_cost_of_saves_against_failures(clock: Time) -> None:
    assert young_interval(2.0, 90_000.0) == 600.0  # sqrt(2 x 2 s x 25 h)
    assert (
        young_interval(0.0, 1e9) == SHORTEST_INTERVAL_S
        and young_interval(600.0, 1e9) == LONGEST_INTERVAL_S
    )
    said = list[str]()
    auto = YoungTimer(16384, 0.0, 0, said.append)
    assert auto.seconds == FIRST_S
    for _ in range(3):
        auto.learn(5.0)
    between = GPU_SECONDS_PER_FAILURE / 16384  # 3.1 h
    assert auto.seconds == pytest.approx(math.sqrt(10 * between)) and len(said) == 1
    assert "checkpoint.interval = auto: a save every 5.6 min (each costs 5 s" in said[0]
    auto.learn(50.0)  # saves have become slower: fewer of them
    assert auto.seconds == pytest.approx(math.sqrt(2 * 65 / 4 * between)) and len(said) == 2
    often = YoungTimer(16384, 3600.0, 9, said.append)
    often.learn(5.0)
    assert often.seconds == pytest.approx(math.sqrt(10 * (between + 3600) / 10))


def test_failures_are_those_in_the_records(tmp_path: Path) -> None:
    """Attempt 0 crashed, 1 was asked to leave, 2 is silent, 3 is this one."""
    lines = [
        '{"event": "start", "time": 100.0, "attempt": 0, "step": 0, "process_began": 90.0}',
        '{"event": "fault", "time": 200.0, "attempt": 0, "kind": "crash", "reason": "x"}',
        '{"event": "start", "time": 300.0, "attempt": 1, "step": 5, "process_began": 290.0}',
        '{"event": "end", "time": 400.0, "attempt": 1, "state": "interrupted", "reason": "x"}',
        '{"event": "start", "time": 500.0, "attempt": 2, "step": 9, "process_began": 490.0}',
        '{"event": "start", "time": 900.0, "attempt": 3, "step": 9, "process_began": 890.0}',
    ]
    (tmp_path / "attempts.jsonl").write_text("\n".join(lines) + "\n")
    ran, failures = failures_of(tmp_path, 3)
    assert failures == 2 and 220 <= ran <= 600


@pytest.mark.parametrize(
    ("interval", "seconds"), [("90s", 90), ("20min", 1200), ("1.5 h", 5400), ("2d", 172_800)]
)
def test_durations(interval: str, seconds: float) -> None:
    cfg = CheckpointConfig(interval=interval)
    assert cfg.problems() == [] and cfg.seconds == seconds and not cfg.is_due(500)
    assert CheckpointConfig(interval=interval, powers_of_two=True).is_due(512)


@pytest.mark.parametrize("interval", [0, 1000, "20min", "auto"])
def test_what_is_kept_is_saved(interval: int | str) -> None:
    """Whatever the interval is."""
    cfg = CheckpointConfig(interval=interval, keep_every=2500)
    assert [step for step in range(500, 8000, 1000) if cfg.is_due(step)] == [2500, 7500]
    assert cfg.is_due(5000) and not CheckpointConfig(interval=interval).is_due(2500)
    assert cfg.is_due(0) == CheckpointConfig(interval=interval).is_due(0)


@pytest.mark.parametrize("interval", ["20mim", "0s", "-1h", "Auto", "1h30", ""])
def test_what_is_no_interval_is_refused(interval: str) -> None:
    (problem,) = CheckpointConfig(interval=interval).problems()
    assert "must be a number of steps" in problem and "write 500, 20min or auto" in problem


def test_any_request_goes_before_a_save_that_is_due() -> None:
    none = dict.fromkeys(REQUEST_FLAGS, 0.0)
    due = {**none, ASKS_TIMED_SAVE: 1.0}
    assert requested_verdict(due) == SAVE_DUE and not SAVE_DUE.save
    asked = requested_verdict({**due, REQUEST_FLAGS[0]: 1.0})
    assert asked.save and requested_verdict(due, asked) == asked
    assert requested_verdict(none, SAVE_DUE) == SAVE_DUE
    assert requested_verdict({**due, REQUEST_FLAGS[2]: 1.0}).state == "stopped"
    assert not SaveTimer(1e9).is_due()


@pytest.mark.parametrize(
    ("interval", "fix"),
    [
        ("\u0665min", "write 500, 20min or auto"),  # digits, but not those of a file
        ("99999999999999999999h", "up to 366 d"),
        ("367d", "up to 366 d"),
        ("0s", "a time above 0"),
        ("500", "write 500, without quotes"),
        ("\u0665\u0660", "write 500, 20min or auto"),
    ],
)
def test_an_interval_that_is_none(interval: str, fix: str) -> None:
    (problem,) = CheckpointConfig(interval=interval).problems()
    assert problem.startswith("checkpoint.interval = ") and fix in problem


def test_intervals_have_a_limit() -> None:
    assert not CheckpointConfig(interval="366d").problems()
    assert CheckpointConfig(interval="1.5 h").seconds == 5400
    with pytest.raises(ConfigError, match="from 0 to 1000000000"):
        load_config([], ["--data.dataset_path=fake:", f"--checkpoint.interval={10**16}"])
