"""How often the blocks are compiled in a run, and that each is one graph."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kempner.config.loading import load_config_files
from kempner.model import decoder
from kempner.model.attention import Documents
from kempner.model.config import ModelConfig
from kempner.parallel.build import build_model
from kempner.parallel.layout import build_layout
from kempner.train.parts import expect_batches, open_loader
from kempner.train.progress import Progress
from kempner.train.sections import RunConfig
from tests.trainer.gpu_path import kernels
from tests.trainer.gpu_path.kernels import registered
from tests.trainer.gpu_path.test_kernels import visible_on_a_gpu

T = 64
SHAPE = ModelConfig(
    vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, max_seq_len=T
)
EXPERTS: dict[str, Any] = {"n_experts": 4, "experts_per_token": 2}


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch, one_process: None) -> Iterator[list[tuple[str, bool]]]:
    """The functions that were compiled, by a backend that runs graphs as they are, and whether they
    take more than one size."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found: list[tuple[str, bool]] = []

    def backend(graph: Any, _: Any) -> Any:
        stack = next(n.stack_trace for n in graph.graph.nodes if n.op == "call_function")
        name = "block" if "in forward" in stack and "loss.py" not in stack else "loss"
        inputs = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
        found.append((name, any(isinstance(x, torch.SymInt) for x in inputs)))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    yield found
    torch._dynamo.reset()


RUN = (
    "--train.compile", "--train.dtype=bf16", f"--train.seq_len={T}", "--train.global_batch=4",
    "--train.max_steps=7", "--data.dataset_path=fake:", "--data.prefetch=0", "--eval.interval=0",
    "--model.vocab_size=64", f"--model.max_seq_len={T}",
)  # fmt: skip
LONGER, MORE = f"--train.seq_len_ramp=[{T // 4},4]", "--train.batch_ramp=[2,1,6]"


def run(shape: ModelConfig, *words: str, begin: int = 0, packed: bool = False) -> None:
    """The passes of a run from step `begin` on, with a validation after each step. `packed`: with
    another number of documents in each batch."""
    words = (*words, "--data.document_mask") if packed else words
    cfg = replace(load_config_files(RunConfig, [], [*RUN, *words]), model=shape)
    layout = build_layout(cfg.distributed, 1, 1, "cpu")
    model = build_model(cfg.model, layout, cfg.train, cfg.distributed)
    expect_batches(cfg, layout, model, begin)
    loader = open_loader(cfg, layout, False, Progress(step=begin))
    counts = itertools.cycle((4, 7, 3, 9, 1, 6))

    def loss_of(tokens: torch.Tensor) -> Any:
        index = torch.arange(tokens.shape[1]) * next(counts) // tokens.shape[1]
        index = index.expand(tokens.shape).contiguous()
        return model(tokens, tokens, Documents.of(index, True) if packed else None)

    for _ in range(begin, cfg.train.max_steps):
        for batch in next(loader):
            loss_of(batch.inputs).backward()
        with torch.no_grad():
            loss_of(torch.zeros(cfg.train.micro_batch or 4, T, dtype=torch.int64))
    loader.close()


SOAK = pytest.mark.soak
RUNS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "longer": (LONGER,),
    "more": (MORE,),
    "longer and more": (LONGER, MORE),
    "more, in passes of one size": (MORE, "--train.micro_batch=1"),
}
ALONE = ("longer", "more", "more, in passes of one size")


@pytest.mark.parametrize("experts", [False, pytest.param(True, marks=SOAK)])
@pytest.mark.parametrize(
    "name", ["plain", "longer and more", *(pytest.param(x, marks=SOAK) for x in ALONE)]
)
def test_steps_and_validation(blocks: list[tuple[str, bool]], name: str, experts: bool) -> None:
    """One graph for training, one for validation. Where no size changes all are constants."""
    run(replace(SHAPE, **(EXPERTS if experts else {})), *RUNS[name])
    changes = name not in ("plain", "more, in passes of one size")
    assert blocks[0] == ("block", changes)
    assert [name for name, _ in blocks].count("block") == 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_after_the_ramps_all_sizes_are_constants(blocks: list[tuple[str, bool]]) -> None:
    run(SHAPE, LONGER, MORE, begin=6)
    assert blocks.count(("block", False)) == 2 and ("block", True) not in blocks


def test_a_row_alone_is_compiled_once_more(blocks: list[tuple[str, bool]]) -> None:
    """A size of 1 is a constant to torch, whatever it is told: here that of the last stage."""
    run(SHAPE, LONGER, "--train.micro_batch=1")
    assert [name for name, _ in blocks].count("block") == 3


@pytest.mark.parametrize(
    ("ramps", "recompute"),
    [
        ((), "none"),
        ((LONGER, MORE), "full"),
        pytest.param((), "full", marks=SOAK),
        pytest.param((LONGER, MORE), "none", marks=SOAK),
    ],
)
def test_packed_batches(
    monkeypatch: pytest.MonkeyPatch,
    blocks: list[tuple[str, bool]],
    ramps: tuple[str, ...],
    recompute: str,
) -> None:
    """As a GPU runs them, with another number of documents in each batch."""
    pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(decoder, "attention_pattern", visible_on_a_gpu)
    parts = {"_varlen_attn": kernels.varlen, "_varlen_attn_backward": kernels.varlen_backward}
    with registered("torch_attn", **parts):
        run(SHAPE, *ramps, f"--train.recompute={recompute}", packed=True)
    assert [name for name, _ in blocks].count("block") == 2
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({**EXPERTS, "moe_frequency": 2}, ()),
        ({}, ("--train.recompute=full", "--train.recompute_every=2")),
    ],
)
def test_two_kinds_of_blocks(
    blocks: list[tuple[str, bool]], shape: dict[str, Any], words: tuple[str, ...]
) -> None:
    run(replace(SHAPE, **shape), LONGER, *words)
    assert [name for name, _ in blocks].count("block") == 4


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ramps", "sizes"), [((), [False, False]), ((LONGER, MORE), [False, True, True])]
)
def test_the_loss_takes_one_size_until_it_changes(
    blocks: list[tuple[str, bool]], ramps: tuple[str, ...], sizes: list[bool]
) -> None:
    """Of a step and of a validation; with ramps it is compiled once more, for all sizes."""
    run(SHAPE, *ramps)
    assert [changes for name, changes in blocks if name == "loss"] == sizes
