"""Ownership of a directory of checkpoints and the names in it: a run renames and deletes only its
own. No torch.

The directory and each checkpoint have a mark (kempner.jobs.system.directories) with the run's id,
written before anything else. Checkpoints of versions without marks are recognised by their
manifests, and their unfinished ones by the names inside."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from kempner.config import toml
from kempner.config.option import ConfigError
from kempner.jobs.system.directories import (
    MARK_FILE,
    NOTHING_THERE,
    Kind,
    describe_directory,
    directory_kind,
    mark_directory,
    read_manifest_of,
    read_mark,
    read_run_id,
)
from kempner.jobs.system.files import step_of_name

IN_A_CHECKPOINT = re.compile(
    r"ranks-\d+|config\.toml|tensors\.json|manifest\.json|\.metadata|\..*\.new"
)
AROUND = re.compile(
    r"step_\d{8,}(\..*)?|latest|skip\.json|lock|\.lock\..*|\.reading|replicas|\..*\.new"
)


def claim_directory(root: Path, run: str) -> None:
    """Mark the directory as this run's. Raises ConfigError if it is something else,
    or another run's."""
    if problems := ownership_problems(root, run):
        raise ConfigError(problems)
    if read_mark(root) != (Kind.CHECKPOINTS, run):
        mark_directory(root, Kind.CHECKPOINTS, run)


def ownership_problems(root: Path, run: str) -> list[str]:
    """List what keeps this run from saving its checkpoints there; `run` is empty before
    it has begun."""
    if (owner := owner_of(root)) and owner != run:
        return [
            f"checkpoint.dir = {root} belongs to another run, {_name_of(root, owner)} "
            f"(id {owner}, this run has {f'id {run}' if run else 'none yet'}): give this run its "
            "own directory, --checkpoint.dir=DIR; or, if this is the same run in a new run.dir, "
            "write that id into RUN_DIR/id"
        ]
    in_a_run = root.name == "checkpoints" and directory_kind(root.parent) in (
        Kind.RUN,
        Kind.STARTED,
    )
    if in_a_run or directory_kind(root) in (*NOTHING_THERE, Kind.CHECKPOINTS) or _is_left(root):
        return []
    return [
        f"checkpoint.dir = {root} is {describe_directory(root)}; give an empty or a new "
        "directory, --checkpoint.dir=DIR"
    ]


def owner_of(root: Path) -> str:
    """Return the id of the run that owns the directory; "" if it has no owner."""
    kind, run = read_mark(root)
    if kind is not None or not root.is_dir():
        return run
    try:
        checkpoints = [path for path in root.iterdir() if step_of_name(path.name) is not None]
    except OSError:
        return ""
    runs = (read_manifest_of(path).get("run") for path in sorted(checkpoints, reverse=True))
    return next((str(run) for run in runs if run), "")


def is_own(path: Path) -> bool:
    """Return whether a checkpoint, or its remains, belongs to the run that owns its
    directory. Raises OSError."""
    if path.is_symlink() or not path.is_dir():
        return False
    kind, run = read_mark(path)
    if kind not in (None, Kind.CHECKPOINT):
        return False
    if kind is None and not (manifest := read_manifest_of(path)):
        return all(IN_A_CHECKPOINT.fullmatch(name) for name in os.listdir(path))
    owner = read_mark(path.parent)[1]
    run = run if kind else str(manifest.get("run") or "")
    # Versions without marks lack the id in one of the two.
    return run == owner or not (run and owner)


def remove_directory(path: Path) -> None:
    """Delete a directory that is_own(), its mark last, so that an interrupted deletion is still
    recognised. Files that cannot be deleted stay."""
    for entry in path.iterdir() if path.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != MARK_FILE:
            entry.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _is_left(root: Path) -> bool:
    """Return whether a version without marks was killed here in its first save."""
    try:
        names = os.listdir(root)
        steps = [root / name for name in names if name.startswith("step_")]
        return all(AROUND.fullmatch(name) for name in names) and all(map(is_own, steps))
    except OSError:
        return False


def _name_of(root: Path, owner: str) -> str:
    """Return the run's name for its user."""
    if read_run_id(root.parent) == owner:
        return str(root.parent)
    for path in sorted(root.iterdir(), reverse=True):
        try:
            return str(toml.loads((path / "config.toml").read_text())["run"]["dir"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return "one that has saved nothing yet"
