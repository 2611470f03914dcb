"""Train from a Ray program: one actor per rank, each running scripts/train.py in its own process.

    COMMAND="python scripts/ray_train.py configs/train/7b.toml --train.max_steps=500" \\
        sbatch --nodes=4 scripts/slurm/ray.sh

All other arguments go to train.py. --workers: the number of ranks; by default one for each GPU of
the cluster, or one for each node if there are no GPUs.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

TRAIN = Path(__file__).resolve().parent / "train.py"


@ray.remote
class Rank:
    """One rank, on a node and a GPU that Ray has assigned."""

    def where(self) -> tuple[str, int]:
        """Its node's address, and a port that is free there: the rendezvous, if it is rank 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def train(self, variables: dict[str, str], arguments: list[str]) -> int:
        """Run train.py, which takes its rank from these variables, as from torchrun's; returns
        its exit code."""
        command = [sys.executable, str(TRAIN), *arguments]
        return subprocess.run(command, env={**os.environ, **variables}).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, help="ranks; default: one per GPU, else per node")
    given, arguments = parser.parse_known_args()
    ray.init()
    gpus = int(ray.cluster_resources().get("GPU", 0))
    workers = given.workers or gpus or len(ray.nodes())
    bundle = {"CPU": 1, "GPU": 1} if gpus else {"CPU": 1}
    group = placement_group([bundle] * workers, strategy="PACK" if gpus else "SPREAD")
    ray.get(group.ready(), timeout=60)
    ranks = [
        Rank.options(
            num_cpus=1,
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, k),
        ).remote()
        for k in range(workers)
    ]
    places = ray.get([rank.where.remote() for rank in ranks])
    master, port = places[0]
    on_node: Counter[str] = Counter()
    running = []
    for k, (rank, (node, _)) in enumerate(zip(ranks, places, strict=True)):
        variables = {"RANK": k, "LOCAL_RANK": on_node[node], "WORLD_SIZE": workers}
        variables |= {"MASTER_ADDR": master, "MASTER_PORT": port}
        on_node[node] += 1
        running.append(rank.train.remote({n: str(v) for n, v in variables.items()}, arguments))
    code = 0
    while running and not code:  # the first failure ends the run: the other ranks would wait for it
        done, running = ray.wait(running)
        code = ray.get(done[0])
    return code


if __name__ == "__main__":
    sys.exit(main())
