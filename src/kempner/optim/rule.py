"""Types shared by the optimizer and its rules: a part of a parameter, the step's verdict on its
gradients, and the rule itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kempner.checkpoint.format.plan import StoredTensor

ParameterGroup = dict[str, Any]
ParameterState = dict[str, Tensor]


class ParameterPart(NamedTuple):
    """This rank's part of a parameter; a rule changes weight and state in place."""

    weight: Tensor  # fp32, as are grad and state
    grad: Tensor
    state: ParameterState  # of the size of weight, or []
    whole: StoredTensor  # the parameter


class Guard(NamedTuple):
    """Verdict of the step on its gradients."""

    grad_scale: Tensor  # fp32 []
    found_inf: Tensor  # fp32 [], 0 or 1

    def keep(self) -> Tensor:
        """Factor for everything that an update adds: 0 leaves the old value exactly."""
        return 1.0 - self.found_inf

    def prepare(self, parts: Iterable[ParameterPart]) -> None:
        """Divide the gradients by grad_scale; zero them in a bad step, since a NaN would survive a
        factor of 0."""
        grads = [part.grad for part in parts]
        torch._foreach_div_(grads, self.grad_scale)
        bad = self.found_inf > 0
        for grad in grads:
            grad.masked_fill_(bad, 0.0)


class Rule:
    """An update rule for a group of parameters. lr and the other numbers come from the group."""

    averages: tuple[str, ...] = ()  # of gradients, which start as 0
    copies: tuple[str, ...] = ()  # of the weights, which start as these
    scalars: tuple[str, ...] = ("step",)  # fp32 []; "step" counts the updates
    # All that a pointwise update() may read of its group besides betas: compiled ones get no more.
    numbers: tuple[str, ...] = ("lr", "weight_decay", "eps")
    pointwise = False  # each element changes by itself, so that an update can be one kernel
    publishes_average = False  # publishes other weights than the trained ones
    ranks: dist.ProcessGroup | None = None  # that together hold the parameters; None: all

    def update(self, group: ParameterGroup, parts: Sequence[ParameterPart], guard: Guard) -> None:
        raise NotImplementedError

    def batches(self, parameters: Sequence[Tensor]) -> list[list[Tensor]] | None:
        """Return the sets of parameters that must be updated together; None: any."""
        return None

    def average(self, group: ParameterGroup, weight: Tensor, state: ParameterState) -> Tensor:
        """Compute the weights to evaluate and publish from the trained ones."""
        return weight
