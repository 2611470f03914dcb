"""A run's checkpoints: the order in which to try them, and their manifests. commit.py writes
them. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from kempner.config.option import ConfigError
from kempner.jobs.system.files import step_of_name

CHECKPOINT_FORMAT = 2
MANIFEST = "manifest.json"
LATEST_LINK = "latest"


class Damaged(ValueError):
    """Proof that a checkpoint is damaged: a file is missing or short, or its sum is wrong."""


def latest_name(root: Path) -> str:
    """Return the name that `latest` links to, which may not exist; "" if it links nowhere."""
    with contextlib.suppress(OSError, RuntimeError):  # a link to itself
        return (root / LATEST_LINK).resolve().name
    return ""


def latest_checkpoint(root: Path) -> Path | None:
    """Return the directory in `root` that `latest` names, None if there is no link
    or it dangles."""
    target = root / latest_name(root)
    return (
        target if step_of_name(target.name) is not None and (target / MANIFEST).is_file() else None
    )


class _Commit(NamedTuple):
    """A manifest's place in the history. Without a readable manifest, time is None."""

    step: int
    parent: int  # the step that was loaded or saved before this one; -1: none
    time: float | None

    def may_follow(self, other: _Commit) -> bool:
        """Return whether `other` can be an ancestor of this one."""
        # A younger checkpoint of an earlier step was saved after the run went back past this one.
        older = self.time is None or other.time is None or other.time < self.time
        # Not only the parent, which retention may have deleted.
        return other.step <= self.parent and older


def run_branches(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the ancestors of `latest`, newest first, and the checkpoints of branches that the run
    has left by going back.

    A younger checkpoint of an abandoned branch holds the state that the run went back to avoid.
    Raises OSError if the directory cannot be read: a run that saw no checkpoints would begin anew.
    """
    commits = {path: _read_commit(path, step) for path, step in _steps_in(root)}
    newest_first = sorted(
        commits, key=lambda p: (commits[p].time or 0.0, commits[p].step), reverse=True
    )
    head = latest_checkpoint(root)
    latest_step = step_of_name(latest_name(root))
    if head is None and latest_step is None and newest_first:
        # Without any `latest`, take the newest.
        head = newest_first[0]
    at = commits[head] if head else _Commit(0, latest_step or 0, None)
    branch = [head] if head else []
    # One walk: the ancestors of an ancestor have lower steps than itself.
    for path in sorted(commits, key=lambda path: commits[path].step, reverse=True):
        if path != head and at.may_follow(commits[path]):
            branch.append(path)
            at = commits[path]
    on_branch = set(branch)
    return branch, [path for path in newest_first if path not in on_branch]


def _steps_in(root: Path) -> list[tuple[Path, int]]:
    """List the checkpoints in a directory, which may be missing, with their steps. Raises OSError:
    Path.is_dir() of Python 3.14 would hide every error."""
    try:
        with os.scandir(root) as entries:
            return [
                (root / entry.name, step)
                for entry in entries
                if (step := step_of_name(entry.name)) is not None and entry.is_dir()
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []


def complete_checkpoints(root: Path) -> list[Path]:
    """List the checkpoints in the order to try them: `latest`, its ancestors, the others."""
    branch, other_branches = run_branches(root)
    return branch + other_branches


def has_checkpoint(root: Path) -> bool:
    """Return whether the run has a checkpoint. An unreadable directory counts as empty; the input
    check reports it."""
    with contextlib.suppress(OSError):
        return bool(complete_checkpoints(root))
    return False


def commit_time(path: Path) -> float:
    """Return the commit time of a checkpoint; 0 if its manifest lacks it."""
    return _read_commit(path, 0).time or 0.0


def _read_commit(path: Path, step: int) -> _Commit:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        return _Commit(step, int(manifest["parent"]), float(manifest["time"]))
    except (OSError, ValueError, KeyError, TypeError):
        # It keeps its place by its step: only a load proves that it is damaged.
        return _Commit(step, step - 1, None)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest. Raises Damaged if it is missing or torn, ConfigError if it
    has another format."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        version = manifest["format"]
        if not isinstance(version, int):
            raise ValueError("its format is not a number")
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path / MANIFEST}: {type(error).__name__}: {error}") from None
    if version != CHECKPOINT_FORMAT:
        other = "an older" if version < CHECKPOINT_FORMAT else "a newer"
        raise ConfigError(
            f"{path} was written by {other} version of this program: it has format {version}, this "
            f"version reads format {CHECKPOINT_FORMAT}. Continue it with that version, or start "
            "over in another directory: --run.dir=runs/NAME"
        )
    return manifest  # type: ignore[no-any-return]


def read_listed(path: Path, manifest: dict[str, Any], name: str) -> bytes:
    """Read one of the small files that the manifest lists. Raises Damaged."""
    try:
        content, expected = (path / name).read_bytes(), manifest["files"][name]
        whole = expected == {"bytes": len(content), "crc32": zlib.crc32(content)}
    except (FileNotFoundError, NotADirectoryError, KeyError, TypeError) as error:
        raise Damaged(f"{path / name}: {type(error).__name__}: {error}") from None
    if not whole:
        raise Damaged(f"{path / name}: size or CRC-32 differ from those in {MANIFEST}")
    return content
