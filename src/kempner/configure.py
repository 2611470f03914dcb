"""The command line -> a configuration that is checked against its files and its world."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kempner.config.command_line import help_text, parse_command
from kempner.config.loading import load, to_toml
from kempner.config.option import ConfigError
from kempner.parallel import mesh
from kempner.process_group import discover
from kempner.progress import open_data
from kempner.resilience.requests import StopRequests
from kempner.run import RunConfig, micro_batch

if TYPE_CHECKING:
    pass

USAGE = """\
python scripts/train.py CONFIG.toml [MORE.toml ...] [--section.key=value ...]

  --help                          this list
  --check                         print the resolved configuration as TOML and exit
  --nodes N --gpus-per-node G     with --check: does it fit N hosts with G processes each?
"""
RANK_0_SPEAKS_S = 5.0
FLAGS = {"help": bool, "check": bool, "nodes": int, "gpus-per-node": int}


def configure(argv: Sequence[str], stop: StopRequests) -> RunConfig:
    """The configuration of a command line, checked against the files that it names.

    Exits here for --help and --check (0), and for bad input (2, every problem on a line of its
    own).
    """
    command = parse_command(argv, FLAGS)
    if command.flags["help"]:
        print(help_text(RunConfig, USAGE))
        sys.exit(0)
    if not argv:
        print(f"usage: {USAGE}", file=sys.stderr)
        sys.exit(2)
    try:
        cfg = with_run_dir(
            load(RunConfig, command.files, command.overrides, command.problems), command.files
        )
        nodes, per_node = command.flags["nodes"], command.flags["gpus-per-node"]
        problems = check_inputs(cfg, 0 if command.flags["check"] else discover().rank)
        if nodes is not None or per_node is not None:
            problems += check_world(cfg, (nodes or 1) * (per_node or 1))
        elif not command.flags["check"]:
            problems += check_world(cfg, discover().size)
        if problems:
            raise ConfigError(problems)
    except ConfigError as error:
        reject(error, stop)
    if command.flags["check"]:
        print(to_toml(cfg), end="")
        sys.exit(0)
    return cfg


def reject(error: ConfigError, stop: StopRequests) -> NoReturn:
    """Bad input: every problem on standard error, exit code 2.

    Rank 0 speaks for all; the others leave later: srun or torchrun ends them as soon as rank 0 has
    left, and one that is not told to go has a problem of its own.
    """
    with contextlib.suppress(ConfigError):
        if discover().rank:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(RANK_0_SPEAKS_S)
            if stop.wants_to_leave():  # told before that
                sys.exit(2)
    count = len(error.problems)
    print(f"error: {count} problem{'s' * (count > 1)} with the input", file=sys.stderr)
    for problem in error.problems:
        print(f"  - {problem}", file=sys.stderr)
    sys.exit(2)


def with_run_dir(cfg: RunConfig, files: Sequence[str]) -> RunConfig:
    """Without a run.dir of its own a run is named after its first file."""
    name = Path(files[0]).stem if files else "default"
    return replace(cfg, run=replace(cfg.run, dir=cfg.run.dir or f"runs/{name}"))


def check_world(cfg: RunConfig, world_size: int) -> list[str]:
    """Do the mesh and the batch fit so many ranks?"""
    found = []
    for check in (
        lambda: mesh.sizes(cfg.distributed, world_size),
        lambda: micro_batch(cfg.train, world_size),
    ):
        try:
            check()
        except ConfigError as error:
            found += error.problems
    return found


def check_inputs(cfg: RunConfig, rank: int) -> list[str]:
    """Can the files be used: token shards readable and of this vocabulary, run directory writable?
    Creates nothing."""
    found = []
    try:
        open_data(cfg, rank)
    except ConfigError as error:
        found += error.problems
    for key, path in (("run.dir", cfg.run.dir), ("checkpoint.dir", cfg.checkpoint.dir)):
        if not path:
            continue  # in the run directory
        # os.path.exists: a directory that may not be entered hides what is in it, without an error
        there = next(p for p in (Path(path), *Path(path).absolute().parents) if os.path.exists(p))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            what = "not writable" if there.is_dir() else "not a directory"
            found.append(f"{key} = {path}: {there} is {what}; give another --{key}")
    return found
