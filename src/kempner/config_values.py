"""One option of a configuration: its type and limits, and values in and out of TOML's grammar."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tomli

NOUN = {bool: "true or false", int: "an int", float: "a float", str: "a string"}
EXAMPLE = {bool: "true", int: "1", float: "0.5", str: '"a"'}


@dataclass(frozen=True)
class Option:
    """A field of a section: what `option()` and the annotation say of it."""

    name: str  # section.key
    item: type  # bool, int, float or str
    size: int | None  # None: a single value; 0: a list of any length; n: a list of n items
    optional: bool  # None is a value too; in TOML it is the string "none"
    default: Any
    help: str
    choices: Sequence[Any] | None
    minimum: float | None
    maximum: float | None

    @property
    def type_name(self) -> str:
        name = self.item.__name__
        if self.size is not None:
            name = f"[{name}, ...]" if self.size == 0 else f"[{', '.join([name] * self.size)}]"
        return f"{name} or none" if self.optional else name

    @property
    def limits(self) -> str:
        """The limits in words; empty when there are none."""
        if self.choices is not None:
            return "one of " + ", ".join(to_text(choice) for choice in self.choices)
        if self.minimum is not None and self.maximum is not None:
            return f"from {number(self.minimum)} to {number(self.maximum)}"
        if self.minimum is not None:
            return f"at least {number(self.minimum)}"
        return "" if self.maximum is None else f"at most {number(self.maximum)}"

    @property
    def example(self) -> str:
        """A value that can stand there, as TOML: the default when it shows the form."""
        if self.default and isinstance(self.default, self.item if self.size is None else tuple):
            return to_text(self.default)
        items = ", ".join([EXAMPLE[self.item]] * (self.size or 2))
        return EXAMPLE[self.item] if self.size is None else f"[{items}]"

    def convert(self, value: Any) -> Any:
        """`value` as a value of this option. Raises ValueError("the limit; the fix")."""
        if self.optional and (value is None or value == "none"):
            return None
        if self.size is None:
            return self._item(value)
        if not isinstance(value, list | tuple):
            raise ValueError(f"must be a list, not {noun(value)}; write '{self.example}'")
        if self.size and len(value) != self.size:
            raise ValueError(
                f"must have {self.size} items, not {len(value)}; write '{self.example}'"
            )
        return tuple(self._item(item) for item in value)

    def _item(self, value: Any) -> Any:
        if self.item is float and type(value) is int:
            value = _float(value)
        if type(value) is not self.item:  # not isinstance: a bool is no int
            raise ValueError(
                f"must be {NOUN[self.item]}, not {noun(value)}; {_fix(self.item, value)}"
            )
        if self.choices is not None and value not in self.choices:
            near = did_you_mean(str(value), map(str, self.choices))
            raise ValueError(f"must be {self.limits}{near}")
        if isinstance(value, float) and not math.isfinite(value):
            # An infinity is sensible only where the option itself names it; NaN never is.
            if value in (self.default, self.minimum, self.maximum):
                return value
            raise ValueError("must be a finite number; change it")
        if isinstance(value, int | float):
            low, high = self.minimum, self.maximum
            if (low is not None and value < low) or (high is not None and value > high):
                raise ValueError(f"must be {self.limits}; change it")
        if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
            raise ValueError("must be valid UTF-8; rename it")
        return value


def _float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _fix(item: type, value: Any) -> str:
    """What to write in place of `value` where an `item` is due."""
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


def number(value: float) -> str:
    """`value` for people: 1.0 is 1."""
    return repr(value).removesuffix(".0")


def noun(value: Any) -> str:
    """What `value`, fresh from a TOML file, is called."""
    names = {**NOUN, list: "a list", tuple: "a list", dict: "a table"}
    return names.get(type(value), "a date or time")


def to_text(value: Any) -> str:
    """`value` in TOML grammar on one line; from_text() gives it back. None is "none"."""
    if value is None:
        return '"none"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_text, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's; TOML alone also forbids a bare DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value) if isinstance(value, int | float) else str(value)


def from_text(option: Option, text: str) -> Any:
    """The value that `text` after `--section.key=` means: TOML, or else a bare word, a string."""
    is_string = option.item is str and option.size is None
    if is_string and not (len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"):
        return text
    try:
        table = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if table.keys() == {"value"} else text  # a newline could start a key


def shown(value: Any, width: int = 60) -> str:
    """`value` for a message: one line, not longer than `width` characters."""
    text = to_text(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`; did you mean NAME?` with the nearest of `names`, or nothing."""
    near = difflib.get_close_matches(word, list(names), n=1)
    return f"; did you mean {near[0]}?" if near else ""
