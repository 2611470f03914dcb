"""The compiled update in bf16, which a GPU alone takes: how often it is compiled, and which tensors
it takes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from kempner.optim.build import build_optimizer
from kempner.optim.config import OptimizerConfig

SIZES = [(48, 33), (48,), (33, 48), (96, 48), (7, 5, 3), (64, 64)]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, one_process: None) -> Iterator[list[Any]]:
    """Those that are compiled, by a backend that runs them as they are."""
    torch._dynamo.reset()
    found: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    yield found
    torch._dynamo.reset()


def parameters(transposed: bool = False) -> nn.ParameterList:
    torch.manual_seed(0)
    found = nn.ParameterList([torch.randn(size).bfloat16() for size in SIZES])
    for p in found:
        grad = torch.randn(p.shape).bfloat16()
        p.grad = grad.t().contiguous().t() if transposed and p.ndim == 2 else grad
    return found


def updated(name: str, compiled: bool, steps: int, **how: bool) -> nn.ParameterList:
    """Another learning rate in each step, two groups with another decay, one step that is bad."""
    found = parameters(**how)
    optimizer = build_optimizer(found, OptimizerConfig(name=name, moments="bf16"))
    optimizer.compiled = compiled
    first = optimizer.param_groups[0]
    optimizer.param_groups.append({**first, "params": first["params"][:1], "weight_decay": 0.3})
    first["params"] = first["params"][1:]
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (number + 1)
        optimizer.grad_scale = torch.tensor(1.0 + number)
        optimizer.found_inf = torch.tensor(float(number == 2))
        optimizer.step()
    return found


@pytest.mark.parametrize(
    "name", [pytest.param("adamw", marks=pytest.mark.soak), "lion", "schedule_free"]
)
def test_sizes_steps_and_learning_rates_have_the_same_graphs(graphs: list[Any], name: str) -> None:
    """One for each number of dims: torch looks at the tensor that a flat one is a view of. At the
    ninth graph it gives up."""
    found = updated(name, True, 5)
    assert len(graphs) == len({len(size) for size in SIZES})
    for graph in graphs:
        inputs = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
        dtypes = {getattr(x, "dtype", None) for x in inputs}
        assert torch.float64 not in dtypes, "a number of the host, in another precision"
    for ours, plain in zip(found, updated(name, False, 5), strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=1e-5)


@pytest.mark.usefixtures("graphs")
def test_the_numbers_of_a_group_are_filled_in_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a launch: for each parameter they would be five of six."""
    real, calls = torch.full, 0

    def counted(*words: Any, **named: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return real(*words, **named)

    monkeypatch.setattr(torch, "full", counted)
    updated("lion", True, 1)
    assert calls == 3 * 5  # groups; lr, weight_decay, eps and two betas


def test_what_is_not_contiguous_is_left_to_the_eager_update(graphs: list[Any]) -> None:
    found, asked = updated("lion", True, 3, transposed=True), list(graphs)
    assert len(asked) == 2  # not of matrices
    for ours, plain in zip(found, updated("lion", False, 3, transposed=True), strict=True):
        assert torch.equal(ours, plain)
