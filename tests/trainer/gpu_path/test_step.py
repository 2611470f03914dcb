"""The whole step on tensors of a GPU that is not there: no operator mixes devices or lacks a kernel
for CUDA, and the host waits nowhere but where it is named here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kempner.data.batch import MicroBatch
from kempner.extensions.generate import token_step
from kempner.extensions.generate.config import Sampling
from kempner.extensions.generate.engine import Engine, GenerationRequest
from kempner.extensions.preference.losses import DPO, Reward, token_losses, token_scores
from kempner.extensions.rl.config import LossConfig
from kempner.extensions.rl.trainer.batch import Rollouts
from kempner.extensions.rl.trainer.loss import Policy
from kempner.model.attention import Documents
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from kempner.optim.build import build_optimizer
from kempner.optim.config import STATE, OptimizerConfig
from kempner.optim.spikes import Spikes
from kempner.parallel.config import DistributedConfig, LoraConfig
from kempner.parallel.layout import build_layout
from kempner.parallel.lora import add_adapters
from kempner.parallel.memory.recompute import add_recompute
from kempner.train.objective import NextToken
from kempner.train.recording.gpu_clock import GpuClock
from kempner.train.recording.objectives import WithExperts
from kempner.train.sections import RunConfig, TrainConfig
from kempner.train.step import PendingStep, StepSums, forward_backward, reduce_step, update_weights
from tests.trainer.gpu_path import kernels, pretend
from tests.trainer.gpu_path.kernels import GPU, registered
from tests.trainer.gpu_path.pretend import Gpu, OnGpu, on_gpu

T = 32
SHAPE = ModelConfig(
    vocab_size=64, dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=48, max_seq_len=T
)
EXPERTS: dict[str, Any] = {"n_experts": 4, "experts_per_token": 2, "router_bias": True}
INDEX = (torch.arange(T) * 4 // T).expand(2, -1).contiguous()


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, one_process: None) -> Iterator[None]:
    """No GPU, no NCCL; varlen_attn has a kernel; what the host waits for is counted anew."""
    pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    # It asks in C++, where they are on the CPU.
    group = torch.optim.Optimizer._group_tensors_by_device_and_dtype
    monkeypatch.setattr(
        torch.optim.Optimizer,
        "_group_tensors_by_device_and_dtype",
        lambda *words: {(GPU, dtype): found for (_, dtype), found in group(*words).items()},
    )
    for notes in (pretend.waits, pretend.unordered, pretend.arriving):
        notes.clear()  # type: ignore[attr-defined]
    parts = {"_varlen_attn": kernels.varlen, "_varlen_attn_backward": kernels.varlen_backward}
    with registered("torch_attn", **parts), pretend.synchronized(), OnGpu():
        yield


def pinned(x: Tensor) -> Tensor:
    x.pinned = True  # type: ignore[attr-defined]
    return x


def batch(packed: bool = False) -> MicroBatch:
    tokens = torch.randint(64, (2, T))
    documents = Documents.of(INDEX, True).map(pinned) if packed else None
    targets = tokens.roll(-1, 1)
    targets[:, :3] = -100
    return MicroBatch(pinned(tokens), pinned(targets), documents, pinned(torch.tensor([[0], [1]])))


def rollouts() -> MicroBatch:
    more = {
        "logprobs": pinned(-torch.rand(2, T)),
        "advantages": pinned(torch.randn(2, T)),
        "fresh": pinned(torch.ones(2, T, dtype=torch.bool)),
    }
    return Rollouts(**{**vars(batch(True)), "sources": None}, **more)


# What the first step alone puts on the GPU.
FIRST = {
    "spikes.py: judge: to": "the state of the spikes",
    "kernels.py: _update_one: to": "where the parts of parameters are",
}
# The numbers of a step, for which the next one does not wait.
READ = "gpu_clock.py: reach: synchronize"
# Additions in no certain order, and why they may be.
UNORDERED = {
    "loss.py: chunk_loss: scatter_add_": "adds one number to each row",
    "moe.py: balance_loss: scatter_add_": "whole numbers",
    "passes.py: backward_passes: scatter_add": "gather's, of a router's scores: no expert twice",
    "losses.py: sum_by_document: index_add": "with train.deterministic torch sorts first",
}


def train(
    model: Decoder, optimizer: Any, objective: Any = None, batches: list[MicroBatch] | None = None
) -> None:
    """Two steps as in scripts/train.py, of which the host waits for the numbers alone."""
    step(model, optimizer, objective or NextToken(), batches or [batch(), batch(True)])
    assert set(pretend.waits) <= FIRST.keys() | {READ}, set(pretend.waits) - FIRST.keys()
    pretend.waits.clear()
    step(model, optimizer, objective or NextToken(), batches or [batch(), batch(True)])
    assert pretend.waits == [READ]
    assert set(pretend.unordered) <= UNORDERED.keys(), pretend.unordered


def step(model: Decoder, optimizer: Any, objective: Any, batches: list[MicroBatch]) -> None:
    layout = build_layout(DistributedConfig(), 1, 1, "cpu")
    if model.cfg.n_experts:
        objective = WithExperts(objective, model, layout, GPU)
    tokens = 2 * T * len(batches)
    sums = StepSums(["a", "b"], GPU)
    parts = forward_backward(model, objective, batches, sums, tokens, None)
    assert isinstance(parts, dict)
    parts = {
        **layout.once(parts),
        "grad_norm_sq": layout.norm_sq(model.parameters()),
        "work": 1.0,
    }
    before = [p.detach().inner.clone() for p in model.parameters() if p.requires_grad]
    numbers = update_weights(optimizer, reduce_step(parts, layout), tokens, 1e-2, 1.0)
    clock = GpuClock()
    clock.begin()
    pretend.waits.remove("gpu_clock.py: begin: synchronize")  # of a start, not of a step
    values = PendingStep(None, 1e-2, numbers, clock).read().values  # type: ignore[arg-type]
    assert values["bad"] == 0.0
    after = [p.detach().inner for p in model.parameters() if p.requires_grad]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def build(dtype: torch.dtype | None = torch.bfloat16, **changes: Any) -> Any:
    torch.manual_seed(0)
    return on_gpu(Decoder(replace(SHAPE, **changes)), dtype)


def optimizer_of(model: Decoder, name: str = "adamw", moments: str = "fp32") -> Any:
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=1e-2, moments=moments))
    optimizer.compiled = False  # the compiler does not take tensors that pretend
    return optimizer


@pytest.mark.parametrize(
    "shape",
    [
        {"tie_embeddings": True, "qkv_bias": True},
        {"sliding_window": 9, "qk_norm": True, "post_norms": True},
        {**EXPERTS, "router": "sigmoid", "shared_experts": 1},
        {**EXPERTS, "router_bias": False, "aux_loss": 0.01},
    ],
    ids=lambda shape: ", ".join(shape) or "plain",
)
def test_shapes(shape: dict[str, Any]) -> None:
    model = build(**shape)
    train(model, optimizer_of(model))


@pytest.mark.parametrize(
    ("name", "moments"),
    [(name, "fp32") for name in STATE] + [("adamw", "bf16")],
)
def test_optimizers(name: str, moments: str) -> None:
    model = build(None)
    optimizer = optimizer_of(model, name, moments)
    optimizer.spikes = Spikes(6.0, 8)
    train(model, optimizer, batches=[batch()])


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_the_update_of_one_kernel(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As it is compiled: the host copies the places of a parameter in the first step alone."""

    def as_it_is(function: Any, **_: Any) -> Any:
        def run(*words: Any) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
                function(*words)

        return run

    monkeypatch.setattr(torch, "compile", as_it_is)
    model = build()
    optimizer = optimizer_of(model, name, "bf16")
    optimizer.compiled = True
    train(model, optimizer, batches=[batch()])


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute(recompute: str) -> None:
    model = build()
    add_recompute(model, TrainConfig(recompute=recompute))
    train(model, optimizer_of(model))


def test_lora() -> None:
    model = Decoder(SHAPE)
    add_adapters(model, LoraConfig(4))
    for p in model.parameters():
        p.data.normal_(std=0.05)
    model = on_gpu(model, torch.bfloat16)
    train(model, optimizer_of(model))


@pytest.mark.parametrize("loss", ["dpo", "reward"])
def test_preferences(loss: str) -> None:
    model = build()
    if loss == "dpo":
        reference = build().requires_grad_(False)
        objective: Any = DPO(reference, 0.1, GPU)
        model.loss = reference.loss = token_losses
    else:
        objective, model.loss = Reward(1, GPU), token_scores
    train(model, optimizer_of(model), objective, [batch(True)])


@pytest.mark.parametrize("name", ["grpo", "masked"])
def test_policy(name: str) -> None:
    model = build()
    policy = Policy(RunConfig(more=(("rl.loss", LossConfig(name=name)),)), GPU)
    model.loss = policy.loss
    train(model, optimizer_of(model), policy, [rollouts()])


# The engine hands its token to the host in each step, and puts what it draws with on the GPU.
GENERATION = {
    "engine.py: _draw: tolist": "what was drawn",
    "token_step.py: draw: cpu": "what a step has drawn",
    "engine.py: _prefill: to": "the tokens that rows begin with",
    "engine.py: _read: to": "a prompt",
    "token_step.py: _replay: copy_": "the tokens of a step and their places",
    "token_step.py: _replay: to": "the same, for a graph that is captured",
    "cache.py: __init__: from memory that is not pinned": "places, and lengths of prompts",
    "sampling.py: draw_rows: to": "the random numbers of a step",
    "sampling.py: draw_rows: from memory that is not pinned": "the rows with the same filters",
}


@pytest.mark.parametrize(("fixed", "window"), [(False, None), (False, 9), (True, None)])
def test_generation(monkeypatch: pytest.MonkeyPatch, fixed: bool, window: int | None) -> None:
    for name in ("_prefill", "_grow", "_read"):  # the wrapped tensors know no inference_mode
        plain = getattr(Engine, name).__wrapped__
        monkeypatch.setattr(Engine, name, torch.no_grad()(plain))
    # Nor have they an address.
    monkeypatch.setattr(token_step, "join_weights", torch.cat)
    monkeypatch.setattr(token_step, "weight_pointers", lambda model: [])
    model = build(sliding_window=window).eval()
    engine: Engine[GenerationRequest] = Engine(model, 64, T, 3, fixed)
    filters = [{}, {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, {"temperature": 0}]
    requests = [
        GenerationRequest(i, [1, 2, 3][: i + 1], Sampling(max_tokens=4, **words))
        for i, words in enumerate(filters)
    ]
    engine.join(requests)
    for _ in range(3):
        engine.step()
    assert all(len(request.new) >= 3 for request in requests)
    assert set(pretend.waits) <= GENERATION.keys(), set(pretend.waits) - GENERATION.keys()


# --- The net itself -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: bool(x.sum() > 0),
        lambda x: float(x[0]), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x.cpu(),
        lambda x: x.to("cpu"), lambda x: torch.zeros(4).copy_(x), lambda x: x.to("cpu", x.dtype),
        lambda x: torch.tensor([1.0], device=GPU), lambda x: torch.ones(3).to(GPU),
        lambda x: torch.equal(x, x), lambda x: x.repeat_interleave(x.long()),
        lambda x: x.new_tensor([1.0]), lambda x: torch.as_tensor([1.0], device=GPU),
        lambda x: torch.asarray([1.0], device=GPU), lambda x: torch.ones(3).cuda(),
        lambda x: torch.from_numpy(np.ones(3)).to(GPU, non_blocking=True),
        lambda x: torch.as_tensor(np.ones(3), device=GPU),
        lambda x: x.__setitem__(x > 1, x[:2] + 0), lambda x: x.index_put_((x > 1,), x[:2] + 0),
        lambda x: torch.where(x > 1), lambda x: torch.linalg.matrix_norm(x.view(2, 2), ord=2),
        lambda x: torch.linalg.eigh(x.view(2, 2)), lambda x: torch.multinomial(x, 1),
        lambda x: torch.cuda.synchronize(), lambda x: torch.accelerator.synchronize(),
        lambda x: torch.Event("cuda").synchronize(),
        lambda x: torch.cuda.Event().synchronize(),
        lambda x: torch.cuda.Stream.synchronize(None),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_read_of_the_host_is_seen(ask: Any) -> None:
    ask(Gpu(torch.arange(4.0)))
    assert len(pretend.waits) >= 1


def test_mixed_devices_fp16_and_operators_of_cpus_alone_are_errors() -> None:
    x = Gpu(torch.randn(1, 2, 8, 16))
    with pytest.raises(AssertionError, match="on the host"):
        x + torch.ones(16)
    with pytest.raises(AssertionError, match="fp16"):
        x.half()
    with pytest.raises(AssertionError, match="no kernel for CUDA"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)


def test_what_waits_for_nothing_is_not_noted() -> None:
    x = Gpu(torch.arange(4.0))
    x[x > 1] = 0.0  # filled in
    x[Gpu(torch.tensor([0]))] = x[:1] + 1
    torch.where(x > 1, x, 0.0).norm(dim=0)
    torch.as_tensor(x, device=GPU)
    torch.full((), 2.0, device=GPU)
    pinned(torch.ones(3)).cuda(non_blocking=True)
    assert pretend.waits == []


def test_a_copy_to_the_host_is_there_when_its_event_is() -> None:
    early, late = torch.Event("cuda"), torch.Event("cuda")
    host = torch.empty(2, pin_memory=True)
    early.record()
    host.copy_(Gpu(torch.ones(2)), non_blocking=True)
    late.record()
    for event, there in ((early, False), (late, True)):
        event.synchronize()
        assert bool((host == 1).all()) is there


@pytest.mark.parametrize(
    "ask",
    [
        lambda x, i: x.index_add(0, i, x), lambda x, i: x.scatter_add(0, i, x),
        lambda x, i: x.cumsum(0), lambda x, i: x.index_select(0, i).sum().backward(),
        lambda x, i: torch.bincount(i, x.detach()),
    ],
)  # fmt: skip
def test_additions_in_no_certain_order_are_seen(ask: Any) -> None:
    x, index = Gpu(torch.ones(4)).requires_grad_(), Gpu(torch.zeros(4, dtype=torch.int64))
    index.cumsum(0), x[index].sum().backward()
    assert pretend.unordered == []
    ask(x, index)
    assert len(pretend.unordered) == 1
