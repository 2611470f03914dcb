"""Rows on their way to the experts of two ranks, in buffers of a fixed size and without. The other
rank is a stand-in that does what this one does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from kempner.model.decoder import Decoder
from kempner.model.moe import (
    Experts,
    MixtureOfExperts,
    Routing,
    Routings,
    through_experts,
)
from kempner.optim.build import build_optimizer
from kempner.optim.config import OptimizerConfig
from kempner.parallel import experts
from kempner.parallel.experts import ExchangeBuffers, ParallelExperts
from tests.trainer.gpu_path import pretend
from tests.trainer.gpu_path.pretend import Gpu, on_gpu
from tests.trainer.gpu_path.test_between import Mesh, values
from tests.trainer.gpu_path.test_step import EXPERTS, SHAPE, gpu

__all__ = ["gpu"]

LOADS = [[3, 0, 5, 4], [8, 2, 0, 2], [0, 0, 0, 12]]
NAN = float("nan")


class Spoil(torch.autograd.Function):
    """As a kernel leaves what is after the last row of an expert, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.rows = rows
        return torch.cat((x[:rows], x[rows:] * NAN))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.cat((grad[: ctx.rows], grad[ctx.rows :] * NAN)), None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts of exchanges, in their order."""
    seen: list[str] = []

    def spoilt(x: Tensor, load: Tensor, *weights: Tensor) -> Tensor:
        rows = int(load.inner.sum())  # type: ignore[attr-defined]
        y = through_experts(Spoil.apply(x, rows), load, *weights)  # type: ignore[no-untyped-call]
        return Spoil.apply(y, rows)  # type: ignore[no-untyped-call, no-any-return]

    def begin(x: Tensor, *_: Any) -> Tensor:
        seen.append("rows" if x.is_floating_point() else "loads")
        return x.clone()

    def wait(x: Tensor) -> Tensor:
        seen.append("wait")
        return x

    monkeypatch.setattr(experts, "through_experts", spoilt)
    monkeypatch.setattr(experts, "_begin", begin)
    monkeypatch.setattr(experts, "_wait", wait)
    for name in ("all_to_all_single", "all_to_all_single_autograd"):
        monkeypatch.setattr(experts, name, lambda x, *_: x.clone())
    monkeypatch.setattr(Mesh, "get_group", lambda _: SimpleNamespace(group_name=""))
    return seen


def layers(spare: float | None) -> tuple[Any, Any]:
    """The plain layer, and that of a rank with half of its experts; the other half are the same
    ones, as the other rank is."""
    torch.manual_seed(0)
    plain = Experts(replace(SHAPE, **EXPERTS))
    for p in plain.parameters():
        p.data[2:] = p.data[:2]
    plain = on_gpu(plain, torch.bfloat16)
    layer = ParallelExperts.__new__(ParallelExperts)
    torch.nn.Module.__init__(layer)
    layer.mesh = Mesh()  # type: ignore[assignment]
    layer.exchange = ExchangeBuffers(spare, 2)
    for name, p in plain.named_parameters():
        setattr(layer, name, torch.nn.Parameter(Gpu(values(p)[:2].clone())))
    return plain, layer


def passes(layer: Callable[..., Tensor], load: list[int]) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of the input."""
    torch.manual_seed(1)
    x = Gpu(torch.randn(sum(load), SHAPE.dim).bfloat16()).requires_grad_()
    y = layer(x, Gpu(torch.tensor(load)))
    y.backward(Gpu(torch.randn(y.shape).bfloat16()))
    assert x.grad is not None
    return values(y), values(x.grad)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("spare", [None, 1.0], ids=["exact", "buffers"])
def test_rows_come_back_from_the_experts(
    calls: list[str], load: list[int], spare: float | None
) -> None:
    plain, layer = layers(spare)
    expected = passes(plain, load)
    pretend.waits.clear()
    found = passes(layer, load)
    waits = [] if spare is not None else ["experts.py: __init__: tolist"]
    assert pretend.waits == waits
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    for name, p in plain.named_parameters():  # both halves have the same rows, those of two ranks
        grad = values(p.grad).float()
        own = values(layer.get_parameter(name).grad).float()
        torch.testing.assert_close(own, grad[:2] + grad[2:], rtol=2e-2, atol=2e-2)


def test_a_row_without_a_place_is_counted_and_is_zero(calls: list[str]) -> None:
    """Ten rows are for the first rank, and buffers have seven places."""
    plain, layer = layers(0.1)
    load = [8, 2, 0, 2]
    places = layer.exchange.places(12)
    assert places == 7
    rows = layer.exchange.rows_over(torch.tensor([load, [3, 3, 3, 3]]))
    assert rows == 3
    expected = passes(plain, load)
    fits = torch.tensor([at < places or at >= 10 for at in range(12)])
    for a, b in zip(passes(layer, load), expected, strict=True):
        assert torch.equal(a[fits], b[fits]) and not a[~fits].any()
    for p in layer.parameters():
        assert values(p.grad).isfinite().all()


def test_passes_that_nobody_repeats_have_no_buffers() -> None:
    buffers = ExchangeBuffers(0.1, 2)
    load = torch.tensor([[8, 2, 0, 2]])
    assert buffers.in_use and buffers.rows_over(load) == 3
    with torch.no_grad():
        assert not buffers.in_use
    assert [buffers.pause(), buffers.pause()] == [8, 16]
    for _ in range(16):
        assert not buffers.in_use and buffers.rows_over(load) == 0
        buffers.after_step()
    assert buffers.in_use
    assert ExchangeBuffers(9.0, 2).places(12) == 12  # there are no more


def test_rows_without_a_place_are_remembered_until_the_step_is_repeated() -> None:
    """The host reads of them a step later: the update of the step between is skipped, too."""
    routings = Routings(replace(SHAPE, **EXPERTS))
    routings.buffers = ExchangeBuffers(0.0, 2)
    targets = torch.zeros(1, 6, dtype=torch.int64)
    for load in ([8, 2, 0, 2], [3, 3, 3, 3]):  # two steps
        routings.add([Routing(torch.tensor(load), None, None)], targets)
        routings.take()
        assert routings.rows_over == 4
    assert routings.repeat() == 8 and routings.rows_over == 0
    routings.add([Routing(torch.tensor([8, 2, 0, 2]), None, None)], targets)
    assert routings.rows_over == 0  # as many travel as there are


def test_a_step_that_is_computed_twice_is_one_step_without_buffers() -> None:
    """Both computations must send rows in the same way (resilience.replay_every)."""
    model = Decoder(replace(SHAPE, **{**EXPERTS, "router_bias": False}))
    model.routings.buffers = buffers = ExchangeBuffers(0.1, 2)
    optimizer = build_optimizer(model, OptimizerConfig())
    for _ in range(model.routings.repeat()):
        for _ in range(2):
            assert not buffers.in_use
            model.routings.take()
        optimizer.step()
    assert buffers.in_use


def test_shared_experts_run_while_rows_are_on_their_way(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both passes; and the layer's numbers stay."""
    cfg = replace(SHAPE, **EXPERTS, shared_experts=1)
    torch.manual_seed(0)
    layer: Any = on_gpu(MixtureOfExperts(cfg), torch.bfloat16)
    layer.experts = layers(1.0)[1]
    shared = layer.shared.forward

    def run(x: Tensor) -> Tensor:
        calls.append("shared")
        y = shared(x)
        y.register_hook(lambda _: calls.append("shared's gradient"))
        return y

    layer.shared.forward = run
    results = []
    for hides in (False, True):
        layer.hides_shared = hides
        layer.zero_grad()
        calls.clear()
        torch.manual_seed(1)
        x = Gpu(torch.randn(2, 6, SHAPE.dim).bfloat16()).requires_grad_()
        y, _ = layer(x)
        forward = len(calls)
        y.backward(Gpu(torch.ones(y.shape).bfloat16()))
        results.append([values(y), values(x.grad), *(values(p.grad) for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert calls[:forward] == ["rows", "shared", "loads", "wait", "wait", "rows", "wait"]
    assert calls[forward:] == ["rows", "wait", "rows", "shared's gradient", "wait"]


def test_the_compiler_makes_one_graph_of_it() -> None:
    """Whose sizes depend on no value: the compiler would stop at one."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    with torch.device("meta"):
        base = Experts(replace(SHAPE, **EXPERTS)).bfloat16()
    layer = ParallelExperts(base, mesh, ExchangeBuffers(0.5, 2)).to_empty(device="cpu")
    x = torch.randn(12, SHAPE.dim).bfloat16().requires_grad_()
    step = torch.compile(partial(layer, beside=lambda: x * 2), backend="aot_eager", fullgraph=True)
    y, _ = step(x, torch.tensor([3, 3, 3, 3]))
    y.sum().backward()
    assert y.shape == x.shape and x.grad is not None
