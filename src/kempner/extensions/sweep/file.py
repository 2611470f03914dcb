"""Read SWEEP.toml and combine its axes. docs/extensions/sweeps.md has the format. No torch."""

from __future__ import annotations

import itertools
import keyword
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kempner.config import toml
from kempner.config.option import ConfigError, config_schema
from kempner.config.values import did_you_mean, format_value
from kempner.extensions.sweep.axes import LARGEST_SWEEP, Propose, draw_axes, grid_values
from kempner.extensions.sweep.early_stop import EarlyStop
from kempner.extensions.sweep.expression import (
    EXPRESSION_FUNCTIONS,
    Expression,
    ExpressionError,
    in_order,
)
from kempner.extensions.sweep.keys import (
    DERIVED,
    RESERVED,
    RUN_OPTIONS,
    SWEEP_KEYS,
    SWEEP_SECTIONS,
    PointValues,
    Root,
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Sweep:
    file: Path
    name: str
    dir: Path  # contains the run directories, and the sweep's own directory, sweep/
    profile: str
    max_running: int  # 0: no limit
    tries: int  # most submissions of one point
    bases: dict[str, list[str]]  # configuration files by name
    fixed: PointValues  # [set] and [resources]
    groups: list[list[PointValues]]  # one value of each group is taken
    rules: dict[str, Expression]
    where: list[Expression]
    early_stop: EarlyStop | None
    propose: Propose | None
    space: PointValues  # lists and ranges of [propose]

    @property
    def varied(self) -> list[str]:
        """Names whose values differ between points, in order."""
        own = [name for group in self.groups for name in group[0]] + [*self.space]
        return (["base"] if len(self.bases) > 1 else []) + own

    def combinations(self) -> list[PointValues]:
        combinations: list[PointValues] = []
        for base in self.bases:
            for values in itertools.product(*self.groups):
                combinations.append({"base": base})
                for each in values:
                    combinations[-1] |= each
        return combinations


def read_sweep(file: Path) -> Sweep:
    """Read a sweep. Raises ConfigError with all problems of the file itself."""
    try:
        table = toml.loads(file.read_text())
    except (OSError, ValueError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else f"not TOML: {error}"
        raise ConfigError(f"{file}: {why}") from None
    return _Reader(file, table).sweep()


class _Reader:
    def __init__(self, file: Path, table: dict[str, Any]) -> None:
        self.file, self.table = file, table
        self.problems: list[str] = []
        self.given: dict[str, str] = {}  # name -> the table that sets its value

    def sweep(self) -> Sweep:
        for key in [*self.table]:
            if key not in SWEEP_KEYS:
                self.wrong(f"{key}: unknown key{did_you_mean(key, SWEEP_KEYS)}")
            # In Python, a bool is an int.
            elif not isinstance(self.table[key], SWEEP_KEYS[key]) or self.table[key] is True:
                # Removed, so that the rest of the file is checked as if it were not set.
                self.wrong(f"{key} = {format_value(self.table.pop(key))}: has the wrong type")
        get = self.table.get
        name = get("name", self.file.stem)
        # Used as a directory, in a job's name (squeue takes a comma-separated list), and
        # in a pattern.
        if name in (".", "..") or not re.fullmatch(r"[A-Za-z0-9._+-]+", name):
            self.wrong(
                f"name = {format_value(name)}: is not a valid sweep name; use only letters, "
                "digits and ._+- (unset: the name of this file)"
            )
        if {*"%\\"}.intersection(get("dir", "")):
            self.wrong(
                f"dir = {format_value(get('dir'))}: is part of sbatch's --output, where % and \\ "
                "have a meaning; leave them out"
            )
        for key in ("max_running", "tries"):
            if get(key, 1) < 1:
                self.wrong(f"{key} = {get(key)}: must be at least 1, or left out")
        fixed = self.values("set", get("set", {}))
        fixed |= self.values("resources", {"resources": get("resources", {})})
        groups = self.groups()
        propose, space = self.propose()
        rules = self.expressions("rules", self.flat("rules", get("rules", {})))
        try:
            rules = in_order(rules)
        except ExpressionError as error:
            self.wrong(f"rules: {error}")
        where = self.expressions("where", {str(i): text for i, text in enumerate(get("where", []))})
        sweep = Sweep(
            self.file, name, Path(get("dir", "runs")) / name, get("profile", ""),
            get("max_running", 0), get("tries", 3), self.bases(), fixed, groups, rules,
            [*where.values()], self.section("early_stop", EarlyStop, get("early_stop")),
            propose, space,
        )  # fmt: skip
        self.check_names(sweep)
        # A product of lengths, because listing the combinations of long axes would fill memory.
        if (count := math.prod(map(len, groups)) * len(sweep.bases)) > LARGEST_SWEEP:
            self.wrong(f"{count:,} combinations: at most {LARGEST_SWEEP:,}; take fewer values")
        if self.problems:
            raise ConfigError(self.problems)
        return sweep

    def section(self, name: str, cls: type[_T], table: PointValues | None) -> _T | None:
        """Read one of the sweep's own sections; None if the file has no such section."""
        if table is None:
            return None
        values, options = {}, config_schema(Root)[name]
        for key, value in table.items():
            try:
                if key not in options:
                    raise ValueError(f"unknown key{did_you_mean(key, options)}")
                values[key] = options[key].convert(value)
            except ValueError as error:
                self.wrong(f"{name}.{key} = {format_value(value)}: {error}")
        return cls(**values)

    def propose(self) -> tuple[Propose | None, PointValues]:
        """Read [propose]: its options, and its lists and ranges."""
        if "propose" not in self.table:
            return None, {}
        table = dict(self.table["propose"])
        own = {key: table.pop(key) for key in config_schema(Root)["propose"] if key in table}
        space = self.flat("propose", table)
        others = [f"[{key}]" for key in ("axes", "zip", "random") if key in self.table]
        base = self.table.get("base")
        others += ["several bases"] if isinstance(base, dict) and len(base) > 1 else []
        if others:
            self.wrong(
                f"propose: cannot be combined with {', '.join(others)}: it searches for one best "
                "point; put what it may choose from into [propose], as a list or a range"
            )
        if "max_running" not in self.table:
            self.wrong(
                "propose: give max_running, the points that run at once: each new one follows from "
                "the results so far"
            )
        if "points" not in own:
            self.wrong("propose.points: is required (the number of points in all)")
        if not space:
            self.wrong("propose: nothing to choose; write optimizer.lr = {log = [1e-4, 1e-2]}")
        try:
            draw_axes(space, 1, 0)
        except ValueError as error:
            self.wrong(f"propose: {error}")
            space = {}
        for name, spec in space.items():  # each choice; the ends of a range, and a value between
            every = spec if isinstance(spec, list) else {**spec, "count": 3}
            self.axis("propose", name, every)
        return self.section("propose", Propose, own), space

    def wrong(self, problem: str) -> None:
        self.problems.append(f"{self.file}: {problem}")

    def bases(self) -> dict[str, list[str]]:
        """Find the configuration files, relative to the directory of the sweep's file."""
        base = self.table.get("base", [])
        files_by_name = base if isinstance(base, dict) else {"": base}
        bases = {}
        for name, files in files_by_name.items():
            files = [files] if isinstance(files, str) else files
            if not isinstance(files, list) or not all(isinstance(each, str) for each in files):
                self.wrong(
                    f"base = {format_value(base)}: must be a file, a list, or a table of these"
                )
                continue
            bases[name] = [str(self.file.parent / each) for each in files]
        if not any(bases.values()):
            self.wrong('base: name a configuration; write base = "../train/quickstart.toml"')
        return bases

    def flat(self, where: str, table: dict[str, Any]) -> PointValues:
        """Flatten {"optimizer": {"lr": x}}, TOML's `optimizer.lr = x`, to {"optimizer.lr": x}."""
        values: PointValues = {}
        for key, value in table.items():
            if key in SWEEP_SECTIONS and isinstance(value, dict):
                values |= {f"{key}.{inner}": each for inner, each in value.items()}
            else:
                values[key] = value
        for name in values:
            self.check_target(where, name)
        return values

    def check_target(self, where: str, name: str) -> None:
        if name in DERIVED:
            self.wrong(f"{where}: {name}: {DERIVED[name]}")
        elif "." in name and name not in RUN_OPTIONS:
            self.wrong(f"{where}: {name}: unknown option{did_you_mean(name, RUN_OPTIONS)}")
        elif "." not in name and (not name.isidentifier() or keyword.iskeyword(name)):
            self.wrong(f"{where}: {format_value(name)}: is not a name; write lr, or optimizer.lr")
        elif name in RESERVED or name in SWEEP_SECTIONS:
            self.wrong(f"{where}: {name}: is a reserved name; choose another")
        if (other := self.given.setdefault(name, where)) != where:
            self.wrong(f"{name}: is in [{other}] and in [{where}]; leave one of them out")

    def values(self, where: str, table: dict[str, Any]) -> PointValues:
        """Read fixed values."""
        values = self.flat(where, table)
        return {name: self.convert(where, name, value) for name, value in values.items()}

    def convert(self, where: str, name: str, value: Any) -> Any:
        if name not in RUN_OPTIONS:
            return value
        try:
            return RUN_OPTIONS[name].convert(value)
        except ConfigError as error:
            self.problems += [f"{self.file}: {where}: {text}" for text in error.problems]
        except ValueError as error:
            self.wrong(f"{where}: {name} = {format_value(value)}: {error}")
        return None

    def groups(self) -> list[list[PointValues]]:
        """List the groups that are combined with each other: each axis, each zip, and
        the random draws."""
        groups: list[list[PointValues]] = []
        for name, spec in self.flat("axes", self.table.get("axes", {})).items():
            groups.append([{name: value} for value in self.axis("axes", name, spec)])
        zip_tables = self.table.get("zip", [])
        tables: list[Any] = zip_tables if isinstance(zip_tables, list) else [zip_tables]
        for table in tables:
            if not isinstance(table, dict):
                self.wrong(
                    f"zip = {format_value(zip_tables)}: must be a table, or several, [[zip]]"
                )
                continue
            if not table:
                self.wrong("zip: has no lists; give some, or leave it out")
            columns: dict[str, list[Any]] = {
                n: self.axis("zip", n, spec) for n, spec in self.flat("zip", table).items()
            }
            if len({len(values) for values in columns.values()}) > 1:
                sizes = ", ".join(f"{name} {len(values)}" for name, values in columns.items())
                self.wrong(f"zip: the lists must be equally long: {sizes}")
                continue
            rows = zip(*columns.values(), strict=True)
            groups.append([dict(zip(columns, values, strict=True)) for values in rows])
        if "random" in self.table:
            groups.append(self.draws(dict(self.table["random"])))
        return [group for group in groups if group]

    def axis(self, where: str, name: str, spec: Any) -> list[Any]:
        try:
            return [self.convert(where, name, value) for value in grid_values(spec)]
        except ValueError as error:
            self.wrong(f"{where}: {name} = {format_value(spec)}: {error}")
            return []

    def draws(self, table: dict[str, Any]) -> list[PointValues]:
        samples, seed = table.pop("samples", None), table.pop("seed", 0)
        try:
            rows = draw_axes(self.flat("random", table), samples, seed)
        except ValueError as error:
            self.wrong(f"random: {error}")
            return []
        return [{name: self.convert("random", name, row[name]) for name in row} for row in rows]

    def expressions(self, where: str, table: Mapping[str, Any]) -> dict[str, Expression]:
        expressions = {}
        for name, text in table.items():
            if not isinstance(text, str | int | float) or isinstance(text, bool):
                self.wrong(
                    f"{where}: {name} = {format_value(text)}: must be an expression, in quotes"
                )
                continue
            try:
                expressions[name] = Expression(str(text))
            except ExpressionError as error:
                self.wrong(f"{where}: {error}")
        return expressions

    def check_names(self, sweep: Sweep) -> None:
        """Check the names: a variable that is never read has no effect; one that is never set
        has no value."""
        names = {*RUN_OPTIONS, *self.given, "base", "parameters"}
        names_read = {
            name
            for expression in (*sweep.rules.values(), *sweep.where)
            for name in expression.names
        }
        for expression in (*sweep.rules.values(), *sweep.where):
            for name in sorted(expression.names - names):
                near = did_you_mean(name, [*names, *EXPRESSION_FUNCTIONS])
                self.wrong(f"{format_value(expression.text)}: unknown name {name}{near}")
        for name, where in self.given.items():
            if "." not in name and name not in names_read:
                near = did_you_mean(name, [key.partition(".")[2] for key in RUN_OPTIONS])
                self.wrong(
                    f"{where}: {name}: has no effect: no rule or condition uses it; an option "
                    f"is written section.key{near}"
                )
