"""Train from a Ray program: one actor per rank, each running scripts/train.py in its own process.

    COMMAND="python scripts/ray_train.py configs/train/7b.toml --train.max_steps=50000" \\
        sbatch --nodes=4 scripts/slurm/ray.sh

All other arguments go to train.py. --workers: the number of ranks; by default one per GPU of the
cluster, or one per node without GPUs.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

import sys
from pathlib import Path

import ray

from kempner.config.command_line import argument_parser
from kempner.jobs.ray.programs import exit_code_of, place_programs, rank_variables_of
from kempner.jobs.system.front_door import run_program

TRAIN = Path(__file__).resolve().parent / "train.py"


def main(argv: list[str]) -> int:
    parser = argument_parser("ray_train.py", __doc__)
    parser.add_argument("--workers", type=int, help="ranks; default: one per GPU, else per node")
    options, arguments = parser.parse_known_args(argv)
    ray.init()
    gpus = int(ray.cluster_resources().get("GPU", 0))
    actors = place_programs(options.workers or gpus or len(ray.nodes()), gpus=min(gpus, 1))
    running = [
        actor.run.remote([str(TRAIN), *arguments], variables)
        for actor, variables in zip(actors, rank_variables_of(actors), strict=True)
    ]
    code = 0
    while running and not code:  # the first failure ends the run: the other ranks would wait for it
        done, running = ray.wait(running)
        ended = exit_code_of(done[0])
        if ended is None:
            print("ray_train: the actor of a rank is lost, perhaps with its node", file=sys.stderr)
        code = 1 if ended is None else ended
    return code


if __name__ == "__main__":
    run_program(main)
