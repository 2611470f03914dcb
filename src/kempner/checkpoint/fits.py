"""Checks of a checkpoint's manifest that a run may continue or fork from it, before anything
starts. No torch."""

from __future__ import annotations

from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from kempner.config.option import ConfigError
from kempner.data.changes import data_changes
from kempner.model.config import OF_CONTEXT, OF_TRAINING, ModelConfig

# "fixed" in a manifest holds the facts that define the meaning of its weights and position. Only
# these may differ in the run that loads it; all others may not, such as the shapes of weights.
MAY_CHANGE = tuple(f"model.{name}" for name in OF_TRAINING)
MAY_CHANGE_IN_A_FORK = (  # a fork has its own position
    *MAY_CHANGE,
    "model.init_from",
    "preference.*",
    "data.*",
    "train.seq_len",
    *(f"model.{name}" for name in OF_CONTEXT),
)


def check_compatible(path: Path, manifest: dict[str, Any], about: dict[str, Any]) -> None:
    """Raise ConfigError if the checkpoint is of another run or another model."""
    # An import has only weights: no optimizer state, and no position in any data.
    if "imported" in manifest:
        raise ConfigError(
            f"{path} was imported from {manifest['imported']}, and cannot be continued: start a "
            "run from it with --model.init_from=THIS_RUN and a new --run.dir"
        )
    if manifest.get("run") != about.get("run"):
        raise ConfigError(
            f"{path} belongs to another run (id {manifest.get('run')}, this run has id "
            f"{about.get('run')}): give this run its own directory, --checkpoint.dir=DIR; or, "
            "if this is the same run in a new run.dir, write the checkpoint's id into RUN_DIR/id"
        )
    if differ := fact_differences(manifest, about, MAY_CHANGE):
        fix = "Use the values there, or give this run its own directory: --run.dir=runs/NAME"
        if not fact_differences(manifest, about, MAY_CHANGE_IN_A_FORK):
            fix += "; add --run.fork=RUN_DIR to begin from the weights of this one"
        raise ConfigError(f"{path} does not fit this run: {'; '.join(differ.values())}. {fix}")


def check_fork(source: str, path: Path, manifest: dict[str, Any], about: dict[str, Any]) -> None:
    """Raise ConfigError if the checkpoint that run.fork = `source` names has other weights."""
    if differ := fact_differences(manifest, about, MAY_CHANGE_IN_A_FORK):
        raise ConfigError(
            f"run.fork = {source}: the weights in {path} do not fit this run: "
            f"{'; '.join(differ.values())}. Use the values there: a fork may change the data, "
            "train.seq_len, the schedule and the world, not the shape or the meaning of the weights"
        )


def fact_differences(
    manifest: dict[str, Any], about: dict[str, Any], allowed: tuple[str, ...]
) -> dict[str, str]:
    """Describe each fact that differs and is not `allowed` to. A model option missing from a
    manifest is newer than it and had its default."""
    before = {entry.name: entry.default for entry in fields(ModelConfig)}
    differ = {
        name: f"{name} is {_text(there)} there, {_text(value)} here"
        for section, values in about["fixed"].items()
        if section != "preference"
        for key, value in values.items()
        if (there := manifest["fixed"].get(section, {}).get(key, before.get(key))) != value
        and (name := f"{section}.{key}") != "data.mixture"
    }
    # Above are this run's sections: without adapters there is no [lora].
    if (lora := manifest["fixed"].get("lora")) and "lora" not in about["fixed"]:
        differ["lora.rank"] = f"lora.rank is {lora['rank']} there, 0 here"
    was, now = (entry["fixed"].get("preference") for entry in (manifest, about))
    if was and now and was != now:  # earlier versions do not record it
        differ["preference.reference"] = (
            "model.init_from does not hold the reference weights of "
            f"preference.loss = dpo (fingerprint {was['reference']} there, {now['reference']} here)"
        )
    if mixture := manifest["fixed"].get("data", {}).get("mixture"):
        # Samples of another length have other numbers: then only tokens can be compared.
        same_length = "train.seq_len" not in differ
        if (here := about["fixed"]["data"].get("mixture")) is None:
            differ["data.sources"] = "the run learns from data.sources there, from rewards here"
        elif past := data_changes(
            mixture, here, manifest["phases"], manifest["samples"], same_length
        ):
            differ["data.sources"] = "; ".join(past)
    return {
        name: text
        for name, text in differ.items()
        if not any(fnmatch(name, pattern) for pattern in allowed)
    }


def _text(value: Any) -> Any:
    return "none" if value is None else value  # as options and files have it
