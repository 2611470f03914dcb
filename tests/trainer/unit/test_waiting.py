"""The watchdog of a replica that waits for others."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kempner.extensions.lowcomm.steps import StepsExchange
from kempner.train.resilience.watchdog import (
    HANG_PATIENCE_S,
    LATE_S,
    LATE_STEPS,
    SURE_STEPS,
    Watchdog,
)


def test_the_watchdog_is_patient_while_a_replica_waits_for_others() -> None:
    waits: list[bool] = []
    patient = [False]

    @contextlib.contextmanager
    def waiting() -> Iterator[None]:
        patient[0] = True
        yield
        patient[0] = False

    def round_(*args: Any) -> Any:
        waits.append(patient[0])
        return "epoch", (torch.ones(1), 4)

    membership: Any = SimpleNamespace(round=round_)
    exchange = StepsExchange(membership, waiting)
    assert exchange.start(torch.zeros(1), "turn 0").wait().tolist() == [1.0]
    assert waits == [True] and not patient[0]


def test_a_wait_is_no_part_of_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watchdog = Watchdog.__new__(Watchdog)
    watchdog.hang_timeout, watchdog._step_limit, watchdog._longest = 8.0, 8.0, HANG_PATIENCE_S
    watchdog._durations, watchdog._beat, watchdog._patience = deque(), 100.0, 0.0
    watchdog._parts, watchdog._on_limit = set(), lambda *_: None
    now[0] += 2.0
    with watchdog.patient():
        assert watchdog.limit == HANG_PATIENCE_S and watchdog.is_patient
        now[0] += 500.0
        for number in range(3):  # the first one may compile
            with watchdog.part("held out"):
                assert watchdog.is_patient == (number == 0) and watchdog.age == 0.0
                assert watchdog.limit == (HANG_PATIENCE_S if number == 0 else 8.0)
                now[0] += 5.0
    assert watchdog.limit == 8.0 and not watchdog.is_patient
    now[0] += 1.0
    watchdog.beat(1)
    assert watchdog.step_time == 3.0


def test_only_a_late_step_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the start, nor the first steps, however long they take, nor a rank alone."""
    asked: list[str] = []
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watchdog = Watchdog.__new__(Watchdog)
    watchdog.hang_timeout, watchdog._step_limit, watchdog._longest = None, 600.0, HANG_PATIENCE_S
    watchdog._durations, watchdog.step_time, watchdog.world_size = deque(maxlen=50), 0.0, 2
    watchdog._beat = watchdog._began = 100.0
    inquiry: Any = SimpleNamespace(
        turn=lambda: asked.append("turn") or "",  # type: ignore[func-returns-value]
        over=lambda: asked.append("over"),
    )
    watchdog._inquiry, watchdog.starting, watchdog._on_limit = inquiry, True, lambda *_: None

    def after(seconds: float) -> str:
        now[0] += seconds
        assert watchdog._inquire() == ""
        return asked.pop()

    assert after(500.0) == "over"
    watchdog.starting = False
    for step in range(SURE_STEPS):
        assert after(500.0) == "over"
        watchdog._beat = now[0] - 2.0
        watchdog.beat(step)
    assert watchdog.step_time == 2.0
    assert after(LATE_STEPS * 2.0 + LATE_S - 0.1) == "over" and after(0.2) == "turn"
    watchdog.world_size = 1
    assert after(0.0) == "over"
