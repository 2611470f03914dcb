"""Which checkpoint a start loads: rank 0 decides, from files that do not grow with the ranks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from kempner.checkpoint import commit, fork
from kempner.checkpoint.commit import Damaged
from kempner.checkpoint.layout import Table
from kempner.checkpoint.reader import read_table
from kempner.config.option import ConfigError
from kempner.data.opening import changes
from kempner.files import write_atomic
from kempner.model.config import OF_TRAINING, ModelConfig

SKIP = "skip.json"  # beside `latest`: samples that the run leaves out since it went back

# A manifest states under "fixed" what gives its weights and its position their meaning. These facts
# may differ in the run that loads it; all others never may, such as the shapes of the weights.
MAY_CHANGE = tuple(f"model.{name}" for name in OF_TRAINING)
MAY_CHANGE_IN_A_FORK = (  # which has a position of its own
    *MAY_CHANGE,
    "model.init_from",
    "data.*",
    "train.seq_len",
    "model.max_seq_len",  # longer contexts: no weight depends on these
    "model.rope_*",
    "model.sliding_window",
)

Choice = tuple[Path, dict[str, Any], Table]


def best(
    root: Path, about: dict[str, Any], log: Callable[[str], None], only: int | None = None
) -> Choice | None:
    """The first checkpoint that is not damaged, with its manifest and table; None when there is
    none at all. `about`: facts of this run, see Checkpointer. `only`: the one of this step.

    A damaged one is set aside. Raises ConfigError when the checkpoint does not fit this run or this
    version, RuntimeError when all have been set aside.
    """
    for path in commit.complete(root):
        if only is not None and path.name != commit.name_of(only):
            continue
        try:
            manifest = commit.read_manifest(path)
            check(path, manifest, about)
            table = read_table(path, manifest)
        except Damaged as error:
            set_aside(path, error, log)
            continue
        return path, with_skip(path, manifest), table
    if only is None and (aside := sorted(path.name for path in root.glob("step_*.corrupt*"))):
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
    if differ := differences(manifest, about, MAY_CHANGE):
        fix = "Use what is there, or give this run a directory of its own: --run.dir=runs/NAME"
        if not differences(manifest, about, MAY_CHANGE_IN_A_FORK):
            fix += "; add --run.fork=RUN_DIR to begin from the weights of this one"
        raise ConfigError(f"{path} does not fit this run: {'; '.join(differ.values())}. {fix}")


def differences(
    manifest: dict[str, Any], about: dict[str, Any], allowed: tuple[str, ...]
) -> dict[str, str]:
    """The facts that differ and that are not `allowed` to, and what to say of each. An option of
    the model that a manifest does not have came later: it had its default."""
    before = {each.name: each.default for each in fields(ModelConfig)}
    differ = {
        name: f"{name} is {there} there, {value} here"
        for section, values in about["fixed"].items()
        for key, value in values.items()
        if (there := manifest["fixed"].get(section, {}).get(key, before.get(key))) != value
        and (name := f"{section}.{key}") != "data.mixture"
    }
    if (lora := manifest["fixed"].get("lora")) and "lora" not in about["fixed"]:
        differ["lora.rank"] = f"lora.rank is {lora['rank']} there, 0 here"
    if mixture := manifest["fixed"].get("data", {}).get("mixture"):
        here, starts = about["fixed"]["data"]["mixture"], manifest["phases"]
        if past := changes(mixture, here, starts, manifest["samples"]):
            differ["data.sources"] = "; ".join(past)
    return {
        name: text
        for name, text in differ.items()
        if not any(fnmatch(name, pattern) for pattern in allowed)
    }


def hold(source: str, about: dict[str, Any], held: contextlib.ExitStack) -> Choice:
    """The checkpoint RUN[@STEP] of another run, which may be training: its retention leaves the
    checkpoint alone as long as `held` is open.

    Raises ConfigError when there is none or it does not fit, Damaged.
    """
    path = fork.find(source)
    held.enter_context(commit.reading(path))
    # If it was deleted between the two lines, it has no manifest any more.
    manifest = commit.read_manifest(path)
    if differ := differences(manifest, about, MAY_CHANGE_IN_A_FORK):
        raise ConfigError(
            f"run.fork = {source}: {path} has other weights than this run: "
            f"{'; '.join(differ.values())}. Use what is there: a fork may change the data, "
            "train.seq_len, the schedule and the world, not the shape or the meaning of the weights"
        )
    return path, with_skip(path, manifest), read_table(path, manifest)


def with_skip(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest, with the samples that the run leaves out since it went back to this one."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        record = json.loads((path.parent / SKIP).read_text())
        if record["checkpoint"] == path.name:
            return {**manifest, "skip": record["skip"]}
    return manifest


def set_aside(path: Path, error: Damaged, log: Callable[[str], None]) -> None:
    aside = commit.set_aside(path)
    log(f"WARNING: {path.name} is damaged ({error}); it is now {aside.name}")


def remember_skip(root: Path, step: int, skip: list[list[int]]) -> None:
    """Whoever loads the checkpoint of this step again gets `skip` in its manifest."""
    record = {"checkpoint": commit.name_of(step), "skip": skip}
    write_atomic(root / SKIP, json.dumps(record))
