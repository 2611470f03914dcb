"""The numbers of a step: one small all-reduce, judged on the device, read by the host one step
later. And the validation's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from kempner.metrics import Clock
from kempner.optim.build import local_norm_sq
from kempner.resilience.requests import REQUESTS


def reduce_step(
    loss_sum: Tensor,
    tokens: Tensor,
    model: nn.Module,
    mesh: DeviceMesh,
    flags: list[float],
    work: float,
) -> Tensor:
    """Sums over all ranks, fp64 [3 + flags + ranks]: loss, real tokens, squared gradient norm, the
    requests to stop, and each rank's work in a place of its own.

    The gradients of the replicas are equal, so their squares are counted once.
    """
    works = [0.0] * dist.get_world_size()
    works[dist.get_rank()] = work
    asked = torch.tensor(flags + works, dtype=torch.float64).to(loss_sum.device, non_blocking=True)
    norm_sq = local_norm_sq(model.parameters()) / mesh["replicate"].size()
    totals = torch.cat((torch.stack((loss_sum, tokens, norm_sq)).double(), asked))
    dist.all_reduce(totals)
    return totals


def guard_update(
    optimizer: torch.optim.Optimizer, totals: Tensor, step_tokens: int, clip: float
) -> Tensor:
    """Hand the optimizer clipping and the verdict on this step, as tensors; returns [loss,
    grad_norm, bad, ...flags].

    The gradients are those of (sum of losses) / step_tokens. Dividing them by `grad_scale` makes
    them those of the mean over the real tokens, clipped to norm `clip`. A loss or norm that is
    not finite, or no real token at all, sets `found_inf`: weights, moments and step count stay,
    on all ranks alike.
    """
    loss_sum, tokens, norm_sq = totals[:3]
    grad_norm = norm_sq.sqrt() * step_tokens / tokens
    bad = ~(torch.isfinite(grad_norm) & torch.isfinite(loss_sum) & (tokens > 0))
    shrink = (grad_norm / clip).clamp(min=1.0) if clip else torch.ones_like(grad_norm)
    optimizer.grad_scale = (shrink * tokens / step_tokens).float()  # type: ignore[attr-defined]
    optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
    return torch.cat((torch.stack((loss_sum / tokens, grad_norm, bad.double())), totals[3:]))


class Numbers(NamedTuple):
    """What the host knows of a step, one step later. `tokens` and `samples` are totals of the
    run."""

    step: int
    lr: float
    tokens: int
    samples: int
    loss: float
    grad_norm: float
    bad: bool
    flags: list[float]
    work: list[float]  # seconds of each rank's own work
    spent: dict[str, float]  # seconds of this rank until the step was done: Clock.spent


class PendingStep:
    """The result of a step on its way to the host; reading it waits only for the step that made
    it."""

    def __init__(self, at: dict[str, Any], lr: float, result: Tensor, clock: Clock) -> None:
        """`at`: where the run is after the step. `result`: what guard_update returns."""
        self._clock, self._spent = clock, clock.spent()
        self._known = (at["step"], lr, at["tokens"], at["samples"])
        self._event = torch.Event(result.device.type) if result.is_cuda else None
        # Pinned, or the copy would wait for the device.
        self._host = torch.empty(result.shape, dtype=result.dtype, pin_memory=result.is_cuda)
        self._host.copy_(result, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def read(self) -> Numbers:
        if self._event is not None:
            self._event.synchronize()
            self._spent = self._clock.spent()  # the device is done now, not when the host was
        loss, grad_norm, bad, *rest = self._host.tolist()
        flags, work = rest[: len(REQUESTS)], rest[len(REQUESTS) :]
        return Numbers(*self._known, loss, grad_norm, bool(bad), flags, work, self._spent)
