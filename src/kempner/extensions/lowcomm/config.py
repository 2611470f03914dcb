"""The [lowcomm] section."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kempner.config.option import ConfigError, option
from kempner.config.values import to_text

if TYPE_CHECKING:
    from kempner.train.sections import RunConfig

RAW = ("norms", "embeddings", "output")
REPLICA_SILENCE_S = 3.0


@dataclass(frozen=True)
class LowcommConfig:
    replicas: int | None = option(
        None,
        "copies of the model that train apart for `interval` steps and then average their changes; "
        "unset, like the next two: plain data parallelism",
        minimum=1,
    )
    gpus_per_replica: int | None = option(
        None, "in place of replicas: ranks that train one copy together", minimum=1
    )
    nodes_per_replica: int | None = option(
        None, "in place of replicas: whole nodes that train one copy together", minimum=1
    )
    mode: str = option(
        "mesh",
        "mesh: all replicas in one srun step; steps: an srun step for each, which may be lost and "
        "come back",
        choices=("mesh", "steps"),
    )
    min_replicas: int = option(
        1, "mode = steps: with fewer replicas the job is requeued", minimum=1
    )
    silence: float = option(
        REPLICA_SILENCE_S,
        "mode = steps: seconds without a sign of life after which a replica is lost; longer than "
        "the network is silent when a switch or a subnet manager fails over",
        minimum=1.0,
    )
    interval: int = option(
        30, "steps of a round (H), in which each weight is averaged once", minimum=1
    )
    lr: float = option(0.7, "learning rate of the outer step", minimum=0.0)
    momentum: float = option(
        0.9, "Nesterov momentum of the outer step; 0: none", minimum=0.0, maximum=0.9999
    )
    fragments: int = option(
        1,
        "parts of the model that are averaged one after another in a round (P); over 1: streaming",
        minimum=1,
    )
    tau: int = option(
        0, "steps during which a fragment is in flight while the replicas train on", minimum=0
    )
    alpha: float = option(
        0.0,
        "share of a replica's own weights when it takes over the average",
        minimum=0.0,
        maximum=1.0,
    )
    compress: str = option(
        "none",
        "how the changes of the weights are sent: fp32, in codes of `bits` bits (linear, "
        "statistical), or the largest `top_k` of them",
        choices=("none", "linear", "statistical", "top-k"),
    )
    bits: int = option(4, "of a code", choices=(8, 4, 2))
    scale: str = option("row", "what has its own range of codes", choices=("row", "tensor"))
    top_k: float = option(
        0.1, "compress = top-k: the fraction that is sent", minimum=1e-6, maximum=1.0
    )
    feedback: float = option(
        0.0,
        "decay of the compression's error, which is sent in the next round; 0: it is dropped",
        minimum=0.0,
        maximum=1.0,
    )
    raw: tuple[str, ...] = option(
        ("norms", "embeddings"), "parameters that are still sent in fp32", choices=RAW
    )

    @property
    def on(self) -> bool:
        return bool(self._sizes)

    @property
    def _sizes(self) -> dict[str, int]:
        names = ("replicas", "gpus_per_replica", "nodes_per_replica")
        return {name: size for name in names if (size := getattr(self, name)) is not None}

    def count(self, world_size: int, per_node: int) -> int:
        """Return the number of replicas in a world of nodes with `per_node` ranks each. Raises
        ConfigError, with the arithmetic, if they cannot divide it equally."""
        if not self.on:
            return 1
        (name, size), *_ = self._sizes.items()
        ranks = size * per_node if name == "nodes_per_replica" else size
        replicas, rest = (
            (size, world_size % size) if name == "replicas" else divmod(world_size, ranks)
        )
        of = f" x {per_node} ranks a node = {ranks}" if name == "nodes_per_replica" else ""
        if rest or not replicas:
            raise ConfigError(
                f"lowcomm.{name} = {size}{of}: must divide the world of {world_size} "
                f"rank{'s' * (world_size > 1)}; give "
                "another number, or start as many tasks"
            )
        if self.min_replicas > replicas:
            raise ConfigError(
                f"lowcomm.min_replicas = {self.min_replicas}: more than the {replicas} of the job; "
                "give at most that"
            )
        inner = world_size // replicas
        if inner > per_node and inner % per_node:
            raise ConfigError(
                f"lowcomm.{name} = {size}: the {inner} ranks of a replica are neither whole nodes "
                f"nor a part of one, with {per_node} ranks a node; give another number"
            )
        return replicas

    def in_step(self, world_size: int, per_node: int) -> int:
        """Return the number of replicas that share the ranks of this srun step."""
        if not self.on or self.mode == "mesh":
            return self.count(world_size, per_node)
        if "KEMPNER_DOOR" not in os.environ:
            raise ConfigError(
                "lowcomm.mode = steps: each replica needs its own srun step; submit "
                "scripts/slurm/replicas.sh, or give --lowcomm.mode=mesh"
            )
        return 1

    def problems(self) -> list[str]:
        if len(self._sizes) > 1:
            names = ", ".join(f"lowcomm.{name}" for name in self._sizes)
            return [f"{names}: each sets the number of replicas; give only one"]
        turn, rest = divmod(self.interval, self.fragments)
        if rest:
            return [
                f"lowcomm.interval = {self.interval}: must be a multiple of lowcomm.fragments = "
                f"{self.fragments}, such as {max(1, turn) * self.fragments}"
            ]
        if self.tau >= turn:
            return [
                f"lowcomm.tau = {self.tau}: a fragment must arrive before the next one leaves, "
                f"{turn} steps later (interval / fragments); give at most {turn - 1}"
            ]
        return self._idle()

    def _idle(self) -> list[str]:
        """List options that have no effect."""
        of_codes = ("bits", "scale", "top_k", "feedback", "raw") if self.compress == "none" else ()
        problems = [
            f"lowcomm.{name} = {to_text(value)}: nothing is compressed; give lowcomm.compress, or "
            f"leave {name} out"
            for name in of_codes
            if (value := getattr(self, name)) != getattr(LowcommConfig, name)
        ]
        if self.mode == "mesh" and self.min_replicas > 1:
            problems.append(
                f"lowcomm.min_replicas = {self.min_replicas}: with mode = mesh all replicas are "
                "always needed; give --lowcomm.mode=steps, or leave it out"
            )
        if self.mode == "mesh" and self.silence != REPLICA_SILENCE_S:
            problems.append(
                f"lowcomm.silence = {self.silence}: with mode = mesh nobody waits for signs of "
                "life; give --lowcomm.mode=steps, or leave it out"
            )
        if self.mode == "steps" and self.interval == 1:
            problems.append(
                "lowcomm.interval = 1: with mode = steps a round has at least 2 steps, so that a "
                "replica can join between two; give --lowcomm.interval=2, or mode = mesh"
            )
        return problems


def replica_problems(cfg: RunConfig) -> list[str]:
    """List options that cannot be combined with replicas."""
    lowcomm = cfg.of(LowcommConfig)
    if not lowcomm.on:
        return []
    rounds = lowcomm.interval
    steps = {
        "train.max_steps": cfg.train.max_steps,
        "eval.interval": cfg.eval.interval,
        "checkpoint.keep_every": cfg.checkpoint.keep_every,
    }
    problems = list[str]()
    if isinstance(cfg.checkpoint.interval, int):
        steps["checkpoint.interval"] = cfg.checkpoint.interval
    else:
        problems.append(
            f"checkpoint.interval = {cfg.checkpoint.interval}: replicas are saved at the end of a "
            f"round, whose time differs between them; give steps, a multiple of lowcomm.interval, "
            f"such as --checkpoint.interval={10 * rounds}"
        )
    problems += [
        f"{key} = {value}: must be a multiple of lowcomm.interval = {rounds}, because the "
        f"replicas share one model only at the end of a round; give --{key}="
        f"{max(1, value // rounds) * rounds}"
        for key, value in steps.items()
        if value % rounds
    ]
    if lowcomm.fragments > cfg.model.n_layers:
        problems.append(
            f"lowcomm.fragments = {lowcomm.fragments}: each has whole layers, and the model "
            f"has {cfg.model.n_layers}; give at most that"
        )
    others = {
        "optimizer.name = schedule_free, which averages weights itself": cfg.optimizer.name
        == "schedule_free",
        f"train.weights = {cfg.train.weights}": cfg.train.weights != "fp32",
        "model.router_bias, which moves beside the weights": cfg.model.router_bias,
        "checkpoint.powers_of_two, most of which are within a round": cfg.checkpoint.powers_of_two,
    }
    if cfg.freeze.stages:
        problems.append(
            "freeze.stages: not built for lowcomm, whose outer steps move all weights; leave one "
            "of the two out"
        )
    if cfg.distributed.pp > 1:
        problems.append(
            f"distributed.pp = {cfg.distributed.pp}: not built for replicas of lowcomm; leave that "
            "out, or give --distributed.pp=1"
        )
    return problems + [
        f"lowcomm: not built for {other}; leave one of the two out"
        for other, is_on in others.items()
        if is_on
    ]
