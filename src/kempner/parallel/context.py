"""Context parallelism: the n ranks of a group hold different tokens of the same rows, so that a row
may be n times as long as one rank could hold. Only attention looks beyond a rank's own tokens.

`ring` (arXiv:2310.01889): keys and values go round the ranks, and each rank accumulates its
queries' attention to them. A row is cut into 2n chunks, and rank r holds chunks r and 2n - 1 - r
(zigzag): with contiguous parts the last rank would have almost twice the mean work, since its
queries see all keys.

`ulysses` (arXiv:2309.14509): the ranks exchange tokens for heads before attention, and back after
it. Each computes whole rows for H / n heads, with any mask and kernel, and holds a contiguous part.

Shapes: B rows, T tokens of a whole row, t = T / n of them here, H query heads, K key-value heads, E
head width, n ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kempner.config.option import ConfigError
from kempner.data.batch import MicroBatch
from kempner.model.attention import FLASH, Documents, Visible, attend
from kempner.model.cache import CacheRows
from kempner.model.decoder import Block, Decoder

aten = torch.ops.aten


def rank_columns(length: int, rank: int, ranks: int, method: str, device: torch.device) -> Tensor:
    """Return this rank's places in a row of `length` tokens, int64 [t], in rising order."""
    if method == "ulysses":
        return torch.arange(length, device=device).view(ranks, -1)[rank]
    chunks = torch.arange(length, device=device).view(2 * ranks, -1)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def split_context(model: Decoder, mesh: DeviceMesh, method: str, dtype: torch.dtype) -> None:
    """Share the tokens of each row among the ranks of the 1-D `mesh`: the model takes this rank's
    rank_columns() of them, and the documents of whole rows. `dtype`: dtype of the activations.

    Raises ConfigError if no kernel supports it.
    """
    if method == "ring" and mesh.device_type == "cuda" and dtype not in FLASH:
        raise ConfigError(
            "distributed.cp_method = ring: needs bf16 activations on a GPU; give "
            "--train.dtype=bf16, or --distributed.cp_method=ulysses"
        )
    group = mesh.get_group()
    model.place = partial(_place, model.place, group, method)  # type: ignore[method-assign]
    attention = _attend_ring if method == "ring" else ulysses_attention

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # messages in a graph of torch.compile
    def attend(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
        return attention(q, k, v, visible, group)

    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.attend = attend


def own_tokens(mesh: DeviceMesh, method: str) -> Callable[[MicroBatch], MicroBatch]:
    """Return a function that cuts whole rows down to this rank's tokens."""
    group = mesh.get_group()

    def cut(batch: MicroBatch) -> MicroBatch:
        # The loader reads whole rows on all ranks of a group; each keeps its part.
        length, device = batch.inputs.shape[1], batch.inputs.device
        return batch.columns(rank_columns(length, group.rank(), group.size(), method, device))

    return cut


def _place(
    of_whole: Callable[
        [Tensor, Documents | None, CacheRows | None, torch.dtype], tuple[Tensor, Visible]
    ],
    group: dist.ProcessGroup,
    method: str,
    tokens: Tensor,
    documents: Documents | None,
    cache: CacheRows | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Visible]:
    """Run Decoder.place for a part of the tokens: angles of the part, attention pattern
    of whole rows."""
    rows, length = tokens.shape[0], tokens.shape[1] * group.size()
    # Decoder.place reads only the shape, not the tokens.
    rope, visible = of_whole(tokens.new_empty(rows, length), documents, cache, dtype)
    mine = rank_columns(length, group.rank(), group.size(), method, tokens.device)
    return rope.index_select(-2, mine), visible


# --- Ring -----------------------------------------------------------------------------------------


def _attend_ring(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible, group: dist.ProcessGroup
) -> Tensor:
    assert visible == Visible(None), "the ring is causal; other patterns are refused at start"
    return ring_attention(q, k, v, group)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Compute causal attention over all tokens of the group's rows: q [B, H, t, E] over k and v [B,
    K, t, E], zigzag parts each; returns [B, H, t, E]."""
    return _Ring.apply(q, k, v, group)  # type: ignore[no-any-return,no-untyped-call]


class _Ring(torch.autograd.Function):
    """Ring attention: in each of n rounds a rank computes one block with the fused kernel
    while the keys and values of the next round are on their way. Blocks are merged by
    their logsumexp; given that of the whole row, the kernel's backward yields the
    gradients of a block (arXiv:2307.08691)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        kv = torch.stack((k, v))  # [2, B, K, t, E]
        first, *state = attention_kernel(q, k, v, causal=True)
        # A copy in fp32, not in place: selective recomputation keeps the kernel's output.
        out, lse = first.to(torch.float32, copy=True), state[0].clone()
        passing = _Passing(kv, group)
        for rounds in range(1, group.size()):
            kv = passing.wait()
            if rounds + 1 < group.size():
                passing = _Passing(kv, group)
            queries, keys = _parts(rounds, group.rank(), q.shape[2])
            seen_k, seen_v = kv[:, :, :, keys].unbind()
            block, block_lse, *_ = attention_kernel(q[:, :, queries], seen_k, seen_v)
            # Both parts are rescaled to the joint denominator of the softmax, in logarithms.
            total = torch.logaddexp(lse[:, :, queries], block_lse)  # [B, H, queries]
            old = (lse[:, :, queries] - total).exp().unsqueeze(-1)
            new = (block_lse - total).exp().unsqueeze(-1)
            out[:, :, queries] = out[:, :, queries] * old + block * new
            lse[:, :, queries] = total
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, *state[1:])
        ctx.group = group
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse, *state = ctx.saved_tensors
        group = ctx.group
        kv = torch.stack((k, v))
        # Sum over the rounds in fp32: in bf16 each addition would be rounded.
        dq = torch.zeros_like(q, dtype=torch.float32)
        passing = _Passing(kv, group)
        dq_part, dk, dv = kernel_backward(dout, q, k, v, out, lse, state, causal=True)
        dq += dq_part
        # The sum travels after its keys and values, a round behind: each rank adds its part.
        dkv = torch.stack((dk, dv)).float()
        for rounds in range(1, group.size()):
            # The sum so far goes on to the rank that adds the next part for these keys.
            kv, returning = passing.wait(), _Passing(dkv, group, tag=1)
            if rounds + 1 < group.size():
                passing = _Passing(kv, group)
            queries, keys = _parts(rounds, group.rank(), q.shape[2])
            seen_k, seen_v = kv[:, :, :, keys].unbind()
            own = [x[:, :, queries].contiguous() for x in (dout, q, out, lse)]
            dq_part, dk, dv = kernel_backward(
                own[0], own[1], seen_k, seen_v, own[2], own[3], state, causal=False
            )
            dq[:, :, queries] += dq_part
            dkv = returning.wait()
            dkv[0, :, :, keys] += dk
            dkv[1, :, :, keys] += dv
        # One hop remains to the rank that owns these keys.
        dk, dv = _Passing(dkv, group, tag=1).wait().to(k.dtype).unbind()
        return dq.to(q.dtype), dk, dv, None


def _parts(rounds: int, rank: int, length: int) -> tuple[slice, slice]:
    """Return the slices of a rank's queries and of the keys it holds in a round (from 1) that see
    each other; both have `length` tokens, two chunks. Queries times keys is the same for all
    ranks and rounds.

    The keys are those of rank (rank - rounds) mod n. If that is an earlier rank, all queries see
    its first chunk; if a later one, the second half of the queries sees both chunks.
    """
    half = length // 2
    if rounds <= rank:
        return slice(None), slice(half)
    return slice(half, None), slice(None)


class _Passing:
    """A tensor in transfer to the next rank while the previous rank's arrives."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, tag: int = 0) -> None:
        """`tag`: distinguishes concurrent transfers."""
        to, of = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
        # Held until sent: its memory must not be reused before that.
        self._sent, self._arrives = tensor.contiguous(), torch.empty_like(tensor)
        # Batched: on NCCL a ring of single sends and receives can deadlock.
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group, tag=tag, group_peer=to),
                dist.P2POp(dist.irecv, self._arrives, group=group, tag=tag, group_peer=of),
            ]
        )

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._arrives


def attention_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, ...]:
    """Compute attention of q over k and v: [B, H, queries, E], its logsumexp fp32 [B, H, queries],
    and on a GPU the state of the (unused) dropout."""
    if q.is_cuda:
        out, lse, _, _, _, _, *state, _ = aten._scaled_dot_product_flash_attention(
            q, k, v, is_causal=causal
        )
        return out, lse, *state
    return aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        q, k, v, is_causal=causal
    )


def kernel_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    state: Sequence[Tensor],
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute this block's gradients of q, k and v. `out`, `lse`: of the queries over the whole
    row; `state`: the rest of attention_kernel()'s result."""
    if q.is_cuda:
        return aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
            dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *state
        )
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        dout, q, k, v, out, lse, 0.0, causal
    )


# --- Ulysses --------------------------------------------------------------------------------------


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible, group: dist.ProcessGroup
) -> Tensor:
    """Compute attention of q [B, H, t, E] over k and v [B, K, t, E], contiguous parts each, with
    the pattern `visible` of whole rows: [B, H, t, E]. n divides H; if it does not divide K, several
    ranks get the same keys and values."""
    n, tokens = group.size(), q.shape[2]
    # Copy until each rank gets the same number of key-value heads.
    if (copies := n // math.gcd(n, k.shape[1])) > 1:
        k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
    # One message for all three: [n, B, (H + 2 K) / n, t, E], indexed by the receiving rank.
    by_rank = [x.view(x.shape[0], n, -1, *x.shape[2:]) for x in (q, k, v)]
    mixed = torch.cat(by_rank, dim=2).transpose(0, 1)
    whole = _Exchange.apply(mixed.contiguous(), group)  # type: ignore[no-untyped-call]
    whole = whole.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [B, (H + 2 K) / n, T, E]
    heads, shared = q.shape[1] // n, k.shape[1] // n
    whole_q, whole_k, whole_v = whole.split((heads, shared, shared), dim=1)
    out = attend(whole_q, whole_k, whole_v, visible)  # [B, H / n, T, E]
    parts = torch.stack(torch.split(out, tokens, dim=2))  # [n, B, H / n, t, E]
    exchanged = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return exchanged.transpose(0, 1).flatten(1, 2)  # type: ignore[no-any-return]


class _Exchange(torch.autograd.Function):
    """All-to-all of x [n, ...]: part r goes to rank r, and is replaced by that rank's part.
    Its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        output = torch.empty_like(x)
        dist.all_to_all_single(output, x, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        back = torch.empty_like(dx, memory_format=torch.contiguous_format)
        dist.all_to_all_single(back, dx.contiguous(), group=ctx.group)
        return back, None
