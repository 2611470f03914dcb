"""Schema of SWEEP.toml. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kempner.config.option import Option, config_schema, whole_schema
from kempner.extensions.sweep.axes import Propose
from kempner.extensions.sweep.early_stop import EarlyStop
from kempner.extensions.sweep.expression import EXPRESSION_FUNCTIONS
from kempner.extensions.sweep.resources import Resources
from kempner.train.sections import RunConfig

PointValues = dict[str, Any]  # by name: section.key of an option, resources.key, or a variable


@dataclass(frozen=True)
class Root:
    """A sweep's own sections, declared like those of a run."""

    resources: Resources = field(default_factory=Resources)
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    propose: Propose = field(default_factory=Propose)


RUN_OPTIONS: dict[str, Option] = {
    option.name: option
    for sections in (whole_schema(RunConfig), config_schema(Root))
    for keys in sections.values()
    for option in keys.values()
    if not option.name.startswith(("early_stop.", "propose."))  # the same for all points
}
SWEEP_SECTIONS = {name.partition(".")[0] for name in RUN_OPTIONS}
SWEEP_KEYS: dict[str, type | tuple[type, ...]] = {
    "base": (str, list, dict),
    "dir": str,
    "name": str,
    "profile": str,
    "max_running": int,
    "tries": int,
    "where": list,
    "set": dict,
    "axes": dict,
    "zip": (dict, list),
    "random": dict,
    "propose": dict,
    "rules": dict,
    "resources": dict,
    "early_stop": dict,
}
DERIVED = {
    "run.dir": "a sweep names its run directories itself; use the sweep's dir and name",
    "checkpoint.dir": "the points would share it; leave it out",
}
RESERVED = {"base", "parameters", *EXPRESSION_FUNCTIONS}
