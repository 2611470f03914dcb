"""A program for torchrun: a step's loss and gradients of the sharded model in several
configurations, beside those of the plain model in one process.

    torchrun ... tests/trainer/distributed/gradients.py '{"name": ["--section.key=value"], ...}'

Rank 0 prints a JSON object: for each name the relative errors of the loss and of the worst
gradient, how often each collective was called, and how many before the embedding. With a number of
steps as a second argument also the largest relative error of loss, norm of the gradients and use
of the experts over so many updates. A third one is the backend that torch.compile takes.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from kempner.config.loading import load_config_files
from kempner.data.batch import MicroBatch
from kempner.model.decoder import Decoder
from kempner.model.moe import Routings
from kempner.optim.build import build_optimizer
from kempner.parallel import fp8
from kempner.parallel.build import build_model, parameter_names
from kempner.parallel.layout import build_layout
from kempner.parallel.memory import offload
from kempner.train.parts import open_objective
from kempner.train.sections import RunConfig
from kempner.train.step import StepSums, forward_backward, reduce_step, update_weights

ROWS, LENGTH, CPU = 16, 24, torch.device("cpu")
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


def batch_of(seed: int) -> MicroBatch:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 61, (ROWS, LENGTH + 1), generator=generator)
    return MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)


def plain(model: nn.Module, cfg: RunConfig) -> Decoder:
    """The plain model with the same weights."""
    reference = Decoder(cfg.model)
    weights = {name: whole(p.detach()) for name, p in parameter_names(model).items()}
    for part in everywhere(weights):  # a stage of a pipeline has some of them
        weights |= part
    reference.load_state_dict(weights, strict=not cfg.model.router_bias)
    return reference


class Case:
    """The sharded model of a configuration, and how it takes a step."""

    def __init__(self, overrides: list[str]) -> None:
        self.cfg = cfg = load_config_files(RunConfig, [], [*SHAPE, *overrides])
        torch._dynamo.reset()
        self.layout = build_layout(cfg.distributed, dist.get_world_size(), 1, "cpu")
        self.model = build_model(
            cfg.model, self.layout, cfg.train, cfg.distributed, experts=cfg.experts
        )
        self.objective = open_objective(cfg, self.layout, self.model, None, CPU)  # type: ignore[arg-type]

    def backward(self, batch: MicroBatch) -> dict[str, Tensor]:
        """Sums over the ranks, by name."""
        share = ROWS // self.layout.data_ranks
        mine = slice(self.layout.data_rank * share, (self.layout.data_rank + 1) * share)
        rows = self.cfg.train.micro_batch or 1
        parts = [
            MicroBatch(inputs, targets, None)
            for inputs, targets in zip(
                batch.inputs[mine].split(rows), batch.targets[mine].split(rows), strict=True
            )
        ]
        sums = forward_backward(
            self.model, self.objective, parts, StepSums([], CPU), ROWS * LENGTH, leave=None
        )
        assert isinstance(sums, dict)
        norm = self.layout.norm_sq(self.model.parameters())
        return reduce_step({**self.layout.once(sums), "grad_norm_sq": norm}, self.layout)


def backward_plain(model: Decoder, batch: MicroBatch, z_loss: float) -> dict[str, Tensor]:
    """The same of the plain model, on the whole batch at once."""
    loss, _ = model(batch.inputs, batch.targets, token_losses=True)
    routings = model.routings if model.cfg.n_experts else None
    if routings is not None:
        model.routings = Routings(model.cfg)
    squares = model(batch.inputs).logsumexp(-1).square().sum()
    if routings is not None:
        model.routings = routings
    ((loss + z_loss * squares) / (ROWS * LENGTH)).backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None])
    sums = {"loss_sum": loss.detach(), "grad_norm_sq": norm.sum()}
    if model.cfg.n_experts:
        load, losses = model.routings.take()
        model.routings.step_load = load
        shares = load / load.mean(1, keepdim=True)
        sums |= {f"{name}_sum": loss for name, loss in losses.items()}
        sums |= {"load_max": shares.max(), "load_min": shares.min()}
    if z_loss:
        sums["z_loss_sum"] = squares.detach()
    return {**sums, "tokens": torch.tensor(float(ROWS * LENGTH))}


def check(overrides: list[str], steps: int) -> dict[str, object]:
    case, batch = Case(overrides), batch_of(0)
    for _ in range(2):  # what one step leaves behind must not reach the next
        case.model.zero_grad()
        calls = Calls()  # nothing is compiled below such a mode
        with nullcontext() if case.cfg.train.compile else calls:
            found = case.backward(batch)
    reference = plain(case.model, case.cfg)
    expected = backward_plain(reference, batch, case.cfg.train.z_loss)
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    errors = {
        name: error(whole(p.grad), gradients[name])
        for name, p in parameter_names(case.model).items()
    }
    return {
        "loss": error(found["loss_sum"], expected["loss_sum"]),
        "gradient": max(everywhere(max(errors.values()))),
        "worst": max(errors, key=lambda name: errors[name]),
        "calls": calls.counts,
        "ahead": calls.ahead,
        "curve": curve(case, reference, steps) if steps else None,
    }


def curve(case: Case, reference: Decoder, steps: int) -> float:
    """The largest relative error of the numbers of a step, over the updates."""
    models = (case.model, reference)
    optimizers = [build_optimizer(model, case.cfg.optimizer) for model in models]
    worst = 0.0
    for step in range(steps):
        for model in models:
            model.zero_grad()
        batch = batch_of(step)
        z_loss = case.cfg.train.z_loss
        pair = (case.backward(batch), backward_plain(reference, batch, z_loss))
        ours, theirs = (
            update_weights(optimizer, sums, ROWS * LENGTH, lr=1e-3, grad_clip=1.0)
            for optimizer, sums in zip(optimizers, pair, strict=True)
        )
        assert not ours.pop("rows_over", torch.zeros(())), "raise experts.spare"
        assert ours.keys() == theirs.keys()
        differ = [name for name in ours if not torch.equal(ours[name], theirs[name])]
        worst = max([worst, *(error(ours[name], theirs[name]) for name in differ)])
    return worst


def main() -> None:
    offload.SMALLEST_OFFLOAD = 0  # the tensors of a model that tests can run
    fp8.need_fp8 = lambda *_: None  # a CPU can, slowly
    if len(sys.argv) > 3:
        torch.compile = partial(torch.compile, backend=sys.argv[3])  # type: ignore[assignment]
    dist.init_process_group("gloo")
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    results = {}
    for name, words in json.loads(sys.argv[1]).items():
        print(name, file=sys.stderr)  # which one fails
        results[name] = check(words, steps)
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
