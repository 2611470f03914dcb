"""What crosses between ranks, replicas and engines, on tensors of a GPU that is not there: the
gradients that wait for the last micro-batch, the outer steps of replicas, merged adapters, and
experts on other ranks. Their partners are stand-ins."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.lowcomm.outer import Alone
from kempner.extensions.lowcomm.replicas import LowcommReplicas
from kempner.extensions.rl.trainer.publish import whole_tensors
from kempner.model.decoder import Decoder
from kempner.model.moe import Experts
from kempner.parallel import experts
from kempner.parallel.build import parameter_names
from kempner.parallel.config import LoraConfig
from kempner.parallel.experts import ExchangeBuffers, ParallelExperts
from kempner.parallel.lora import add_adapters
from kempner.parallel.shard import GradientSums, begin_micro_batch
from kempner.parallel.single import add_up
from kempner.train.objective import NextToken
from kempner.train.progress import Progress
from kempner.train.resilience.requests import REQUEST_FLAGS
from kempner.train.sections import RunConfig
from tests.trainer.gpu_path import pretend
from tests.trainer.gpu_path.kernels import GPU
from tests.trainer.gpu_path.pretend import Gpu, on_gpu
from tests.trainer.gpu_path.test_step import (
    EXPERTS,
    SHAPE,
    batch,
    build,
    gpu,
    optimizer_of,
)

__all__ = ["gpu"]  # a fixture: each test has one, which is not there


def values(x: Tensor) -> Tensor:
    assert isinstance(x, Gpu), f"a tensor of {x.shape} on the host"
    return x.detach().inner


# --- Gradients that cross once in a step ----------------------------------------------------------


class Sharded:
    """What begin_micro_batch() tells FSDP2, which a GPU alone runs."""

    def __init__(self, model: Decoder) -> None:
        self.sync_once, self.reduces_in_bf16 = True, False
        self.fp32_sums, self.told = GradientSums(model, add_up), []

    def set_requires_gradient_sync(self, last: bool) -> None:
        self.told.append(("sync", last))

    def set_reshard_after_backward(self, last: bool) -> None:
        self.told.append(("reshard", last))


def test_sync_once_sums_in_fp32() -> None:
    model = build()
    how: Any = Sharded(model)
    sums: dict[str, Tensor] = {}
    for number in range(8):
        begin_micro_batch(how, last=number == 7)
        one = build()
        micro = batch(packed=True).to(GPU)
        for each in (model, one):
            NextToken()(each, micro)[0].backward()
        for name, p in one.named_parameters():
            sums[name] = sums.get(name, 0) + values(p.grad).float()
    assert how.told == [(what, i == 7) for i in range(8) for what in ("sync", "reshard")]
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.bfloat16
        torch.testing.assert_close(values(p.grad), sums[name].bfloat16(), rtol=0, atol=0)
    assert pretend.waits == []


# --- Replicas -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fragments": 2, "tau": 1, "alpha": 0.5},
        {"compress": "linear", "feedback": 1.0},
        {"compress": "statistical", "bits": 2, "raw": ()},
        {"compress": "top-k", "feedback": 0.9},
    ],
    ids=lambda options: options.get("compress", "fragments" if options else "plain"),
)
def test_rounds_of_replicas(options: dict[str, Any]) -> None:
    """Two rounds: what is sent, decoded and taken over stays on the GPU, and nobody waits."""
    lowcomm = LowcommConfig(replicas=1, interval=4, **options)
    cfg = RunConfig(more=(("lowcomm", lowcomm),))
    world: Any = SimpleNamespace(size=1, replica=0, replicas=1)
    model = build(None)
    optimizer = optimizer_of(model)
    named = {name: p for name, p in parameter_names(model).items() if p.requires_grad}
    replicas = LowcommReplicas(cfg, world, named, Alone())
    replicas.begin(Progress())
    numbers = {
        name: Gpu(torch.ones((), dtype=torch.float64))
        for name in (*REQUEST_FLAGS, "loss_sum", "tokens")
    }
    pretend.waits.clear()
    for step in range(1, 9):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        told = replicas.after_step(Progress(step=step), numbers)
    assert pretend.waits == []
    assert {"round_loss", "spoilt 0", "round"} <= told.keys()
    assert all(isinstance(x, Gpu) for x in told.values())
    for fragment in replicas.outer.fragments:
        for anchor, p in zip(fragment.anchors, fragment.parameters, strict=True):
            assert torch.isfinite(values(anchor)).all()
            if not replicas.outer.apart:
                assert torch.equal(values(anchor), values(p))


# --- Adapters -------------------------------------------------------------------------------------


def test_adapters_are_merged_where_they_are() -> None:
    model = Decoder(SHAPE)
    add_adapters(model, LoraConfig(4))
    for p in model.parameters():
        p.data.normal_(std=0.05)
    model = on_gpu(model)
    tensors = dict(whole_tensors(model, scale=0.5))
    assert pretend.waits == [] and not any("lora" in name for name in tensors)
    merged = 0
    for name, module in model.named_modules():
        if hasattr(module, "lora_a"):
            a, b, weight = (values(x) for x in (module.lora_a, module.lora_b, module.weight))
            expected = weight.float() + 0.5 * (b @ a)
            torch.testing.assert_close(values(tensors[f"{name}.weight"]), expected)
            merged += 1
    assert merged and all(isinstance(tensor, Gpu) for tensor in tensors.values())


def test_a_merged_model_computes_what_its_adapters_do() -> None:
    model = Decoder(SHAPE)
    add_adapters(model, LoraConfig(4))
    for p in model.parameters():
        p.data.normal_(std=0.05)
    model, plain = on_gpu(model, torch.float32), build(None)
    scale = next(m.scale for m in model.modules() if hasattr(m, "lora_a"))
    plain.load_state_dict(dict(whole_tensors(model, scale)), assign=True, strict=False)
    tokens = Gpu(torch.randint(64, (2, 8)))
    torch.testing.assert_close(values(model(tokens)), values(plain(tokens)), rtol=1e-4, atol=1e-5)


# --- Experts of other ranks -----------------------------------------------------------------------


class Mesh:
    """Of two ranks, of which this is the first."""

    def size(self) -> int:
        return 2

    def get_group(self) -> None:
        return None


@pytest.mark.parametrize("load", [[0, 0, 5, 3], [4, 4, 0, 0], [0, 0, 0, 0]])
def test_a_rank_of_experts_without_tokens(monkeypatch: pytest.MonkeyPatch, load: list[int]) -> None:
    """The other rank sends none. Ours go to it, or stay; it returns what it has got."""
    kept = sum(load[:2])

    def exchange(x: Tensor, there: Any, here: Any, group: Any) -> Tensor:
        if there is None:  # the loads: ours, and nothing of the other rank
            return torch.cat((x[:1], torch.zeros_like(x[1:])))
        if sum(there) == kept:  # to the experts
            assert here == [kept, len(x) - kept]
            return x[:kept]
        return torch.cat((x, x.new_zeros(sum(there) - len(x), x.shape[1])))

    monkeypatch.setattr(experts, "all_to_all_single", exchange)
    monkeypatch.setattr(experts, "all_to_all_single_autograd", exchange)
    plain = on_gpu(Experts(replace(SHAPE, **EXPERTS)), torch.bfloat16)
    layer = ParallelExperts.__new__(ParallelExperts)
    torch.nn.Module.__init__(layer)
    layer.mesh = Mesh()  # type: ignore[assignment]
    layer.exchange = ExchangeBuffers(None, 2)
    for name, p in plain.named_parameters():
        setattr(layer, name, torch.nn.Parameter(Gpu(values(p)[:2].clone())))
    x = Gpu(torch.randn(sum(load), SHAPE.dim).bfloat16()).requires_grad_()
    pretend.waits.clear()
    y = layer(x, Gpu(torch.tensor(load)))
    y.backward(torch.ones_like(y))
    assert pretend.waits == ["experts.py: __init__: tolist"]
    assert y.shape == x.shape and x.grad is not None and x.grad.shape == x.shape
    for p in layer.parameters():
        used = values(p.grad).flatten(1).any(1).tolist()
        assert used == [bool(n) for n in load[:2]]
    if kept:
        expected = plain(Gpu(values(x)[:kept]), Gpu(torch.tensor([*load[:2], 0, 0])))
        torch.testing.assert_close(values(y)[:kept], values(expected))
