"""Who gets which engine, and how much an engine has at a time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from benchmarks import rl_router
from kempner.extensions.generate.config import Sampling
from kempner.extensions.rl.engines import router as routers
from kempner.extensions.rl.engines.client import Busy, Completion, Flight, Rejected, RouterEngine
from kempner.extensions.rl.engines.members import Member, Waiter
from kempner.extensions.rl.engines.router import Router

SLOTS = 8


class Uneven:
    """Of each request of four samples one is as long as it, and the others are short."""

    url = "http://engine"

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.now = self.most = 0  # requests at a time
        self.lock, self.go = threading.Lock(), threading.Event()

    def complete(
        self, prompts: Any, n: int, sampling: Sampling, flight: Flight
    ) -> list[list[Completion]]:
        with self.lock:
            self.asked.append(sampling.seed)
            self.now += 1
            self.most = max(self.most, self.now)
        self.go.wait()
        time.sleep(0.005)
        with self.lock:
            self.now -= 1
        lengths = [20, 1, 1, 2]
        return [[Completion([48] * k, [-1.0] * k, [0], "stop") for k in lengths] for _ in prompts]

    def version(self) -> int:
        return 0

    def progress(self) -> None:
        return None

    def abort(self) -> None:
        self.go.set()


def test_engines_without_room_are_not_looked_at_for_each_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """128 engines and 2,048 groups took 20 ms of each change: benchmarks/rl_router.py."""
    looks = 0

    def choose(self: Waiter, members: Any, capacity: float) -> Member | None:
        nonlocal looks
        looks += 1
        return before(self, members, capacity)

    before = Waiter.choose
    monkeypatch.setattr(Waiter, "choose", choose)
    router = rl_router.full(8, 100)
    with router._change:
        router._hand_out()
        assert looks == 0 and len(router._waiting) == 100
        router._members["engine-3"].load = 64 + 32 - 40  # room for two
        order = list(router._waiting)
        router._hand_out()
    assert looks == 3 and list(router._waiting) == order[2:]
    assert [each.member.name for each in order[:2] if each.member] == ["engine-3"] * 2


def test_slots_stay_in_use_when_lengths_vary() -> None:
    """A request of few long samples takes few slots: as many more are asked; in the order of the
    requests."""
    engine = Uneven()
    router = Router(lambda: {"engine-0": engine.url}, lambda url: engine, SLOTS, 0, print, 60.0)  # type: ignore[arg-type,return-value]
    router.start()
    threads = []
    for seed in range(40):
        asked = [[1]], 4, Sampling(seed=seed), 0
        threads.append(threading.Thread(target=router.ask, args=asked))
        threads[-1].start()
        time.sleep(0.002)
    while len(engine.asked) < SLOTS // 4:
        time.sleep(0.01)
    assert engine.most == SLOTS // 4  # nothing is known of the lengths yet
    engine.go.set()
    for thread in threads:
        thread.join(30)
    router.close()
    assert engine.most >= 2 * SLOTS // 4
    places = {seed: place for place, seed in enumerate(engine.asked)}
    assert len(places) == 40 and all(abs(places[seed] - seed) <= 8 for seed in places)


class Unwilling(Uneven):
    """Takes no weights."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.tries = error, list[int]()
        self.turns: threading.Semaphore | None = None  # one for each try

    def update(self, body: dict[str, int]) -> int:
        if self.turns:
            self.turns.acquire(timeout=30)
        self.tries.append(body["version"])
        raise self.error


def open_unwilling(error: Exception) -> tuple[Router, Unwilling, list[str]]:
    engine, said = Unwilling(error), list[str]()

    def make(url: str) -> RouterEngine:
        return engine  # type: ignore[return-value]

    router = Router(lambda: {"engine-0": engine.url}, make, SLOTS, 0, said.append, 60.0)
    router.start()
    return router, engine, said


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "BEAT_EVERY_S", 0.02)


def until_tried(engine: Unwilling, version: int, times: int) -> None:
    until = time.monotonic() + 30
    while engine.tries.count(version) < times:
        assert time.monotonic() < until, engine.tries
        time.sleep(0.005)


def test_transfers_that_newer_versions_cut_off_do_not_end_the_run(quick: None) -> None:
    """Nor does a version that is not offered any more, until the next one is."""
    router, engine, said = open_unwilling(Busy("the transfer has broken off"))
    for version in range(1, 4):
        router.offer(version, {"version": version})
        until_tried(engine, version, 2 * routers.UPDATE_TRIES)
    assert router._failure is None
    assert [line.partition(" weights ")[2][0] for line in said if "could not" in line] == [*"123"]
    router.close()


def test_weights_count_as_refused_for_each_version(quick: None) -> None:
    router, engine, said = open_unwilling(Rejected("of another shape"))
    engine.turns = threading.Semaphore(0)
    for version in range(1, 2 * routers.UPDATE_TRIES):
        router.offer(version, {"version": version})
        while not any(f" refuses weights {version}:" in line for line in said):
            tries = len(engine.tries)
            engine.turns.release()  # the first try may still be that of the version before
            while len(engine.tries) == tries:
                time.sleep(0.005)
    assert router._failure is None
    engine.turns.release(routers.UPDATE_TRIES)
    with pytest.raises(Rejected, match=f"refuses weights {version}: of another shape"):
        router.ask([[1]], 1, Sampling(), version)
    router.close()
