"""How often the blocks are compiled in a run, and that each is one graph."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kempner.model import decoder
from kempner.model.attention import Documents
from kempner.model.config import ModelConfig
from kempner.parallel.build import build_model
from kempner.parallel.config import DistributedConfig
from kempner.parallel.layout import build_layout
from kempner.run import TrainConfig
from tests.gpu_path import kernels
from tests.gpu_path.kernels import registered
from tests.gpu_path.test_kernels import visible_on_a_gpu

T = 64
SHAPE = ModelConfig(
    vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, max_seq_len=T
)
EXPERTS: dict[str, Any] = {"n_experts": 4, "experts_per_token": 2}


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch, one_process: None) -> Iterator[list[str]]:
    """The functions that were compiled, by a backend that runs graphs as they are."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        stack = next(n.stack_trace for n in graph.graph.nodes if n.op == "call_function")
        found.append("block" if "in forward" in stack and "loss.py" not in stack else "loss")
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    yield found
    torch._dynamo.reset()


def run(model: Any, rows: int, length: int, documents: Documents | None = None) -> Tensor:
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    loss = model(tokens, tokens, documents)
    if torch.is_grad_enabled():
        loss.backward()
    return loss.detach()


def build(shape: ModelConfig, recompute: str = "none") -> Any:
    layout = build_layout(DistributedConfig(), 1, 1, "cpu")
    train = TrainConfig(compile=True, dtype="bf16", recompute=recompute)
    return build_model(shape, layout, train, DistributedConfig())


RAMPS = {
    "none": [(2, T)] * 3,
    "seq_len": [(2, T // 4), (2, T // 2), (2, T)],
    "batch": [(2, T), (3, T), (4, T)],
}


@pytest.mark.parametrize("experts", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("ramp", RAMPS)
def test_steps_and_validation(blocks: list[str], ramp: str, experts: bool) -> None:
    """A ramp costs a second compilation, with a size that may change; no_grad another one. (Two
    ramps in one run cost two more.)"""
    model = build(replace(SHAPE, **(EXPERTS if experts else {})))
    for rows, length in RAMPS[ramp]:
        run(model, rows, length)
    assert blocks.count("block") == (1 if ramp == "none" else 2)
    with torch.no_grad():
        for rows, _ in RAMPS[ramp][-2:]:
            run(model, rows, T)
    assert blocks.count("block") <= (2 if ramp == "none" else 3)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_packed_batches(monkeypatch: pytest.MonkeyPatch, blocks: list[str], recompute: str) -> None:
    """As a GPU runs them, with another number of documents in each step."""
    pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(decoder, "visible", visible_on_a_gpu)
    model = build(SHAPE, recompute)
    parts = {"_varlen_attn": kernels.varlen, "_varlen_attn_backward": kernels.varlen_backward}
    with registered("torch_attn", **parts):
        for count in (5, 7, 3, 9, 2, 6):
            index = (torch.arange(T) * count // T).expand(2, -1).contiguous()
            run(model, 2, T, Documents.of(index, True))
    assert blocks.count("block") <= 2 and not torch._dynamo.utils.counters["graph_break"]
