"""The shell's globals, KP_*, and those of them that more than one file writes: neither number
grows. The goal is few, each written in one file. No line has over 100 columns."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

SCRIPTS = Path(__file__).parents[3] / "scripts/slurm"
WRITTEN = re.compile(
    r"(?<![\w${])(KP_[A-Z_]+)(?:\[[^\]\n]*\])?\+?=(?![=~])"  # NAME=, NAME+=, NAME[...]=
    r"|\b(?:mapfile|read)\b[^\n|;&]*?\b(?<!\$)(KP_[A-Z_]+)\b"
)
GLOBALS = 183
SHARED = 44  # what several parts set, each for the kind of job that it knows
LONG_LINES = 0


def texts() -> dict[str, str]:
    return {str(path.relative_to(SCRIPTS)): path.read_text() for path in SCRIPTS.rglob("*.sh")}


def test_no_more_globals_are_written_in_several_files() -> None:
    writers: dict[str, set[str]] = defaultdict(set)
    for name, text in texts().items():
        for line in text.splitlines():
            code = "" if line.lstrip().startswith("#") else re.sub(r"^\s*local .*", "", line)
            for found in WRITTEN.finditer(code):
                writers[found[1] or found[2]].add(name)
    shared = {name: sorted(files) for name, files in writers.items() if len(files) > 1}
    assert len(shared) <= SHARED, shared


def test_there_are_no_more_globals_and_long_lines() -> None:
    whole = "\n".join(texts().values())
    assert len(set(re.findall(r"KP_[A-Z_]+", whole))) <= GLOBALS
    assert sum(len(line) > 100 for line in whole.splitlines()) <= LONG_LINES
