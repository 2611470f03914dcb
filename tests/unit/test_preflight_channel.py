"""How a preflight goes on and ends: the driver asks, its tasks come, answer and leave."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kempner import peers
from kempner.preflight.channel import Driver, Task


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.VARIABLE, peers.new_key())


def test_the_driver_leaves_after_its_tasks() -> None:
    driver, left = Driver(), []

    def answer() -> None:
        task = Task("localhost", driver.port, 3)
        question = task.question()
        time.sleep(0.3)
        left.append(question)
        task.answer({})

    thread = threading.Thread(target=answer)
    thread.start()
    driver.end([3])
    assert left == [{"what": "end"}]
    thread.join()


def test_a_driver_that_is_gone_is_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    """Quietly: a table with all ok is not followed by the stack of a store's client."""
    driver = Driver()
    task = Task("localhost", driver.port, 0)
    asked: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: asked.append(task.question()))
    thread.start()
    end = time.monotonic() + 60
    while not driver._tasks and time.monotonic() < end:
        driver.answers({0: "none"}, time.monotonic() + 0.1)
    for link in driver._tasks.values():
        link.socket.close()
    thread.join(timeout=60)
    assert asked == [{"what": "end"}]
    task.answer({})
    assert capfd.readouterr() == ("", "")


def test_a_task_may_come_late_and_twice() -> None:
    """It gets what was asked before it came; another that calls itself the same is not heard."""
    driver = Driver()
    keys = driver.ask([1], {"what": "time"})
    assert driver.answers(keys, time.monotonic() + 0.01) == {}
    first = Task("localhost", driver.port, 1)
    first.answer({"time": 7.0})
    assert driver.answers(keys, time.monotonic() + 60) == {1: {"time": 7.0}}
    second = Task("localhost", driver.port, 1)
    second.answer({"time": 8.0})
    keys = driver.ask([1], {"what": "time"})
    assert driver.answers(keys, time.monotonic() + 1) == {}
    assert second.question() == {"what": "end"}
    assert first.question() == first.question() == {"what": "time"}
