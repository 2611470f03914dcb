"""Detection of slow ranks: compares each rank's own work, without the waiting for others.

In a step every rank takes as long as the slowest, because each collective waits for it. So only
time between collectives is compared: the forward of one block with gathered weights, scaled to all
blocks, and the wait for data. If ranks also wait for each other within a block (tensor, context and
expert parallelism), it is the time of one of its products, which comes after all of its siblings
and waits for nobody.

Every WINDOW steps each rank puts its median work, and its share of waiting for data, into the
step's all-reduce; from the sums it derives the means of the others, how much slower it is itself,
and by which part. A second reduction, of two numbers, keeps the slowest rank, its part and its
slowness. No list of ranks is ever made. A slow link delays all ranks alike and names none: then the
time outside of every rank's own work grows.

A run with a single rank does not load this module.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from kempner.train.resilience.straggler_report import StragglerReport

WINDOW = 10  # steps of one comparison
SLOW_RATIO = 1.5  # times the mean work of the other ranks
# To report slower collectives: previous windows, and growth relative to a step.
LEAST_WINDOWS, MOST_WINDOWS, LEAST_GROWTH = 5, 100, 0.2
# A block's forward and backward take about three times its forward.
WORK_PER_FORWARD = 3
PARTS = ("compute", "input")  # of a rank's own work
# More ranks than any world, times the parts. A ratio, a rank and its slow part travel as ratio *
# 1e6 * PLACES + rank * len(PARTS) + part.
PLACES = len(PARTS) << 20


class BlockClock:
    """Seconds of this rank's own work in a step, from the forward of the model's first block."""

    def __init__(self, model: nn.Module, device: torch.device, apart: bool = True) -> None:
        """`model` has `blocks`. A model compiled as a whole is timed by its own forward, because an
        inner hook would cut its graph in two. `apart`: no rank waits for another within a block.
        Otherwise an uncompiled block has the product `attention.wv`."""
        assert isinstance(model.blocks, nn.ModuleList)
        whole = model._compiled_call_impl is not None
        clocked = model if whole else model.blocks[0]
        # With a pipeline, the mean of the stages: one with fewer blocks also has the output layer.
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
        """Return the seconds of all forwards that have ended since the last call. Those still
        running on the device count the next time: reading their events now would be an error, and
        waiting would stop the host."""
        spans = [span for span in self._spans if not self._cuda or span[1].query()]
        # The first ones have ended: a stream reaches its events in order.
        self._spans = self._spans[len(spans) :]
        return self._scale * sum(_seconds(*span) for span in spans)


def _weights(module: nn.Module, model: Any) -> float:
    """Count the weights that multiply a token: of the experts [E, ...] only those it is sent to."""
    per_token = model.cfg.experts_per_token
    sizes = (p.numel() / (len(p) / per_token if p.ndim == 3 else 1) for p in module.parameters())
    return sum(sizes)


def _seconds(began: Any, ended: Any) -> float:
    seconds: float
    seconds = ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1000
    return seconds


class Stragglers:
    """Finds the slowest rank of each window of steps. All ranks call the same methods at
    the same steps."""

    def __init__(self, hosts: list[str], device: torch.device, say: Callable[[str], None]) -> None:
        """`hosts`: of each rank; needed where `say` has readers (rank 0)."""
        self._hosts, self._say, self._device = hosts, say, device
        self._report: StragglerReport | None = None
        self._rank, self._others = dist.get_rank(), dist.get_world_size() - 1
        self._window: list[tuple[float, float]] = []
        self._work = self._waited = 0.0
        self._rest: list[tuple[float, float]] = []  # of each window, on rank 0
        self._pending: tuple[int, Tensor, torch.Event | None] | None = None

    def contribution(self, compute: float, waited: float) -> dict[str, float]:
        """Return this rank's terms of the step's sum: its medians at the end of a window,
        else 0. `compute`, `waited`: seconds of this rank's own work, and of waiting for data,
        in this step."""
        self._window.append((compute + waited, waited))
        if len(self._window) < WINDOW:
            return {"work": 0.0, "input": 0.0}
        self._work, self._waited = map(statistics.median, zip(*self._window, strict=True))
        self._window = []
        return {"work": self._work, "input": self._waited}

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Start the search for the slowest rank at the end of a window, and report it one step
        later, so that nothing waits. `values`: the sums of the contributions to `step`, with a
        nonzero "work" at the end of a window, and its "step_time"."""
        if self._pending is not None:
            last_step, result, event = self._pending
            self._pending = None
            if event is not None:
                event.synchronize()
            packed, late = result.tolist()
            ratio, place = divmod(int(packed), PLACES)
            if self._rank == 0:
                self._judge(last_step, *divmod(place, len(PARTS)), ratio / 1e6, late)
        if values["work"] and self._others:
            work = values["work"] / (self._others + 1)
            del self._rest[:-MOST_WINDOWS]
            self._rest.append((work, max(0.0, values["step_time"] - work)))
            self._pending = (step, *self._search(values["work"], values["input"]))

    def _judge(self, step: int, rank: int, part: int, ratio: float, late: float) -> None:
        """Pass on rank 0's result, to a module that most runs never load."""
        slow, grown = ratio > SLOW_RATIO, have_collectives_grown(self._rest)
        if self._report is None and (slow or grown):
            from kempner.train.resilience.straggler_report import StragglerReport

            self._report = StragglerReport(self._hosts, WINDOW, self._say)
        if self._report is not None:
            self._report.update(step, rank if slow else -1, ratio, late, PARTS[part])
            self._report.collectives(step, self._rest, grown and not slow)

    def _search(self, total: float, total_input: float) -> tuple[Tensor, torch.Event | None]:
        """Return [packed ratio, rank and part; seconds per step that the slowest rank is late], on
        their way to the host. The ratio is a rank's work over the mean of the others'."""
        others = (total - self._work) / self._others
        late = max(0.0, self._work - others)
        # The part of the delay from a longer wait for data than the others'.
        late_input = self._waited - (total_input - self._waited) / self._others
        # Bounded, so that it fits into the packed number below.
        ratio = min(self._work / others, 1e3) if others > 0 else 1.0
        place = self._rank * len(PARTS) + (late_input > late / 2)
        # fp64 keeps integers up to 2^53: 1e3 * 1e6 * 2^21 is 2^51. The seconds are a separate
        # maximum: the rank with the largest ratio also has the largest delay.
        mine = [round(ratio * 1e6) * PLACES + place, late]
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


def have_collectives_grown(windows: list[tuple[float, float]]) -> bool:
    """Return whether the time outside of the ranks' own work has grown to SLOW_RATIO times the
    median of the windows before, in itself and beside their work, which alone grows with a larger
    batch. `windows`: (mean work, rest) of each, in seconds a step."""
    *before, (work, rest) = windows
    if len(before) < LEAST_WINDOWS or not work:
        return False
    usual = statistics.median(rest for _, rest in before)
    share = statistics.median(rest / work for work, rest in before if work)
    least = LEAST_GROWTH * (work + rest)  # less is noise
    return rest > SLOW_RATIO * usual and rest / work > SLOW_RATIO * share and rest - usual > least
