"""The copy of the code: with --code=DIR, run.sh runs a copy of DIR, RUN/code/HASH, which
scripts/slurm/lib/code.sh makes. No torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kempner.config.option import ConfigError
from kempner.jobs.code import ORIGIN, CodeVersion, commit_of


class CodeCopy(NamedTuple):
    """`root`: a copy of the directory `origin`."""

    origin: Path
    root: Path

    @classmethod
    def given(cls) -> CodeCopy | None:
        """Return the batch script's copy; None without one. Raises ConfigError if it is gone."""
        if not (name := os.environ.get("KEMPNER_COPY")):
            return None
        root = Path(name)
        try:
            return cls(Path((root / ORIGIN).read_text().rstrip("\n")), root)
        except OSError as error:
            raise ConfigError(
                f"the copy of the program's code is gone: {error}: submit the job again"
            ) from None

    def code(self) -> CodeVersion:
        """Identify the code, without versions: the program may use another Python."""
        return CodeVersion(self.root.name, commit_of(self.root, True), ())

    def command(self, words: Sequence[str]) -> tuple[str, ...]:
        """Replace each copied file in the command by its copy, also in --option=FILE. The program
        keeps its working directory for data and results."""
        return tuple(self._word(word) for word in words)

    def _word(self, word: str) -> str:
        value = _value(word)
        name = file_in(self.origin, value)
        if name is None or not (self.root / name).is_file():
            return word
        return word.removesuffix(value) + str(self.root / name)

    def python_path(self, path: str) -> str:
        """Rewrite PYTHONPATH so that an editable install of `origin` is imported from the copy."""
        entries = [
            str(self.root / name) if (name := file_in(self.origin, entry)) is not None else entry
            for entry in path.split(os.pathsep)
            if entry
        ]
        # PYTHONPATH precedes the entries that an editable install adds to sys.path.
        own = [str(each) for each in (self.root / "src", self.root) if each.is_dir()]
        return os.pathsep.join(dict.fromkeys([*own, *entries]))


def file_in(directory: Path, word: str) -> Path | None:
    """Return the path within `directory` that a word names; None if it is outside."""
    if not word:
        return None
    path, root = Path(os.path.abspath(word)), Path(os.path.abspath(directory))
    return path.relative_to(root) if path.is_relative_to(root) else None


def _value(word: str) -> str:
    """Return the part of a word that may be a file: the word, or its value if it is an option."""
    return word.rpartition("=")[2] if word.startswith("-") else word


def check_code(directory: Path, command: Sequence[str]) -> None:
    """Raise ConfigError if the command would not run from a copy of the directory."""
    if not directory.is_dir():
        raise ConfigError(f"--code={directory}: no such directory: give the program's repository")
    for before, word in zip(("", *command), command, strict=False):
        here = Path(word.partition(".")[0])
        inside = file_in(directory, str(here)) is not None
        if before == "-m" and inside and (here.is_dir() or here.with_suffix(".py").is_file()):
            raise ConfigError(
                f"--code={directory}: Python takes the module of '-m {word}' from the working"
                " directory, not from the copy: name its file instead"
            )
    if not any(file_in(directory, each) and Path(each).is_file() for each in map(_value, command)):
        raise ConfigError(
            f"--code={directory}: no word of the command names a file in it, so nothing would run"
            f" from the copy; name the program's file: python {directory / 'my_train.py'}"
        )
