"""Low-communication training as an extension of the trainer: its section and its replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from kempner.extensions.lowcomm import config
from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.jobs.trackers.config import TrackersConfig
from kempner.train.extensions import Extension

if TYPE_CHECKING:
    from kempner.jobs.ranks.placement import World
    from kempner.model.decoder import Decoder
    from kempner.optim.optimizer import Optimizer
    from kempner.train.replicas import Replicas, Waiting
    from kempner.train.sections import RunConfig


class LowcommExtension(Extension):
    sections: ClassVar = {"lowcomm": LowcommConfig}

    def fills_memory(self, cfg: RunConfig) -> bool:
        return cfg.of(LowcommConfig).on

    def problems(self, cfg: RunConfig) -> list[str]:
        return config.replica_problems(cfg)

    def warnings(self, cfg: RunConfig) -> list[str]:
        off = (
            "[lowcomm] has no effect: it has no replicas; give --lowcomm.replicas=N, "
            "gpus_per_replica or nodes_per_replica"
        )
        return [] if cfg.of(LowcommConfig).on else [off]

    def count_replicas(self, cfg: RunConfig, world_size: int, per_node: int) -> int:
        return cfg.of(LowcommConfig).count(world_size, per_node)

    def replicas_in_step(self, cfg: RunConfig, world_size: int, per_node: int) -> int:
        return cfg.of(LowcommConfig).in_step(world_size, per_node)

    def of_replica(self, cfg: RunConfig, number: int) -> RunConfig:
        """Return a replica's configuration: the first replica is the run itself; another has its
        run directory inside the run's."""
        if number == 0:
            return cfg
        checkpoints = cfg.checkpoint.dir and f"{cfg.checkpoint.dir}/replicas/{number}"
        return replace(
            cfg,
            run=replace(cfg.run, dir=f"{cfg.run.dir}/replicas/{number}"),
            checkpoint=replace(cfg.checkpoint, dir=checkpoints),
            trackers=TrackersConfig(),
        )

    def replicas(
        self,
        cfg: RunConfig,
        world: World,
        model: Decoder,
        optimizer: Optimizer,
        waiting: Waiting,
    ) -> Replicas | None:
        if not cfg.of(LowcommConfig).on:
            return None
        from kempner.extensions.lowcomm.opening import open_lowcomm

        return open_lowcomm(cfg, world, model, optimizer, waiting)
