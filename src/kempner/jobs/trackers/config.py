"""The [trackers] section."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from kempner.config.option import option

# Each tracker's option, and the package that it needs.
TRACKER_NAMES = ("tensorboard", "wandb")


@dataclass(frozen=True)
class TrackersConfig:
    tensorboard: bool = option(False, "write the metrics to <run.dir>/tensorboard as well")
    wandb: str = option(
        "off",
        "send the metrics to W&B; offline: to <run.dir>/wandb, for `wandb sync`",
        choices=("off", "online", "offline"),
    )
    wandb_project: str = option("kempner", "project in W&B; its entity is WANDB_ENTITY or yours")

    @property
    def names(self) -> list[str]:
        return [name for name in TRACKER_NAMES if getattr(self, name) not in (False, "off")]

    def problems(self) -> list[str]:
        return [text for name in self.names if (text := missing_package(name))]


def missing_package(name: str) -> str:
    """Return the message for a tracker whose package is not installed; "" if it is."""
    if importlib.util.find_spec(name) is not None:
        return ""
    fix = f".venv/bin/pip install -c constraints.txt -e '.[{name}]'"
    return f"trackers.{name}: the package {name} is not installed; run {fix}, or leave it off"
