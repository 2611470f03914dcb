"""The place of this process among the ranks: from an srun step, from torchrun's variables, or as a
single process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kempner.config.option import ConfigError
from kempner.jobs import this_job

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """The place of this process among those of the run; `source` is slurm, torchrun or single."""

    rank: int
    local_rank: int
    size: int
    source: str
    per_node: int = 1  # ranks on each node
    # With replicas (lowcomm/), the fields above describe this process's replica.
    replica: int = 0
    replicas: int = 1
    store: Any = field(default=None, compare=False)  # of all replicas; None if only one
    meeting: Any = field(default=None, compare=False)  # store of all ranks of the step; None: alone

    @property
    def leads(self) -> bool:
        """True if this process speaks for the run: the first rank of the first replica."""
        return self.rank == 0 and self.replica == 0

    def split(self, replicas: int, store: dist.Store) -> World:
        """Return the world of this process's replica. Replicas are blocks of ranks."""
        size = self.size // replicas
        replica, rank = divmod(self.rank, size)
        return replace(
            self,
            rank=rank,
            size=size,
            per_node=min(self.per_node, size),
            replica=replica,
            replicas=replicas,
            store=store,
        )


def discover_world(env: Mapping[str, str] = os.environ) -> World:
    """Read the ranks from the environment; torchrun's variables win over SLURM's.

    SLURM's count only inside an srun step, which alone has SLURM_STEP_NUM_TASKS. A batch or salloc
    shell already has SLURM_NTASKS and SLURM_PROCID, and a plain `python` there would wait for ranks
    that do not exist.
    """
    in_step = "SLURM_STEP_NUM_TASKS" in env
    # Some launchers set only what torch needs; without this, each rank would train alone.
    of_several = not in_step and "RANK" in env and env.get("WORLD_SIZE", "1") != "1"
    if of_several or all(name in env for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        names, source = ("RANK", "LOCAL_RANK", "WORLD_SIZE"), "torchrun"
        per_node = env.get("LOCAL_WORLD_SIZE")
    elif in_step:
        names, source = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"), "slurm"
        per_node = str(this_job.tasks_per_node(env) or 1)
    else:
        return _of_step(World(0, 0, 1, "single"), env)
    try:
        rank, local_rank, size = (int(env[name]) for name in names)
        if not 0 <= rank < size:
            raise ValueError
        return _of_step(World(rank, local_rank, size, source, int(per_node or 1)), env)
    except (KeyError, ValueError):
        settings = ", ".join(f"{name}={env.get(name, '(unset)')}" for name in names)
        raise ConfigError(
            f"{source} environment: {settings}: must be integers, the first from 0 and below the "
            "last; start the ranks by srun or torchrun, which set them, or unset them all for one "
            "process"
        ) from None


def _of_step(world: World, env: Mapping[str, str]) -> World:
    """Add the replica that the batch script names, if each replica has its own srun step."""
    replica, replicas = env.get("KEMPNER_REPLICA", "0"), env.get("KEMPNER_REPLICAS", "1")
    return replace(world, replica=int(replica), replicas=int(replicas))
