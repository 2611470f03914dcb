"""Questions and answers from a file."""

from __future__ import annotations

import importlib
import json
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from kempner.config.option import ConfigError
from kempner.rl.environments.protocol import Environment, Task

NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
MARK = re.compile(r"####\s*(.+)")
FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
UNITS = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}|\^\{?\\circ\}?|\\[,!;: $%]")
FORMULA = re.compile(r"[\d\\^=]")  # a text with none of these is words


class Qa(Environment):
    """The reward is 1 for the right answer. It stands after ####, or in \\boxed{}, or it is the
    last number of the completion; where it is no number, its last line."""

    runs_code = False

    def __init__(self, file: str, held_out: float = 0.1) -> None:
        """`file`: JSON lines with "question" (or "prompt") and "answer", of which what follows ####
        counts, as in GSM8K. `held_out`: share of them for evaluation alone; 1: all."""
        if not 0 <= held_out <= 1:
            raise ConfigError("held_out must be from 0 to 1")
        self.rows = read_rows(file, ("question", "prompt"), ("answer",))
        self.size, self.held_out = len(self.rows), held_out

    def task(self, number: int, rng: random.Random) -> Task:
        prompt, answer = self.rows[number]
        return Task(prompt, marked(str(answer)) or str(answer).strip())

    def score(self, task: Task, completion: str) -> float:
        wanted, given = value(task.answer), marked(completion)
        if wanted is None:
            lines = completion.strip().splitlines()
            text = (lines[-1] if lines else "") if given is None else given
            return float(plain(text) == plain(task.answer) or same(text, task.answer))
        found = value(given or "")
        if given is not None and found is None and "\\" in UNITS.sub("", given):  # a formula
            return float(same(given, task.answer))
        numbers = NUMBER.findall(completion if given is None else given)
        if found is None and numbers:  # "#### 18 eggs in 3 days" begins with the answer
            found = value(numbers[0 if MARK.search(completion) else -1])
        return float(found == wanted)


def marked(text: str) -> str | None:
    """The last of what is marked as the answer."""
    found = MARK.findall(text)
    return found[-1].strip() if found else boxed(text)


def boxed(text: str) -> str | None:
    """What the last \\boxed{} has, with the braces in it; None: there is none, or it has no end."""
    _, mark, rest = text.rpartition("\\boxed{")
    depth = 1
    for at, letter in enumerate(rest if mark else ""):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return rest[:at].strip()
    return None


def value(text: str) -> Fraction | None:
    """Of a number as people write it: $1,000.50, 3/4, \\frac{3}{4}, 12%, 5 \\text{ cm}."""
    text = FRACTION.sub(r"\1\2/\3", UNITS.sub("", text))
    try:
        return Fraction(re.sub(r"[$,%\s]", "", text).rstrip("."))
    except (ValueError, ZeroDivisionError):
        return None


def same(given: str, wanted: str) -> bool:
    """Are they the same formula? By math_verify where it is installed, else letter by letter."""
    if not FORMULA.search(wanted):
        return False
    if without_marks(given) == without_marks(wanted):
        return True
    try:
        package = importlib.import_module("math_verify")
    except ImportError:
        return False
    # Its own limits are signals; that of a reward ends the process.
    read = [package.parse(f"${text}$", parsing_timeout=None) for text in (wanted, given)]
    return bool(package.verify(*read, timeout_seconds=None))


def without_marks(text: str) -> str:
    text = UNITS.sub("", text).replace("\\left", "").replace("\\right", "")
    return re.sub(r"\\[dt]frac", r"\\frac", re.sub(r"[\s$]", "", text)).rstrip(".")


def plain(text: str) -> str:
    return " ".join(text.casefold().strip(" .\n\"'").split())


def read_rows(
    file: str, prompts: Sequence[str], answers: Sequence[str], *more: str
) -> list[tuple[Any, ...]]:
    """The first of these keys that each line has, then `more`, or None; raises ConfigError."""
    rows = []
    path = Path(file).expanduser()
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
                pair = [next(row[k] for k in keys if k in row) for keys in (prompts, answers)]
            except (ValueError, TypeError, StopIteration):
                keys = f"{' or '.join(prompts)}, and {' or '.join(answers)}"
                raise ConfigError(
                    f"{path}, line {number}: must be a JSON object with {keys}"
                ) from None
            rows.append((*pair, *map(row.get, more)))
    if not rows:
        raise ConfigError(f"{path} has no lines")
    return rows
