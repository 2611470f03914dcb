"""The command line of a program that takes a configuration: its words, and its `--help`."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from kempner.config.option import ConfigError
from kempner.config.values import format_value

# Larger values are typing errors.
FLAG_MAXIMA = {"nodes": 100_000, "gpus-per-node": 1024, "host-memory": 100_000}
DASHES = "\u2013\u2014"  # a word processor turns two hyphens into one


@dataclass(frozen=True)
class Command:
    """A parsed command line: load() takes the first three, the program reads `flags`."""

    files: list[str]
    overrides: list[str]  # one word each: --section.key=value, --section.flag, --no-section.flag
    problems: list[str]
    flags: dict[str, Any]  # every flag of the program by name; False or None if not given


def parse_command(argv: Sequence[str], flags: Mapping[str, type]) -> Command:
    """Sort `argv` into files, overrides and the program's flags, {"check": bool, "nodes": int}.

    Raises nothing: problems with the words go into `problems`, for load() to raise with the rest.
    A word after `--section.key` is its value, unless it starts with a dash and is not a number;
    other words are files. Integer flags are counts: from 1 to FLAG_MAXIMA.
    """
    values = {name: False if kind is bool else None for name, kind in flags.items()}
    command = Command([], [], [], values)
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "-h" and "help" in flags:
            command.flags["help"] = True
        elif not word.startswith("--"):
            _file_or_stray(word, command)
        elif (name := word[2:].partition("=")[0].replace("_", "-")) in flags:
            _flag(name, flags[name], word, words, command)
        elif near := difflib.get_close_matches(name, flags, n=1, cutoff=0.75):
            command.problems.append(f"{word}: unknown option; did you mean --{near[0]}?")
            # Skip its value, which would otherwise be reported as a stray word.
            if "=" not in word and flags[near[0]] is not bool and _is_value(words):
                words.pop(0)
        elif "=" in word or name.startswith("no-") or not _is_value(words):
            command.overrides.append(word)
        else:
            command.overrides.append(f"{word}={words.pop(0)}")
    return command


def _is_value(words: Sequence[str]) -> bool:
    """Return whether the next word is a value: not an option, or a negative number."""
    if not words or not words[0].startswith("-"):
        return bool(words)
    try:
        float(words[0])
    except ValueError:
        return False
    return True


def _file_or_stray(word: str, command: Command) -> None:
    run_config = os.path.join(word, "config.toml")
    if word.startswith("@") and not os.path.isfile(word):  # as in prime-rl
        fix = f"name the file alone, {word[1:] if len(word) > 1 else 'without @'}"
        command.problems.append(f"{format_value(word)}: unexpected argument; {fix}")
        return
    if word.endswith(".toml") or os.path.isfile(word):
        command.files.append(word)
        return
    fix = "an override is --section.key=value, a configuration file ends in .toml"
    if word and os.path.isfile(run_config):
        fix = f"the configuration of that run is {run_config}"
    elif word.endswith(("]", '"', "'")):
        fix = "put an override that has spaces in quotes, '--section.key=[1, 2]'"
    elif word and os.path.isfile(f"{word}.toml"):
        fix = f"did you mean {word}.toml?"
    elif ("." in word and "=" in word) or word.startswith(tuple(DASHES)):
        fix = f"did you mean --{word.lstrip(DASHES + '-')}?"
    command.problems.append(f"{format_value(word)}: unexpected argument; {fix}")


def _flag(name: str, kind: type, word: str, words: list[str], command: Command) -> None:
    _, equals, text = word.partition("=")
    if kind is bool:
        command.flags[name] = True
        if equals:
            command.problems.append(f"{word}: --{name} takes no value; write --{name}")
        return
    if not equals and _is_value(words):
        text = words.pop(0)
    if not text:
        command.problems.append(f"{word}: a value is missing; write --{name}=VALUE")
    elif kind is int and not (
        # isdigit() also accepts superscripts; int() rejects them, and over 4,300 digits.
        text.isascii() and text.isdigit() and len(text) < 10 and 0 < int(text) <= FLAG_MAXIMA[name]
    ):
        fix = f"must be a whole number from 1 to {FLAG_MAXIMA[name]:,}; write --{name}=1"
        command.problems.append(f"--{name}={text}: {fix}")
    else:
        command.flags[name] = kind(text)


class Parser(argparse.ArgumentParser):
    """A parser that raises errors as ConfigError, without printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def argument_parser(program: str, doc: str | None) -> argparse.ArgumentParser:
    """Make a parser for a program without a configuration; the program's docstring is the help."""
    about, _, more = (doc or "").partition("\n")
    return Parser(program, None, about, more, formatter_class=argparse.RawDescriptionHelpFormatter)
