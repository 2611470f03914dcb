"""Optimizers over sharded parameters.

An optimizer takes two tensors from the step, so that neither clipping nor a bad gradient costs the
host a wait: `grad_scale` (gradients are divided by it) and `found_inf` (1: leave everything as it
is). The fused kernels read both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kempner.model.decoder import Decoder
from kempner.optim.config import OptimizerConfig


def build_optimizer(model: nn.Module, cfg: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (arXiv:1711.05101) in two groups: matrices decay; norms, biases and embeddings do
    not. What is frozen has no part in it."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decay = [p for name, p in named if p.ndim >= 2 and "embed" not in name]
    rest = [p for name, p in named if p.ndim < 2 or "embed" in name]
    groups = [
        {"params": decay, "weight_decay": cfg.weight_decay, "lr_scale": 1.0},
        {"params": rest, "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    groups = [part for group in groups for part in by_mesh(group)]
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True)
    if isinstance(model, Decoder) and model.cfg.router_bias:
        optimizer.register_step_post_hook(
            lambda optimizer, *_: model.move_router_biases(unless=optimizer.found_inf)
        )
    return optimizer


def by_mesh(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The group in parts whose parameters are on one mesh each: a fused kernel takes no others."""
    parts: dict[Any, list[nn.Parameter]] = {}
    for p in group["params"]:
        parts.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return [{**group, "params": part} for part in parts.values()]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """`lr`: of this step, for all groups alike; a group with an "lr_scale" has that multiple."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
