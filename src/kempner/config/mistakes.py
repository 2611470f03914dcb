"""Hints for mistakes in configuration files and on command lines."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from kempner.config import toml
from kempner.config.option import Schema


def nearest_option(name: str, known: Schema, every: Schema, dashes: str = "") -> str:
    """Return the hint for a name that is not among the `known` sections and options: `; did you
    mean ...?` if `every` has a similar one."""
    section, _, key = name.rpartition(".")
    names = [option.name for keys in every.values() for option in keys.values()]
    elsewhere = [other for other in names if other.endswith(f".{key}")]
    if section in known:
        near = difflib.get_close_matches(key, known[section], n=1)
        guesses = [f"{section}.{key}" for key in near] or elsewhere
    else:
        # Without a section, guess the trainer's option, which comes before those of extensions.
        guesses = elsewhere[:1]
        if section:
            # Cutoff 0: the key is right, so take the nearest section, however far.
            guesses = difflib.get_close_matches(name, elsewhere, n=1, cutoff=0)
        names += () if dashes else every  # sections are not options
        guesses = guesses or difflib.get_close_matches(name, names, n=1)
    if guesses:
        return f"; did you mean {dashes}{guesses[0]}?"
    return f"; --help {section if section in known else '--all'} lists all"


def why_not_read(path: Path, error: Exception) -> str:
    """Say why a configuration file could not be read, and what to do."""
    if not isinstance(error, OSError):
        return _why_not_toml(error)
    if isinstance(error, IsADirectoryError):
        return "is a directory; name a file in it"
    # Not path.exists(), which raises if a directory may not be entered or a name is too long.
    if os.path.exists(path) and not os.path.isfile(path):
        return "is not a regular file; name one"
    if not isinstance(error, FileNotFoundError):
        return f"cannot be read: {error.strerror}; change its permissions or name another file"
    if path.is_symlink():
        return f"is a broken link to {os.readlink(path)}; name another file"
    try:
        whole = path.absolute()
    except FileNotFoundError:
        return "no such file: the current directory is gone; cd to one that exists"
    folder = path.parent
    if not folder.is_dir():
        return f"no such file: the directory {whole.parent} does not exist; correct the path"
    names = sorted(other.stem for other in folder.glob("*.toml") if other.name != "pyproject.toml")
    near = difflib.get_close_matches(path.stem, names, n=3)
    hint = f"did you mean {' or '.join(str(folder / name) + '.toml' for name in near)}?"
    if not near:
        hint = (
            f"{folder}/ has {', '.join(name + '.toml' for name in names[:12]) or 'no .toml file'}"
        )
    return f"no such file: looked at {whole}; {hint}"


def _why_not_toml(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not a TOML file: it is not UTF-8 text; save it as UTF-8"
    fix = "; correct it there" if isinstance(error, toml.TOMLDecodeError | RecursionError) else ""
    return f"not a TOML file: {error}{fix}"  # the error has line and column
