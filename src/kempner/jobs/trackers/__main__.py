"""Send new metrics of a run to TensorBoard or W&B.

    python -m kempner.jobs.trackers runs/7b                        # those of its configuration
    python -m kempner.jobs.trackers runs/7b tensorboard            # or any
    python -m kempner.jobs.trackers runs/7b wandb --follow         # and what comes, until Ctrl-C

A training run with [trackers] starts it automatically. Exit code 0 if all points were sent, 1 if
not, 2 on bad input.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from kempner.config import toml
from kempner.config.command_line import argument_parser
from kempner.config.option import ConfigError
from kempner.jobs.system.front_door import run_program
from kempner.jobs.system.process import module_command
from kempner.jobs.trackers.config import TRACKER_NAMES, missing_package
from kempner.jobs.trackers.follow import follow_run


def main(argv: list[str]) -> int:
    parser = argument_parser("python -m kempner.jobs.trackers", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("names", nargs="*", metavar="TRACKER", help=f"{' or '.join(TRACKER_NAMES)}")
    parser.add_argument(
        "--follow", action="store_true", help="go on with new points until standard input ends"
    )
    options = parser.parse_args(argv)
    problem = ""
    names = options.names
    if not (options.run / "config.toml").is_file():
        problem = f"{options.run}: no config.toml in it; name the run.dir of a training"
    elif not names and not (names := configured_trackers(options.run)):
        problem = (
            f"{options.run}/config.toml has no tracker; name one: {' or '.join(TRACKER_NAMES)}"
        )
    for name in names:
        wrong = f"{name}: no such tracker; give {' or '.join(TRACKER_NAMES)}"
        problem = problem or (missing_package(name) if name in TRACKER_NAMES else wrong)
    if problem:
        raise ConfigError(problem)
    # One process each, so that a server that does not answer blocks no other tracker.
    if len(names) > 1:
        again = [*module_command("kempner.jobs.trackers"), str(options.run)]
        flags = ["--follow"] if options.follow else []
        each = [subprocess.Popen([*again, name, *flags]) for name in names]
        return max(process.wait() for process in each)
    if options.follow and not sys.stdin.isatty():
        # Started by a training run: Slurm signals all processes, and this one ends last.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
    os.nice(10)  # training steps have priority
    return follow_run(names[0], options.run, options.follow)


def configured_trackers(run_dir: Path) -> list[str]:
    table = toml.loads((run_dir / "config.toml").read_text()).get("trackers", {})
    return [name for name in TRACKER_NAMES if table.get(name, False) not in (False, "off")]


if __name__ == "__main__":
    run_program(main, "trackers")
