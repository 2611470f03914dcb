"""Building of a model's optimizer from the [optimizer] section."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from kempner.config.option import ConfigError
from kempner.model.decoder import Decoder
from kempner.optim.adamw import AdamW
from kempner.optim.config import GroupConfig, OptimizerConfig, first_match
from kempner.optim.optimizer import Optimizer
from kempner.optim.rule import ParameterGroup, Rule
from kempner.parallel.build import parameter_names


def rule_named(name: str) -> Rule:
    """Return the rule of optimizer.name."""
    if name == "muon":
        from kempner.optim.muon import Muon

        return Muon()
    if name == "lion":
        from kempner.optim.lion import Lion

        return Lion()
    if name == "schedule_free":
        from kempner.optim.schedule_free import ScheduleFree

        return ScheduleFree()
    assert name == "adamw", f"{name} of STATE has no rule here"
    return AdamW()


def build_optimizer(model: nn.Module, cfg: OptimizerConfig) -> Optimizer:
    """Build the run's optimizer. Matrices decay; norms, biases and embeddings do not. Muon takes
    the matrices of the blocks, and AdamW the rest. Frozen parameters are left out.

    Raises ConfigError if an entry of optimizer.groups is the first match of no parameter.
    """
    parameters = {name: p for name, p in parameter_names(model).items() if p.requires_grad}
    groups: dict[tuple[str, bool, int | None], ParameterGroup] = {}
    for name, p in parameters.items():
        matrix = p.ndim >= 2 and "embed" not in name
        rule = "adamw" if cfg.name == "muon" and (not matrix or "output" in name) else cfg.name
        number = first_match(cfg.groups, name)
        own = GroupConfig(names=()) if number is None else cfg.groups[number]
        decay = cfg.weight_decay if matrix else 0.0
        group = groups.setdefault(
            (rule, matrix, number),
            {
                "params": [],
                "rule": rule_named(rule),
                "lr": cfg.lr,
                "lr_scale": own.lr_scale,
                "weight_decay": decay if own.weight_decay is None else own.weight_decay,
                "betas": cfg.betas,
                "eps": cfg.eps,
                "momentum": cfg.momentum,
                "nesterov": cfg.nesterov,
                "scale": cfg.muon_scale,
            },
        )
        group["params"].append(p)
    if unused := cfg.unused_groups([*parameters, *getattr(model, "elsewhere", ())]):
        raise ConfigError(unused)
    ordered = [groups[key] for key in sorted(groups, key=lambda key: not key[1])]
    averages = {"fp32": torch.float32, "bf16": torch.bfloat16}[cfg.moments]
    optimizer = Optimizer(ordered, averages, cfg.cpu_offload)
    if isinstance(model, Decoder) and model.cfg.router_bias:
        optimizer.register_step_post_hook(
            lambda optimizer, *_: model.move_router_biases(unless=optimizer.found_inf)
        )
    if isinstance(model, Decoder) and model.cfg.n_experts and model.routings.buffers is not None:
        # With the update: resilience.replay_every may compute a step several times, which must all
        # send rows in the same way.
        optimizer.register_step_post_hook(lambda *_: model.routings.buffers.after_step())
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set this step's rate `lr` in all groups, times each group's "lr_scale"."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


@contextlib.contextmanager
def published_weights(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Give the model the weights to evaluate, which differ from the trained ones for some
    optimizers; restore the trained ones bitwise at exit."""
    averaging = optimizer.averaging()
    trained = {p: p.detach().clone() for p in averaging}
    with torch.no_grad():
        for p, average in averaging.items():
            p.copy_(average())
    yield
    with torch.no_grad():
        for p, weights in trained.items():
            p.copy_(weights)
    if not trained:
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        # FSDP keeps the root's gathered weights after a forward pass until the next backward
        # pass: without this the next forward would use the evaluated ones.
        if isinstance(module, FSDPModule):
            module.reshard()
