"""Which rank is slow: each rank's own work, without the waiting for others, side by side.

In a step every rank takes as long as the slowest, because each collective waits for it. So only
time between collectives is compared: the forward of one block, whose weights are already gathered,
scaled to all of them, and the wait for data. It travels in the step's all-reduce, one number a
rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WINDOW = 20  # steps of one comparison
SLOW = 1.5  # times the median rank's work
# Forward and backward of a block are about three times its forward.
WORK_PER_FORWARD = 3


class BlockClock:
    """Seconds of this rank's own work in a step, from the forward of the model's first block."""

    def __init__(self, blocks: nn.ModuleList, device: torch.device) -> None:
        self._scale = WORK_PER_FORWARD * len(blocks)
        self._cuda = device.type == "cuda"
        self._began: float | torch.Event = 0.0
        self._spans: list[tuple[Any, Any]] = []
        self._before: list[tuple[Any, Any]] = []
        # Inside of what fully_shard has put around the block: its weights are there by then.
        blocks[0].register_forward_pre_hook(self._start)
        blocks[0].register_forward_hook(self._end, prepend=True)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _start(self, *_: object) -> None:
        self._began = self._now()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _end(self, *_: object) -> None:
        self._spans.append((self._began, self._now()))

    def _now(self) -> float | torch.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.Event("cuda", enable_timing=True)
        event.record()
        return event

    def take(self) -> float:
        """Of the step before the one in flight: its device work has ended, so that nothing
        waits."""
        done, self._before, self._spans = self._before, self._spans, []
        return self._scale * sum(_seconds(*span) for span in done)


def _seconds(began: Any, ended: Any) -> float:
    return began.elapsed_time(ended) / 1000 if isinstance(began, torch.Event) else ended - began


class Stragglers:
    """Compares the ranks over windows of steps and says who is slow, ever less often, and who is
    so no more."""

    def __init__(self, hosts: list[str], say: Callable[[str], None]) -> None:
        self._hosts, self._say = hosts, say
        self._window: list[list[float]] = []
        self.since: dict[int, int] = {}  # slow rank -> first step of the first slow window

    def update(self, step: int, work: list[float]) -> None:
        """`work`: seconds of each rank in this step."""
        self._window.append(work)
        if len(self._window) < WINDOW:
            return
        ranks = [statistics.median(rank) for rank in zip(*self._window, strict=True)]
        self._window = []
        typical = statistics.median_low(ranks)
        for rank, seconds in enumerate(ranks):
            if seconds > SLOW * typical:
                self.since.setdefault(rank, step - WINDOW + 1)
                windows = (step - self.since[rank] + 1) // WINDOW
                if windows & (windows - 1):
                    continue  # not a power of two
                self._say(
                    f"straggler: rank {rank} on {self._hosts[rank]} is {seconds / typical:.1f} "
                    f"times slower than the median rank since step {self.since[rank]} "
                    f"({1000 * (seconds - typical):.0f} ms a step)"
                )
            elif rank in self.since:
                begin = self.since.pop(rank)
                self._say(f"straggler: rank {rank} on {self._hosts[rank]} is as fast as the others "
                          f"again, after steps {begin} to {step}")  # fmt: skip
