"""A world of one rank, without FSDP: the model computes with copies of its weights in the compute
dtype, made once per step, and gradients are summed in place.

FSDP on one rank computes the same numbers, but moves 46 bytes per parameter in each pass: it casts
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
    """Let the model, whose memory is allocated, compute in `dtype` on this single rank. `add`:
    add_up(), or the same compiled."""
    copies = ComputeCopies(model, dtype, add)
    model.begin_micro_batch = copies.begin_micro_batch
    if copies.any:
        # A hook of the model, so that validation and any other caller use new weights, too.
        hook = torch._dynamo.disable(copies.refresh)  # type: ignore[no-untyped-call]
        model.register_forward_pre_hook(hook)


class ComputeCopies:
    """Copies of the parameters that are not in the compute dtype. Modules compute with the copy in
    place of the parameter; lists of parameters contain the parameters."""

    def __init__(self, model: Decoder, dtype: torch.dtype, add: AddUp) -> None:
        self._model, self._add_up = model, add
        self._weights: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._unchanged = False  # weights unchanged since the last forward pass
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                if weight.dtype != dtype:
                    module.__dict__[name] = self._add(weight, dtype)

    def _add(self, weight: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        copy = nn.Parameter(torch.empty_like(weight, dtype=dtype), weight.requires_grad)
        if weight.requires_grad:
            copy.register_post_accumulate_grad_hook(partial(self._hand_over, weight))  # type: ignore[no-untyped-call]
        self._weights.append(weight)
        # .data has a separate version counter: a forward pass may precede an earlier one's backward
        # pass, and autograd would object, although the same values were written again.
        self._copies.append(copy.data)
        return copy

    @property
    def any(self) -> bool:
        return bool(self._copies)

    def begin_micro_batch(self, last: bool, first: bool = False) -> None:
        """Prepare a micro-batch, before its forward pass. The weights do not change within a step,
        so the first one's copies serve all."""
        if self._model.fp32_sums is not None:
            self._model.fp32_sums.last = last
        self._unchanged = not first

    @torch.no_grad()
    def refresh(self, *_: Any) -> None:
        """Copy the weights again, unless they are known to be unchanged since the last pass."""
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
    """Return total + part in `dtype`, in the memory of `total` if given."""
    return part.to(dtype) if total is None else total.add_(part)
