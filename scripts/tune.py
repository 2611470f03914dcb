"""Find the fastest settings of a configuration on this machine, by measurement.

    python scripts/tune.py configs/train/1b.toml --minutes 10
    sbatch --nodes=2 scripts/slurm/multinode.sh configs/train/7b.toml --tune --minutes 20

Tries micro-batches, compilation, meshes, what FSDP keeps, recomputation, attention kernels and loss
chunks, each in separate processes with fake data: many briefly, then the best for longer. Prints a
table and the command that uses the best settings, which are written to --out (tuned.toml in the run
directory, runs/tune-NAME). The same command continues where the last one ended.

  --minutes N      total time of all starts (10); Ctrl-C ends it with the best so far
  --out FILE       the file to write: give it to train.py after the configuration
  --allow fp8      also try fp8, which changes the numbers beyond rounding
  --record         add the figure to configs/verified, if it is faster than the one there
  --check          check and print the configuration, for --nodes N --gpus-per-node G

docs/extensions/tuning.md says what is tried, and how. Exit code 1: nothing ran; 2: bad input.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

from kempner.config.command_line import parse_command
from kempner.config.loading import to_toml
from kempner.config.option import ConfigError
from kempner.extensions.tune.front import TUNE_FLAGS, configure_tune, tune
from kempner.jobs.system.front_door import run_program
from kempner.train.configure import reject_input
from kempner.train.resilience.requests import StopRequests


def main(argv: list[str]) -> int:
    command = parse_command(argv, TUNE_FLAGS)
    if command.flags["help"] or not argv:
        print(__doc__)
        return 0 if argv else 2
    stop = StopRequests()
    try:
        cfg, options = configure_tune(command)
        if command.flags["check"]:
            print(to_toml(cfg), end="")
            return 0
        return tune(command, cfg, options, stop)
    except ConfigError as error:
        reject_input(error, stop)


if __name__ == "__main__":
    run_program(main)
