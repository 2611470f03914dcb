"""The sizes of the steps of a run: a batch that grows, sequences that get longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kempner.config.option import ConfigError
from kempner.data.config import DataConfig, PhaseConfig
from kempner.data.stages import RampStage, ramp_stages, samples_between, stage_at, step_of_sample
from kempner.train.progress import Progress
from kempner.train.replicas import Replicas
from kempner.train.resilience import resuming
from kempner.train.resilience.requests import Verdict
from kempner.train.resilience.resuming import fork_position, go_back
from kempner.train.sections import RunConfig, TrainConfig, check_batch, micro_batch


def test_a_ramp_has_the_global_batch_from_its_last_step_on() -> None:
    cfg = TrainConfig(global_batch=32, batch_ramp=(8, 8, 10))
    sizes = [cfg.stage(step).batch for step in range(12)]
    assert sizes == [8, 8, 8, 8, 16, 16, 16, 24, 24, 24, 32, 32]
    assert {cfg.stage(step).pieces for step in range(12)} == {1}


def test_lengths_double_for_equal_parts_of_the_ramp() -> None:
    cfg = TrainConfig(seq_len=64, seq_len_ramp=(16, 8), global_batch=32, batch_ramp=(16, 16, 6))
    lengths = [cfg.seq_len // cfg.stage(step).pieces for step in range(10)]
    assert lengths == [16, 16, 16, 16, 32, 32, 32, 32, 64, 64]
    assert cfg.stages == [
        RampStage(0, 16, 4),
        RampStage(4, 16, 2),
        RampStage(6, 32, 2),
        RampStage(8, 32, 1),
    ]
    assert TrainConfig().stages == [RampStage(0, 32, 1)]


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 40)),
    st.integers(1, 6),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_steps_and_samples_are_counted_as_one_by_one(
    ramp: tuple[int, int, int], rises: int, begin: int, count: int
) -> None:
    every = ramp_stages(ramp[0] + rises * ramp[1], ramp, [4, 2], 30)
    sizes = [stage_at(every, step).batch for step in range(200)]
    end = begin + count
    total = sum(sizes[begin:end])
    assert samples_between(every, begin, end) == total == -samples_between(every, end, begin)
    assert step_of_sample(every, begin, total) == end
    assert step_of_sample(every, begin, total + 1) == end + 1


def test_phases_of_the_data_begin_where_the_ramp_has_led_to() -> None:
    phases = (PhaseConfig(start_step=8), PhaseConfig(start_token=2000))
    train = TrainConfig(seq_len=10, global_batch=32, batch_ramp=(8, 8, 10))
    cfg = RunConfig(train=train, data=DataConfig(phases=phases))
    assert Progress().plan(cfg).phases == [4 * 8 + 3 * 16 + 24, 4 * 8 + 3 * 16 + 3 * 24 + 2 * 32]
    later = Progress(step=5, samples=48, tokens=480).plan(cfg)
    assert later.phases == Progress().plan(cfg).phases


def test_a_run_that_goes_back_leaves_out_the_batches_that_were_bad(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bad were steps 4 and 5, of 8 and 16 samples, and step 6 has been read."""
    train = TrainConfig(global_batch=32, batch_ramp=(8, 8, 10))
    manifest = {**Progress(step=2, samples=16).record(), "step": 2}
    sought: list[tuple[Any, ...]] = []
    run: Any = SimpleNamespace(cfg=RunConfig(train=train), went_back=lambda *_: None)
    checkpointer: Any = SimpleNamespace(load=lambda: manifest, remember_skip=lambda _: None)
    loader: Any = SimpleNamespace(position=64, sources=[], at_once=False)
    loader.seek = lambda *to: sought.append(to)
    monkeypatch.setattr(resuming, "open_mixture", lambda *_: "mixture")
    now, first = Progress(step=6, samples=64), Progress(step=4, samples=32)
    back, _ = go_back(now, first, Verdict(go_back=True), checkpointer, loader, run)
    assert (back.step, back.skip) == (2, [[24, 64]])
    assert sought == [(16, 2, [[24, 64]], "mixture")]


def test_a_fork_may_go_back_though_the_other_run_has_done_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the samples that the other run left out, it leaves out those that are still ahead."""
    monkeypatch.setattr(resuming, "fact_differences", lambda *_: {})

    def fork(skip: list[list[int]]) -> Progress:
        there = Progress(step=9000, samples=288_000, tokens=10**7, skip=skip)
        fixed = {"data": {"mixture": {"sources": []}}}
        found, changed = fork_position({**there.record(), "fixed": fixed}, {"fixed": fixed})
        assert (found.step, found.samples, changed) == (0, 288_000, [])
        return found

    assert Replicas().may_go_back(fork([[1000, 1320], [287_000, 288_000]]))
    near = fork([[1000, 1320], [288_032, 288_064]])
    assert near.skip == [[288_032, 288_064]] and not Replicas().may_go_back(near)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"batch_ramp": (8, 7, 10)}, "from 8 by 7 does not lead to the global batch of 32"),
        ({"batch_ramp": (32, 8, 10)}, "does not lead to the global batch of 32"),
        ({"batch_ramp": (1, 1, 9), "global_batch": 2000}, "grows 1999 times; give a larger"),
        ({"seq_len_ramp": (96, 10), "seq_len": 256}, "does not lead to train.seq_len = 256"),
        ({"seq_len_ramp": (256, 10), "seq_len": 256}, "give a half, a quarter"),
        ({"seq_len_ramp": (64, 10), "seq_len": 192}, "does not lead to train.seq_len = 192"),
    ],
)
def test_ramps_that_lead_nowhere_are_refused(changes: dict[str, Any], told: str) -> None:
    (problem,) = TrainConfig(**changes).problems()
    assert told in problem


def test_every_batch_of_a_ramp_divides_by_the_ranks() -> None:
    cfg = TrainConfig(global_batch=32, batch_ramp=(8, 8, 10), micro_batch=4)
    check_batch(cfg, 8)
    assert [micro_batch(cfg, 4, batch) for batch in (8, 16, 32)] == [2, 4, 4]
    with pytest.raises(ConfigError, match=r"batch_ramp: 24 sequences do not divide by 16 ranks"):
        check_batch(TrainConfig(global_batch=32, batch_ramp=(8, 8, 10)), 16)
    with pytest.raises(ConfigError, match=r"batch_ramp: 24 sequences .* micro_batch 4 = 16; start"):
        check_batch(cfg, 4)
