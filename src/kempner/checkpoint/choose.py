"""Choice of the checkpoint that a start loads: rank 0 decides, from files that do not grow with the
number of ranks."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kempner.checkpoint import commit, history
from kempner.checkpoint.format.plan import Table
from kempner.checkpoint.history import LATEST_LINK, Damaged, latest_checkpoint
from kempner.checkpoint.ownership import is_own
from kempner.jobs.system.files import name_of_step, write_atomic

SKIP = "skip.json"  # beside `latest`: samples that the run leaves out since it went back

Choice = tuple[Path, dict[str, Any], Table]


def choose_checkpoint(
    root: Path, about: dict[str, Any], log: Callable[[str], None], only: int | None = None
) -> Choice | None:
    """Return the first undamaged checkpoint, with its manifest and table; None if there are none at
    all. `about`: facts of this run, see Checkpointer. `only`: consider only this step's.

    A damaged one is set aside. Raises ConfigError if the checkpoint does not fit this run or this
    version, RuntimeError if all have been set aside.
    """
    for path in history.complete_checkpoints(root):
        if only is not None and path.name != name_of_step(only):
            continue
        # Import here: a new run does not get here and needs none of it.
        from kempner.checkpoint.fits import check_compatible
        from kempner.checkpoint.format.reader import read_table

        try:
            manifest = history.read_manifest(path)
            check_compatible(path, manifest, about)
            table = read_table(path, manifest)
        except Damaged as error:
            if not is_own(path):
                log(f"{path} is left alone: it is not a checkpoint of this run ({error})")
                continue
            set_damaged_aside(path, error, log)
            continue
        link = root / LATEST_LINK
        if only is None and os.path.lexists(link) and not latest_checkpoint(root):
            what = "is not a link"
            if link.is_symlink():
                what = f"names {link.readlink()}, which is not a checkpoint"
            log(f"WARNING: latest {what}: {path.name} is loaded")
        return path, with_skip(path, manifest), table
    aside = sorted(path.name for path in root.glob("step_*.corrupt*") if is_own(path))
    if only is None and aside:
        raise RuntimeError(
            f"no checkpoint in {root} can be loaded; set aside: {', '.join(aside)} (the log "
            "says why). Repair one and rename it back, or start over with another run.dir"
        )
    return None


def with_skip(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Add to the manifest the samples that the run leaves out since it went back
    to this checkpoint."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        record = json.loads((path.parent / SKIP).read_text())
        if record["checkpoint"] == path.name:
            return {**manifest, "skip": record["skip"]}
    return manifest


def set_damaged_aside(path: Path, error: Damaged, log: Callable[[str], None]) -> None:
    aside = commit.set_checkpoint_aside(path)
    log(f"WARNING: {path.name} is damaged ({error}); it is now {aside.name}")


def remember_skip(root: Path, step: int, skip: list[list[int]]) -> None:
    """Store `skip` for every later load of the checkpoint of this step: it goes
    into its manifest."""
    record = {"checkpoint": name_of_step(step), "skip": skip}
    write_atomic(root / SKIP, json.dumps(record))
