"""FlashAttention 3 as torch hands its operators over to it: torch's own glue, with plain kernels in
the place of the package's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks.gpu_parts import ring_attention
from kempner.config.option import ConfigError
from kempner.model import flash
from kempner.model.attention import Visible, attend, varlen_kernel
from kempner.parallel.memory.recompute import kept_operators
from tests.trainer.gpu_path import kernels
from tests.trainer.gpu_path.kernels import CPU, GPU, OnCpu, registered
from tests.trainer.gpu_path.test_kernels import (
    SHAPE,
    T,
    check_packed_documents,
    heads,
    with_gradients,
)

fa3: Any = pytest.importorskip("torch.nn.attention._fa3")
registry: Any = pytest.importorskip("torch.nn.attention._registry")
OPERATORS = {
    "_flash_attention_forward": "_fa3_flash_attention_forward_impl_default",
    "_flash_attention_backward": "_fa3_flash_attention_backward_impl",
    "_scaled_dot_product_flash_attention": (
        "_fa3_scaled_dot_product_flash_attention_forward_impl_default"
    ),
    "_scaled_dot_product_flash_attention_backward": (
        "_fa3_scaled_dot_product_flash_attention_backward_impl"
    ),
}
calls: list[str] = []


def rows_of(x: Tensor, starts: Tensor | None) -> list[Tensor]:
    """As [H, N, E] each: the rows of [B, N, H, E], or the documents of [N, H, E]."""
    if starts is None:
        return [row.transpose(0, 1) for row in x]
    return [x[piece].transpose(0, 1) for piece in kernels.pieces(starts, T)]


def fwd(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Any, ...]:
    """flash_attn_3::fwd."""
    calls.append("forward")
    assert {x.dtype for x in (q, k, v)} == {torch.bfloat16} and q.shape[-1] % 8 == 0
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    out, starts_q, starts_k = more[3:6]
    scale, causal, left, right = more[20:24]
    assert scale is None and right in (-1, 0)
    assert starts_q is None or torch.equal(starts_q, starts_k)
    rows = [
        kernels.forward(*row, causal or right == 0, left)
        for row in zip(*(rows_of(x, starts_q) for x in (q, k, v)), strict=True)
    ]
    made = [y.transpose(0, 1).to(q.dtype) for y, _ in rows]
    lse = [x.float() for _, x in rows]
    out = torch.empty_like(q) if out is None else out
    out.copy_(torch.stack(made) if starts_q is None else torch.cat(made))
    return out, torch.stack(lse) if starts_q is None else torch.cat(lse, 1), None, None


def bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Any
) -> None:
    """flash_attn_3::bwd, which writes its results."""
    calls.append("backward")
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    grads, (starts, starts_k), (causal, left, right) = more[:3], more[3:5], more[10:13]
    assert all(x.stride(-1) == 1 for x in (dout, q, k, v, out))
    assert starts is None or torch.equal(starts, starts_k)
    lses = list(lse) if starts is None else [lse[:, x] for x in kernels.pieces(starts, T)]
    rows = zip(*(rows_of(x, starts) for x in (dout, q, k, v, out)), lses, strict=True)
    found = [kernels.backward(*row, causal or right == 0, left) for row in rows]
    for grad, parts in zip(grads, zip(*found, strict=True), strict=True):
        made = [x.transpose(0, 1).to(q.dtype) for x in parts]
        grad.copy_(torch.stack(made) if starts is None else torch.cat(made))


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that has one, and the package; torch's glue is registered for the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fa3, "_get_device_major", lambda _: 9)
    monkeypatch.setattr(fa3, "_FA3_CUDA_FWD", fwd)
    monkeypatch.setattr(fa3, "_FA3_CUDA_BWD", bwd)
    monkeypatch.setattr(registry, "_FLASH_ATTENTION_ACTIVE", None)
    monkeypatch.setitem(registry._FLASH_ATTENTION_IMPLS, "FA3", activated)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    calls.clear()
    yield
    if registry.current_flash_attention_impl():
        registry.restore_flash_attention_impl()


class Kernels:
    """What register_flash_attention_fa3() returns."""

    def __init__(self) -> None:
        kernels_of = {name: getattr(fa3, glue) for name, glue in OPERATORS.items()}
        self._registered = registered("aten", **kernels_of)
        self._registered.__enter__()

    def remove(self) -> None:
        self._registered.__exit__(None, None, None)


def activated() -> Kernels:
    return Kernels()


def not_there() -> None:
    raise ModuleNotFoundError("No module named", name="flash_attn_interface")


def use(kernel: str = "auto", by_length: bool = True, fixed: bool = False, **shape: Any) -> str:
    with OnCpu():
        model = replace(SHAPE, **shape)
        return flash.use_newer_flash(kernel, model, torch.bfloat16, GPU, fixed, by_length)


@pytest.mark.parametrize("kernel", ["auto", "fa3"])
@pytest.mark.parametrize("window", [None, 9])
def test_a_model_with_packed_documents(
    monkeypatch: pytest.MonkeyPatch, window: int | None, kernel: str
) -> None:
    assert use(kernel, sliding_window=window) == ", FlashAttention 3"
    assert calls == ["forward", "backward"]  # it was tried
    check_packed_documents(monkeypatch, window, is_cuda=True)
    assert len(calls) == 2 * (1 + SHAPE.n_layers)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring(ranks: int) -> None:
    """What the operator returns besides the output goes back to its backward pass."""
    inputs = heads(4, 2, 2)
    groups = [x.repeat_interleave(4 // x.shape[1], 1) for x in inputs]
    scores = (groups[0] @ groups[1].mT / 16**0.5).float()
    scores = scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf)
    expected = scores.softmax(-1) @ groups[2].float()
    dout = torch.randn(expected.shape).bfloat16()
    want = [expected.detach(), *torch.autograd.grad(expected, inputs, dout.float())]
    assert use(by_length=False) == ", FlashAttention 3"
    found = ring_attention(ranks, *(x.detach() for x in inputs), dout)
    for ours, plain in zip(found, want, strict=True):
        assert (ours - plain).norm() < 0.02 * plain.norm()


def test_selective_recomputation_keeps_its_output() -> None:
    use()
    inputs = heads(4, 2, 2)
    starts = torch.tensor([0, T, 2 * T], dtype=torch.int32)
    calls.clear()

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(kept_operators())

    def doubled(*x: Tensor) -> Tensor:
        return attend(*x, Visible(9, starts=starts, kernel=varlen_kernel())) * 2

    y = checkpoint(doubled, *inputs, use_reentrant=False, context_fn=contexts)
    with_gradients(y, inputs)
    assert calls == ["forward", "backward"]


def test_a_package_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of another version than torch knows: auto goes on with torch's own."""

    def five(*_: Any) -> Any:
        raise ValueError("too many values to unpack (expected 2)")

    monkeypatch.setattr(fa3, "_FA3_CUDA_FWD", five)
    assert use() == (
        ", without FlashAttention 3: it does not run here (ValueError: too many values to unpack "
        "(expected 2)); leave it at auto"
    )
    assert registry.current_flash_attention_impl() is None
    with pytest.raises(ConfigError, match="attention = fa3: it does not run here"):
        use("fa3")


def test_where_it_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert use(fixed=True) == ", without FlashAttention 3: train.deterministic"
    with pytest.raises(ConfigError, match="fa3: a CPU does not run it; leave it at auto"):
        flash.use_newer_flash("fa3", SHAPE, torch.bfloat16, CPU, False, True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert use() == ""
    with pytest.raises(ConfigError, match="fa4: NVIDIA H100 does not run it"):
        use("fa4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setitem(registry._FLASH_ATTENTION_IMPLS, "FA3", not_there)
    assert use() == ""
    assert not calls and registry.current_flash_attention_impl() is None
