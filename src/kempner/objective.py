"""What a step minimises. preference/ has others than this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from kempner.data.batch import MicroBatch


class Objective(Protocol):
    """The loss of a micro-batch of B rows of T tokens."""

    def __call__(self, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor, MicroBatch]:
        """The sum of the losses, fp32 [], to be differentiated; its terms, [B, T], 0 where there is
        none; and the batch, with a target other than -100 just where a loss counts."""
        ...

    def numbers(self) -> dict[str, Tensor]:
        """More sums of this rank to be recorded, fp32 [] by name, since the last call."""
        ...


class NextToken:
    """Cross entropy of each token given those before it."""

    def __init__(self, own_tokens: Callable[[MicroBatch], MicroBatch] | None = None) -> None:
        """`own_tokens`: cuts the rows down to the tokens of this rank, where ranks share rows."""
        self._own_tokens = own_tokens

    def __call__(self, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor, MicroBatch]:
        if self._own_tokens is not None:
            batch = self._own_tokens(batch)
        loss, terms = model(batch.inputs, batch.targets, batch.documents, token_losses=True)
        return loss, terms, batch

    def numbers(self) -> dict[str, Tensor]:
        return {}
