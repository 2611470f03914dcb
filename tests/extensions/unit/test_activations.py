"""What blocks keep for their backward pass: how much, where, and that no gradient changes. And
what the options of FSDP may not be together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from kempner.parallel.config import DistributedConfig
from kempner.parallel.memory import offload, recompute
from kempner.train.sections import TrainConfig

CFG = ModelConfig(31, 32, 4, 4, 2, ffn_dim=48, max_seq_len=16)
TOKENS = torch.arange(32).view(2, 16) % 31


def model(compiled: bool = False, **settings: Any) -> Decoder:
    torch.manual_seed(0)
    made, cfg = Decoder(CFG), replace(TrainConfig(), **settings)
    if cfg.recompute != "none":
        recompute.add_recompute(made, cfg)
    if compiled:
        for block in made.blocks:
            block.compile(backend="aot_eager")
    if cfg.offload_activations:
        offload.Offload(made, cfg.offload_activations)
    return made


def step(made: Decoder) -> list[Tensor]:
    """Gradients of two micro-batches."""
    made.zero_grad()
    for tokens in (TOKENS, TOKENS.flip(1)):
        made(tokens, tokens).backward()
    return [p.grad for p in made.parameters() if p.grad is not None]


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return step(model())


LEVERS: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "modules": {"recompute": "full", "recompute_every": 2, "recompute_modules": ("ffn",)},
    "offload": {"offload_activations": 1},
    "full-offload": {"recompute": "full", "offload_activations": 2},
    "selective-offload": {"recompute": "selective", "offload_activations": 9},
}


@pytest.mark.parametrize("lever", LEVERS)
def test_gradients_are_those_without_bit_for_bit(
    expected: list[Tensor], monkeypatch: pytest.MonkeyPatch, lever: str
) -> None:
    monkeypatch.setattr(offload, "SMALLEST_OFFLOAD", 0)
    found = step(model(**LEVERS[lever]))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def products(made: Decoder) -> int:
    with Products() as found:
        made(TOKENS, TOKENS).backward()
    return found.count


def test_what_is_computed_again() -> None:
    """Of a block's seven products: all but the last one, whose output nothing needs again; none;
    those of every second block; and the two of each feed-forward layer."""
    once = products(model())
    again = {name: products(model(**LEVERS[name])) - once for name in LEVERS}
    assert again["full"] == again["full-offload"] == 4 * 6
    assert again["selective"] == again["offload"] == 0
    assert again["modules"] == 2 * 2
    assert products(model(recompute="full", recompute_every=2)) - once == 2 * 6


def test_gradients_of_compiled_blocks(
    expected: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph serves all of them: the hooks that offload stay outside of it."""
    monkeypatch.setattr(offload, "SMALLEST_OFFLOAD", 0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = step(model(compiled=True, **LEVERS["selective-offload"]))
    torch.testing.assert_close(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_at_most_so_many_blocks_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward: those of n blocks, besides the one that runs. Weights do not leave."""
    monkeypatch.setattr(offload, "SMALLEST_OFFLOAD", 0)
    groups: list[offload.OffloadedBlock] = []
    real = offload.OffloadedBlock.__init__

    def made(self: offload.OffloadedBlock, previous: offload.OffloadedBlock | None) -> None:
        real(self, previous)
        groups.append(self)

    def on_device(*_: object) -> None:
        kept = [[each() for each in group.kept] for group in groups]
        counts.append(sum(any(x and x.storage for x in group) for group in kept))
        sent.update(x.storage.data_ptr() for group in kept for x in group if x and x.storage)

    monkeypatch.setattr(offload.OffloadedBlock, "__init__", made)
    counts: list[int] = []
    sent: set[int] = set()
    model_ = model(offload_activations=1)
    for block in model_.blocks:
        block.register_forward_hook(on_device)
        block.register_full_backward_hook(on_device)
    step(model_)
    assert counts == [1, 1, 1, 1, 1, 1, 1, 0] * 2
    assert not sent & {x.data_ptr() for x in (*model_.parameters(), model_.rope)}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"reshard_island": 2, "sync_once": True}, "leave reshard_island out"),
        ({"reshard_island": 2, "reshard_after_forward": False}, "leave reshard_island out"),
        ({"sync_once": True, "fsdp_cpu_offload": True}, "choose one of the two"),
        ({"sync_once": True, "reduce_dtype": "bf16"}, "leave reduce_dtype at fp32"),
    ],
)
def test_options_that_contradict_each_other(wrong: dict[str, Any], why: str) -> None:
    (problem,) = DistributedConfig(**wrong).problems()
    assert problem.startswith("distributed.") and why in problem
