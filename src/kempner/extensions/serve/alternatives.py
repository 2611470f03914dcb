"""Log-probabilities of a text's tokens and of their alternatives, in one pass over all of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kempner.extensions.generate.whole_texts import chunk_logits, run_all_blocks
from kempner.model.decoder import Decoder


class Looked(NamedTuple):
    """Log-probabilities of each token but the first: T - 1 of them."""

    values: list[float]  # its log-probability
    tops: list[dict[int, float]]  # the most likely tokens in its place


@torch.inference_mode()
def score_alternatives(
    model: Decoder, vocab_size: int, ids: list[int], top: int, temperature: float = 1.0
) -> Looked:
    """Compute the model's log-probabilities at this temperature, without filters. `vocab_size`: of
    the tokenizer; other tokens have their share, but are not listed as alternatives."""
    scores = Looked([], [])
    if len(ids) < 2:
        return scores
    tokens = torch.tensor([ids], device=model.embed.weight.device)
    # The last token is only a target.
    x = run_all_blocks(model, tokens[:, :-1])[0]  # [T - 1, D]
    for logits, target in chunk_logits(model, x, tokens[0, 1:]):
        logprobs = (logits / temperature).log_softmax(-1)
        scores.values.extend(logprobs.gather(1, target.unsqueeze(1)).squeeze(1).tolist())
        values, names = logprobs[:, :vocab_size].topk(min(top, vocab_size))
        scores.tops.extend(
            dict(zip(top_tokens, value, strict=True))
            for top_tokens, value in zip(names.tolist(), values.tolist(), strict=True)
        )
    return scores
