"""Programs of this kit as Ray actors, each in its own process on the node and GPUs Ray assigns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kempner.jobs.ranks.port_range import ReservedPort

PLACEMENT_START_S = 60.0  # until Ray has room for all
PROGRAM_END_S = 130.0  # for a program to save and leave after SIGTERM


class RayProgram:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._port: ReservedPort | None = None

    def where(self, meets_here: bool) -> tuple[str, int]:
        """Return its node's address and, for rank 0, a port reserved for the rendezvous; else 0."""
        # Kept as long as the actor, so that nobody takes the port before rank 0 has bound it.
        self._port = ReservedPort() if meets_here else None
        return ray.util.get_node_ip_address(), self._port.port if self._port else 0

    def run(self, words: Sequence[str], variables: Mapping[str, str]) -> int:
        """Run Python with these command-line arguments; returns its exit code."""
        self._process = subprocess.Popen([sys.executable, *words], env={**os.environ, **variables})
        return self._process.wait()

    def end(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(PROGRAM_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


# Two calls at a time, so that end() is handled while run() waits.
_Actor: Any = ray.remote(max_concurrency=2)(RayProgram)


def place_programs(count: int, gpus: int) -> list[ray.actor.ActorHandle]:
    """Start `count` programs with `gpus` GPUs each, node by node, or spread evenly without GPUs."""
    bundle = {"CPU": 1.0, **({"GPU": float(gpus)} if gpus else {})}
    group = placement_group([bundle] * count, strategy="PACK" if gpus else "SPREAD")
    ray.get(group.ready(), timeout=PLACEMENT_START_S)
    return [
        _Actor.options(
            num_cpus=1,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, k),
        ).remote()
        for k in range(count)
    ]


def exit_code_of(run: Any) -> int | None:
    """Return the result of a run() future; None if its actor is lost, perhaps with its node."""
    try:
        return int(ray.get(run))
    except ray.exceptions.RayActorError:
        return None


def rank_variables_of(actors: Sequence[ray.actor.ActorHandle]) -> list[dict[str, str]]:
    """Return the variables of each rank, as torchrun sets them: its rank and the rendezvous."""
    places = ray.get([actor.where.remote(k == 0) for k, actor in enumerate(actors)])
    master, port = places[0]
    on_node: Counter[str] = Counter()
    environments = []
    for rank, (node, _) in enumerate(places):
        variables = {"RANK": rank, "LOCAL_RANK": on_node[node], "WORLD_SIZE": len(actors)}
        variables |= {"MASTER_ADDR": master, "MASTER_PORT": port}
        on_node[node] += 1
        environments.append({name: str(value) for name, value in variables.items()})
    return environments
