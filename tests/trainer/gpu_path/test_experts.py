"""Which products of experts a GPU gets: the grouped one where it can, whatever it leaves in the
gradients of experts without a token; and one by one where its rows are not aligned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kempner.model import moe
from tests.trainer.gpu_path import kernels, pretend
from tests.trainer.gpu_path.kernels import GPU, registered
from tests.trainer.gpu_path.pretend import Gpu
from tests.trainer.gpu_path.test_kernels import products, through
from tests.trainer.gpu_path.test_step import gpu

__all__ = ["gpu", "products"]  # fixtures


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("capability", "waits"),
    [
        ((7, 5), ["moe.py: one_by_one: tolist"]),  # torch has no grouped product there
        *(((major, minor), []) for major, minor in ((8, 0), (8, 6), (9, 0), (10, 0), (12, 0))),
    ],
)
def test_from_ampere_on_the_host_does_not_read_the_load(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], waits: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    x, weight = Gpu(torch.ones(6, 16).bfloat16()), Gpu(torch.ones(2, 16, 16).bfloat16())
    moe.through_experts(x, Gpu(torch.tensor([4, 2])), weight, weight, weight)
    assert pretend.waits == waits


def aligned(a: Tensor, b: Tensor, offs: Tensor, *more: Any) -> Tensor:
    """aten::_grouped_mm, which refuses on CUDA what is not aligned to 16 bytes."""
    assert offs.dtype == torch.int32
    for x in (a, b):
        wide = [n for n, size in zip(x.stride(), x.shape, strict=True) if n != 1 and size > 1]
        assert not any(n * x.element_size() % 16 for n in wide), f"strides of {x.stride()}"
    return kernels.grouped_with_garbage(a, b, offs, *more)


@pytest.mark.parametrize("width", [16, 20, 12, 17])
def test_rows_that_are_not_aligned_are_not_grouped(width: int) -> None:
    torch.manual_seed(0)
    load = torch.tensor([5, 0, 7, 0])
    x = torch.randn(12, 32).bfloat16().requires_grad_()
    weights = [torch.randn(4, *size).bfloat16() for size in ((width, 32), (32, width))]
    w1, w2 = (w.requires_grad_() for w in weights)
    calls: list[int] = []

    def counted(*words: Any) -> Tensor:
        calls.append(1)
        return aligned(*words)

    with registered("aten", _grouped_mm=counted):
        found = moe.through_experts(x, load, w1, w2, w1)
        found.sum().backward()
    assert bool(calls) is (width % 8 == 0)
    torch.testing.assert_close(found, moe.one_by_one(x, load, w1, w2, w1), atol=0.1, rtol=2e-2)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("spoilt", [[1], [3], [1, 3]])
@pytest.mark.parametrize("first", [0, 2])
def test_garbage_in_any_idle_expert_is_found(spoilt: list[int], first: int) -> None:
    """`first`: products whose accumulator happens to be 0."""
    done: list[int] = []

    def kernel(a: Tensor, b: Tensor, offs: Tensor, *more: Any) -> Tensor:
        found = kernels.grouped_with_garbage(a, b, offs, *more)
        if b.ndim == 2:  # a gradient of weights
            done.append(1)
            clean = [e for e in (1, 3) if e not in spoilt or len(done) * 2 <= first]
            found[clean] = 0.0
        return found

    with registered("aten", _grouped_mm=kernel):
        assert "is set to 0" in moe.choose_products(torch.bfloat16, kernels.CPU)
        grads = through(torch.tensor([5, 0, 7, 0]), moe.through_experts)
    assert not any(grads[i][[1, 3]].any() for i in (2, 3))


def test_a_token_goes_back_by_a_gather() -> None:
    """On a GPU index_add adds in another order every time, and resumed runs would drift apart."""
    with pretend.OnGpu():
        pretend.unordered.clear()
        x = Gpu(torch.randn(4, 8)).requires_grad_()
        chosen = Gpu(torch.tensor([[[0, 1], [1, 2], [0, 2], [2, 1]]]))
        _, order, place = moe.sort_by_expert(chosen, 3)
        rows = moe.take_rows(x, order, place, 2)
        moe.take_rows(rows, place, order).sum().backward()
    assert pretend.unordered == [] and x.grad is not None and x.grad.device == GPU
    assert torch.equal(x.grad.inner, torch.full((4, 8), 2.0))  # type: ignore[attr-defined]
