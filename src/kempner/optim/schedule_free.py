"""Schedule-free AdamW, which changes each element by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kempner.optim.config import STATE
from kempner.optim.rule import Guard, ParameterGroup, ParameterPart, ParameterState, Rule


class ScheduleFree(Rule):
    """Schedule-free AdamW (arXiv:2405.15682): gradients are taken at y = (1 - beta1) z + beta1 x,
    where z are the weights of plain AdamW without momentum, and x their running mean, weighted by
    lr^2. The parameter is y; x, the weights to evaluate, follows from y and z."""

    averages, copies = STATE["schedule_free"]
    pointwise = True
    scalars = ("step", "lr_max", "weight_sum")
    publishes_average = True

    def update(self, group: ParameterGroup, parts: Sequence[ParameterPart], guard: Guard) -> None:
        guard.prepare(parts)
        keep, (beta1, beta2) = guard.keep(), group["betas"]
        rate = group["lr"] * keep
        for scalar, news in self._counted(parts[0].state, rate, keep).items():
            torch._foreach_copy_([part.state[scalar] for part in parts], [news] * len(parts))
        state = parts[0].state
        correction = 1 - beta2 ** state["step"].clamp(min=1)
        # In a bad step the weight is 0, so that the mean stays.
        weight = state["lr_max"].square() * keep
        share = weight / state["weight_sum"].clamp(min=torch.finfo(torch.float32).tiny)
        for part in parts:
            y, z, square = part.weight, part.state["z"], part.state["exp_avg_sq"]
            square.lerp_(part.grad.square(), (1 - beta2) * keep)
            change = part.grad.div_(square.div(correction).sqrt_().add_(group["eps"]))
            # Decay at y, where the gradient was taken, as in the paper's algorithm.
            change.add_(y * group["weight_decay"])
            # x is not stored: y = (1 - beta1) z + beta1 x moves by what x and z would move it.
            # With the share c and z's own step d that is x' = (1 - c) x + c (z - d), and therefore
            # y' = (1 - c) y + c z - (1 - beta1 (1 - c)) d.
            y.lerp_(z, share).add_(change * (rate * (beta1 * (1 - share) - 1)))
            z.sub_(change.mul_(rate))

    @staticmethod
    def _counted(state: ParameterState, rate: Tensor, keep: Tensor) -> ParameterState:
        """Return the scalars after this update, the same for all parameters of a group."""
        highest = torch.maximum(state["lr_max"], rate)
        return {
            "step": state["step"] + keep,
            "lr_max": highest,
            "weight_sum": state["weight_sum"] + highest.square() * keep,
        }

    def average(self, group: ParameterGroup, weight: Tensor, state: ParameterState) -> Tensor:
        """Compute x from y and z."""
        # x = y / beta1 + (1 - 1 / beta1) z: it lies beyond y, and the weight of z is negative.
        x = weight.float().lerp(state["z"].to(weight.device), 1 - 1 / group["betas"][0])
        return x.to(weight.dtype)
