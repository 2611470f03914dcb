"""Cross entropy over the vocabulary, in chunks of tokens, so that the logits of a whole batch never
exist at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kempner.data.source import IGNORE

CHUNK_LOGITS = 1 << 27  # logits in one chunk: 0.5 GiB in fp32
LOSS_TILE = 256  # rows of a chunk are a multiple of this: matrix kernels are slow on ragged edges

LossTransform = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""Maps -log p(target) [n, 1] of these targets, 0 if one does not count, to their losses and the
derivatives of these by it, [n, 1] each."""


class VocabularyPart(NamedTuple):
    """Some rows of a vocabulary; the others are on other ranks."""

    first: int
    rows: int  # of the largest part, so that all ranks cut their tokens into the same chunks
    over_all: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Maps logsumexp over these rows, and the target's logit or 0, to those over all rows."""


def cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int | None = None,
    part: VocabularyPart | None = None,
    temperature: float = 1.0,
    judge: LossTransform | None = None,
    z_loss: float = 0.0,
    compiled: Callable[..., Any] | None = None,
) -> tuple[Tensor, ...]:
    """Return the sum of -log p(target) over the targets that are not -100, fp32 []; and its terms,
    fp32 [N], 0 where the target is -100, without a gradient.

    x [N, D], weight [V, D], targets int64 [N]; `chunk`: tokens whose logits exist at once, or what
    chunk_rows() returns. A sum and a count reduce exactly where a mean does not: ranks and
    micro-batches with different numbers of real tokens add up to the exact mean, and one without
    any adds 0, not NaN. `part`: the rows of the vocabulary in `weight`; the gradient of x is then
    the part that comes from these. `temperature`: divides the logits. `judge`: computes the term
    that replaces -log p. `compiled`: chunk_loss(), compiled.

    With `z_loss` the gradient is that of the sum of -log p + z_loss log^2 Z, where Z is the sum of
    the exponentials of a token's logits (PaLM, arXiv:2204.02311, section 5); and the sum of log^2 Z
    is returned as well, fp32 [], without a gradient.
    """
    learns = torch.is_grad_enabled()  # always False within a Function's forward
    large = compiled is not None and x.is_cuda and learns and weight.requires_grad
    of_chunk = partial(compiled or chunk_loss, learns, part, temperature, judge, z_loss)
    rows = chunk or chunk_rows(part.rows if part else len(weight), large)
    result: tuple[Tensor, ...] = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x, weight, targets, rows, of_chunk
    )
    return result if z_loss else result[:2]


def chunk_rows(vocabulary: int, large: bool) -> int:
    """Return the number of tokens whose logits exist at once. `large`: compiled for a
    GPU, which keeps them only in bf16, 1 GiB; each chunk moves 12 bytes per element of
    the weight's gradient."""
    logits = 4 * CHUNK_LOGITS if large else CHUNK_LOGITS
    return max(LOSS_TILE, logits // vocabulary // LOSS_TILE * LOSS_TILE)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross entropy that computes each chunk's gradient right after its loss, while its
    logits exist (as Liger Kernel does, arXiv:2410.10989): backward only scales it,
    without recomputing logits.

    The weight's gradient is summed over the chunks in fp32. Summed by autograd in bf16 it loses a
    digit: 0.5 % relative error with 32 chunks, against 0.17 % of a single product.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int, chunk: Callable[..., Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss = x.new_zeros((), dtype=torch.float32)
        squares = x.new_zeros((), dtype=torch.float32)
        terms = x.new_empty(targets.shape, dtype=torch.float32)
        dx = dw = None
        for start in range(0, x.shape[0], rows):
            part, labels = x[start : start + rows], targets[start : start + rows]
            place = slice(start, start + len(labels))
            losses, square, d = chunk(F.linear(part, weight), labels, place)
            loss += losses.sum()
            terms[place] = losses.squeeze(1)
            squares += square
            if d is None:
                continue
            dx = torch.empty_like(x) if dx is None else dx
            dx[place] = d @ weight
            if ctx.needs_input_grad[1]:  # not if the weight is frozen
                product = d.t() @ part
                dw = product.float() if dw is None else dw.add_(product)
                del product
            del d  # or two would exist while the next chunk computes its own
        ctx.save_for_backward(dx, dw)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(terms, squares)
        return loss, terms, squares

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        # In fp32: a scale rounded to bf16 would make every gradient wrong by the same 0.4 %.
        if dw is not None:  # one kernel, without another copy in fp32
            dw = torch.mul(dw, scale, out=torch.empty_like(dw, dtype=ctx.weight_dtype))
        return (dx.float() * scale).to(dx.dtype), dw, None, None, None


def chunk_loss(
    learns: bool, vocabulary: VocabularyPart | None, temperature: float,
    judge: LossTransform | None, z_loss: float, kept: Tensor, labels: Tensor, place: slice,
) -> tuple[Tensor, Tensor | float, Tensor | None]:  # fmt: skip
    """Return losses, fp32 [n, 1]; with a z-loss the sum of log^2 Z, []; and, if it `learns`, the
    derivatives by the logits `kept` [n, V], in place of these. `labels` [n]: targets[place]."""
    logits = kept.float()
    if temperature != 1.0:
        logits.div_(temperature)
    counts = (labels != IGNORE).unsqueeze(1)
    rows_of = labels.unsqueeze(1) - (vocabulary.first if vocabulary else 0)
    here = counts & (rows_of >= 0) & (rows_of < kept.shape[1]) if vocabulary else counts
    # gather() needs a valid index; the value found there is not used.
    rows_of = torch.where(here, rows_of, 0)
    hits: Tensor | None = None
    if torch.compiler.is_compiling():  # gather and scatter do not fuse, comparisons do
        hits = (torch.arange(kept.shape[1], device=kept.device) == rows_of) & here
        target_logits = torch.where(hits, logits, 0.0).sum(1, keepdim=True)
    else:
        target_logits = torch.where(here, logits.gather(1, rows_of), 0.0)
    # Subtract the largest logit first, so that no exponential overflows.
    top = logits.amax(1, keepdim=True)
    d = logits.sub_(top).exp_()  # in place, and only once: exp costs as much as a pass
    over = d.sum(1, keepdim=True)
    total = over.log() + top  # logsumexp
    if vocabulary is not None:
        total, target_logits = vocabulary.over_all(total, target_logits)
        # Sum over the whole vocabulary, relative to this part's largest logit.
        over = (total - top).exp()
    losses, slopes = torch.where(counts, total - target_logits, 0.0), None
    if judge is not None:
        losses, slopes = judge(losses, place)
        losses = torch.where(counts, losses, 0.0)
    squares = torch.where(counts, total, 0.0).square().sum() if z_loss else 0.0
    if not learns:
        return losses, squares, None
    if z_loss:  # the derivative of log^2 Z is 2 log Z times the probabilities
        over = over / (1 + 2 * z_loss * total)
    d.div_(over)
    d = d.scatter_add_(1, rows_of, -here.float()) if hits is None else d - hits.float()
    if slopes is not None:
        d.mul_(slopes / temperature)
    d.masked_fill_(~counts, 0.0)  # not a product: 0 times infinity is NaN
    return losses, squares, kept.copy_(d)
