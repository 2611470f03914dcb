"""Finds extensions and their sections by the index, and knows nothing else of them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

INDEX = "kempner.extensions.index"


def extension_index() -> Any:
    """The tables of the extensions: SECTIONS, KEYS, FLAGS, ADVICE."""
    return importlib.import_module(INDEX)


@functools.cache
def load_extension(name: str) -> Any:
    """The extension MODULE:CLASS, a kempner.train.extensions.Extension."""
    module, _, cls = name.partition(":")
    return getattr(importlib.import_module(module), cls)()


def sections_with(section: str) -> Mapping[str, type]:
    """Map section name -> class, of the extension that has this section, or one around it."""
    name = extension_index().SECTIONS.get(section.partition(".")[0])
    found: Mapping[str, type] = load_extension(name).sections if name else {}
    return found


def every_section() -> dict[str, type]:
    """Map section name -> class, of all extensions in the order of the index."""
    every = map(load_extension, dict.fromkeys(extension_index().SECTIONS.values()))
    return {name: section for each in every for name, section in each.sections.items()}
