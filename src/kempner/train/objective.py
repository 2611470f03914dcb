"""Objectives that a step minimises. preference/ has others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from kempner.data.batch import MicroBatch


class Objective(Protocol):
    """The loss of a micro-batch of B rows of T tokens."""

    counted: str
    """The name of the targets that count, in metrics.jsonl."""

    def __call__(self, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor, MicroBatch]:
        """Return the sum of the losses, fp32 [], to be differentiated; its terms, [B, T], 0 if a
        token has none; and the batch, with targets other than -100 exactly where a loss counts."""
        ...

    def numbers(self) -> dict[str, Tensor]:
        """Return more of this rank's sums to record since the last call, fp32 [] by name."""
        ...

    def record(self, values: Mapping[str, float]) -> dict[str, Any]:
        """Return these numbers' part of the line in metrics.jsonl. `values`: sums
        over all ranks."""
        ...


class NextToken:
    """Cross entropy of each token given those before it."""

    counted = "loss_tokens"

    def __init__(self, own_tokens: Callable[[MicroBatch], MicroBatch] | None = None) -> None:
        """`own_tokens`: cuts the rows down to the tokens of this rank, if ranks share rows."""
        self._own_tokens = own_tokens

    def __call__(self, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor, MicroBatch]:
        if self._own_tokens is not None:
            batch = self._own_tokens(batch)
        loss, terms = model(batch.inputs, batch.targets, batch.documents, token_losses=True)
        return loss, terms, batch

    def numbers(self) -> dict[str, Tensor]:
        return {}

    def record(self, values: Mapping[str, float]) -> dict[str, Any]:
        return {}
