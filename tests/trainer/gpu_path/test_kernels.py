"""The branches that only a GPU takes, against the plain ones: outputs and gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_parts import ring_attention
from kempner.model import decoder, moe
from kempner.model.attention import Documents, Visible, attend, attention_pattern
from kempner.model.config import ModelConfig
from kempner.parallel.fp8 import use_fp8
from tests.trainer.gpu_path import kernels
from tests.trainer.gpu_path.kernels import GPU, OnCpu, registered

T = 64
SHAPE = ModelConfig(
    vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, max_seq_len=T
)
DOCUMENTS = Documents.of(torch.stack((torch.arange(T) * 5 // T, torch.arange(T) // 60)), True)


@pytest.fixture
def varlen() -> Iterator[None]:
    pytest.importorskip("torch.nn.attention.varlen")  # it declares the operators
    parts = {"_varlen_attn": kernels.varlen, "_varlen_attn_backward": kernels.varlen_backward}
    with registered("torch_attn", **parts):
        yield


def visible_on_a_gpu(tokens: Tensor, *more: Any) -> Visible:
    with OnCpu():
        return attention_pattern(SimpleNamespace(shape=tokens.shape, device=GPU), *more)  # type: ignore[arg-type]


def heads(*counts: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, T, 16).bfloat16().requires_grad_() for n in counts]


def with_gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    along = torch.linspace(-1, 1, y.numel()).view(y.shape)
    return [y.detach(), *torch.autograd.grad((y.float() * along).sum(), inputs)]


@pytest.mark.usefixtures("varlen")
@pytest.mark.parametrize(
    ("window", "documents"), [(9, None), (None, DOCUMENTS), (9, DOCUMENTS), (1, DOCUMENTS)]
)
def test_variable_length_attention(window: int | None, documents: Documents | None) -> None:
    inputs, tokens = heads(4, 2, 2), torch.zeros(2, T, dtype=torch.int64)
    ours = visible_on_a_gpu(tokens, window, documents, torch.bfloat16)
    dense = attention_pattern(tokens, window, documents, torch.bfloat16, None, "math")
    assert ours.starts is not None and dense.mask is not None
    for found, expected in zip(
        with_gradients(attend(*inputs, ours), inputs),
        with_gradients(attend(*inputs, dense), inputs),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def check_packed_documents(
    monkeypatch: pytest.MonkeyPatch, window: int | None, is_cuda: bool = False
) -> None:
    """The model gives the loss and the gradients of a dense mask. `is_cuda`: tensors say so."""
    torch.manual_seed(0)
    model = decoder.Decoder(replace(SHAPE, sliding_window=window)).bfloat16()
    tokens = torch.randint(64, (2, T))
    found = []
    for place in (visible_on_a_gpu, attention_pattern):
        monkeypatch.setattr(decoder, "attention_pattern", place)
        if is_cuda:
            monkeypatch.setattr(torch.Tensor, "is_cuda", place is visible_on_a_gpu)
        model.zero_grad()
        loss = model(tokens, tokens.roll(-1, 1), DOCUMENTS)
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(*(loss for loss, _ in found), rtol=1e-3, atol=0)
    for ours, dense in zip(*(grads for _, grads in found), strict=True):
        assert (ours - dense).norm() < 0.03 * dense.norm()


@pytest.mark.usefixtures("varlen")
@pytest.mark.parametrize("window", [None, 9])
def test_a_model_with_packed_documents(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    check_packed_documents(monkeypatch, window)


# --- The ring -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_flash_attention_of_a_ring(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Its arguments, grouped heads, blocks of unequal sizes, and the state that goes back."""
    inputs = heads(4, 2, 2)
    expected = attend(*inputs, Visible(None))
    dout = torch.randn(expected.shape).bfloat16()
    want = [expected.detach(), *torch.autograd.grad(expected, inputs, dout)]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    parts = {"": kernels.flash, "_backward": kernels.flash_backward}
    names = {f"_scaled_dot_product_flash_attention{end}": part for end, part in parts.items()}
    with registered("aten", **names):
        found = ring_attention(ranks, *(x.detach() for x in inputs), dout)
    for ours, plain in zip(found, want, strict=True):
        assert (ours - plain).norm() < 0.02 * plain.norm()


# --- Experts --------------------------------------------------------------------------------------


@pytest.fixture
def products() -> Iterator[None]:
    yield
    moe.CLEARS_IDLE[0] = True


def through(load: Tensor, way: Any) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(int(load.sum()), 32).bfloat16().requires_grad_()
    weights = [torch.randn(4, a, b).bfloat16().requires_grad_() for a, b in [(16, 32), (32, 16)]]
    w1, w2 = weights
    return with_gradients(way(x, load, w1, w2, w1), [x, w1, w2])


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("garbage", [False, True])
def test_experts_without_a_token_get_no_gradient(garbage: bool) -> None:
    """On Blackwell grouped_mm may leave there what was in the accumulator (pytorch#172439)."""
    load = torch.tensor([5, 0, 7, 0])
    expected = through(load, moe.one_by_one)
    with registered("aten", **({"_grouped_mm": kernels.grouped_with_garbage} if garbage else {})):
        before = through(load, moe.through_experts)
        assert bool(before[2][[1, 3]].any()) is garbage
        said = moe.choose_products(torch.bfloat16, kernels.CPU)
        found = through(load, moe.through_experts)
    assert ("is set to 0" in said) is garbage
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, atol=0.1, rtol=2e-2)
    assert not found[2][[1, 3]].any() and not found[3][[1, 3]].any()


# --- 8-bit floats ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_8_bit_floats(monkeypatch: pytest.MonkeyPatch, recipe: str, bias: bool) -> None:
    """A model with train.fp8 calls _scaled_mm as CUDA's takes it, forward and backward, for each
    projection but those whose sizes it refuses; the loss and the gradients are nearly the same."""
    pytest.importorskip("torchao")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    calls: list[Any] = []

    def counted(*words: Any, **named: Any) -> Tensor:
        calls.append(words[0].shape)
        return kernels.scaled_mm(*words, **named)

    torch.manual_seed(0)
    shape = replace(SHAPE, dim=64, ffn_dim=56, qkv_bias=bias)  # no kernel takes 56
    plain = decoder.Decoder(shape).bfloat16()
    ours = copy.deepcopy(plain)
    use_fp8(ours, recipe, GPU)
    tokens = torch.randint(64, (2, T))
    with registered("aten", _scaled_mm=counted):
        losses = [model(tokens, tokens.roll(-1, 1)) for model in (ours, plain)]
        for loss in losses:
            loss.backward()
    # wq, wk, wv and wo of each layer: the output, and the gradients of input and weight.
    assert len(calls) == 2 * 4 * 3
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
    for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        # Three bits of mantissa: up to 6 % for each number, 11 % were found.
        assert (mine.grad - its.grad).norm() < 0.15 * its.grad.norm()


def test_the_kernel_of_8_bit_floats_refuses_what_cuda_does() -> None:
    a, one = torch.randn(32, 16).to(torch.float8_e4m3fn), torch.ones(())
    kernels.scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16)
    rows = torch.ones(32, 1)
    kernels.scaled_mm(a, a.t(), rows, rows.t(), out_dtype=torch.bfloat16)
    for wrong in (
        lambda: kernels.scaled_mm(a.t(), a, one, one, out_dtype=torch.bfloat16),
        lambda: kernels.scaled_mm(a[:, :8], a[:, :8].t(), one, one, out_dtype=torch.bfloat16),
        lambda: kernels.scaled_mm(a, a.t(), one.double(), one, out_dtype=torch.bfloat16),
        lambda: kernels.scaled_mm(a, a.t(), rows, one, out_dtype=torch.bfloat16),
        lambda: kernels.scaled_mm(a, a.t(), rows, rows.t(), out_dtype=torch.float32),
        lambda: kernels.scaled_mm(a, a.t(), one, one),
    ):
        with pytest.raises(AssertionError):
            wrong()
