"""Lion, which changes each element by itself."""

from __future__ import annotations

from collections.abc import Sequence

from kempner.optim.config import STATE
from kempner.optim.rule import Guard, ParameterGroup, ParameterPart, Rule


class Lion(Rule):
    """Lion (arXiv:2302.06675, algorithm 2): the update is the sign of an average, so each element
    changes by lr."""

    averages, copies = STATE["lion"]
    pointwise = True

    def update(self, group: ParameterGroup, parts: Sequence[ParameterPart], guard: Guard) -> None:
        guard.prepare(parts)
        keep, (beta1, beta2) = guard.keep(), group["betas"]
        rate = group["lr"] * keep
        for part in parts:
            average = part.state["exp_avg"]
            # Before the average takes in the gradient, by the slower beta2.
            direction = average.lerp(part.grad, 1 - beta1).sign_()
            part.weight.mul_(1 - rate * group["weight_decay"]).sub_(direction.mul_(rate))
            average.lerp_(part.grad, (1 - beta2) * keep)
            part.state["step"].add_(keep)
