"""A world of one rank, without FSDP: the model computes with copies of its weights in the compute
dtype, made once a step, and gradients are summed in place.

FSDP of one rank computes the same numbers, but moves 46 bytes a parameter in each pass: it casts
all weights for the forward and again for the backward pass, and copies each gradient three times.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kempner.model.decoder import Decoder

AddUp = Callable[[Tensor | None, Tensor, torch.dtype], Tensor]


def keep_whole(model: Decoder, dtype: torch.dtype, add: AddUp) -> None:
    """Let the model, which has its memory, compute in `dtype` on this rank alone. `add`: add_up(),
    or the same compiled."""
    copies = ComputeCopies(model, dtype, add)
    model.begin_micro_batch = copies.begin_micro_batch
    if copies.any:
        # A hook of the model: also a validation, or whoever calls it, computes with new weights.
        hook = torch._dynamo.disable(copies.refresh)  # type: ignore[no-untyped-call]
        model.register_forward_pre_hook(hook)


class ComputeCopies:
    """Copies of the parameters that are not in the compute dtype. A module that computes finds its
    copy in the place of the parameter; whoever lists parameters finds the parameters."""

    def __init__(self, model: Decoder, dtype: torch.dtype, add: AddUp) -> None:
        self._model, self._add_up = model, add
        self._weights: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._unchanged = False  # the weights, since the last forward pass
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                if weight.dtype != dtype:
                    module.__dict__[name] = self._add(weight, dtype)

    def _add(self, weight: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        copy = nn.Parameter(torch.empty_like(weight, dtype=dtype), weight.requires_grad)
        if weight.requires_grad:
            copy.register_post_accumulate_grad_hook(partial(self._hand_over, weight))  # type: ignore[no-untyped-call]
        self._weights.append(weight)
        # .data has a version of its own: a forward pass may come before the backward pass of an
        # earlier one, for which autograd would miss that the same values were written again.
        self._copies.append(copy.data)
        return copy

    @property
    def any(self) -> bool:
        return bool(self._copies)

    def begin_micro_batch(self, last: bool, first: bool = False) -> None:
        """Prepare a micro-batch, before its forward pass. Within a step the weights stay what they
        are, so the first one's copies serve all."""
        if self._model.fp32_sums is not None:
            self._model.fp32_sums.last = last
        self._unchanged = not first

    @torch.no_grad()
    def refresh(self, *_: Any) -> None:
        """Copy the weights again, unless they are known to be those of the last pass."""
        if not self._unchanged:
            torch._foreach_copy_(self._copies, self._weights)
        self._unchanged = False

    @torch.no_grad()
    def _hand_over(self, weight: Tensor, copy: Tensor) -> None:
        """Add a micro-batch's gradient to that of the parameter, in the parameter's dtype."""
        gradient, copy.grad = copy.grad, None
        assert gradient is not None
        weight.grad = self._add_up(weight.grad, gradient, weight.dtype)


def add_up(total: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return total + part in `dtype`, in the memory of `total` if there is one yet."""
    return part.to(dtype) if total is None else total.add_(part)
