"""What `recompute = selective` keeps on a GPU: the output of every attention that torch may take
there is computed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kempner.model import decoder
from kempner.parallel.memory.recompute import add_recompute, kept_operators
from kempner.train.sections import TrainConfig
from tests.trainer.gpu_path import kernels, pretend
from tests.trainer.gpu_path.kernels import registered
from tests.trainer.gpu_path.test_kernels import DOCUMENTS, SHAPE, T, visible_on_a_gpu


def test_every_attention_with_a_kernel_of_cuda_is_kept() -> None:
    """But not that of plain operators, whose output may be the scores."""
    names = {
        entry
        for entry, text in pretend.native().items()
        if entry.startswith("_scaled_dot_product_") and "backward" not in entry
        if "CUDA" in text.partition("dispatch:")[2]
    }
    assert len(names) >= 3
    mine = {str(op).removeprefix("aten.").removesuffix(".default") for op in kept_operators()}
    assert names <= mine, names - mine


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_attention_of_packed_documents(monkeypatch: pytest.MonkeyPatch, recompute: str) -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(decoder, "attention_pattern", visible_on_a_gpu)
    calls: list[int] = []

    def counted(*words: Any) -> Any:
        calls.append(1)
        return kernels.varlen(*words)

    torch.manual_seed(0)
    model = decoder.Decoder(SHAPE).bfloat16()
    add_recompute(model, TrainConfig(recompute=recompute))
    tokens = torch.randint(64, (2, T))
    parts = {"_varlen_attn": counted, "_varlen_attn_backward": kernels.varlen_backward}
    with registered("torch_attn", **parts):
        model(tokens, tokens.roll(-1, 1), DOCUMENTS).backward()
    assert len(calls) == SHAPE.n_layers * (2 if recompute == "full" else 1)
