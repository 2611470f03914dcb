"""Open the replicas from the [lowcomm] section."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch import nn

from kempner.lowcomm.mesh import MeshExchange
from kempner.lowcomm.outer import Alone, Exchange
from kempner.lowcomm.replicas import LowcommReplicas, Replicas, Waiting
from kempner.lowcomm.steps import open_steps
from kempner.optim.build import build_optimizer
from kempner.optim.optimizer import Optimizer
from kempner.parallel.build import parameter_names
from kempner.resilience.spikes import Spikes

if TYPE_CHECKING:
    from kempner.process_group import World
    from kempner.run import RunConfig


def open_replicas(
    cfg: RunConfig, world: World, model: nn.Module, waiting: Waiting = nullcontext
) -> tuple[Optimizer, Replicas]:
    """Return this replica's optimizer, and its link to the other replicas. `waiting`: the
    watchdog's patient()."""
    optimizer = build_optimizer(model, cfg.optimizer)
    if cfg.resilience.spike_sigma is not None:
        optimizer.spikes = Spikes(cfg.resilience.spike_sigma, cfg.resilience.spike_window)
    if not cfg.lowcomm.on:
        return optimizer, Replicas()
    named = {name: p for name, p in parameter_names(model).items() if p.requires_grad}
    if cfg.lowcomm.mode == "steps":
        replicas: LowcommReplicas = open_steps(cfg, world, named)
    else:
        exchange: Exchange = Alone()
        if world.store is not None:
            exchange = MeshExchange(world, next(iter(named.values())).device)
        replicas = LowcommReplicas(cfg, world, named, exchange)
    replicas.waiting = waiting
    if replicas.outer.apart:
        optimizer.published = replicas.outer.published()
    return optimizer, replicas
