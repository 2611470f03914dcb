"""How a preflight ends: the driver serves the store, and its tasks still look into it."""

from __future__ import annotations

import threading
import time
from typing import Any

from kempner.preflight.channel import Driver, Task


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


def test_a_store_that_is_closed_is_the_end() -> None:
    driver = Driver()
    task = Task("localhost", driver.port, 0)
    asked: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: asked.append(task.question()))
    thread.start()
    time.sleep(0.1)
    del driver
    thread.join(timeout=60)
    assert asked == [{"what": "end"}]
