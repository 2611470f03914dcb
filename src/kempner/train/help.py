"""Options shown by --help."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from kempner.config.help import help_text
from kempner.config.option import ConfigError, config_schema, whole_schema
from kempner.train.sections import RunConfig

if TYPE_CHECKING:
    from kempner.train.extensions import Extension


# The trainer's sections that few runs set.
SELDOM = ("lora", "freeze", "experts", "trackers", "profile", "resilience")


def help_of(argv: Sequence[str], program: type[Extension] | None, usage: str) -> str:
    """Return the text of --help: the trainer's sections without SELDOM. Those and the sections of
    extensions appear on request: by name, with --all, or in an extension's own program. Raises
    ConfigError for an unknown section."""
    own, whole = config_schema(RunConfig), whole_schema(RunConfig)
    words = [word.strip("[]").split(".")[0] for word in argv if not word.startswith("-")]
    tops = list(dict.fromkeys(name.split(".")[0] for name in whole))
    for word in takewhile(lambda word: not word.startswith("-"), words_after_help(argv)):
        if word.strip("[]").split(".")[0] not in tops and not word.endswith(".toml"):
            near = difflib.get_close_matches(word, tops, n=1) or ["--all"]
            raise ConfigError([f"--help {word}: there is no such section; see --help {near[0]}"])
    names = {name for name in whole if name.split(".")[0] in words}
    if not names:
        names = {*own, *(program.sections if program else ())} - {*SELDOM}
    if "--all" in argv:
        names = {*whole}
    sections = {name: options for name, options in whole.items() if name in names}
    others = [name for name in whole if name not in sections and name not in {*own} - {*SELDOM}]
    heads = dict.fromkeys(name.split(".")[0] for name in others)
    more = f"\nMore sections: {', '.join(heads)}; see --help SECTION, or --help --all\n"
    return help_text(sections, usage) + (more if heads else "")


def words_after_help(argv: Sequence[str]) -> Sequence[str]:
    return next((argv[i + 1 :] for i, word in enumerate(argv) if word in ("--help", "-h")), ())
