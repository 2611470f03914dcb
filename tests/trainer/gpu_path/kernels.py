"""CPU kernels for operators that have none, in fp64 and plain words, so that the branches which
only a GPU takes can run."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def scores_of(q: Tensor, k: Tensor, causal: bool, left: int) -> Tensor:
    """Of q [H, N, E] and k [H, S, E], -inf where a key is not seen."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    behind = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    seen = (behind >= 0) if causal else torch.ones_like(behind, dtype=torch.bool)
    if left >= 0:
        seen = seen & (behind <= left)
    return scores.masked_fill(~seen, -torch.inf)


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int = -1) -> tuple[Tensor, Tensor]:
    """q [H, N, E], k and v [K, S, E]: the output, and the logsumexp [H, N], fp64."""
    groups = q.shape[0] // k.shape[0]
    q, k, v = (x.double() for x in (q, k, v))
    scores = scores_of(q, k.repeat_interleave(groups, 0), causal, left)
    return scores.softmax(-1) @ v.repeat_interleave(groups, 0), scores.logsumexp(-1)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, left: int
) -> list[Tensor]:
    """With the output and the logsumexp of whole rows, of which these keys may be a part."""
    groups = q.shape[0] // k.shape[0]
    dout, q, k, v, out, lse = (x.double() for x in (dout, q, k, v, out, lse))
    wide_k, wide_v = (x.repeat_interleave(groups, 0) for x in (k, v))
    share = (scores_of(q, wide_k, causal, left) - lse.unsqueeze(-1)).exp()
    ds = share * (dout @ wide_v.mT - (dout * out).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    dk, dv = (x.view(k.shape[0], groups, *x.shape[1:]).sum(1) for x in (ds.mT @ q, share.mT @ dout))
    return [ds @ wide_k, dk, dv]


def pieces(starts: Tensor, longest: int) -> list[slice]:
    assert starts.dtype == torch.int32
    found = [slice(a, b) for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
    assert all(0 < piece.stop - piece.start <= longest for piece in found)
    return found


def varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *more: Any) -> tuple[Tensor, ...]:
    """torch_attn::_varlen_attn: q [N, H, E], k and v [N, K, E]."""
    of_keys, longest, _, causal, _, window = (*more, None, None)[:6]
    assert torch.equal(starts, of_keys) and int(starts[-1]) == len(q)
    left, right = window or (-1, -1)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    found = [
        forward(q[:, piece], k[:, piece], v[:, piece], causal or right == 0, left)
        for piece in pieces(starts, longest)
    ]
    out, lse = torch.cat([x for x, _ in found], 1), torch.cat([x for _, x in found], 1)
    out = out.transpose(0, 1).to(q.dtype).contiguous()
    return out, lse.float(), torch.zeros(2, dtype=torch.uint64)


def varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Any
) -> tuple[Tensor, ...]:
    starts, _, longest, _, causal, _, _, window = (*more, None, None)[:8]
    left, right = window or (-1, -1)
    parts: list[list[Tensor]] = []
    for piece in pieces(starts, longest):
        mine = [x.transpose(0, 1)[:, piece] for x in (dout, q, k, v, out)]
        parts.append(backward(*mine, lse[:, piece], causal or right == 0, left))
    grads = [torch.cat(x, 1).transpose(0, 1) for x in zip(*parts, strict=True)]
    return tuple(x.to(q.dtype).contiguous() for x in grads)


def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention, which refuses a width that is no multiple of 8."""
    assert q.shape[-1] % 8 == 0
    rows = [forward(*row, is_causal) for row in zip(q, k, v, strict=True)]
    out, lse = (torch.stack(x) for x in zip(*rows, strict=True))
    # As the kernel returns it: [B, T, H, E] in memory.
    out = out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return (out, lse.float(), None, None, q.shape[2], k.shape[2], *state, torch.empty(0))


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Any, **_: Any
) -> tuple[Tensor, ...]:
    starts_q, starts_k, longest_q, longest_k, dropout, causal, *state = more
    assert starts_q is None and starts_k is None and dropout == 0.0 and len(state) == 2
    assert (longest_q, longest_k) == (q.shape[2], k.shape[2])
    assert lse.is_contiguous(), "the kernel knows no strides of it"
    rows = zip(dout, q, k, v, out, lse, strict=True)
    grads = zip(*(backward(*row, causal, -1) for row in rows), strict=True)
    return tuple(torch.stack(x).to(q.dtype) for x in grads)


def grouped_with_garbage(a: Tensor, b: Tensor, offs: Tensor, *_: Any) -> Tensor:
    """aten::_grouped_mm as on Blackwell: a product over no rows is what was there before."""
    edges = [0, *offs.tolist()]
    parts = [slice(x, y) for x, y in itertools.pairwise(edges)]
    if b.ndim == 3:  # rows of each group times the matrix of its expert
        return torch.cat([a[part] @ b[e] for e, part in enumerate(parts)])
    found = torch.stack([a[:, part] @ b[part] for part in parts])  # of weights
    found[[x.start == x.stop for x in parts]] = 3.0
    return found


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None,
    scale_result: Tensor | None = None, out_dtype: torch.dtype | None = None, *_: Any,
) -> Tensor:  # fmt: skip
    """aten::_scaled_mm with what CUDA's refuses (aten/src/ATen/native/cuda/ScaledBlas.cpp)."""
    assert a.dtype in FLOAT8 and b.dtype in FLOAT8 and a.shape[1] == b.shape[0]
    assert torch.float8_e4m3fn in (a.dtype, b.dtype), "no product of two e5m2"
    assert a.stride(1) == 1 and a.stride(0) >= a.shape[1], f"rows of a, not {a.stride()}"
    assert b.stride(0) == 1 and b.stride(1) >= b.shape[0], f"columns of b, not {b.stride()}"
    assert not any(size % 16 for size in (a.shape[1], *b.shape)), f"{a.shape} @ {b.shape}"
    assert scale_a.dtype == scale_b.dtype == torch.float32
    one = scale_a.numel() == scale_b.numel() == 1
    each = scale_a.shape == (len(a), 1) and scale_b.shape == (1, b.shape[1])
    assert one or each, f"scales of {scale_a.shape} and {scale_b.shape}"
    assert one or (scale_a.is_contiguous() and scale_b.is_contiguous())
    assert scale_result is None and out_dtype is not None
    known = (torch.bfloat16, torch.float16, torch.float32) if one else (torch.bfloat16,)
    assert out_dtype in known, f"{out_dtype} with scales of {scale_a.shape}"
    assert bias is None or (out_dtype != torch.float32 and bias.dtype == out_dtype)
    out = (a.float() @ b.float()) * scale_a * scale_b
    return (out if bias is None else out + bias.float()).to(out_dtype)


@contextlib.contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@contextlib.contextmanager
def registered(library: str, **kernels: Any) -> Iterator[None]:
    with torch.library._scoped_library(library, "IMPL") as found:
        for name, kernel in kernels.items():
            found.impl(name, kernel, "CPU", allow_override=True)
        yield


class OnCpu(TorchFunctionMode):
    """What is made on a GPU is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and torch.device(kwargs["device"] or CPU).type == "cuda":
            kwargs["device"] = CPU
        return func(*args, **kwargs)
