"""Updates in bf16 as one compiled kernel: what they move, and that they are the eager ones. On a
CPU the trainer takes the eager update; the kernel of a GPU is made of the same operators."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from kempner.jobs.system import compiler
from kempner.optim import optimizer as module
from kempner.optim.build import build_optimizer, rule_named
from kempner.optim.config import STATE, OptimizerConfig
from kempner.optim.kernels import in_lines, line_places
from kempner.optim.optimizer import Optimizer
from kempner.optim.rounding import hashed_at, hashed_int32

pytestmark = pytest.mark.usefixtures("one_process")
RULES = tuple(name for name in STATE if rule_named(name).pointwise)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()  # it compiles one function a few times in a process
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("missing", [0.0, 1.0])
def test_a_host_without_a_compiler_decides_for_all(
    monkeypatch: pytest.MonkeyPatch, missing: float
) -> None:
    """Copies of a shard must be updated in the same way."""
    monkeypatch.setattr(compiler, "missing_compiler", lambda _: None)
    monkeypatch.setattr(dist, "all_reduce", lambda found, op: found.fill_(missing))
    assert module._can_compile() == (not missing)


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96), nn.Linear(96, 33, bias=False)).to(dtype)


def optimizer_of(model: nn.Module, name: str, compiled: bool) -> Optimizer:
    optimizer = build_optimizer(model, OptimizerConfig(name=name, moments="bf16"))
    optimizer.compiled = compiled
    return optimizer


def train(model: nn.Module, optimizer: Optimizer, steps: range, bad: int = -1) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1)
        optimizer.grad_scale, optimizer.found_inf = (
            torch.tensor(2.0),
            torch.tensor(step == bad).float(),
        )
        if step == bad:
            next(model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
        optimizer.step()


def everything(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    tensors = [
        x
        for p in model.parameters()
        for x in (p, *(optimizer.state[p][key] for key in sorted(optimizer.state[p])))
    ]
    return [x.detach().clone() for x in tensors]


def same_bits(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_each_number_is_read_and_written_once(name: str, dtype: torch.dtype) -> None:
    """No more than 20 bytes a parameter with AdamW: 14 where weights are in bf16."""
    model = model_of(dtype)
    optimizer = optimizer_of(model, name, compiled=True)
    _, codes = run_and_get_code(train, model, optimizer, range(1))
    size = 2 if dtype is torch.bfloat16 else 4
    expected = 3 * size + 4 * len(STATE[name].averages) + 8 * len(STATE[name].copies)
    assert codes
    for code in codes:
        moved = {}
        for kernel in code.split('extern "C"')[1:]:
            loop = kernel[kernel.index("{") :]
            for kind, pointer in re.findall(r"(at::BFloat16|float)\* (\w+)[,)]", kernel):
                for way in (r"loadu\({} \+", r"store\({} \+"):
                    if re.search(way.format(pointer), loop):
                        moved[kernel[:9], pointer, way] = 2 if "BFloat" in kind else 4
        assert sum(moved.values()) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_it_is_the_eager_update(name: str, dtype: torch.dtype) -> None:
    """Rounded by the same bits: of a thousand numbers one or two, that stand at the border by their
    last digit, go the other way; a bad step changes nothing."""
    found = []
    for compiled in (False, True):
        model = model_of(dtype)
        optimizer = optimizer_of(model, name, compiled)
        train(model, optimizer, range(3))
        before = everything(model, optimizer)
        train(model, optimizer, range(3, 4), bad=3)
        assert same_bits(before, everything(model, optimizer))
        found.append(before)
    for eager, one in zip(*found, strict=True):
        assert eager.dtype is one.dtype
        close = torch.isclose(eager.float(), one.float(), rtol=1e-4, atol=1e-7).float()
        assert close.mean() > 0.995 and torch.allclose(
            eager.float(), one.float(), rtol=2e-2, atol=1e-5
        )


@pytest.mark.parametrize("name", RULES)
def test_resumed_it_is_the_unbroken_one_to_the_last_bit(name: str) -> None:
    model = model_of(torch.bfloat16)
    optimizer = optimizer_of(model, name, compiled=True)
    train(model, optimizer, range(2))
    again = model_of(torch.bfloat16)
    again.load_state_dict(model.state_dict())
    resumed = optimizer_of(again, name, compiled=True)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        resumed.state[q] = {key: x.clone() for key, x in optimizer.state[p].items()}
    train(model, optimizer, range(2, 4))
    torch._dynamo.reset()  # another process
    train(again, resumed, range(2, 4))
    assert same_bits(everything(model, optimizer), everything(again, resumed))


@pytest.mark.parametrize(
    "box",
    [
        ((0, 6), (0, 4), (0, 5)), ((2, 3), (0, 4), (0, 5)), ((0, 6), (1, 2), (0, 5)),
        ((2, 3), (1, 2), (0, 5)), ((0, 6), (0, 4), (3, 2)), ((5, 1), (0, 4), (3, 2)),
        ((0, 6), (1, 2), (3, 2)),
    ],
)  # fmt: skip
def test_parts_of_a_tensor_are_rounded_as_the_whole(box: tuple[tuple[int, int], ...]) -> None:
    shape, step = torch.Size((6, 4, 5)), torch.tensor(7.0)
    assert in_lines(shape, box) == (box != ((0, 6), (1, 2), (3, 2)))
    if in_lines(shape, box):
        length, gap, first = line_places(shape, box)
        at = torch.arange(math.prod(size for _, size in box), dtype=torch.int32)
        found = hashed_at(first + at + at // length * gap, step, torch.tensor(3, dtype=torch.int32))
        assert torch.equal(found, hashed_int32(shape, box, step, salt=3).flatten())
