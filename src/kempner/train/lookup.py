"""Look-up of extensions and their sections in the index: those that a configuration uses or a flag
asks for. A run without extensions loads only this module."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kempner.jobs.ranks.placement import World
    from kempner.train.extensions import Extension
    from kempner.train.sections import RunConfig

Values = dict[str, dict[str, Any]]  # section -> key -> value, as given

INDEX = "kempner.extensions.index"


def extension_index() -> Any:
    """Return the extensions' tables: SECTIONS, KEYS, FLAGS, ADVICE."""
    return importlib.import_module(INDEX)


@functools.cache
def load_extension(name: str) -> Any:
    """Return the class MODULE:CLASS, a kempner.train.extensions.Extension."""
    module, _, cls = name.partition(":")
    return getattr(importlib.import_module(module), cls)()


def sections_with(section: str) -> Mapping[str, type]:
    """Map section name -> class for the extension that has this section or its parent."""
    name = extension_index().SECTIONS.get(section.partition(".")[0])
    sections: Mapping[str, type] = load_extension(name).sections if name else {}
    return sections


def every_section() -> dict[str, type]:
    """Map section name -> class for all extensions, in the order of the index."""
    every = map(load_extension, dict.fromkeys(extension_index().SECTIONS.values()))
    return {name: section for each in every for name, section in each.sections.items()}


def extension(name: str) -> Extension:
    """Return the extension MODULE:CLASS."""
    found: Extension = load_extension(name)
    return found


def of_flag(flag: str) -> Extension:
    """Return the extension whose program a command-line flag asks for."""
    return extension(extension_index().FLAGS[flag])


def advise(cfg: RunConfig, world: World) -> str:
    """Return advice for a run that has run out of memory."""
    return extension(extension_index().ADVICE).advise(cfg, world)


def recompute_choices(
    cfg: RunConfig, world: World, gpu: bool
) -> Sequence[tuple[dict[str, Any], float]]:
    """Return the choices of train.recompute = auto: see Extension."""
    return extension(extension_index().ADVICE).recompute_choices(cfg, world, gpu)


def used(cfg: RunConfig) -> list[Extension]:
    """Return the extensions that a configuration uses, each once."""
    tables = extension_index()
    sections = [tables.SECTIONS[name.partition(".")[0]] for name, _ in cfg.more]
    return [extension(name) for name in dict.fromkeys([*_by_key(cfg, tables), *sections])]


def _by_key(cfg: RunConfig, tables: Any) -> Iterator[str]:
    for key, name in tables.KEYS.items():
        section, _, option = key.partition(".")
        values = getattr(cfg, section)
        if getattr(values, option) != getattr(type(values), option):
            yield name


def used_by(values: Values) -> list[Extension]:
    """Do the same for values that are not yet a configuration."""
    tables = extension_index()
    names = [tables.SECTIONS[word] for section in values if (word := _word(section, tables))]
    for key, name in tables.KEYS.items():
        section, _, option = key.partition(".")
        if values[section].get(option) is not None:
            names.append(name)
    return [extension(name) for name in dict.fromkeys(names)]


def _word(section: str, tables: Any) -> str:
    word = section.partition(".")[0]
    return word if word in tables.SECTIONS else ""


def of_replica(cfg: RunConfig, number: int) -> RunConfig:
    """Return the configuration of replica `number`."""
    for each in used(cfg):
        cfg = each.of_replica(cfg, number)
    return cfg


def bringer(cfg: RunConfig) -> Extension | None:
    """Return the extension that brings the batches of the run, if any."""
    return next((each for each in used(cfg) if each.brings_batches(cfg)), None)
