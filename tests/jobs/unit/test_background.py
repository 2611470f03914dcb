"""Writes in a thread of their own: nothing waits for a file system that does not answer."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kempner.jobs.system import background
from kempner.jobs.system.background import Background

PATH = Path("runs/x/metrics.jsonl")


class Blocked:
    """A background whose first write does not return until `answer` is set."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.answer, self.written = threading.Event(), threading.Event()
        self.background = Background(self._hear)
        self.heard = threading.Semaphore(0)
        blocked = threading.Event()

        def block() -> None:
            blocked.set()
            assert self.answer.wait(60)

        self.background.put(block, PATH)
        assert blocked.wait(60)

    def _hear(self, text: str) -> None:
        self.said.append(text)
        self.heard.release()


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blocked]:
    monkeypatch.setattr(background, "BEHIND_S", 0.0)
    monkeypatch.setattr(background, "MOST_WRITES", 3)
    made = Blocked()
    yield made
    made.answer.set()


def test_nothing_waits_and_the_user_is_told_once(blocked: Blocked) -> None:
    for _ in range(5):  # of three that may wait
        blocked.background.put(blocked.written.set, PATH)
    assert blocked.heard.acquire(timeout=60)
    assert blocked.said == [f"{PATH}: no answer from the file system for 0 s; training continues"]
    assert not blocked.background.flush(0.01) and not blocked.written.is_set()
    blocked.answer.set()
    assert blocked.heard.acquire(timeout=60) and blocked.background.flush(60)
    assert blocked.written.is_set() and len(blocked.said) == 2
    assert "answers again" in blocked.said[1] and "2 lines are lost" in blocked.said[1]


def test_a_write_that_fails_is_told_once_and_the_next_one_is_done() -> None:
    said: list[str] = []
    made, done = Background(said.append), threading.Event()

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail() -> None:
        raise ValueError("not JSON")

    for write in (full, full, fail, done.set):
        made.put(write, PATH)
    assert made.flush(60) and done.is_set()
    assert len(said) == 2 and said[0].startswith(f"{PATH}: No space left on device: what was")
    assert said[1].startswith(f"{PATH}: ValueError('not JSON'): what was")
