"""Declaration of a section: its options, each with a type, limits and one line of help.

    @dataclass(frozen=True)
    class TrainConfig:
        max_steps: int = option(1000, "optimizer steps of the whole run", minimum=1)

A field is bool, int, float, str, a tuple of int, float or str, or one of these `| None`; or a tuple
of another dataclass like this for a list of tables, [[data.sources]]; or `int | str`, whose section
checks the strings in problems().
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kempner.config import toml
from kempner.config.values import (
    NOUN,
    describe_type,
    did_you_mean,
    format_number,
    format_value,
    to_text,
)

S = TypeVar("S")
R = TypeVar("R", bound="Sections")
EXAMPLE = {bool: "true", int: "1", float: "0.5", str: '"a"'}

# A separate object, since None is a valid value of an option.
REQUIRED_OPTION: Any = type("Required", (), {"__repr__": lambda self: "required"})()
"""The default of an option that every run must set."""


CONTROLS = {n: repr(chr(n))[1:-1] for n in (*range(32), 127)}  # a name may contain terminal escapes


class ConfigError(Exception):
    """All problems of a configuration; `problems` has one line for each."""

    def __init__(self, *problems: str | Iterable[str]) -> None:
        """Takes problems one by one or in lists."""
        lines = [[entry] if isinstance(entry, str) else entry for entry in problems]
        self.problems = [line.translate(CONTROLS) for line in itertools.chain(*lines)]
        super().__init__(*self.problems)  # pickle passes these to __init__

    def __str__(self) -> str:
        return "\n".join(self.problems)


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare one field of a section: its default (or REQUIRED_OPTION), one line of meaning, and
    its limits.

    The limits are inclusive; for a tuple they apply to each item. A list default becomes a tuple.
    """
    limits = {"choices": choices, "minimum": minimum, "maximum": maximum}
    default = tuple(default) if isinstance(default, list) else default
    return field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True)
class Option:
    """A field of a section, made from `option()` and its annotation."""

    name: str  # section.key
    item: type  # bool, int, float or str
    size: int | None  # None: a single value; 0: a list of any length; n: a list of n items
    optional: bool  # None is a value too, the string "none" in TOML
    default: Any
    help: str
    choices: Sequence[Any] | None
    minimum: float | None
    maximum: float | None
    keys: Mapping[str, Option] | None  # the options of each table in a list; item is their class
    words: bool = False  # a string is a value, too

    @property
    def type_name(self) -> str:
        name = "table" if self.keys else self.item.__name__ + " or str" * self.words
        if self.size is not None:
            name = f"[{name}, ...]" if self.size == 0 else f"[{', '.join([name] * self.size)}]"
        return f"{name} or none" if self.optional else name

    @property
    def limits(self) -> str:
        """The limits in words; empty when there are none."""
        if self.choices is not None:
            return "one of " + ", ".join(to_text(choice) for choice in self.choices)
        if self.minimum is not None and self.maximum is not None:
            return f"from {format_number(self.minimum)} to {format_number(self.maximum)}"
        if self.minimum is not None:
            return f"at least {format_number(self.minimum)}"
        return "" if self.maximum is None else f"at most {format_number(self.maximum)}"

    @property
    def example(self) -> str:
        """A valid value as TOML: the default if it shows the form."""
        if self.keys is not None:
            required_keys = [
                (key, o) for key, o in self.keys.items() if o.default is REQUIRED_OPTION
            ]
            return f"[{{{', '.join(f'{key} = {o.example}' for key, o in required_keys)}}}]"
        if self.default and isinstance(self.default, self.item if self.size is None else tuple):
            return to_text(self.default)
        if self.choices:
            return f"[{to_text(self.choices[0])}]" if self.size == 0 else to_text(self.choices[0])
        one = EXAMPLE[self.item]
        if self.minimum is not None and float(one) < self.minimum:
            one = to_text(self.item(self.minimum))
        return one if self.size is None else f"[{', '.join([one] * (self.size or 2))}]"

    def convert(self, value: Any) -> Any:
        """Convert `value` to this option's type. Raises ValueError("the limit; the fix"), or
        ConfigError with a line for each problem of the tables."""
        if self.optional and (value is None or value == "none"):
            return None
        if self.size is None:
            return self._item(value)
        if not isinstance(value, list | tuple):
            raise ValueError(f"must be a list, not {describe_type(value)}; write '{self.example}'")
        if self.size and len(value) != self.size:
            raise ValueError(
                f"must have {self.size} items, not {len(value)}; write '{self.example}'"
            )
        if self.keys is not None:
            return self._tables(value, self.keys)
        return tuple(self._item(item) for item in value)

    def _tables(self, tables: Sequence[Any], keys: Mapping[str, Option]) -> tuple[Any, ...]:
        result, problems = [], []
        for i, table in enumerate(tables):
            if isinstance(table, self.item):
                result.append(table)
                continue
            if not isinstance(table, dict):
                raise ValueError(f"must be a list of tables; write '{self.example}'")
            values = {name.replace("-", "_"): value for name, value in table.items()}
            where, wrong = f"{self.name}[{i}]", []
            for key, value in values.items():
                if key not in keys:
                    wrong.append(f"{where}.{key}: unknown key{did_you_mean(key, keys)}")
                    continue
                try:
                    values[key] = keys[key].convert(value)
                except ValueError as error:
                    wrong.append(f"{where}.{key} = {format_value(value)}: {error}")
            for key, option in keys.items():
                if option.default is REQUIRED_OPTION and key not in values:
                    wrong.append(f"{where}.{key}: is required ({option.type_name})")
            result += [] if wrong else [self.item(**values)]
            problems += wrong
        if problems:
            raise ConfigError(problems)
        return tuple(result)

    def _item(self, value: Any) -> Any:
        if self.words and type(value) is str:
            return value
        if self.item is float and type(value) is int:
            value = _float(value)
        if type(value) is not self.item:  # not isinstance: a bool is not an int
            raise ValueError(
                f"must be {NOUN[self.item]}, not {describe_type(value)}; {_fix(self.item, value)}"
            )
        if self.choices is not None and value not in self.choices:
            near = did_you_mean(str(value), map(str, self.choices))
            raise ValueError(f"must be {self.limits}{near}")
        if isinstance(value, float) and not math.isfinite(value):
            # Infinity is allowed only as the option's default or limit; NaN never is.
            if value in (self.default, self.minimum, self.maximum):
                return value
            raise ValueError("must be a finite number; change it")
        # TOML guarantees only 64-bit integers.
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("must fit in 64 bits; change it")
        if isinstance(value, int | float):
            low, high = self.minimum, self.maximum
            if (low is not None and value < low) or (high is not None and value > high):
                raise ValueError(f"must be {self.limits}; change it")
        # Python decodes command-line bytes that are not UTF-8 to surrogates.
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise ValueError("must be valid UTF-8, without NUL; rename it")
        return value


def _float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _fix(item: type, value: Any) -> str:
    """Say what to write in place of `value` for an `item`."""
    if item is int and isinstance(value, float):
        whole = math.isfinite(value) and value.is_integer()
        return f"write {int(value)}" if whole else "write a whole number"
    if item is bool:
        if str(value).endswith(".toml"):  # --section.flag FILE
            return "write true or false, and files before the overrides"
        near = difflib.get_close_matches(str(value).lower(), ("true", "false"), n=1)
        return f"did you mean {near[0]}?" if near else "write true or false"
    if item is str:
        return 'write it in quotes, "..."'
    return "write a number"


def from_text(option: Option, text: str) -> Any:
    """Parse `text` after `--section.key=` as TOML, or else as a bare string."""
    is_string = option.item is str and option.size is None
    # A string option takes the text verbatim: in TOML, 7 and true are not strings.
    if is_string and not (len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"):
        return text
    try:
        table = toml.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if table.keys() == {"value"} else text  # a newline could start a key


# Sections and their options, in declaration order.
Schema = dict[str, dict[str, Option]]


@dataclass(frozen=True)
class Sections:
    """A root that also takes sections that are not its fields. They are found by name when a file
    or an override uses one, and kept in `more` with their names."""

    more: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def find_sections(cls, name: str) -> Mapping[str, type]:
        """Map the name of `name`'s section, and of those that come with it, to their classes; empty
        if no section has this name."""
        return {}

    @classmethod
    def all_sections(cls) -> Mapping[str, type]:
        """Map the name of every section that find_sections() knows to its class."""
        return {}

    def of(self, section: type[S]) -> S:
        """Return the section of this class, with its defaults if it is not given."""
        matches = (each for _, each in self.more if type(each) is section)
        return next(matches, None) or section()

    def with_section(self: R, name: str, section: Any) -> R:
        """Return a copy with this section in place of the one of that name."""
        return dataclasses.replace(self, more=tuple({**dict(self.more), name: section}.items()))


def sections_of(root: type) -> dict[str, type]:
    """Map section name -> class for the sections that are fields of `root`."""
    hints = typing.get_type_hints(root)
    return {each.name: hints[each.name] for each in dataclasses.fields(root) if each.name != "more"}


def config_schema(root: type) -> Schema:
    """Return the options that the dataclasses under `root` declare. Raises AssertionError for a
    mistake in them."""
    return _schema(root)


@functools.cache  # a sweep calls it for each point
def _schema(root: type) -> Schema:
    sections: Schema = {}
    for section, cls in sections_of(root).items():
        sections[section] = section_options(section, cls)
    return sections


def whole_schema(root: type[Sections]) -> Schema:
    """Extend config_schema() by every section that can be found by name."""
    others = root.all_sections().items()
    return {**config_schema(root), **{name: section_options(name, cls) for name, cls in others}}


@functools.cache
def section_options(section: str, cls: type) -> dict[str, Option]:
    """Map key -> option of one section."""
    assert dataclasses.is_dataclass(cls) and section != "base", f"{section} is not a section"
    hints = typing.get_type_hints(cls)
    return {
        field.name: _option(f"{section}.{field.name}", hints[field.name], field)
        for field in dataclasses.fields(cls)
    }


def _option(name: str, hint: Any, field: dataclasses.Field[Any]) -> Option:
    assert "help" in field.metadata, f"{name}: declare it with option(default, help)"
    declared, optional, size, words = hint, False, None, hint == int | str
    hint = int if words else hint
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        optional = len(kinds) == 1
        hint = kinds[0] if optional else None
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        size = 0 if items[1:] == (Ellipsis,) else len(items)
        hint = items[0] if size == 0 or len(set(items)) == 1 else None
    keys = None
    if dataclasses.is_dataclass(hint) and size == 0:
        hints = typing.get_type_hints(hint)
        columns = dataclasses.fields(hint)
        keys = {f.name: _option(f"{name}[].{f.name}", hints[f.name], f) for f in columns}
    else:
        assert hint in (bool, int, float, str), f"{name}: {declared} is not a supported type"
    result = Option(
        name, hint, size, optional, field.default, **field.metadata, keys=keys, words=words
    )
    if field.default is not REQUIRED_OPTION:
        try:
            result.convert(field.default)
        except ValueError as error:
            raise AssertionError(f"{name}: its default {error}") from None
    return result
