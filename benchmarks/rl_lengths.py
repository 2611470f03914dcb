"""What rl.max_async does to the lengths that are trained: this project's own Groups, with lognormal
lengths, in simulated time.

    python -m benchmarks.rl_lengths

An engine writes each of its texts at 40 tokens/s, and takes the next group when one of its groups
ends with its longest sample. The trainer takes 60 s for each step. A group is as old as the weights
that its first token was drawn with; one that is too old is cancelled, and its task asked again.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import NamedTuple

import numpy as np

from kempner.extensions.rl.config import RlConfig
from kempner.extensions.rl.orchestrate.batches import Groups, batches_ahead, is_wanted
from kempner.extensions.rl.orchestrate.groups import Rollout, SampleGroup, TaskPlace
from kempner.jobs.report.tables import align_table

RATE, TRAIN_S = 40.0, 60.0  # tokens/s of a text; seconds of a step
MEDIAN, MOST, TASK, SAMPLE = 1500, 32768, 0.8, 0.6  # tokens; deviations of the log of lengths
GROUP, BATCH = 16, 64  # samples of a group, groups of a batch
ROOM = 512  # groups that all engines work on at a time


class Count(NamedTuple):
    """In the place of an array of tokens: its sum."""

    tokens: int

    def sum(self) -> int:
        return self.tokens


class Sampled(NamedTuple):
    sampled: Count


class Result(NamedTuple):
    asked: float  # mean tokens of a sample, of all tasks in the order
    trained: float  # of those that were trained meanwhile
    lost: float  # share of the tokens that were written for nothing
    missing: int  # tasks that were asked, and are nowhere
    behind: float  # versions, mean
    seconds: float  # of a step


class Simulation:
    def __init__(self, max_async: int, room: int, steps: int, seed: int = 0) -> None:
        """`room`: groups that all engines work on at a time."""
        self.rl = RlConfig(group_size=GROUP, batch_samples=GROUP * BATCH, max_async=max_async)
        self.room, self.steps = room, steps
        draw = np.random.default_rng(seed).standard_normal
        count = 2 * (steps + max_async) * BATCH
        logs = np.log(MEDIAN) + TASK * draw((count, 1)) + SAMPLE * draw((count, GROUP))
        self.lengths = np.exp(logs).clip(1, MOST).astype(int)  # [tasks, samples]
        self.groups = Groups(self.rl, MOST, print)
        self.groups.new_target()
        self.asked = 0  # tasks
        self.ticket = 0
        self.flying: dict[int, tuple[int, float, int]] = {}  # by ticket: task, begin, version
        self.ends: list[tuple[float, int]] = []
        self.waiting, self.again = deque[int](), deque[int]()  # tasks
        self.now, self.step, self.newest, self.trains_until = 0.0, 0, 0, math.inf
        self.written = self.lost = 0.0
        self.trained: list[int] = []  # tasks
        self.behind: list[int] = []

    def run(self) -> Result:
        while self.step < self.steps:
            # The end of a run is no part of it: there all waits for the last ones.
            ahead = batches_ahead(self.rl, self.newest, self.step, 2 * self.steps)
            self.ask(ahead)
            chosen = None
            if is_wanted(self.newest, self.step):
                flying = len(self.flying) + len(self.waiting)
                chosen = self.groups.chosen(self.step + 1, ahead, flying)
            for place in self.groups.again:
                self.lost += self.lengths[place.place].sum()
                self.again.append(place.place)
            self.groups.again = []
            if chosen is not None:
                self.train(chosen)
            else:
                self.wait()
        there = {at.place for at in self.groups.carried} | {*self.waiting, *self.again}
        there |= {task for task, _, _ in self.flying.values()} | set(self.trained)
        return Result(
            float(self.lengths[: self.steps * BATCH].mean()),
            float(self.lengths[self.trained].mean()),
            self.lost / (self.written + self.lost),
            self.asked - len(there),
            float(np.mean(self.behind)),
            self.now / self.steps,
        )

    def ask(self, ahead: int) -> None:
        flying = len(self.flying) + len(self.waiting)
        late = sum(version < self.newest for _, _, version in self.flying.values())
        for _ in range(self.groups.wanted(ahead, flying, late)):
            if self.again:
                self.waiting.append(self.again.popleft())
            else:
                self.waiting.append(self.asked)
                self.asked += 1
        while self.waiting and len(self.flying) < self.room:
            task = self.waiting.popleft()
            self.ticket += 1
            self.flying[self.ticket] = task, self.now, self.newest
            end = self.now + self.lengths[task].max() / RATE
            heapq.heappush(self.ends, (end, self.ticket))

    def train(self, chosen: list[SampleGroup]) -> None:
        self.groups.next_batch(chosen)
        self.step += 1
        self.trained += [group.at.place for group in chosen]
        self.behind += [self.step - 1 - group.oldest for group in chosen]
        if self.trains_until == math.inf:  # it waited for this batch
            self.trains_until = self.now + TRAIN_S
        least = self.groups.least(self.step + 1)
        for ticket in [each for each, (_, _, version) in self.flying.items() if version < least]:
            task, began, _ = self.flying.pop(ticket)
            self.lost += np.minimum(self.lengths[task], (self.now - began) * RATE).sum()
            self.again.append(task)

    def wait(self) -> None:
        """Until a group ends, or a step."""
        while self.ends and self.ends[0][1] not in self.flying:  # it was cancelled
            heapq.heappop(self.ends)
        if self.trains_until < math.inf and (not self.ends or self.trains_until <= self.ends[0][0]):
            self.now, self.newest = self.trains_until, self.newest + 1
            self.trains_until = self.now + TRAIN_S if self.newest < self.step else math.inf
            return
        self.now, ticket = heapq.heappop(self.ends)
        task, _, version = self.flying.pop(ticket)
        self.written += self.lengths[task].sum()
        rollouts = [
            # Rewards all differ: no group is without variance.
            Rollout(Sampled(Count(int(n))), "", float(i), False, version)  # type: ignore[arg-type]
            for i, n in enumerate(self.lengths[task])
        ]
        self.groups.add(SampleGroup(TaskPlace(task, "", task), "", "", rollouts))


def main() -> None:
    rows = [["max_async", "asked", "trained", "bias", "in vain", "behind", "s a step"]]
    for max_async in (0, 1, 2, 4, 8, 16):
        found = Simulation(max_async, ROOM, 150).run()
        rows.append([
            str(max_async), f"{found.asked:,.0f}", f"{found.trained:,.0f}",
            f"{found.trained / found.asked - 1:+.1%}", f"{found.lost:.1%}", f"{found.behind:.1f}",
            f"{found.seconds:.0f}",
        ])  # fmt: skip
    print(align_table(rows, 2, range(7)))


if __name__ == "__main__":
    main()
