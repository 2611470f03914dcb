"""The points of a sweep: each is a whole configuration, checked like that of a run, with a
descriptive name. No torch."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kempner.config.loading import as_dict
from kempner.config.option import ConfigError
from kempner.config.values import format_value, to_text
from kempner.extensions.sweep.expression import ExpressionError
from kempner.extensions.sweep.file import Sweep
from kempner.extensions.sweep.keys import RUN_OPTIONS, PointValues
from kempner.extensions.sweep.resources import Resources
from kempner.model.config import ModelConfig
from kempner.train.configure import check_config, load_config
from kempner.train.sections import RunConfig

SLUG = 60  # characters of a name before its hash
HASH = 8


@dataclass(frozen=True)
class SweepPoint:
    """One run. `values`: its differences from the other runs, for people."""

    values: PointValues
    cfg: RunConfig
    resources: Resources

    @property
    def run_dir(self) -> Path:
        return Path(self.cfg.run.dir)

    @property
    def name(self) -> str:
        return self.run_dir.name


def load_bases(sweep: Sweep) -> dict[str, RunConfig]:
    return {name: load_config(files, []) for name, files in sweep.bases.items()}


def expand_points(sweep: Sweep) -> list[SweepPoint]:
    """Return all points in the order of the file. Raises ConfigError with all of their problems,
    each once; does not open files that the configurations name: see check_points."""
    bases = load_bases(sweep)
    problems: dict[str, list[str]] = {}
    points = []
    for number, combination in enumerate(sweep.combinations(), 1):
        try:
            point = make_point(sweep, bases[combination["base"]], combination)
        except ConfigError as error:
            for text in error.problems:
                problems.setdefault(text, []).append(f"{number}")
            continue
        points += [] if point is None else [point]
    _raise(problems)
    if not points:
        raise ConfigError(f"{sweep.file}: no combination satisfies all conditions of where")
    points_by_sign: dict[tuple[str, str], SweepPoint] = {}
    for point in points:
        # A name also contains variables, which may not affect the configuration; and short hashes
        # of different configurations may collide.
        for sign in (("configuration", _identity_text(point.cfg)), ("name", point.name)):
            other = points_by_sign.setdefault(sign, point)
            if other is not point:
                first, second = (describe_point(sweep, each) for each in (other, point))
                problems.setdefault(
                    f"{sweep.file}: two points have the same {sign[0]}: {first}, and {second}; "
                    "leave one of them out",
                    [],
                )
                break
    _raise(problems)
    return points


def check_points(points: Sequence[SweepPoint]) -> None:
    """Check every point as train.py --check does: the files that it names, and whether it fits its
    nodes. Raises ConfigError with all problems, each once, listing the points that have it."""
    problems: dict[str, list[str]] = {}
    for point in points:
        flags = {"check": True, "build": False, "bench": False}
        size = {"nodes": point.resources.nodes, "gpus-per-node": point.resources.per_node}
        for text in check_config(point.cfg, {**flags, **size}):
            problems.setdefault(text, []).append(point.name)
    _raise(problems)


def describe_point(sweep: Sweep, point: SweepPoint) -> str:
    return " ".join(f"{key}={short_value(point.values[key])}" for key in sweep.varied) or point.name


def _raise(problems: Mapping[str, list[str]]) -> None:
    lines = []
    for text, points in problems.items():
        more = f" and {len(points) - 3} more" if len(points) > 3 else ""
        whose = f"point {', '.join(points[:3])}{more}: " if points else ""
        lines.append(whose + text)
    if lines:
        raise ConfigError(lines)


def make_point(sweep: Sweep, base: RunConfig, combination: PointValues) -> SweepPoint | None:
    """Make a point; None if a condition excludes it. Raises ConfigError."""
    variables: PointValues = {
        f"{section}.{key}": value
        for section, keys in as_dict(base).items()
        for key, value in keys.items()
    }
    variables |= {f"resources.{key}": value for key, value in asdict(Resources()).items()}
    point_values: PointValues = {**sweep.fixed, **combination}
    variables |= point_values | {"parameters": _parameters(variables | point_values)}
    try:
        for name, rule in sweep.rules.items():
            point_values[name] = variables[name] = _converted(name, rule.value(variables))
            # A later rule may read it.
            if name.startswith("model."):
                variables["parameters"] = _parameters(variables)
        if not all(condition.value(variables) for condition in sweep.where):
            return None
    except ExpressionError as error:
        raise ConfigError(f"{sweep.file}: {error}") from None
    own = {
        name.partition(".")[2]: value
        for name, value in point_values.items()
        if name.startswith("resources.")
    }
    resources = Resources(**own)
    words = [
        f"--{name}={to_text(value)}"
        for name, value in point_values.items()
        if name in RUN_OPTIONS and not name.startswith("resources.")
    ]
    problems = [f"{sweep.file}: {text}" for text in resources.problems()]
    for key, table in (("early_stop", sweep.early_stop), ("propose", sweep.propose)):
        if table and not variables["eval.interval"]:
            problems.append(
                f"{sweep.file}: {key}: needs validations; set eval.interval, or leave it out"
            )
    if sweep.propose and resources.pack > 1:
        problems.append(
            f"{sweep.file}: resources.pack: cannot be combined with [propose], which submits one "
            "point whenever another has ended; leave it out"
        )
    try:
        # As train.py loads it, so that a point is refused for the same reasons as its run.
        cfg = load_config(sweep.bases[combination["base"]], words)
    except ConfigError as error:
        raise ConfigError(error.problems, problems) from None
    if problems:
        raise ConfigError(problems)
    # After the rules: the name shows the run's values, not those of the file's axes.
    values = {name: variables[name] for name in sweep.varied}
    name = f"{_slug(values)}-{run_identity(cfg)}"
    cfg = replace(cfg, run=replace(cfg.run, dir=str(sweep.dir / name)))
    return SweepPoint(values, cfg, resources)


def _converted(name: str, value: Any) -> Any:
    """Convert a rule's value to the option's type: 240.0 becomes an integer."""
    if name not in RUN_OPTIONS:
        return value
    option = RUN_OPTIONS[name]
    if option.item is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        return option.convert(value)
    except ValueError as error:
        raise ExpressionError(f"rules: {name} = {format_value(value)}: {error}") from None


def _parameters(variables: Mapping[str, Any]) -> int | None:
    """Count the parameters of the model that the values so far describe; None if
    they are incomplete."""
    keys = {k.partition(".")[2]: v for k, v in variables.items() if k.startswith("model.")}
    try:
        return ModelConfig(**keys).count_parameters()
    # A size that is 0, or unset until a rule sets it.
    except (ArithmeticError, TypeError):
        return None


def run_identity(cfg: RunConfig) -> str:
    """Hash the run's configuration without its directory."""
    return hashlib.sha256(_identity_text(cfg).encode()).hexdigest()[:HASH]


def _identity_text(cfg: RunConfig) -> str:
    """Format the run's configuration without its directory. Omits options at their defaults, so
    that a new option of a later version does not rename any run."""
    plain, defaults = as_dict(cfg), _defaults()
    del plain["run"]["dir"]
    options = {
        f"{section}.{key}": value
        for section, keys in plain.items()
        for key, value in keys.items()
        if value != defaults[section][key]
    }
    return json.dumps(options, sort_keys=True)


@functools.cache
def _defaults() -> dict[str, dict[str, Any]]:
    others = RunConfig.all_sections().items()
    return as_dict(RunConfig(more=tuple((name, cls()) for name, cls in others)))


def _slug(values: PointValues) -> str:
    parts = [
        str(values[name])
        if name == "base"
        else f"{name.rpartition('.')[2]}{short_value(values[name])}"
        for name in values
    ]
    text = re.sub(r"[^A-Za-z0-9.+-]+", "_", "-".join(parts)).strip("-_.")
    return text[:SLUG] or "run"


def short_value(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
