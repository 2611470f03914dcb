"""AdamW, which changes each element by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from kempner.optim.config import STATE
from kempner.optim.rule import Guard, ParameterGroup, ParameterPart, Rule


class AdamW(Rule):
    """AdamW (arXiv:1711.05101): eager, by torch's fused kernel, which reads grad_scale
    and found_inf itself; compiled, in plain operators that fuse with their surroundings
    into one kernel."""

    pointwise = True
    averages, copies = STATE["adamw"]

    def update(self, group: ParameterGroup, parts: Sequence[ParameterPart], guard: Guard) -> None:
        if torch.compiler.is_compiling():
            return self._plainly(group, parts, guard)
        beta1, beta2 = group["betas"]
        adamw(
            [part.weight for part in parts],
            [part.grad for part in parts],
            [part.state["exp_avg"] for part in parts],
            [part.state["exp_avg_sq"] for part in parts],
            [],
            [part.state["step"] for part in parts],
            fused=True,
            grad_scale=guard.grad_scale,
            found_inf=guard.found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    @staticmethod
    def _plainly(group: ParameterGroup, parts: Sequence[ParameterPart], guard: Guard) -> None:
        guard.prepare(parts)
        # No branch, which would need the host: a bad step multiplies all changes by 0.
        keep, (beta1, beta2) = guard.keep(), group["betas"]
        rate = group["lr"] * keep
        for weight, grad, state, _ in parts:
            mean, square, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
            step.add_(keep)
            mean.lerp_(grad, (1 - beta1) * keep)
            square.lerp_(grad * grad, (1 - beta2) * keep)
            count = step.clamp(min=1)  # 0 if the first step was bad
            size = (square / (1 - beta2**count)).sqrt() + group["eps"]
            weight.mul_(1 - rate * group["weight_decay"])
            weight.sub_(rate * (mean / (1 - beta1**count)) / size)
