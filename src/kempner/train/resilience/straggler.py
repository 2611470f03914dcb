"""Detection of slow ranks: compares each rank's own work, without the waiting for others.

In a step every rank takes as long as the slowest, because each collective waits for it. So only
time between collectives is compared: the forward of one block, whose weights are already gathered,
scaled to all of them, and the wait for data. Where ranks wait for each other within a block, too
(tensor, context and expert parallelism), it is that of the one product in it that comes after all
of its siblings, and waits for nobody.

Every WINDOW steps each rank puts its median work into the step's all-reduce; from the sum it knows
the mean of the others and how much slower it is itself. A second reduction, of one number, keeps
the slowest rank and how slow it is. No list of ranks is ever made.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WINDOW = 10  # steps of one comparison
SLOW_WINDOWS = 2  # in a row: one alone is noise, such as another job's burst on a shared node
SLOW_RATIO = 1.5  # times the mean work of the other ranks
# Forward and backward of a block are about three times its forward.
WORK_PER_FORWARD = 3
RANKS = 1 << 20  # more than any world has; a ratio and a rank travel as ratio * 1e6 * RANKS + rank


class BlockClock:
    """Seconds of this rank's own work in a step, from the forward of the model's first block."""

    def __init__(self, model: nn.Module, device: torch.device, apart: bool = True) -> None:
        """`model` has `blocks`. A model compiled as a whole is timed by its own forward: a hook
        within would cut its graph in two. `apart`: no rank waits for another within a block.
        Otherwise a block that is not compiled has the product `attention.wv`."""
        assert isinstance(model.blocks, nn.ModuleList)
        whole = model._compiled_call_impl is not None
        clocked = model if whole else model.blocks[0]
        # With a pipeline the mean of the stages: one with fewer blocks has the output layer, too.
        pipeline = getattr(model, "pipeline", None)
        blocks = len(model.blocks) if pipeline is None else pipeline.mean_blocks
        self._scale = WORK_PER_FORWARD * (1.0 if whole else blocks)
        if not apart and clocked._compiled_call_impl is None:
            block, clocked = clocked, clocked.get_submodule("attention.wv")
            self._scale *= _weights(block, model) / _weights(clocked, model)
        self._cuda = device.type == "cuda"
        self._began: float | torch.Event = 0.0
        self._spans: list[tuple[Any, Any]] = []
        start, end = self._start, self._end
        if whole or clocked._compiled_call_impl is not None:
            # Only for a compiled model: it imports the compiler, half a second of every start.
            start, end = map(torch.compiler.disable, (start, end))
        # Inside fully_shard's hooks: its weights are gathered by then, and are not timed.
        clocked.register_forward_pre_hook(start)
        # Prepended, so that FSDP's own hook, which frees the weights, is not timed.
        clocked.register_forward_hook(end, prepend=True)

    def _start(self, *_: object) -> None:
        self._began = self._now()

    def _end(self, *_: object) -> None:
        if torch.is_grad_enabled():  # not a validation
            self._spans.append((self._began, self._now()))

    def _now(self) -> float | torch.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.Event("cuda", enable_timing=True)
        event.record()
        return event

    def take(self) -> float:
        """Return the seconds of all forwards that have ended since the last call. Those that the
        device still works on count the next time: reading their events now would be an error, and
        waiting for them would stop the host."""
        spans = [span for span in self._spans if not self._cuda or span[1].query()]
        self._spans = self._spans[len(spans) :]  # a stream ends them in their order
        return self._scale * sum(_seconds(*span) for span in spans)


def _weights(module: nn.Module, model: Any) -> float:
    """Count the weights that multiply a token: of the experts [E, ...] only those that it goes
    to."""
    per_token = model.cfg.experts_per_token
    sizes = (p.numel() / (len(p) / per_token if p.ndim == 3 else 1) for p in module.parameters())
    return sum(sizes)


def _seconds(began: Any, ended: Any) -> float:
    seconds: float
    seconds = ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1000
    return seconds


class Stragglers:
    """Finds the slowest rank of each window of steps. All ranks call the same methods at the same
    steps."""

    def __init__(self, hosts: list[str], device: torch.device, say: Callable[[str], None]) -> None:
        """`hosts`: of each rank; needed where `say` reaches somebody (rank 0)."""
        self._report = StragglerReport(hosts, say)
        self._device = device
        self._rank, self._others = dist.get_rank(), dist.get_world_size() - 1
        self._window: list[float] = []
        self._mine = 0.0
        self._pending: tuple[int, Tensor, torch.Event | None] | None = None

    def contribution(self, work: float) -> float:
        """Return this rank's term of the step's sum: its median over the window at its end, else 0.
        `work`: seconds of this rank in this step."""
        self._window.append(work)
        if len(self._window) < WINDOW:
            return 0.0
        self._mine, self._window = statistics.median(self._window), []
        return self._mine

    def update(self, step: int, total: float) -> None:
        """Start the search for the slowest rank at the end of a window, and report it one step
        later, so that nothing waits. `total`: the sum of the contributions to `step`, not 0 at the
        end of a window."""
        if self._pending is not None:
            last_step, result, event = self._pending
            self._pending = None
            if event is not None:
                event.synchronize()
            packed, late = result.tolist()
            ratio, rank = divmod(int(packed), RANKS)
            if self._rank == 0:
                self._report.update(last_step, rank, ratio / 1e6, late)
        if total and self._others:
            self._pending = (step, *self._search(total))

    def _search(self, total: float) -> tuple[Tensor, torch.Event | None]:
        """Return [packed ratio and rank, seconds a step that the slowest one is late], on their way
        to the host. The ratio is that of a rank's work to the mean of the others'."""
        others = (total - self._mine) / self._others
        # Bounded, so that it fits into the packed number below.
        ratio = min(self._mine / others, 1e3) if others > 0 else 1.0
        # fp64 keeps integers up to 2^53: 1e3 * 1e6 * 2^20 is 2^50. The seconds are a maximum of
        # their own: the rank with the largest ratio has the largest delay, too.
        mine = [round(ratio * 1e6) * RANKS + self._rank, max(0.0, self._mine - others)]
        cuda = self._device.type == "cuda"
        host = torch.tensor(mine, dtype=torch.float64, pin_memory=cuda)
        worst = host.to(self._device, non_blocking=True)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        host.copy_(worst, non_blocking=True)
        if not cuda:
            return host, None
        event = torch.Event("cuda")
        event.record()
        return host, event


class StragglerReport:
    """Reports of a rank that stays slow, with exponential back-off, and of its recovery."""

    def __init__(self, hosts: list[str], say: Callable[[str], None]) -> None:
        self._hosts, self._say = hosts, say
        self._rank, self._since = -1, 0  # the slow one, and the first step of its first slow window
        self._said = False

    def update(self, step: int, rank: int, ratio: float, late: float) -> None:
        """Take the slowest rank of the window that ended with `step`: `late` in seconds a step."""
        slow = rank if ratio > SLOW_RATIO else -1
        if self._rank >= 0 and slow != self._rank:
            if self._said:
                self._say(
                    f"straggler: rank {self._rank} on {self._hosts[self._rank]} is as fast as the "
                    f"others again, after steps {self._since} to {step}"
                )
            self._rank, self._said = -1, False
        if slow < 0:
            return
        if self._rank < 0:
            self._rank, self._since = slow, step - WINDOW + 1
        windows = (step - self._since + 1) // WINDOW
        if windows >= SLOW_WINDOWS and windows & (windows - 1) == 0:  # a power of two
            self._said = True
            self._say(
                f"straggler: rank {slow} on {self._hosts[slow]} is {ratio:.1f} times slower than "
                f"the other ranks since step {self._since} ({1000 * late:.0f} ms a step)"
            )
