"""Sample the next token of each row from the logits of a step. B rows, V vocabulary of the model,
whose first `size` tokens are the tokenizer's. Any others are padding, which is never drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from kempner.extensions.generate.config import Sampling

DRAWN = 64  # random numbers drawn at a time


class Uniforms:
    """Random numbers in [0, 1), one for each token of text `number`, drawn on demand: few texts
    reach their token limit.

    A row draws from its own numbers, so that its text depends neither on the other prompts of the
    batch nor on when they join and leave.
    """

    def __init__(self, sampling: Sampling, number: int) -> None:
        # With a plain sum, texts of neighbouring seeds would share their numbers.
        self._seed = (sampling.seed * 1_000_003 + number) % 2**63
        self._generator: torch.Generator | None = None
        self._drawn: list[float] = []

    def __getitem__(self, token: int) -> float:
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self._seed)
        while token >= len(self._drawn):
            # A few at a time: a text may have 131,000 tokens, but most end long before.
            self._drawn += torch.rand(DRAWN, generator=self._generator).tolist()
        return self._drawn[token]


def draw_rows(
    logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float], size: int
) -> tuple[Tensor, Tensor]:
    """Draw for rows that each have their own sampling; rows with equal filters are drawn together.
    Everything else is as in sample_tokens()."""
    uniform = torch.tensor(uniforms).to(logits.device)
    groups: dict[tuple[float, int | None, float, float], list[int]] = defaultdict(list)
    for row, sampling in enumerate(samplings):
        groups[sampling.filters].append(row)
    if len(groups) == 1:
        return sample_tokens(logits, samplings[0], uniform, size)
    tokens = torch.empty(len(samplings), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(samplings), device=logits.device)
    for numbers in groups.values():
        rows = torch.tensor(numbers, device=logits.device)
        tokens[rows], logprobs[rows] = sample_tokens(
            logits[rows], samplings[numbers[0]], uniform[rows], size
        )
    return tokens, logprobs


def sample_tokens(
    logits: Tensor, sampling: Sampling, uniform: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Draw the next token of each row, int64 [B], and the log of its probability, fp32 [B]; logits
    [B, V], uniform [B] in [0, 1).

    The probability is taken from the distribution that the token was drawn from: after temperature
    and filters. At temperature 0 it is the model's own, as at temperature 1. Without filters all V
    tokens have their share, as in a trainer's loss, although padding is not drawn.
    """
    if sampling.temperature == 0:
        highest, tokens = logits[:, :size].max(-1)
        return tokens, highest.float() - logits.float().logsumexp(-1)
    chances, ids = filter_probabilities(logits, sampling, size)
    # Inverse of the cumulative distribution. The factor keeps a uniform that rounds to 1 from
    # choosing a token past the last one with non-zero probability.
    total = chances.cumsum(-1)  # [B, V or k]
    at = uniform.to(total).unsqueeze(1) * total[:, -1:] * (1 - 1e-6)
    index = torch.searchsorted(total, at, right=True)  # [B, 1]
    # NaN logits give an index past the end, and a NaN log-probability.
    index = index.clamp(max=chances.shape[1] - 1)
    logprobs = chances.gather(1, index).squeeze(1).log()
    if sampling.cuts:
        logprobs = logprobs - chances.sum(-1).log()
    return (index if ids is None else ids.gather(1, index)).squeeze(1), logprobs


def filter_probabilities(
    logits: Tensor, sampling: Sampling, size: int
) -> tuple[Tensor, Tensor | None]:
    """Return probabilities [B, n] and their tokens [B, n]; None: n = size and the tokens are in
    order. Without filters they are shares of all V tokens; with filters they are not normalized.

    top_p is nucleus sampling (arXiv:1904.09751); min_p is that of arXiv:2407.01082.
    """
    logits, ids = logits.float() / sampling.temperature, None
    if not sampling.cuts:
        return logits.softmax(-1)[:, :size], ids
    logits = logits[:, :size]
    if sampling.top_k is not None or sampling.top_p < 1:
        count = min(sampling.top_k or logits.shape[1], logits.shape[1])
        logits, ids = logits.topk(count)  # the most likely token first
    # Among those that top_k has left: as in transformers, filters apply one after another.
    chances = logits.softmax(-1)
    if sampling.top_p < 1:  # a token stays while those before it have less than top_p
        before = chances.cumsum(-1) - chances
        chances = torch.where(before < sampling.top_p, chances, 0.0)
    if sampling.min_p > 0:
        least = sampling.min_p * chances.amax(-1, keepdim=True)
        chances = torch.where(chances >= least, chances, 0.0)
    return chances, ids
