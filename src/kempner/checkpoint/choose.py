"""Which checkpoint a start loads: rank 0 decides, from files that do not grow with the ranks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kempner.checkpoint import commit
from kempner.checkpoint.commit import Damaged
from kempner.checkpoint.layout import Table
from kempner.checkpoint.reader import read_table
from kempner.config.option import ConfigError
from kempner.data.opening import changes
from kempner.files import write_atomic

SKIP = "skip.json"  # beside `latest`: samples that the run leaves out since it went back

Choice = tuple[Path, dict[str, Any], Table]


def best(root: Path, about: dict[str, Any], log: Callable[[str], None]) -> Choice | None:
    """The first checkpoint that is not damaged, with its manifest and table; None when there is
    none at all. `about`: facts of this run, see Checkpointer.

    A damaged one is set aside. Raises ConfigError when the checkpoint does not fit this run or this
    version, RuntimeError when all have been set aside.
    """
    for path in commit.complete(root):
        try:
            manifest = commit.read_manifest(path)
            check(path, manifest, about)
            table = read_table(path, manifest)
        except Damaged as error:
            set_aside(path, error, log)
            continue
        with contextlib.suppress(FileNotFoundError, ValueError):
            record = json.loads((root / SKIP).read_text())
            if record["checkpoint"] == path.name:
                manifest["skip"] = record["skip"]
        return path, manifest, table
    if aside := sorted(path.name for path in root.glob("step_*.corrupt*")):
        raise RuntimeError(
            f"no checkpoint in {root} can be loaded; set aside are {', '.join(aside)} (the log "
            "says why). Repair one and rename it back, or start over with another run.dir"
        )
    return None


def check(path: Path, manifest: dict[str, Any], about: dict[str, Any]) -> None:
    """Raises ConfigError when the checkpoint is of another run or another model."""
    if "imported" in manifest:
        raise ConfigError(
            f"{path} was imported from {manifest['imported']}, and is no run to continue: start "
            "one from it with --model.init_from=THIS_RUN and a --run.dir of its own"
        )
    if manifest.get("run") != about.get("run"):
        raise ConfigError(
            f"{path} is of another run (id {manifest.get('run')}, this run has id "
            f"{about.get('run')}): give this run a directory of its own, --checkpoint.dir=DIR; or, "
            "if this is the same run in a new run.dir, write the checkpoint's id into RUN_DIR/id"
        )
    differ = [
        f"{section}.{key} is {manifest['fixed'].get(section, {}).get(key)} there, {value} here"
        for section, values in about["fixed"].items()
        for key, value in values.items()
        if manifest["fixed"].get(section, {}).get(key) != value and key != "mixture"
    ]
    if there := manifest["fixed"].get("data", {}).get("mixture"):
        here, starts = about["fixed"]["data"]["mixture"], manifest["phases"]
        differ += changes(there, here, starts, manifest["samples"])
    if differ:
        raise ConfigError(
            f"{path} does not fit this run: {'; '.join(differ)}. Use what is there, or give this "
            "run a directory of its own: --run.dir=runs/NAME"
        )


def set_aside(path: Path, error: Damaged, log: Callable[[str], None]) -> None:
    aside = commit.set_aside(path)
    log(f"WARNING: {path.name} is damaged ({error}); it is now {aside.name}")


def remember_skip(root: Path, step: int, skip: list[list[int]]) -> None:
    """Whoever loads the checkpoint of this step again gets `skip` in its manifest."""
    record = {"checkpoint": commit.name_of(step), "skip": skip}
    write_atomic(root / SKIP, json.dumps(record))
