"""The trainer's interface to the replicas: one call after each step.

Each replica is a separate world: its ranks have a default process group, a layout, a run directory
and checkpoints like those of any run. Replicas communicate here: in the outer steps, and once per
round about requests to any of them, so that all save or stop at the same step. In between, none
waits for another.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kempner.checkpoint.checkpointer import Checkpointer
from kempner.checkpoint.state import StateProvider
from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.lowcomm.outer import Handle, OuterOptimizer, OuterState, ReplicaExchange
from kempner.train.replicas import ReplicaNumbers, Replicas, Waiting
from kempner.train.resilience.requests import REQUEST_FLAGS

if TYPE_CHECKING:
    from kempner.jobs.ranks.placement import World
    from kempner.train.progress import Progress
    from kempner.train.sections import RunConfig
    from kempner.train.step import StepResult

SHARED_NUMBERS = (
    *REQUEST_FLAGS,
    "loss_sum",
    "tokens",
)  # the numbers of a step that all replicas share


class LowcommReplicas(Replicas):
    """One of several replicas. Requests to it wait until all agree, in an exchange that starts two
    steps before the end of a round, or before the last fragment leaves, so that its result arrives,
    without a wait, one step before the round ends. The host reads it at the end of the round."""

    waiting: Waiting = nullcontext
    """The watchdog's patient(), for waits for replicas that another process judges."""

    def __init__(
        self,
        cfg: RunConfig,
        world: World,
        parameters: Mapping[str, nn.Parameter],
        exchange: ReplicaExchange,
    ) -> None:
        self.cfg, self.world, self.exchange = cfg.of(LowcommConfig), world, exchange
        self.outer = OuterOptimizer(cfg.of(LowcommConfig), parameters, exchange)
        # time_to_leave() allows for three steps.
        self.patience = 1 + (cfg.of(LowcommConfig).interval + cfg.of(LowcommConfig).tau) / 3
        self._state = OuterState(self.outer)
        self._asked: Handle | None = None
        self._sums: Tensor | None = None
        self._waited = 0.0
        self._sent = 0
        # Of this round, once all have agreed; a start that runs only its end does not agree in it.
        self._loss: Tensor | None = None
        self._spoilt: Tensor  # [replicas], over 0: has had non-finite numbers
        ring = 2 * (world.replicas - 1) / world.replicas * 4  # bytes per number, fp32
        self._data_parallel = ring * sum(p.numel() for p in parameters.values())  # bytes per step

    def with_outer(self, state: dict[str, StateProvider]) -> dict[str, StateProvider]:
        """Insert the outer state between the model, which holds the anchors, and the optimizer,
        which may replace the weights."""
        return {"model": state["model"], "outer": self._state, **state}

    def checkpointer(self, *parts: Any) -> Checkpointer:
        """Return the checkpointer; replicas that meet in a store resume at the same step."""
        if self.world.store is None:
            return super().checkpointer(*parts)
        from kempner.extensions.lowcomm.checkpoints import ReplicaCheckpointer

        return ReplicaCheckpointer(*parts, world=self.world, replicas=self)

    def begin(self, progress: Progress) -> Progress:
        if not self._state.loaded:
            self.outer.begin()
        return progress

    def may_go_back(self, progress: Progress) -> bool:
        """Return False: the other replicas would wait for one that goes back alone."""
        return self.world.replicas == 1 and super().may_go_back(progress)

    def forget_errors(self) -> None:
        for fragment in self.outer.fragments:
            for error in fragment.errors.values():
                error.zero_()

    def after_step(self, progress: Progress, numbers: ReplicaNumbers) -> ReplicaNumbers:
        began, step = time.monotonic(), progress.step
        self.outer.after_step(step)
        rounds, steps_left = self.cfg.interval, -step % self.cfg.interval  # steps of this round
        shared = torch.stack([numbers[name] for name in SHARED_NUMBERS])
        self._sums = shared if self._sums is None else self._sums + shared
        # Sent before the last fragment, behind which the numbers would wait.
        if steps_left == min(max(2 if rounds > 2 else 1, self.cfg.tau + 1), rounds - 1):
            # Exchanges require fp32.
            ours = torch.cat([self._sums.float(), self._own_spoilt()])
            self._asked = self.exchange.start(ours, f"numbers {step}")
            self._sums = None
        zero = torch.zeros_like(shared[0])
        # A step is never abandoned midway, because the other replicas would wait for this one.
        result = {**numbers, **dict.fromkeys(REQUEST_FLAGS, zero), "step_time": zero}
        if steps_left == min(1, rounds - 1) and self._asked is not None:
            # The facts of a round take this dtype: fp32 would round the number of bytes sent.
            mean, self._asked = self._asked.wait().double(), None
            sums, self._spoilt = mean.tensor_split([len(SHARED_NUMBERS)])
            means = dict(zip(SHARED_NUMBERS, sums.unbind(), strict=True))
            self._loss = means.pop("loss_sum") / means.pop("tokens")
            result |= means
        self._waited += time.monotonic() - began
        if steps_left or self._loss is None:
            return result
        return {**result, **self._facts(step)}

    def record(self, result: StepResult) -> tuple[dict[str, Any], list[str]]:
        """Return the numbers that all replicas share, at the end of a round."""
        values = result.values
        if "round_loss" not in values:
            return {}, []
        whole = ("round", "replicas", "bytes_sent", "bytes_data_parallel")
        spoilt = [i for i in range(int(values["replicas"])) if values[f"spoilt {i}"]]
        line = {
            "step": result.step,
            **{name: int(values[name]) for name in whole},
            **{name: values[name] for name in ("round_loss", "outer_time")},
            "not_finite": spoilt,
        }
        return line, [
            f"replica {replica}: had non-finite weights when it sent its changes, before "
            f"step {result.step}: these weights counted as unchanged"
            for replica in spoilt
        ]

    def _own_spoilt(self) -> Tensor:
        """Return this replica's share of `_spoilt`, fp32, from the changes sent since the last
        report: those of the previous round, as the numbers leave before the last fragment."""
        spoilt = self.outer.take_spoilt().float()
        if self.world.size > 1:
            # Each rank has checked its own part of the weights.
            dist.all_reduce(spoilt, dist.ReduceOp.MAX)
        flags = spoilt.new_zeros(self.world.replicas)
        flags[self.world.replica] = spoilt
        return flags

    def _facts(self, step: int) -> ReplicaNumbers:
        """Return the numbers of a round, at its end. The loss is the mean over all replicas and the
        steps between two agreements."""
        facts = {
            "round": step // self.cfg.interval,
            "replicas": self.world.replicas,
            "bytes_sent": (self.exchange.sent - self._sent) * self.world.size,
            "bytes_data_parallel": self._data_parallel * self.cfg.interval,
            "outer_time": self._waited,
        }
        self._sent, self._waited = self.exchange.sent, 0.0
        place, self._loss = self._loss, None
        assert place is not None
        return {
            "round_loss": place,
            **{f"spoilt {i}": spoilt for i, spoilt in enumerate(self._spoilt.unbind())},
            **{k: torch.full_like(place, v) for k, v in facts.items()},
        }
