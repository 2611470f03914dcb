"""Logits of whole texts, a chunk of tokens at a time: for 131,072 tokens and as large a vocabulary,
all at once would take 34 GB in bf16. B texts, T tokens, D width, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kempner.model.decoder import Decoder, apply_blocks

LOGPROB_CHUNK = 256  # tokens whose logits exist at a time


def run_all_blocks(model: Decoder, tokens: Tensor) -> Tensor:
    """Return the last block's output [B, T, D] for tokens [B, T]."""
    x = model.embed(tokens)
    rope, visible = model.place(tokens, None, None, x.dtype)
    return apply_blocks(model.blocks, x, rope, visible)[0]


def chunk_logits(model: Decoder, x: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits, fp32 [n, V], of chunks of the last block's output x [T, D], with their part
    of the targets [T]."""
    for start in range(0, len(x), LOGPROB_CHUNK):
        chunk = slice(start, start + LOGPROB_CHUNK)
        yield model.predict(x[chunk], None).float(), targets[chunk]  # type: ignore[union-attr]
