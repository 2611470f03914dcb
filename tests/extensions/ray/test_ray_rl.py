"""scripts/ray_rl.py and ray_train.py without a cluster: how long they wait for their programs, and
what is lost with a node."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kempner.extensions.rl import exchange
from kempner.extensions.rl.exchange import RolloutExchange
from tests.conftest import load_program

programs: Any = pytest.importorskip("kempner.jobs.ray.programs")

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
    ("beats", "trains", "code"), [(LOOKS, False, 0), (8, False, 1), (8, True, 1)]
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
    monkeypatch.setattr(programs, "ray", theirs)
    monkeypatch.setattr(exchange, "time", theirs)
    run: Any = ray_rl.RayRun.__new__(ray_rl.RayRun)
    run.exchange, run.engines = place, []
    run.running = {"trainer": "trainer", "orchestrator": "orchestrator"}
    assert run.follow() == code
    said = capsys.readouterr().err
    if beats == LOOKS:
        assert theirs.looks == LOOKS and not said
    else:  # 600 s of standing still count as 10
        assert "the orchestrator has done nothing for 120 s" in said
        assert 8 + 24 <= theirs.looks <= 8 + 26


class Lost:
    """In place of Ray: an actor, and what asks for it. Nothing that it was asked for comes back."""

    def __init__(self, real: ModuleType, order: Sequence[str]) -> None:
        self.exceptions, self.order, self.asked = real.exceptions, list(order), list[str]()
        self.run = SimpleNamespace(remote=lambda *_: self.ask("run"))
        self.end = SimpleNamespace(remote=lambda: self.ask("end"))

    def ask(self, word: str) -> str:
        self.asked.append(word)
        return "lost"

    def init(self) -> None: ...

    def cluster_resources(self) -> dict[str, float]:
        return {"GPU": 2.0}

    def wait(self, running: Sequence[str], timeout: float = 0) -> tuple[list[str], list[str]]:
        return [self.order.pop(0)], list(running[1:])

    def get(self, future: str) -> int:
        if future == "lost":
            raise self.exceptions.RayActorError
        return 0


@pytest.mark.parametrize("part", ["engine 0", "trainer"])
def test_what_is_lost_with_a_node(
    ray_rl: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    part: str,
) -> None:
    """The run goes on without an engine, whose actor is asked to end alone, and not without the
    trainer."""
    theirs = Lost(ray_rl.ray, ["lost", "trainer", "orchestrator"])
    monkeypatch.setattr(ray_rl, "ray", theirs)
    monkeypatch.setattr(programs, "ray", theirs)
    run: Any = ray_rl.RayRun.__new__(ray_rl.RayRun)
    run.exchange, run.engines, run.tries = RolloutExchange(tmp_path), [theirs], [0]
    run.running = {"trainer": "trainer", "orchestrator": "orchestrator", "lost": part}
    assert run.follow() == (1 if part == "trainer" else 0)
    said = capsys.readouterr().err
    why = "the actor of the trainer is lost" if part == "trainer" else "is not started again"
    assert why in said and theirs.asked == ([] if part == "trainer" else ["end"])


def test_a_rank_that_is_lost_ends_the_training(
    ray_rl: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program: Any = load_program("ray_train")
    theirs = Lost(ray_rl.ray, ["lost"])
    monkeypatch.setattr(program, "ray", theirs)
    monkeypatch.setattr(programs, "ray", theirs)
    monkeypatch.setattr(program, "place_programs", lambda count, gpus: [theirs] * count)
    monkeypatch.setattr(program, "rank_variables_of", lambda actors: [{} for _ in actors])
    assert program.main([]) == 1
    assert "the actor of a rank is lost" in capsys.readouterr().err
