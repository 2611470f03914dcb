"""Open the replicas from the [lowcomm] section."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.lowcomm.mesh import MeshExchange
from kempner.extensions.lowcomm.outer import Alone, ReplicaExchange
from kempner.extensions.lowcomm.replicas import LowcommReplicas
from kempner.extensions.lowcomm.steps import open_steps
from kempner.optim.optimizer import Optimizer
from kempner.parallel.build import parameter_names
from kempner.train.replicas import Waiting

if TYPE_CHECKING:
    from kempner.jobs.ranks.placement import World
    from kempner.train.sections import RunConfig


def open_lowcomm(
    cfg: RunConfig, world: World, model: nn.Module, optimizer: Optimizer, waiting: Waiting
) -> LowcommReplicas:
    """Open the replicas of a run, this one among them. `waiting`: the watchdog's patient()."""
    parameters = {name: p for name, p in parameter_names(model).items() if p.requires_grad}
    if cfg.of(LowcommConfig).mode == "steps":
        replicas: LowcommReplicas = open_steps(cfg, world, parameters)
    else:
        exchange: ReplicaExchange = Alone()
        if world.store is not None:
            exchange = MeshExchange(world, next(iter(parameters.values())).device)
        replicas = LowcommReplicas(cfg, world, parameters, exchange)
    replicas.waiting = waiting
    if replicas.outer.apart:
        # Weights that differ between replicas are not the run's: save and validate its anchors.
        optimizer.published = replicas.outer.published()
    return replicas
