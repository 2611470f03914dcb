"""Which rank is slow, since when, and how its own work is measured."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kempner.checkpoint.ranks import Ranks
from kempner.train.resilience.straggler import (
    WINDOW,
    BlockClock,
    Stragglers,
    have_collectives_grown,
)


def test_a_slow_rank_is_reported_with_back_off_and_when_it_recovers() -> None:
    from kempner.train.resilience.straggler_report import StragglerReport

    said: list[str] = []
    report = StragglerReport(["one", "one", "two", "two"], WINDOW, said.append)
    for window in range(1, 12):
        slow = window == 1 or 3 <= window <= 9  # one slow window alone is noise
        report.update(window * WINDOW, 2 if slow else -1, 3.5, 0.25, "compute")
    first = 2 * WINDOW + 1
    named = f"straggler: rank 2 on two is 3.5 times slower than the other ranks since step {first}"
    assert (
        said[:2] == [f"{named} (250 ms a step): it computes slower"] * 2
    )  # after two windows, and after four
    recovered = f"as fast as the others again, after steps {first} to {10 * WINDOW}"
    assert said[2:] == [f"straggler: rank 2 on two is {recovered}"]


WHY = {"compute": "it computes slower", "input": "it waits for its data"}


def work_of(rank: int, step: int, part: str) -> tuple[float, float]:
    """Seconds of computing, and of the wait for data. All wait, rank 2 in `part` for long."""
    compute = 5.0 if step % 9 == 0 else 0.06  # a single slow step is not a straggler
    if rank != 2 or step <= WINDOW:
        return compute, 0.04
    return (0.31, 0.04) if part == "compute" else (0.06, 0.29)


def search(rank: int, part: str) -> list[str]:
    """Steps of one rank; returns what it says."""
    said: list[str] = []
    stragglers = Stragglers(["a", "b", "c", "d"], torch.device("cpu"), said.append)
    for step in range(1, 5 * WINDOW + 2):
        terms = stragglers.contribution(*work_of(rank, step, part))
        total = torch.tensor([*terms.values()], dtype=torch.float64)
        dist.all_reduce(total)
        sums = dict(zip(terms, total.tolist(), strict=True))
        stragglers.update(step, sums | {"step_time": 0.5})
    return said


def train(rank: int, world: int, file: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    said = {part: search(rank, part) for part in WHY}
    loaded = "kempner.train.resilience.straggler_report" in sys.modules
    slowest = Ranks(dist.new_group()).slowest(12.5 if rank == 2 else 1.0 + rank)
    results.put((rank, said, loaded, slowest))
    dist.barrier()


def test_the_slowest_of_four_ranks_is_found_by_two_reductions(tmp_path: Any) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=train, args=(rank, 4, str(tmp_path / "store"), results))
        for rank in range(4)
    ]
    for process in ranks:
        process.start()
    found = sorted(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(30)
    assert [loaded for _, _, loaded, _ in found] == [True, False, False, False]
    assert {slowest for *_, slowest in found} == {(2, 12.5, 7 / 3)}
    told = [said for _, said, *_ in found]
    start = "straggler: rank 2 on c is 3.5 times slower than the other ranks since step "
    for part, why in WHY.items():
        assert not told[1][part] and not told[2][part] and not told[3][part]
        assert [text.partition(" (")[0] for text in told[0][part]] == [f"{start}{WINDOW + 1}"] * 2
        assert all(text.endswith(f" ms a step): {why}") for text in told[0][part])


def windows(*rests: float, work: float = 0.1) -> list[tuple[float, float]]:
    return [(work, rest) for rest in rests]


def test_collectives_that_become_slower_are_told_from_a_slow_rank() -> None:
    from kempner.train.resilience.straggler_report import StragglerReport

    usual = windows(0.05, 0.06, 0.05, 0.05, 0.07)
    assert have_collectives_grown([*usual, (0.1, 0.12)])
    assert not have_collectives_grown([*usual, (0.3, 0.12)])  # a larger batch
    assert not have_collectives_grown([*usual, (0.1, 0.074)])
    assert not have_collectives_grown([*usual[:4], (0.1, 0.2)])  # too few
    assert not have_collectives_grown(windows(*[0.001] * 5, 0.004))  # of no account
    said: list[str] = []
    report, seen = StragglerReport(["one"] * 4, WINDOW, said.append), list(usual)
    for window in range(6, 20):
        rest = 0.12 if window == 7 or window >= 9 else 0.05
        seen.append((0.1, rest))
        report.collectives(window * WINDOW, seen, have_collectives_grown(seen))
    assert len(said) == 1, said  # then that is the usual time
    assert said[0].startswith(
        "slow collectives: since step 81 steps spend 120 ms outside of every rank's own work, "
        "before 50 ms: the network"
    )


@pytest.mark.parametrize(
    ("slowest", "rank", "named"),
    [
        ((2, 12.5, 2.0), 0, True),
        ((2, 12.5, 8.0), 0, False),
        ((2, 1.1, 0.2), 0, False),
        (None, 0, False),
        ((2, 12.5, 2.0), 1, False),
    ],
)
def test_a_rank_that_is_slow_to_save_is_named(slowest: Any, rank: int, named: bool) -> None:
    """Rank 0 names it: it alone knows the hosts of all."""
    from kempner.train.recording.metrics import Clock
    from kempner.train.recording.saves import Saves

    said: list[str] = []
    cfg = SimpleNamespace(checkpoint=SimpleNamespace(interval=5))
    hosts = ["c"] if rank else ["a", "b", "c"]
    world = SimpleNamespace(rank=rank)
    run: Any = SimpleNamespace(cfg=cfg, announce=said.append, hosts=hosts, world=world)
    recorder: Any = SimpleNamespace(clock=Clock(), write=lambda record: None)
    checkpointer: Any = SimpleNamespace(
        slowest_write=slowest,
        in_flight=None,
        seconds=13.0,
        stall=0.0,
        waves=0,
        saved_step=-1,
        wait=lambda: None,
    )
    checkpointer.save = lambda step, _: setattr(checkpointer, "saved_step", step)
    progress: Any = SimpleNamespace(step=40, record=dict)
    saves = Saves(run, checkpointer, recorder, contextlib.nullcontext)
    saves.save(progress)
    saves.see()
    expected = (
        "straggler: rank 2 on c is slow to save: its part of the checkpoint of step 40 took "
        "12.5 s, those of the other ranks 2.0 s on average"
    )
    assert said == [expected] * named


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


def test_the_clock_scales_one_block_to_all_of_them() -> None:
    blocks = [nn.Linear(64, 64) for _ in range(4)]
    clock = BlockClock(Model(*blocks), torch.device("cpu"))
    blocks[0](torch.randn(512, 64))
    assert clock.take() > 0.0
    blocks[1](torch.randn(512, 64))
    assert clock.take() == 0.0  # the first block has done nothing in this step
    with torch.no_grad():  # a validation is not the work of a step
        blocks[0](torch.randn(512, 64))
    assert clock.take() == 0.0


def test_work_that_the_device_has_not_ended_counts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """elapsed_time raises on an event that has not completed, and would end the run."""
    done: list[Any] = []

    class Event(SimpleNamespace):
        def query(self) -> bool:
            return self in done

        def elapsed_time(self, other: Event) -> float:
            assert self in done and other in done, "Both events must be completed"
            return 2000.0

    clock = BlockClock(Model(nn.Identity()), torch.device("cuda"))
    monkeypatch.setattr(clock, "_now", lambda: Event(name=len(clock._spans)))
    for _ in range(2):
        clock._start()
        clock._end()
    assert clock.take() == 0.0
    done += clock._spans[0]
    assert clock.take() == 6.0
    done += clock._spans[0]
    assert clock.take() == 6.0 and clock.take() == 0.0
