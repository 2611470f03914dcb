"""Configuration values as text, for people and as TOML."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

NOUN = {bool: "true or false", int: "an int", float: "a float", str: "a string"}


def format_number(value: float) -> str:
    """Format a number for people: 1.0 is 1."""
    return repr(value).removesuffix(".0")


def describe_type(value: Any) -> str:
    """Name the type of a `value` read from TOML."""
    names = {**NOUN, list: "a list", tuple: "a list", dict: "a table"}
    return names.get(type(value), "a date or time")


def to_text(value: Any) -> str:
    """Format `value` as TOML on one line; from_text() parses it back. None is "none"."""
    if value is None:
        return '"none"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {to_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, but TOML also forbids a bare DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value) if isinstance(value, int | float) else str(value)


def format_value(value: Any, width: int = 60) -> str:
    """Format `value` for a message: one line of at most `width` characters."""
    text = to_text(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return `; did you mean NAME?` with the nearest of `names`, or ""."""
    near = difflib.get_close_matches(word, list(names), n=1)
    return f"; did you mean {near[0]}?" if near else ""
