"""Kinds of paths, recognized by the marks that programs of this kit and others leave: a program
writes, renames and deletes only in a directory of its own kind, and messages can name the kind. No
torch.

A run has `id`, a data set dataset.json, a model in Hugging Face format config.json. Directories
without such a file get `.kempner` before anything else is written to them, which also marks the
leftovers of a killed program.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kempner.config.option import ConfigError
from kempner.jobs.system.files import step_of_name, write_atomic

MARK_FILE = ".kempner"  # one JSON object: {"is": the name of a Kind, "run": the id of a run, or ""}
RUN_ID = re.compile(r"[0-9a-f]{32}\n?")
SHOWN_FILES = 3  # names of other files in a message

# Files that a job leaves in a run directory before the run has its id, and files that the user may
# have put there: sbatch's output and configurations (config.toml is the run's own).
BEFORE_THE_RUN = re.compile(
    r"(attempts|chain|gpu|metrics|replicas)\.jsonl|(status|bench|recompute)\.json|lock|report\.html"
    r"|STOP|SAVE|PROFILE|REPLAY|README(\.\w+)?|attempts|logs|code|eval|rl|tune|replicas|notified|\d+"
    r"|\.(reserve|lock\.|rendezvous-|ask-|door|environment-|size-|unfit-).*"
    r"|\..*\.new|.*\.(out|err|log)|(?!config\.toml$).*\.toml"
)
# Other files that the user may have put there: no program of this kit writes such names in a run.
# More than LISTED_FILES of them make it a directory of other files.
NOTE = re.compile(r".*\.(md|txt|ya?ml|sh|sbatch)")
LISTED_FILES = 8
# Entries of file systems, desktops and git, which do not count as content.
NOBODYS = re.compile(
    r"\.nfs\w+|\.fuse_hidden\w+|\.snapshots?|lost\+found|\.git(keep|ignore)|\.DS_Store"
)
IN_A_SWEEP = {"journal.jsonl", "points", "arrays", "logs", ".lock", "table.csv", "table.png"}
OBJECTS = ("status.json", "bench.json", "recompute.json", "lock")  # each holds one JSON object
LINES = ("attempts.jsonl", "metrics.jsonl", "gpu.jsonl")  # empty if attempts.jsonl has no event


class Kind(enum.Enum):
    """Kind of a path; the value completes "PATH is ..."."""

    MISSING = "not there"
    DANGLING = "a broken link"
    UNREADABLE = "not readable"
    FILE = "a file"
    EMPTY = "an empty directory"
    STARTED = "a run that has not begun"  # a job was there, but no step
    NOTES = "a directory of notes"  # and perhaps of a run that has not begun
    RUN = "a run"
    PROGRAM = "a run of run.sh"
    SWEEP = "a sweep"
    CHECKPOINTS = "a directory of checkpoints"
    CHECKPOINT = "a checkpoint"
    DATA = "a data set"
    MODEL = "a model"
    EXPORT = "an unfinished export of a model"
    IMPORT = "an unfinished import of a model"
    ACTIVATIONS = "activations of a model"
    STAGE = "a job's copies on a disk of its node"
    OTHER = "a directory of other files"


NOTHING_THERE = (Kind.MISSING, Kind.EMPTY)


def directory_kind(path: str | Path) -> Kind:
    """Return the kind of a path, following links. Raises nothing."""
    path = Path(path).expanduser()
    try:
        if not path.exists():
            return Kind.DANGLING if path.is_symlink() else Kind.MISSING
        if not path.is_dir():
            return Kind.FILE
        names = {name for name in os.listdir(path) if not NOBODYS.fullmatch(name)}
        return _kind_of_directory(path, names) if names else Kind.EMPTY
    except OSError:
        return Kind.UNREADABLE


def describe_directory(path: str | Path) -> str:
    """Describe the path in words that complete "PATH is ..."."""
    path, kind = Path(path).expanduser(), directory_kind(path)
    if kind is Kind.DANGLING:
        return f"a broken link to {os.readlink(path)}"
    if kind in (Kind.OTHER, Kind.NOTES):
        names = sorted(os.listdir(path), key=lambda name: (name.startswith("."), name))
        more = ", ..." if len(names) > SHOWN_FILES else ""
        return f"{Kind.OTHER.value} ({', '.join(names[:SHOWN_FILES])}{more})"
    return str(kind.value)


def refuse_others(path: str | Path, option: str, kinds: Collection[Kind], fix: str) -> None:
    """Raise ConfigError with the option, the kind of `path` and the fix, unless `path` is one of
    these kinds or nothing yet."""
    name = os.fspath(path)
    if name.encode(errors="ignore") != os.fsencode(name):
        text = "is not UTF-8 text, or LC_ALL and PYTHONUTF8 say that names are not"
        raise ConfigError(f"{option} = {name!a} {text}; give a name in ASCII")
    if directory_kind(path) not in (*NOTHING_THERE, *kinds):
        raise ConfigError(f"{option} = {path} is {describe_directory(path)}; {fix}")


def mark_directory(directory: Path, kind: Kind, run: str = "") -> None:
    """Make the directory and mark it with its kind and run."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / MARK_FILE, json.dumps({"is": kind.name, "run": run}) + "\n")


def read_mark(directory: Path) -> tuple[Kind | None, str]:
    """Return the kind and the run's id from mark_directory(); (None, "") without a mark."""
    mark = _object(directory / MARK_FILE)
    name, run = mark.get("is"), mark.get("run")
    return Kind.__members__.get(str(name)), run if isinstance(run, str) else ""


def read_run_id(directory: Path) -> str:
    """Return the id of the run in this directory; "" if there is none."""
    text = _text(directory / "id")
    return text.strip() if RUN_ID.fullmatch(text) else ""


def read_manifest_of(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint of ours; {} if there is none."""
    manifest = _object(checkpoint / "manifest.json")
    return manifest if {"format", "step", "files"} <= manifest.keys() else {}


def _kind_of_directory(path: Path, names: set[str]) -> Kind:
    # The most reliable sign first; guesses from names alone come last.
    if read_run_id(path):
        return Kind.RUN
    if (marked := read_mark(path)[0]) is not None:
        return marked
    from kempner.jobs.system.reading import read_jsonl  # not needed by most starts

    events = [line["event"] for line in read_jsonl(path / "attempts.jsonl") if _is_event(line)]
    if events and "config.toml" in names:  # a copy that has lost its id
        return Kind.RUN
    if "start" in events:  # the trainer writes its id earlier; older run.sh wrote no mark
        return Kind.PROGRAM
    if _is_sweep(path, names) or directory_kind(path / "sweep") is Kind.SWEEP:
        return Kind.SWEEP
    if read_manifest_of(path):
        return Kind.CHECKPOINT
    if _has_checkpoints(path, names):
        return Kind.CHECKPOINTS
    if _is_model(path, names):
        return Kind.MODEL
    if any(_is_sidecar(_object(path / f"dataset.{end}")) for end in ("json", "partial.json")):
        return Kind.DATA
    # A file of this name without a JSON object is not ours.
    ours = all(_object(path / name) for name in names.intersection(OBJECTS))
    sizes = [(path / name).stat().st_size for name in names.intersection(LINES)]
    ours = ours and bool(events or not any(sizes))
    rest = [name for name in names if not BEFORE_THE_RUN.fullmatch(name)]
    if ours and not rest:
        return Kind.STARTED
    if ours and len(rest) <= LISTED_FILES and all(NOTE.fullmatch(name) for name in rest):
        return Kind.NOTES
    return Kind.OTHER


def _is_event(line: dict[str, Any]) -> bool:
    return isinstance(line.get("event"), str) and "attempt_id" in line


def _has_checkpoints(path: Path, names: set[str]) -> bool:
    return any(read_manifest_of(path / name) for name in names if step_of_name(name) is not None)


def _is_sweep(path: Path, names: set[str]) -> bool:
    submitted = (path / "journal.jsonl").is_file() or (path / "points").is_dir()
    return names <= IN_A_SWEEP and (submitted or "table.csv" in names)


def _is_model(path: Path, names: set[str]) -> bool:
    weights = any(name.endswith(".safetensors") for name in names)
    return (
        weights or {"model_type", "architectures"} & _object(path / "config.json").keys() != set()
    )


def _is_sidecar(record: dict[str, Any]) -> bool:
    return {"format", "tokenizer", "dtype", "splits", "prepared"} <= record.keys()


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} without one."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(_text(path) or "{}")
        return record if isinstance(record, dict) else {}
    return {}


def _text(path: Path) -> str:
    """Return a file's text; "" if it cannot be read or is not text."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.is_file():
            return path.read_text()
    return ""
