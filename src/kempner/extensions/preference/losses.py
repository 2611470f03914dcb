"""Losses on preferences, whose two answers are neighbours in a row: the chosen answer is an even
document, the rejected one the odd document after it.

Both losses define by how much the model values the chosen answer more, v; the loss of a pair is
-log sigmoid(v) (Bradley and Terry, Biometrika 39, 1952). Shapes: B rows, T tokens, N documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kempner.data.batch import MicroBatch
from kempner.data.source import IGNORE
from kempner.model.attention import Documents
from kempner.model.loss import CHUNK_LOGITS


class Preference:
    """An objective (kempner.train.objective) on pairs of answers. Also counts how often the chosen
    answer has the higher value, and sums the margins."""

    counted = "pairs"

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, device=device)  # correctly ordered pairs, and margins

    def values(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """Compute the value of each document, fp32 [N]."""
        raise NotImplementedError

    def __call__(self, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor, MicroBatch]:
        """Return the sum of the losses of the pairs, fp32 []; the loss of each, [B, T], at the end
        of its second document; and the batch with targets only there, so that pairs are counted
        like tokens elsewhere."""
        assert batch.documents is not None
        values, second = self.values(model, batch), second_of_pair(batch.documents)
        margins = F.pad(values[:-1] - values[1:], (1, 0))  # [N]: of each and its predecessor
        losses = torch.where(second, F.softplus(-margins), 0.0)  # -log sigmoid
        if torch.is_grad_enabled():  # not in validation
            right = (second & (margins > 0)).sum()
            margin = torch.where(second, margins, 0.0).sum().detach()
            self._sums += torch.stack((right.float(), margin))
        # scatter() requires int64; starts are int32 for the attention kernel.
        ends = batch.documents.starts[1:].long() - 1
        places = losses.new_zeros(batch.targets.numel()).scatter(0, ends, losses.detach())
        counts = places.new_zeros(places.shape, dtype=torch.bool).scatter(0, ends, second)
        # The token does not matter: anything but IGNORE counts.
        targets = torch.where(counts, 0, IGNORE).view(batch.targets.shape)
        return losses.sum(), places.view(targets.shape), replace(batch, targets=targets)

    def numbers(self) -> dict[str, Tensor]:
        """Return the numbers since the last call, and reset them."""
        # A copy, because it is read a step later, when the sums have restarted.
        right, margin = self._sums.clone().unbind()
        self._sums.zero_()
        return {"ordered_right": right, "margin_sum": margin}

    def record(self, values: Mapping[str, float]) -> dict[str, Any]:
        pairs = values["tokens"]
        return {
            "accuracy": values["ordered_right"] / pairs if pairs else None,
            "margin": values["margin_sum"] / pairs if pairs else None,
        }


class DPO(Preference):
    """Direct preference optimization (arXiv:2305.18290): the value of an answer is beta times the
    log ratio of its probabilities under the model and under the reference."""

    def __init__(self, reference: nn.Module, beta: float, device: torch.device) -> None:
        super().__init__(device)
        self._reference, self._beta = reference, beta

    def values(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        words = (batch.inputs, batch.targets, batch.documents)
        with torch.no_grad():
            _, expected = self._reference(*words, token_losses=True)  # [B, T]: -log p
        _, losses = model(*words, token_losses=True)
        assert batch.documents is not None
        return self._beta * sum_by_document(expected - losses, batch.documents)


class Reward(Preference):
    """A reward model: the value of an answer is the product of the activations at its last position
    and one row of the output layer, that of the end-of-turn token."""

    def __init__(self, token: int, device: torch.device) -> None:
        super().__init__(device)
        self._token = token

    def values(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        assert batch.documents is not None
        ends = batch.documents.starts[1:].long() - 1
        # One logit per document: token_scores() multiplies only this token's row.
        targets = torch.full_like(batch.targets, IGNORE).flatten()
        targets = targets.index_fill(0, ends, self._token).view(batch.targets.shape)
        _, scores = model(batch.inputs, targets, batch.documents, token_losses=True)
        return scores.flatten()[ends]  # type: ignore[no-any-return]


def token_losses(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the same as loss.cross_entropy, but with a gradient for its terms, too: the backward
    pass recomputes logits, a chunk at a time."""
    rows = max(1, CHUNK_LOGITS // weight.shape[0])
    parts = [
        checkpoint(_token_losses, part, weight, labels, use_reentrant=False)
        for part, labels in zip(torch.split(x, rows), torch.split(targets, rows), strict=True)
    ]
    losses = torch.cat(parts)
    return losses.sum(), losses


def _token_losses(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(x, weight).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")


def token_scores(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the scores, and the scores, fp32 [N]: the unnormalized logit of each
    target; 0 for targets of -100."""
    counts = targets != IGNORE
    # For -100, which would index from the end, take any row: its score is dropped.
    rows = weight[torch.where(counts, targets, 0)]
    scores = torch.where(counts, (x.float() * rows.float()).sum(1), 0.0)
    return scores.sum(), scores


def second_of_pair(documents: Documents) -> Tensor:
    """Mark the documents that are rejected answers, each after its chosen one, bool [N]."""
    return documents.index.flatten()[documents.starts[:-1].long()] % 2 == 1


def sum_by_document(terms: Tensor, documents: Documents) -> Tensor:
    """Sum terms [B, T] by document, [N]."""
    lengths = documents.starts.diff().long()
    number = torch.arange(len(lengths), device=terms.device)
    # Without output_size the host would wait for the GPU to learn the sum of the lengths.
    number = number.repeat_interleave(lengths, output_size=terms.numel())
    return terms.new_zeros(len(lengths)).index_add(0, number, terms.flatten())
