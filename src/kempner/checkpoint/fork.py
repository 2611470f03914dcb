"""The checkpoint that a fork starts from, named by `run.fork = "RUN[@STEP]"`. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kempner.checkpoint import commit, history, named
from kempner.checkpoint.choose import with_skip
from kempner.checkpoint.history import Damaged
from kempner.config.option import ConfigError

if TYPE_CHECKING:
    from kempner.checkpoint.checkpointer import Checkpointer
    from kempner.checkpoint.choose import Choice


def find_fork(source: str) -> Path:
    """Find the checkpoint RUN[@STEP]. Raises ConfigError if there is none."""
    try:
        return named.find_checkpoint(source)
    except ConfigError as error:
        raise ConfigError([f"run.fork = {problem}" for problem in error.problems]) from None


def hold_checkpoint(source: str, about: dict[str, Any], locks: contextlib.ExitStack) -> Choice:
    """Open the checkpoint RUN[@STEP] of another run, which may be training: its retention keeps the
    checkpoint while `locks` is open.

    Raises ConfigError if it is missing or does not fit, Damaged if it is damaged.
    """
    from kempner.checkpoint.fits import check_fork
    from kempner.checkpoint.format.reader import read_table

    path = find_fork(source)
    locks.enter_context(commit.reading_lock(path))
    # Retention may delete it before this line; then the manifest is missing.
    manifest = history.read_manifest(path)
    check_fork(source, path, manifest, about)
    return path, with_skip(path, manifest), read_table(path, manifest)


def load_fork(checkpointer: Checkpointer, source: str, names: Collection[str]) -> Choice:
    """Load the state of these providers from a checkpoint of another run, RUN[@STEP], on all ranks.
    Raises ConfigError if it cannot be used."""
    providers = {name: checkpointer.providers[name] for name in names}
    with contextlib.ExitStack() as locks:
        hold = partial(hold_checkpoint, source, checkpointer.about, locks)
        try:
            # Rank 0's lock serves all ranks: `locks` stays open until every one of them has read.
            choice = checkpointer.ranks.on_first(hold)
            checkpointer.ranks.on_all(partial(checkpointer.read, choice, providers))
        except Damaged as error:  # not ours to set aside
            raise not_whole(source, error) from None
    return choice


def fork_problems(source: str, run_dir: Path, root: Path) -> list[str]:
    """List problems of run.fork that the paths alone show, before anything is loaded.
    `run_dir`, `root`: directories of the fork and its checkpoints; once it has one, the other
    run is not needed."""
    run = named.split_name(source)[0]
    if run.resolve() == run_dir.resolve():
        return [
            f"run.fork = {source} is this run itself; give the fork its own directory, "
            "--run.dir=runs/NAME"
        ]
    try:
        # A fork that has begun continues from its own checkpoints, even without the other run.
        if own := history.latest_checkpoint(root):
            return _not_from(source, own)
        find_fork(source)
    except Damaged:  # the load handles it
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
    """Check that a run that continues from its own checkpoint is a fork of `source`."""
    run, step = named.split_name(source)
    lineage: list[dict[str, Any]] = history.read_manifest(own).get("lineage") or [{}]
    origin = lineage[0]
    if origin.get("dir") == str(run.resolve()) and step in (None, origin["step"]):
        return []
    is_fork = f"a fork of {origin['from']}" if origin else "not a fork"
    return [
        f"run.fork = {source}: {own} belongs to a run that is {is_fork}; leave out run.fork to "
        "continue that one, or give the new fork its own directory, --run.dir=runs/NAME"
    ]


def fork_generation(source: str, manifest: dict[str, Any], optimizer: str) -> list[dict[str, Any]]:
    """Return the lineage of a fork of this checkpoint, for its own manifests: its origin, then the
    origin of that run, and so on. `optimizer`: "keep" or "fresh", its state."""
    run, step = named.split_name(source)[0], manifest["step"]
    parent = {
        "from": f"{run}@{step}",
        "dir": str(run.resolve()),
        "id": manifest.get("run", ""),  # imported checkpoints have none
        "step": step,
        "samples": manifest.get("samples", 0),
        "tokens": manifest.get("tokens", 0),
        "optimizer": optimizer,
    }
    return [parent, *manifest.get("lineage", [])]
