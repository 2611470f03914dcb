"""Which rank is slow, since when, and how its own work is measured."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kempner.train.resilience.straggler import WINDOW, BlockClock, StragglerReport, Stragglers


def test_a_slow_rank_is_reported_with_back_off_and_when_it_recovers() -> None:
    said: list[str] = []
    report = StragglerReport(["one", "one", "two", "two"], said.append)
    for window in range(1, 12):
        slow = window == 1 or 3 <= window <= 9  # one slow window alone is noise
        report.update(window * WINDOW, 2, 3.5 if slow else 1.1, 0.25 if slow else 0.01)
    first = 2 * WINDOW + 1
    named = f"straggler: rank 2 on two is 3.5 times slower than the other ranks since step {first}"
    assert said[:2] == [f"{named} (250 ms a step)"] * 2  # after two windows, and after four
    recovered = f"as fast as the others again, after steps {first} to {10 * WINDOW}"
    assert said[2:] == [f"straggler: rank 2 on two is {recovered}"]


def work_of(rank: int, step: int) -> float:
    if rank == 2 and step > WINDOW:
        return 0.35
    return 5.0 if step % 9 == 0 else 0.1  # a single slow step is not a straggler


def train(rank: int, world: int, file: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    said: list[str] = []
    stragglers = Stragglers(["a", "b", "c", "d"], torch.device("cpu"), said.append)
    for step in range(1, 5 * WINDOW + 2):
        total = torch.tensor(stragglers.contribution(work_of(rank, step)), dtype=torch.float64)
        dist.all_reduce(total)
        stragglers.update(step, total.item())
    results.put((rank, said))
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
    told = dict(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(30)
    assert not told[1] and not told[2] and not told[3]
    assert [text.partition(" (")[0] for text in told[0]] == [
        f"straggler: rank 2 on c is 3.5 times slower than the other ranks since step {WINDOW + 1}"
    ] * 2


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
