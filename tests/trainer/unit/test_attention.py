"""Capped scores, the kernel that train.attention chooses, and what flex_attention is given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from kempner.config.option import ConfigError
from kempner.model.attention import (
    Documents,
    Visible,
    attend,
    attention_pattern,
    choose_kernel,
)
from kempner.model.config import ModelConfig
from kempner.model.flex import block_mask

SHAPE = ModelConfig(dim=32, n_heads=4, n_kv_heads=2)
TOKENS = torch.zeros(2, 16, dtype=torch.int64)
INDEX = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])


@pytest.fixture
def heads() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, 16, 8, requires_grad=True) for n in (4, 2, 2)]


@pytest.fixture
def any_kernel() -> Iterator[None]:
    yield
    choose_kernel("auto", SHAPE, TOKENS, False, torch.float32)


def one_query_after_the_other(
    q: Tensor, k: Tensor, v: Tensor, softcap: float | None, window: int, index: Tensor
) -> Tensor:
    """Attention as its formula says, in fp64: each query over the keys that it sees."""
    rows, count, length, width = q.shape
    groups = count // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for b in range(rows):
        for h in range(count):
            for t in range(length):
                near = range(max(0, t - window + 1), t + 1)
                seen = [s for s in near if index[b, s] == index[b, t]]
                keys, values = k[b, h // groups, seen].double(), v[b, h // groups, seen].double()
                scores = keys @ q[b, h, t].double() / width**0.5
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[b, h, t] = scores.softmax(0) @ values
    return out


@pytest.mark.parametrize("window", [16, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_scores_are_capped(heads: list[Tensor], window: int, packed: bool) -> None:
    """By a dense mask, and by what flex_attention is given."""
    index = INDEX if packed else torch.zeros_like(INDEX)
    documents = Documents.of(INDEX, False) if packed else None
    expected = one_query_after_the_other(*heads, 0.7, window, index)
    seen = attention_pattern(TOKENS, window, documents, torch.float32, softcap=0.7)
    y = attend(*heads, seen)
    torch.testing.assert_close(y.double(), expected, atol=1e-6, rtol=1e-5)
    uncapped = one_query_after_the_other(*heads, None, window, index)
    assert (expected - uncapped).abs().max() > 0.1
    for ours, theirs in zip(
        torch.autograd.grad(y.square().sum(), heads),
        torch.autograd.grad(expected.square().sum(), heads),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_flex_attention_gets_the_same_pattern(
    monkeypatch: pytest.MonkeyPatch,
    heads: list[Tensor],
    softcap: float | None,
    window: int | None,
    packed: bool,
) -> None:
    """A stand-in that does what its documentation says: the change of the scores, then the mask.
    The kernel itself needs a GPU (make gpu-check)."""

    def plainly(q, k, v, score_mod, block_mask, enable_gqa):  # type: ignore[no-untyped-def]
        assert enable_gqa
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if score_mod is not None:
            scores = score_mod(scores, None, None, None, None)
        where = flex_attention.create_mask(block_mask.mask_mod, 2, 1, 16, 16, device="cpu")
        return scores.masked_fill(~where, -torch.inf).softmax(-1) @ v

    eager = (plainly, flex_attention.create_block_mask)
    monkeypatch.setattr("kempner.model.flex.compiled_flex", lambda: eager)
    index = INDEX if packed else None
    blocks = block_mask(2, 16, window, index, torch.device("cpu"))
    documents = None if index is None else Documents.of(index, False)
    flex = attend(*heads, Visible(window, softcap, blocks=blocks, kernel=eager[0]))
    dense = attend(*heads, attention_pattern(TOKENS, window, documents, torch.float32, softcap))
    torch.testing.assert_close(flex, dense)


@pytest.mark.usefixtures("any_kernel")
def test_the_chosen_kernel_is_the_one_that_runs() -> None:
    said = {
        (kernel, packed): choose_kernel(kernel, SHAPE, TOKENS, packed, torch.float32)
        for kernel in ("flash", "math", "auto")
        for packed in (False, True)
    }
    assert said == {
        ("flash", False): "flash", ("flash", True): "flash, dense mask",
        ("math", False): "math", ("math", True): "math, dense mask",
        ("auto", False): "flash", ("auto", True): "flash, dense mask",
    }  # fmt: skip
    with torch.profiler.profile() as profile:
        for kernel in ("math", "flash"):
            choose_kernel(kernel, SHAPE, TOKENS, False, torch.float32)
            q = torch.randn(1, 4, 16, 8)
            attend(q, q, q, Visible(None))
    ran = [event.name for event in profile.events() if "_scaled_dot_product" in event.name]
    assert [name.split("_for_cpu")[0] for name in ran if "backward" not in name] == [
        "aten::_scaled_dot_product_attention_math",
        "aten::_scaled_dot_product_flash_attention",
    ]


@pytest.mark.usefixtures("any_kernel")
def test_a_kernel_that_this_device_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention = cudnn"):
        choose_kernel("cudnn", SHAPE, TOKENS, False, torch.float32)
