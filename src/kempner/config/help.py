"""The options of sections as the text of --help."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from kempner.config.option import Option
from kempner.config.values import to_text

HELP_WIDTH = 100


MEANING_COLUMN = 46  # where the meaning begins; after a longer option it goes on the next line


def help_text(sections: Mapping[str, Mapping[str, Option]], usage: str) -> str:
    """Format `usage`, then every option by section: name, type, [default], one line of meaning."""
    lines = [usage.rstrip()]
    for section, options in sections.items():
        lines += ["", f"[{section}]"]
        for option in options.values():
            lines += _help(option, f"--{option.name}")
            for key, inner in (option.keys or {}).items():
                lines += _help(inner, f"  {key}")
    return "\n".join(lines) + "\n"


def _help(option: Option, name: str) -> list[str]:
    kind = _type(option)
    head = f"  {name} {kind} {_default(option)}"
    limits = f" ({option.limits})" if option.limits and "|" not in kind else ""
    meaning = textwrap.wrap(option.help + limits, HELP_WIDTH - MEANING_COLUMN)
    if len(head) < MEANING_COLUMN:
        head = head.ljust(MEANING_COLUMN) + meaning.pop(0)
    return [head, *(" " * MEANING_COLUMN + line for line in meaning)]


def _type(option: Option) -> str:
    """Return the type, or the choices if there are any: adamw|muon."""
    if option.choices is None or option.size is not None:
        return option.type_name
    return "|".join(map(str, [*option.choices, *(["none"] if option.optional else [])]))


def _default(option: Option) -> str:
    text = "none" if option.default is None else to_text(option.default)  # REQUIRED: "required"
    return text if text.startswith("[") else f"[{text}]"
