"""scripts/ray_rl.py without a cluster: how long it waits for its programs."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kempner.extensions.rl import exchange
from kempner.extensions.rl.exchange import RolloutExchange
from tests.conftest import load_program

LOOKS = 60  # that the last evaluation takes, 5 s each
STILL = 600.0


@pytest.fixture(scope="module")
def ray_rl() -> ModuleType:
    pytest.importorskip("ray")
    return load_program("ray_rl")


class Programs:
    """In place of Ray: its trainer has ended, its orchestrator ends after LOOKS looks, and gives a
    sign of life in the first `beats` of them."""

    def __init__(self, place: RolloutExchange, beats: int, trains: bool) -> None:
        self.place, self.beats, self.trains = place, beats, trains
        self.looks, self.now = 0, 0.0
        self.queue = deque([] if trains else ["trainer"])

    def wait(self, running: Sequence[str], timeout: float) -> tuple[list[str], list[str]]:
        if self.queue:
            return [self.queue.popleft()], []
        self.looks += 1
        self.now += STILL if self.looks == 10 else timeout  # the job was suspended
        if self.looks <= self.beats:
            os.utime(self.place.root / "orchestrator", (self.looks, self.looks))
        return (["orchestrator"] if self.looks == LOOKS else []), []

    def get(self, future: object) -> int:
        return 0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("beats", "trains", "code"), [(LOOKS, False, 0), (8, False, 0), (8, True, 1)]
)
def test_the_orchestrator_is_waited_for_while_it_lives(
    ray_rl: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    beats: int,
    trains: bool,
    code: int,
) -> None:
    place = RolloutExchange(tmp_path)
    place.root.mkdir(parents=True)
    (place.root / "orchestrator").touch()
    theirs = Programs(place, beats, trains)
    monkeypatch.setattr(ray_rl, "ray", theirs)
    monkeypatch.setattr(exchange, "time", theirs)
    run: Any = ray_rl.RayRun.__new__(ray_rl.RayRun)
    run.exchange, run.engines = place, []
    run.running = {"trainer": "trainer", "orchestrator": "orchestrator"}
    assert run.follow() == code
    said = capsys.readouterr().err
    if beats == LOOKS:
        assert theirs.looks == LOOKS and not said
    else:  # 600 s of standing still count as 10
        assert "the orchestrator does nothing for 120 s" in said
        assert 8 + 24 <= theirs.looks <= 8 + 26
