"""From the logits of a step to the next token of each row. B rows, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The filters apply in this order, as in transformers."""

    temperature: float = 1.0  # 0: always the most likely token
    top_k: int | None = None  # only the k most likely tokens
    top_p: float = 1.0  # only the most likely tokens that together have this probability
    min_p: float = 0.0  # only tokens with at least this fraction of the largest probability
    seed: int = 0
    max_tokens: int = 200
    stop: tuple[str, ...] = ()  # the text ends before the first of these strings


def uniforms(sampling: Sampling, number: int) -> Tensor:
    """One random number in [0, 1) for each token that prompt `number` may get, fp32 [max_tokens].

    A row draws from its own numbers, so that its text does not depend on the other prompts of the
    batch, nor on when they join and leave.
    """
    generator = torch.Generator().manual_seed(sampling.seed * 1_000_003 + number)
    return torch.rand(sampling.max_tokens, generator=generator)


def draw(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """The next token of each row, int64 [B]; logits [B, V], uniform [B] in [0, 1)."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    chances, ids = filtered(logits, sampling)
    # The inverse of the cumulative distribution. The factor keeps a number that rounds to 1 from
    # choosing a token behind the last one with a probability over 0.
    total = chances.cumsum(-1)  # [B, V or k]
    at = uniform.to(total).unsqueeze(1) * total[:, -1:] * (1 - 1e-6)
    drawn = torch.searchsorted(total, at, right=True)  # [B, 1]
    return (drawn if ids is None else ids.gather(1, drawn)).squeeze(1)


def filtered(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Probabilities [B, n], not normalized, and the tokens that they belong to [B, n]; None: n = V
    and the tokens are in order.

    top_p is nucleus sampling (arXiv:1904.09751); min_p is that of arXiv:2407.01082.
    """
    logits, ids = logits.float() / sampling.temperature, None
    if sampling.top_k is not None or sampling.top_p < 1:
        count = min(sampling.top_k or logits.shape[1], logits.shape[1])
        logits, ids = logits.topk(count)  # the most likely token first
    chances = logits.softmax(-1)
    if sampling.top_p < 1:  # a token stays while those before it have less than top_p
        before = chances.cumsum(-1) - chances
        chances = torch.where(before < sampling.top_p, chances, 0.0)
    if sampling.min_p > 0:
        least = sampling.min_p * chances.amax(-1, keepdim=True)
        chances = torch.where(chances >= least, chances, 0.0)
    return chances, ids
