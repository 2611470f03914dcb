"""Questions and answers from a file."""

from __future__ import annotations

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
MARKS = (re.compile(r"####\s*(.+)"), re.compile(r"\\boxed\{([^{}]*)\}"))


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
        wanted = value(task.answer)
        if wanted is None:
            lines = completion.strip().splitlines()
            given = marked(completion) or (lines[-1] if lines else "")
            return float(plain(given) == plain(task.answer))
        numbers = NUMBER.findall(marked(completion) or completion)
        return float(bool(numbers) and value(numbers[-1]) == wanted)


def marked(text: str) -> str | None:
    """The last of what is marked as the answer."""
    found = [hits[-1] for mark in MARKS if (hits := mark.findall(text))]
    return found[0].strip() if found else None


def value(text: str) -> Fraction | None:
    """Of a number as people write it: $1,000.50, 3/4, 12%."""
    try:
        return Fraction(re.sub(r"[$,%\s]", "", text).rstrip("."))
    except (ValueError, ZeroDivisionError):
        return None


def plain(text: str) -> str:
    return " ".join(text.casefold().strip(" .\n\"'").split())


def read_rows(
    file: str, prompts: Sequence[str], answers: Sequence[str]
) -> list[tuple[str | list[dict[str, Any]], Any]]:
    """The first of these keys that each line has; raises ConfigError."""
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
            rows.append((pair[0], pair[1]))
    if not rows:
        raise ConfigError(f"{path} has no lines")
    return rows
