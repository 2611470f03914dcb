"""The checkpoint that a fork starts from, named by `run.fork = "RUN[@STEP]"`. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kempner.checkpoint import history, named
from kempner.checkpoint.history import Damaged
from kempner.config.option import ConfigError


def find_fork(source: str) -> Path:
    """Find the checkpoint RUN[@STEP]. Raises ConfigError if there is none."""
    try:
        return named.find_checkpoint(source)
    except ConfigError as error:
        raise ConfigError([f"run.fork = {problem}" for problem in error.problems]) from None


def fork_problems(source: str, run_dir: Path, root: Path) -> list[str]:
    """List problems of run.fork that the paths alone show, before anything is loaded. `run_dir`,
    `root`: of the fork and of its checkpoints; once it has one, the other run is not needed."""
    run = named.split_name(source)[0]
    if run.resolve() == run_dir.resolve():
        return [
            f"run.fork = {source} is this run itself; give the fork a directory of its own, "
            "--run.dir=runs/NAME"
        ]
    try:
        if own := history.latest_checkpoint(root):
            return _not_from(source, own)
        find_fork(source)
    except Damaged:  # the load sees to it
        return []
    except ConfigError as error:
        return error.problems
    return []


def not_whole(source: str, error: Damaged) -> ConfigError:
    return ConfigError(
        f"run.fork = {source}: this checkpoint is damaged or has just been deleted: {error}; name "
        "another one, --run.fork=RUN@STEP"
    )


def _not_from(source: str, own: Path) -> list[str]:
    """Check that a run with a checkpoint, which continues from that, is a fork of `source`."""
    run, step = named.split_name(source)
    lineage: list[dict[str, Any]] = history.read_manifest(own).get("lineage") or [{}]
    origin = lineage[0]
    if origin.get("dir") == str(run.resolve()) and step in (None, origin["step"]):
        return []
    is_fork = f"a fork of {origin['from']}" if origin else "not a fork"
    return [
        f"run.fork = {source}: {own} is of a run that is {is_fork}; leave out run.fork to continue "
        "that one, or give the new fork a directory of its own, --run.dir=runs/NAME"
    ]


def fork_generation(source: str, manifest: dict[str, Any], optimizer: str) -> list[dict[str, Any]]:
    """Return the lineage of a fork of this checkpoint, for its own manifests: its origin, then the
    origin of that run, and so on. `optimizer`: "keep" or "fresh", its state."""
    run, step = named.split_name(source)[0], manifest["step"]
    parent = {
        "from": f"{run}@{step}",
        "dir": str(run.resolve()),
        "id": manifest.get("run", ""),  # an imported one has none
        "step": step,
        "samples": manifest.get("samples", 0),
        "tokens": manifest.get("tokens", 0),
        "optimizer": optimizer,
    }
    return [parent, *manifest.get("lineage", [])]
