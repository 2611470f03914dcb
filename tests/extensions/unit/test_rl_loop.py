"""The orchestrator between engines that are slow, die, hang and lie, and a trainer."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import rl_lengths
from kempner.extensions.rl import exchange
from kempner.extensions.rl.config import RlConfig
from kempner.extensions.rl.engines import client as engines
from kempner.extensions.rl.engines import router
from kempner.extensions.rl.engines.client import NoEngines, Rejected
from kempner.extensions.rl.engines.router import Router
from kempner.extensions.rl.environments.opening import Tasks
from kempner.extensions.rl.environments.protocol import Task
from kempner.extensions.rl.orchestrate import mismatch, orchestrator, packing
from kempner.extensions.rl.orchestrate.batches import Failed
from kempner.extensions.rl.orchestrate.orchestrator import Orchestrator
from kempner.extensions.rl.samples import SampleLog
from tests.fake_engine import END, LOST, SCORE, TOKEN, FakeEngine, Fault
from tests.rl_loop import OWN, Handed, Loop, config

Make = Callable[..., FakeEngine]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "BEAT_EVERY_S", 0.1)
    monkeypatch.setattr(engines, "ENGINE_HEARTBEAT_S", 0.5)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[FakeEngine] = []

    def one(*args: object, **more: object) -> FakeEngine:
        made.append(FakeEngine(*args, **more))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for engine in made:
        engine.end()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Handed]:
    """What one fast engine gives."""
    engine = FakeEngine()
    found = Loop(config(tmp_path_factory.mktemp("plain")), [engine]).run()
    engine.end()
    return found


def samples(handed: list[Handed]) -> list[tuple[object, ...]]:
    """Inputs of each document that counts, over all batches, and their log-probabilities: two
    samples of a task may be the same short text."""
    found = []
    for each in handed:
        for rank in each.ranks:
            for row in range(len(rank["inputs"])):
                for number in np.unique(rank["documents"][row]):
                    there = rank["documents"][row] == number
                    if (rank["targets"][row][there] >= 0).any():
                        inputs, logprobs = (rank[n][row][there] for n in ("inputs", "logprobs"))
                        found.append((*inputs.tolist(), *logprobs.tolist()))
    return found


def equal(one: list[Handed], other: list[Handed]) -> bool:
    return len(one) == len(other) and all(a.same(b) for a, b in zip(one, other, strict=True))


def test_a_batch_is_what_the_exchange_says(plain: list[Handed]) -> None:
    assert [each.batch.step for each in plain] == [1, 2, 3]
    for each in plain:
        rows = {rank["inputs"].shape for rank in each.ranks}
        assert len(rows) == 1 and next(iter(rows))[0] % 2 == 0
        counted = sum(int((rank["targets"] >= 0).sum()) for rank in each.ranks)
        assert counted == each.batch.tokens
        for rank in each.ranks:
            counts = rank["targets"] >= 0
            assert (rank["logprobs"][counts] < 0).all() and not rank["logprobs"][~counts].any()
            assert not rank["advantages"][~counts].any()
        assert each.batch.metrics["samples"] == 12
        assert each.batch.metrics["staleness"] == 0


@pytest.mark.parametrize("count", [1, 3])
def test_a_synchronous_batch_does_not_depend_on_timing_or_engines(
    count: int, plain: list[Handed], make: Make, tmp_path: Path
) -> None:
    slow = [make(delay=0.4) for _ in range(count)]
    assert equal(Loop(config(tmp_path), slow).run(), plain)
    used = sum(bool(engine.requests) for engine in slow)
    assert used > count // 2  # one that gets the weights late may find nothing left to do


def lost(engine: FakeEngine, path: str) -> int | str | None:
    """Breaks its first connection, and others now and then."""
    now = not engine.faulty or engine.random.random() < 0.3
    return LOST if path == "/v1/completions" and now else None


def code(number: int) -> Fault:
    def fault(engine: FakeEngine, path: str) -> int | None:
        now = not engine.faulty or engine.random.random() < 0.3
        return number if path == "/v1/completions" and now else None

    return fault


def dies(engine: FakeEngine, path: str) -> str | None:
    if len(engine.requests) < 2:
        return None
    engine.end()
    return LOST


def hangs(engine: FakeEngine, path: str) -> str | None:
    if len(engine.requests) < 2:
        return None
    engine.hang()
    return LOST


@pytest.mark.parametrize("fault", [lost, code(500), code(503), dies, hangs])
def test_what_an_engine_has_lost_is_asked_again(
    fault: Fault, plain: list[Handed], make: Make, tmp_path: Path
) -> None:
    first = make(fault)
    assert equal(Loop(config(tmp_path), [first, make()]).run(), plain)
    assert first.faulty or len(first.requests) < 2  # a busy machine may leave it without work


def test_a_long_answer_is_waited_for_and_cuts_no_other(
    plain: list[Handed], make: Make, tmp_path: Path
) -> None:
    """It takes longer than the limit, which is one of silence: the engine makes tokens."""
    engine = make()
    longest = Sampled()
    engine.slow = longest
    loop = Loop(config(tmp_path, **{"inference.timeout": 1.0}), [engine])
    assert equal(loop.run(), plain)
    assert longest.seconds == 0.0 and not any("is lost" in line for line in loop.lines)
    asked = [json.dumps(body) for body in engine.requests]
    assert len(asked) == len(set(asked))


class Sampled:
    """The first request is slow, once."""

    def __init__(self, seconds: float = 3.0) -> None:
        self.seconds, self.slow = seconds, dict[str, object]()

    def __call__(self, body: dict[str, object]) -> float:
        found, self.seconds = self.seconds, 0.0
        self.slow = body if found else self.slow
        return found


def test_an_engine_without_progress_is_lost(
    plain: list[Handed], make: Make, tmp_path: Path
) -> None:
    def hangs_once(engine: FakeEngine, path: str) -> str | None:
        if path != "/v1/completions" or engine.faulty:
            return None
        engine.hang()
        return LOST

    loop = Loop(config(tmp_path, **{"inference.timeout": 1.0}), [make(hangs_once)])
    assert equal(loop.run(), plain)
    assert any("made no token for" in line for line in loop.lines)


def test_a_group_that_fails_again_and_again_is_given_up(make: Make, tmp_path: Path) -> None:
    """It is said, counted and replaced; the engine and its other requests stay."""
    engine = make()
    poison: list[object] = []

    def breaks(engine: FakeEngine, path: str) -> str | None:
        if path != "/v1/completions":
            return None
        poison[:] = poison or [engine.body["prompt"]]
        return LOST if engine.body["prompt"] == poison[0] else None

    engine.fault = breaks
    loop = Loop(config(tmp_path), [engine, make(breaks)])
    handed = loop.run()
    assert sum(each.batch.metrics["given_up"] for each in handed) == 1
    assert sum("is given up: engines have lost it 5 times" in line for line in loop.lines) == 1
    assert all(each.batch.metrics["samples"] == 12 for each in handed)


def test_a_stranger_gets_no_work(plain: list[Handed], make: Make, tmp_path: Path) -> None:
    stranger = make(lambda engine, path: 401)
    loop = Loop(config(tmp_path), [stranger, make()])
    assert equal(loop.run(), plain)
    assert not stranger.requests and sum("fault 401" in line for line in loop.lines) == 1


def test_old_weights_are_found_out(plain: list[Handed], make: Make, tmp_path: Path) -> None:
    """An engine whose texts are of an older version than it says is sent the weights again."""
    liar = make()

    def once(engine: FakeEngine, path: str) -> None:
        if path == "/v1/completions" and engine.version == 2 and engine.updates.count(2) == 1:
            engine.said = 0

    liar.fault = once
    assert equal(Loop(config(tmp_path), [liar]).run(), plain)
    assert 2 <= liar.updates.count(2) <= 4  # once more for each answer that is late: three at most


def test_an_engine_that_comes_back_has_the_newest_weights(
    plain: list[Handed], make: Make, tmp_path: Path
) -> None:
    second = make()

    def dies_once(engine: FakeEngine, path: str) -> str | None:
        if engine.version < 1 or not path.startswith("/v1"):
            return None
        loop.place(0, second)
        engine.end()
        return LOST

    loop = Loop(config(tmp_path), [make(dies_once)])
    assert equal(loop.run(), plain)
    assert second.updates[0] == 1


def test_weights_that_all_refuse_end_the_run(make: Make, tmp_path: Path) -> None:
    engine = make(lambda engine, path: 400 if path == "/update_weights" else None)
    with pytest.raises(Rejected, match="refuses weights 1"):
        Loop(config(tmp_path), [engine]).run()


def test_an_engine_that_another_run_has_taken_comes_back(
    plain: list[Handed], make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is lost: it is asked again, longer than an update that is refused, and only
    without any for rl.inference.timeout the run ends."""
    monkeypatch.setenv("KEMPNER_SERVE_TOKEN", TOKEN)
    asked = []

    def taken(engine: FakeEngine, path: str) -> None:
        if engine.version >= 1 and path in ("/health", "/update_weights"):
            asked.append(path)
            engine.holder = "/runs/other#1" if len(asked) < 20 else ""

    engine = make(taken)
    cfg = config(tmp_path, **{"inference.urls": f"['{engine.url}']"})
    loop = Loop(cfg, [])
    assert equal(loop.run(), plain) and len(asked) >= 20
    assert 1 <= sum("uses it" in line for line in loop.lines) <= 2, loop.lines
    engine = make()
    engine.holder = "/runs/other#1"
    impatient = {"inference.urls": f"['{engine.url}']", "inference.timeout": 1}
    monkeypatch.setenv("KEMPNER_SERVE_TOKEN", TOKEN)
    (tmp_path / "second").mkdir()
    with pytest.raises(NoEngines, match="another run, /runs/other#1, which uses it"):
        Loop(config(tmp_path / "second", **impatient), []).run()


def test_what_nobody_reads_any_more_is_removed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the newest directory, which an engine that starts reads, also when later versions
    are sent straight to the engines."""
    monkeypatch.setattr(orchestrator, "TIDY_S", 0.0)
    loop = Loop(config(tmp_path, steps=4), [make()], trains=0.2)
    loop.straight = {2, 3}
    loop.run()
    assert [sorted(seen) for seen in loop.seen] == [[0], [1], [1, 2], [1, 3]]
    assert not loop.exchange.rollouts(3).exists()


def test_versions_do_not_pile_up_behind_an_engine(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes long to read a version: then it reads the newest."""
    monkeypatch.setattr(orchestrator, "TIDY_S", 0.0)
    lag = make(lambda engine, path: engine.hang() if path == "/update_weights" else None)
    loop = Loop(config(tmp_path, steps=8, max_async=1), [lag, make()], trains=0.1)
    loop.run()
    assert max(map(len, loop.seen)) <= 4, loop.seen


# --- what counts toward a batch ---


def test_groups_without_variance_never_shrink_a_batch(plain: list[Handed]) -> None:
    assert all(each.batch.metrics["samples"] == 12 for each in plain)
    assert all(each.batch.metrics["zero_variance"] > 0 for each in plain)
    for each in plain:  # all that counts has an advantage
        for rank in each.ranks:
            assert (rank["advantages"][rank["targets"] >= 0] != 0).all()


def test_a_batch_is_filled_when_refills_are_used_up(make: Make, tmp_path: Path) -> None:
    """No deadlock, and no smaller batch: the groups without variance have no advantage."""
    loop = Loop(config(tmp_path, "Flat", refill=2), [make(delay=0.02)])
    handed = loop.run()
    assert [each.batch.metrics["samples"] for each in handed] == [12, 12, 12]
    assert handed[0].batch.metrics["zero_variance"] == 6
    assert not any(rank["advantages"].any() for each in handed for rank in each.ranks)
    assert any("warning: step 1: 0 of 3 groups" in line for line in loop.lines)


def test_refill_is_kept_however_many_batches_are_ahead(make: Make, tmp_path: Path) -> None:
    """Two are filled at a time, as elsewhere."""
    cfg = config(tmp_path, "Flat", steps=8, refill=2, max_async=16)
    handed = Loop(cfg, [make(delay=0.02)]).run()
    assert handed[0].batch.metrics["zero_variance"] <= 2 * 3 + 3


def test_a_batch_that_is_smaller_is_said(make: Make, tmp_path: Path) -> None:
    loop = Loop(config(tmp_path, "Sparse", steps=1), [make()])
    (only,) = loop.run()
    assert only.batch.metrics["samples"] == 4
    assert any("0 of 3 groups" in line and "which has only 1" in line for line in loop.lines)


def test_a_stop_string_is_no_part_of_what_is_scored(make: Make, tmp_path: Path) -> None:
    handed = Loop(config(tmp_path, "Cut", **{"sampling.stop": "['5']"}), [make()]).run()
    assert all(each.batch.metrics["failed_rewards"] == 0 for each in handed)
    assert all((rank["targets"] == ord("5")).any() for each in handed for rank in each.ranks)


def test_a_wait_for_room_gives_signs_of_life(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be ended before there is room."""
    monkeypatch.setattr(orchestrator, "AGAIN_S", 0.05)
    monkeypatch.setattr(exchange, "EXCHANGE_HEARTBEAT_S", 0.0)
    loop, beats, write = Loop(config(tmp_path, steps=1), [make()]), [], packing.write_rank_files

    def full(*words: Any) -> None:
        (mark,) = loop.exchange.root.glob("orchestrator*")
        beats.append((mark.name, mark.stat().st_mtime_ns))
        if len(beats) < 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*words)

    monkeypatch.setattr(packing, "write_rank_files", full)
    loop.run()
    names, times = zip(*beats, strict=True)
    assert names == ("orchestrator", *["orchestrator.full"] * 3) and len(set(times[1:])) == 3
    assert not (loop.exchange.root / "orchestrator.full").exists()


def test_samples_without_a_reward_are_left_out(make: Make, tmp_path: Path) -> None:
    loop = Loop(config(tmp_path, "Broken"), [make()])
    handed = loop.run()
    assert all(each.batch.metrics["samples"] == 12 for each in handed)
    assert sum(each.batch.metrics["failed_rewards"] for each in handed) >= 8
    assert sum("no reward here" in line for line in loop.lines) == 1


def test_without_any_reward_the_run_ends(make: Make, tmp_path: Path) -> None:
    with pytest.raises(Failed, match="none of 12 groups has two rewards"):
        Loop(config(tmp_path, "Dead"), [make()]).run()


def test_a_batch_in_tokens_does_not_depend_on_timing(make: Make, tmp_path: Path) -> None:
    found = []
    for name, delay in (("a", 0.0), ("b", 0.1)):
        (tmp_path / name).mkdir()
        cfg = config(tmp_path / name, batch_samples="none", batch_tokens=100)
        found.append(Loop(cfg, [make(delay=delay), make(delay=delay)]).run())
    assert equal(*found)
    assert all(each.batch.tokens >= 100 for each in found[0])


# --- resume ---


@pytest.mark.parametrize("step", [1, 2])
def test_a_resumed_run_equals_the_unbroken_one(
    step: int, plain: list[Handed], make: Make, tmp_path: Path
) -> None:
    state = json.loads(json.dumps(plain[step - 1].batch.state))
    rest = Loop(config(tmp_path), [make(delay=0.05)], step, state).run()
    assert equal(rest, plain[step:])


def test_solve_rates_are_resumed(make: Make, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    cfg = config(tmp_path / "a", "Few", steps=5, solve_rate="[0.1, 0.9]")
    whole = Loop(cfg, [make()]).run()
    assert whole[2].batch.state["curriculum"]["out"]["Few"]
    cfg = config(tmp_path / "b", "Few", steps=5, solve_rate="[0.1, 0.9]")
    assert equal(Loop(cfg, [make()], 3, whole[2].batch.state).run(), whole[3:])


@pytest.mark.parametrize("delay", [0.0, 0.2])
def test_asynchronous_nothing_is_trained_twice_or_lost(
    delay: float, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after each step: every task before the newest one was trained, or is known to have
    come to nothing."""
    look = Orchestrator._look

    def slow(self: Orchestrator) -> None:  # without a delay, groups of two batches come at once
        time.sleep(0.0 if delay else 0.1)
        look(self)

    monkeypatch.setattr(Orchestrator, "_look", slow)
    (tmp_path / "a").mkdir()
    cfg = config(tmp_path / "a", steps=6, max_async=1)
    whole = Loop(cfg, [make(delay=delay / 4), make(delay=delay)], trains=0.05).run()
    for step in (2, 4):
        (tmp_path / str(step)).mkdir()
        cfg = config(tmp_path / str(step), steps=6, max_async=1)
        state = whole[step - 1].batch.state
        handed = whole[:step] + Loop(cfg, [make(delay=0.05)], step, state).run()
        found = samples(handed)
        assert len(found) == len(set(found)) == 6 * 12
    for number, each in enumerate(whole, 1):
        assert each.batch.metrics["staleness"] <= 1
        asked = each.batch.state["curriculum"]["place"]
        pending = len(each.batch.state["pending"])
        ended = sum(e.batch.metrics["zero_variance"] + 3 for e in whole[:number])
        assert asked == pending + ended


def test_old_samples_are_dropped(make: Make, tmp_path: Path) -> None:
    """An engine that never takes new weights in time works for nothing."""
    lag = make()
    lag.fault = lambda engine, path: 503 if path == "/update_weights" else None
    loop = Loop(config(tmp_path, steps=4, max_async=1), [lag, make()], trains=0.05)
    handed = loop.run()
    assert all(each.batch.metrics["staleness"] <= 1 for each in handed)


def test_engines_are_found_after_a_fault_of_the_file_system(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_in, faults = Router._take_in, [OSError(errno.ESTALE, "stale file handle")] * 2

    def failing(router: Router, name: str, url: str) -> None:
        if faults:
            raise faults.pop()
        take_in(router, name, url)

    monkeypatch.setattr(Router, "_take_in", failing)
    assert len(Loop(config(tmp_path), [make()]).run()) == 3


def test_samples_do_not_age_in_a_queue(make: Make, tmp_path: Path) -> None:
    """Engines that are faster than the trainer: one batch waits for it, and two are filled."""
    loop = Loop(config(tmp_path, steps=16, max_async=16), [make()], trains=0.1)
    handed = loop.run()
    assert max(each.batch.metrics["staleness"] for each in handed) <= 5
    assert not sum(each.batch.metrics["cancelled"] for each in handed)


def test_what_cannot_be_trained_any_more_is_cancelled_and_asked_again(
    make: Make, tmp_path: Path
) -> None:
    """The engine sees that its client has gone; the task is not lost, and all of it is said."""
    engine = make()
    engine.slow = first = Sampled(60.0)
    loop = Loop(config(tmp_path, steps=6, max_async=1), [engine], trains=0.1)
    handed = loop.run(50)
    assert sum(each.batch.metrics["cancelled"] for each in handed) >= 1
    asked = [body["prompt"] for body in engine.requests]
    assert asked.count(first.slow["prompt"]) >= 2
    assert all(each.batch.metrics["length_trained"] > 0 for each in handed)


@pytest.mark.parametrize("right", [True, False])
def test_an_engine_scores_a_batch_without_samples_of_the_newest_weights(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    """The distance is a part of later batches, where the weights are those that train the batch."""
    engine = make()
    monkeypatch.setattr(mismatch, "KEPT_BATCHES", 5)
    loop = Loop(config(tmp_path, steps=12, max_async=2), [engine], trains=0.3)
    if not right:
        engine.fault = lambda at, path: setattr(at, "said", 99 if path == "/score" else None)
    handed = loop.run()
    said = [batch.metrics["mismatch"] for batch, _ in handed if "mismatch" in batch.metrics]
    assert sum(each.batch.scored for each in handed) >= 3
    assert all(each.batch.scored == (newest(each) < each.batch.step - 1) for each in handed)
    assert not right or len(said) >= 2
    assert said == [SCORE - OWN] * (len(said) if right else 0)
    assert len(list(loop.exchange.scores.iterdir())) <= 5


def newest(handed: Handed) -> int:
    """Version of any of its samples."""
    return max(int(arrays["versions"][arrays["targets"] != -100].max()) for arrays in handed.ranks)


def test_the_default_of_max_async_does_not_select_short_answers() -> None:
    """Lengths up to 32,768 at 40 tokens/s, and steps of 60 s: benchmarks/rl_lengths.py."""
    cfg = RlConfig()
    found = rl_lengths.Simulation(cfg.max_async, rl_lengths.ROOM, 60).run()
    assert abs(found.trained / found.asked - 1) < 0.03 and found.lost < 0.01
    assert not found.missing and found.behind < cfg.max_async / 3
    short = rl_lengths.Simulation(1, rl_lengths.ROOM, 30).run()
    assert not short.missing and short.lost > 0.3  # all that is dropped is asked again


# --- conversations ---


def test_tokens_of_the_environment_do_not_count(make: Make, tmp_path: Path) -> None:
    engine = make()
    handed = Loop(config(tmp_path, "Talk", refill=8), [engine]).run()
    reply = list(b" more? ")
    later = [body for body in engine.requests if len(body["prompt"][0]) > 20]
    assert later, "no conversation has had a second turn"
    for body in later:  # tokens that were sampled stay as they are, the end of a turn too
        assert all(prompt[-len(reply) - 1 :] == [END, *reply] for prompt in body["prompt"])
    for each in handed:
        for rank in each.ranks:
            counted = rank["targets"][rank["targets"] >= 0]
            assert not np.isin(counted, [ord("m"), ord("?"), ord(" ")]).any()
            assert (rank["inputs"] == ord("?")).any()


def test_a_reply_without_room_for_another_turn_is_left_out(make: Make, tmp_path: Path) -> None:
    """What is scored ends with the model's words, and every sample fits a row."""
    loop = Loop(config(tmp_path, "Chatty"), [make()])
    figures = [each.batch.metrics for each in loop.run()]
    assert all(each["failed_rewards"] == 0 and each["truncated"] > 0.5 for each in figures)


def test_evaluation(make: Make, tmp_path: Path) -> None:
    """Greedy, before the first step, in its interval and at the end; nothing of it is trained."""
    engine = make()
    cfg = config(tmp_path, steps=3, eval_interval=2, eval_samples=5)
    handed = Loop(cfg, [engine]).run()
    lines = [
        json.loads(line)
        for line in (tmp_path / "run/metrics.jsonl").read_text().split("\n")
        if line
    ]
    assert [line["step"] for line in lines] == [0, 2, 3] and "eval/Digits" in lines[0]
    greedy = [body for body in engine.requests if body["temperature"] == 0]
    held_out = {tuple(body["prompt"][0]) for body in greedy}
    assert len(greedy) == 15 and len(held_out) == 5
    for sample in samples(handed):
        assert not any(sample[: len(prompt)] == prompt for prompt in held_out)


def test_an_evaluation_counts_every_sample(make: Make, tmp_path: Path) -> None:
    """Those without a reward as 0."""
    cfg = config(tmp_path, "Dead", steps=1, eval_interval=1, eval_samples=5)
    with pytest.raises(Failed):
        Loop(cfg, [make()]).run()
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert (line["eval/Dead"], line["eval/Dead/failed"]) == (0.0, 5.0)


def test_a_task_that_raises_is_counted_and_replaced(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as rl.refill has others in its place."""
    task = Tasks.task

    def broken(self: Tasks, number: int, held_out: bool = False) -> Task:
        if number in (40, 41, 42, 43) or (number > 50 and all_of_them):
            raise KeyError("answer")
        return task(self, number, held_out)

    all_of_them = False
    cfg = config(tmp_path, steps=8, refill=6)
    monkeypatch.setattr(Tasks, "task", broken)
    loop = Loop(cfg, [make()])
    handed = loop.run()
    assert sum(each.batch.metrics["broken_tasks"] for each in handed) == 4
    assert all(each.batch.metrics["samples"] == 12 for each in handed)
    assert sum("is broken: KeyError: 'answer'" in line for line in loop.lines) == 1
    (tmp_path / "b").mkdir()
    all_of_them = True
    with pytest.raises(Failed, match="reasons are above"):
        Loop(config(tmp_path / "b", steps=20), [make()]).run()


@pytest.mark.parametrize("env", ["Holes", "Drawn"])
def test_a_start_with_tasks_that_raise(make: Make, tmp_path: Path, env: str) -> None:
    """In the file of the user's own environment. In an evaluation such a task counts as 0."""
    cfg = config(tmp_path, env, steps=3, eval_interval=3, eval_samples=40, refill=6)
    loop = Loop(cfg, [make()])
    handed = loop.run()
    assert all(each.batch.metrics["samples"] == 12 for each in handed)
    assert sum(each.batch.metrics["broken_tasks"] for each in handed) > 0
    assert sum("is broken: " in line for line in loop.lines) == 1, loop.lines
    if env == "Drawn":  # of a list, what raises is not held out
        line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
        assert line["eval/Drawn/failed"] == 4.0


def test_a_resume_reads_the_end_of_the_log_of_samples(tmp_path: Path) -> None:
    """Its first line is 4 TiB long here."""
    log = tmp_path / "rl-samples.jsonl"
    lines = b"".join(b'\n{"step": %d, "env": "a"}' % step for step in (1, 2, 2, 3, 3))
    with open(log, "wb") as file:
        file.seek(1 << 42)
        file.write(lines)
    SampleLog(tmp_path, 2, print)
    assert log.stat().st_size == (1 << 42) + lines.index(b'{"step": 3')


def test_samples_are_recorded_and_those_of_lost_steps_removed(make: Make, tmp_path: Path) -> None:
    cfg = config(tmp_path, steps=3)
    whole = Loop(cfg, [make()]).run()
    log = tmp_path / "run" / "rl-samples.jsonl"
    before = log.read_text()
    lines = [json.loads(line) for line in before.splitlines()]
    assert [line["step"] for line in lines] == [1] * 4 + [2] * 4 + [3] * 4
    assert lines[0]["reward"] > lines[1]["reward"]
    for folder in ("rollouts", "weights"):
        for path in sorted((tmp_path / "run/rl/0" / folder).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    Loop(cfg, [make()], 1, whole[0].batch.state).run()
    assert log.read_text() == before
