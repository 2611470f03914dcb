"""A program for torchrun: a step's loss and gradients of the sharded model in several
configurations, beside those of the plain model in one process.

    torchrun ... tests/distributed/gradients.py '{"name": ["--section.key=value", ...], ...}'

Rank 0 prints a JSON object: for each name the relative errors of the loss and of the worst
gradient, how often each collective was called, and how many before the embedding.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from kempner.config.loading import load
from kempner.data.batch import MicroBatch
from kempner.model.decoder import Decoder
from kempner.objective import NextToken
from kempner.parallel import offload
from kempner.parallel.build import build_model, parameter_names
from kempner.parallel.layout import build_layout
from kempner.run import RunConfig
from kempner.step import StepSums
from scripts.train import forward_backward

ROWS, LENGTH = 16, 24
SHAPE = [
    "--model.vocab_size=61",  # the ranks' parts differ
    "--model.dim=32",
    "--model.n_layers=3",
    "--model.n_heads=4",
    "--model.n_kv_heads=2",
    "--model.ffn_dim=48",
    "--model.max_seq_len=24",
    "--train.seq_len=24",
    "--data.dataset_path=none",  # the batches are made here
]


class Calls(TorchDispatchMode):
    """How often each collective is called; and how often any was before the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.ahead: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.name()] += 1
        if self.ahead is None and func is torch.ops.aten.embedding.default:
            self.ahead = self.counts.total()
        return func(*args, **(kwargs or {}))


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def everywhere(mine: Any) -> list[Any]:
    """What each rank has."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def plain(model: nn.Module, cfg: RunConfig, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the plain model with the same weights, on the whole batch at once."""
    reference = Decoder(cfg.model)
    weights = {name: whole(p.detach()) for name, p in parameter_names(model).items()}
    for part in everywhere(weights):  # a stage of a pipeline has some of them
        weights |= part
    reference.load_state_dict(weights)
    loss = reference(batch.inputs, batch.targets)
    (loss / batch.targets.numel()).backward()
    return loss.detach(), {name: p.grad for name, p in reference.named_parameters()}


def check(overrides: list[str], batch: MicroBatch) -> dict[str, object]:
    cfg = load(RunConfig, [], [*SHAPE, *overrides])
    layout = build_layout(cfg.distributed, dist.get_world_size(), 1, "cpu")
    model = build_model(cfg.model, layout, cfg.train, cfg.distributed)
    share = ROWS // layout.data_ranks
    mine = slice(layout.data_rank * share, (layout.data_rank + 1) * share)
    parts = [
        MicroBatch(inputs.unsqueeze(0), targets.unsqueeze(0), None)
        for inputs, targets in zip(batch.inputs[mine], batch.targets[mine], strict=True)
    ]
    for _ in range(2):  # what one step leaves behind must not reach the next
        model.zero_grad()
        sums = StepSums([], torch.device("cpu"))
        with Calls() as calls:
            found = forward_backward(model, NextToken(), parts, sums, ROWS * LENGTH, leave=None)
    loss, gradients = plain(model, cfg, batch)
    errors = {
        name: error(whole(p.grad), gradients[name]) for name, p in parameter_names(model).items()
    }
    return {
        "loss": error(layout.sum(layout.once(found)["loss_sum"].clone()), loss),
        "gradient": max(everywhere(max(errors.values()))),
        "calls": calls.counts,
        "ahead": calls.ahead,
    }


def main() -> None:
    offload.SMALLEST = 0  # the tensors of a model that tests can run
    dist.init_process_group("gloo")
    tokens = torch.randint(0, 61, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batch = MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)
    results = {name: check(words, batch) for name, words in json.loads(sys.argv[1]).items()}
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
