"""Questions and answers from a file."""

from __future__ import annotations

import importlib
import json
import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from kempner.config.option import ConfigError
from kempner.extensions.rl.environments.protocol import Environment, Task

DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"  # commas separate groups of three, or do not belong to it
NUMBER_PATTERN = re.compile(rf"-?\$?{DIGITS}(?:\.\d+)?(?:[eE][+-]?\d+|/\d+)?")
# At most two exponent digits: the Fraction of 1e999999999 has a billion digits.
WHOLE = re.compile(rf"[+-]?{DIGITS}?(?:\.\d*)?(?:[eE][+-]?\d{{1,2}}|/\d+)?")
DIGIT_GROUPS = re.compile(r"(?<![\d.])(\d{1,3})((?: \d{3})+)(?!\d)")
ANSWER_MARK = re.compile(r"####\s*(.+)")
FRACTION = re.compile(r"(?<!\d)(-?)\\[dt]?frac *(?:\{(-?\d+)\}|(\d)) *(?:\{(\d+)\}|(\d))")
# At most 9 digits each: int() raises ValueError for more than 4300.
MIXED = re.compile(r"(-?)(\d{1,9}) *\\[dt]?frac *(?:\{(\d{1,9})\}|(\d)) *(?:\{(\d{1,9})\}|(\d))")
# Typeset minus signs, hyphens and spaces: the patterns here use ASCII.
SIGN_TABLE = str.maketrans(
    {"\u2212": "-", "\u2011": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " "}
)
UNIT_PATTERN = re.compile(
    r"\\(?:text|mathrm|mbox)\{[^{}]*\}(?:\^(?:\d|\{\d\}))?|\^\{?\\circ\}?|\\[,!;: $%]"
)
TEXT_COMMANDS = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}")
LETTER = re.compile(r"\(([a-z])\)")  # in multiple choice
FORMULA = re.compile(r"[\d\\^=]")  # a text with none of these is words
MATH_S = 2  # that math_verify may take to read a formula, or to compare two


class Qa(Environment):
    """Questions with answers. The reward is 1 for the right answer, which stands after ####, in
    \\boxed{}, or is the last number of the completion; if it is not a number, the last line."""

    runs_code = False

    def __init__(self, file: str, held_out: float = 0.1) -> None:
        """`file`: JSON lines with "question" (or "prompt") and "answer", of which the part after
        #### counts, as in GSM8K. `held_out`: share of them only for evaluation; 1: all."""
        if not 0 <= held_out <= 1:
            raise ConfigError("held_out must be from 0 to 1")
        self.rows = read_rows(file, ("question", "prompt"), "answer", problem_of_answer)
        self.size, self.held_out = len(self.rows), held_out

    def task(self, number: int, rng: random.Random) -> Task:
        prompt, answer = self.rows[number]
        return Task(prompt, marked_answer(str(answer)) or str(answer).strip())

    def score(self, task: Task, completion: str) -> float:
        completion = completion.translate(SIGN_TABLE)
        target, reply = number_value(task.answer), marked_answer(completion)
        if target is None:
            lines = completion.strip().splitlines()
            text = (lines[-1] if lines else "") if reply is None else reply
            return float(
                plain_text(text) == plain_text(task.answer) or same_formula(text, task.answer)
            )
        number = number_value(reply or "")
        if reply is not None and number is None:
            # A marked answer that is more than a number must not count as the last number in it.
            bare = UNIT_PATTERN.sub("", reply).strip()
            if bare.startswith(("(", "[", "{", "\\{")):  # a pair, an interval, a set
                return 0.0
            if re.search(r"[\\^]", bare):  # a formula
                return float(same_formula(reply, task.answer))
        numbers = NUMBER_PATTERN.findall(completion if reply is None else reply)
        if number is None and numbers:  # "#### 18 eggs in 3 days" begins with the answer
            number = number_value(numbers[0 if ANSWER_MARK.search(completion) else -1])
        return float(number == target)


def marked_answer(text: str) -> str | None:
    """Return the last text marked as the answer."""
    found = ANSWER_MARK.findall(text)
    return found[-1].strip() if found else boxed_answer(text)


def boxed_answer(text: str) -> str | None:
    """Return the content of the last \\boxed{}, including inner braces; None if there is none, or
    it is not closed."""
    _, mark, rest = text.rpartition("\\boxed{")
    depth = 1
    for at, letter in enumerate(rest if mark else ""):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return rest[:at].strip()
    return None


def number_value(text: str) -> Fraction | None:
    """Parse a number as people write it: $1,000.50, 1e3, 3/4, \\frac{3}{4}, 12%, 5 \\text{ cm}^2,
    10{,}000, 3\\frac{1}{2}."""
    # LaTeX writes a comma between digits as {,}, which suppresses the space after it.
    text = UNIT_PATTERN.sub("", text.translate(SIGN_TABLE).replace("{,}", ","))
    if mixed := MIXED.fullmatch(text.strip(" $.")):
        sign, whole, *parts = mixed.groups("")
        above, below = int(parts[0] or parts[1]), int(parts[2] or parts[3])
        found = int(whole) + Fraction(above, below) if below else None
        return -found if found and sign else found
    text = FRACTION.sub(lambda m: f"{m[1]}{m[2] or m[3]}/{m[4] or m[5]}", text)
    text = DIGIT_GROUPS.sub(lambda m: m[1] + m[2].replace(" ", ""), text.strip())
    text = re.sub(r"[$%\s]", "", text).rstrip(".,")
    try:
        return Fraction(text.replace(",", "")) if WHOLE.fullmatch(text) else None
    except (ValueError, ZeroDivisionError):
        return None


def same_formula(reply: str, target: str) -> bool:
    """Return whether two formulas are the same: by math_verify if installed, else
    letter by letter."""
    if not FORMULA.search(target):
        return False
    if without_marks(reply) == without_marks(target):
        return True
    try:
        package = importlib.import_module("math_verify")
    except ImportError:
        return False
    # A formula that takes too long is not the answer: math_verify's limits, which use signals, say
    # no. The limit of a reward would instead end the process, and leave the sample out.
    read = [package.parse(f"${text}$", parsing_timeout=MATH_S) for text in (target, reply)]
    return bool(package.verify(*read, timeout_seconds=MATH_S))


def without_marks(text: str) -> str:
    text = UNIT_PATTERN.sub("", text).replace("\\left", "").replace("\\right", "")
    return re.sub(r"\\[dt]frac", r"\\frac", re.sub(r"[\s$]", "", text)).rstrip(".")


def plain_text(text: str) -> str:
    text = TEXT_COMMANDS.sub(r"\1", text).casefold().strip(" .\n\"'$*")
    choice = LETTER.fullmatch(text)
    return choice[1] if choice else " ".join(text.split())


def problem_of_prompt(prompt: Any) -> str:
    """Return what is wrong with a prompt; "" if nothing."""
    is_talk = isinstance(prompt, list) and bool(prompt)
    for message in prompt if is_talk else []:
        is_talk &= isinstance(message, dict) and {"role", "content"} <= message.keys()
    if not isinstance(prompt, str) and not is_talk:
        return "must be a string or a list of messages with role and content"
    # JSON can spell half of a surrogate pair, which no tokenizer accepts.
    try:
        json.dumps(prompt, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"is not Unicode text: {error.reason}"
    return ""


def problem_of_answer(answer: Any) -> str:
    if isinstance(answer, (str, int, float)) and not isinstance(answer, bool):
        return ""
    return "must be a string or a number"


def read_rows(
    file: str, prompts: Sequence[str], answer: str, problem_of: Callable[[Any], str], *more: str
) -> list[tuple[Any, ...]]:
    """Read from each line the first of `prompts` that it has, its `answer`, which `problem_of`
    checks, and its `more`, strings or None. Raises ConfigError."""
    rows = []
    path = Path(file).expanduser()
    try:
        # Not splitlines(), which also splits at U+2028, which JSON may contain.
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
                key = next(key for key in prompts if key in row)
                pair = row[key], row[answer]
            except (ValueError, TypeError, LookupError, StopIteration):
                keys = f"{' or '.join(prompts)}, and {answer}"
                raise ConfigError(
                    f"{path}, line {number}: must be a JSON object with {keys}"
                ) from None
            problems = {key: problem_of_prompt(pair[0]), answer: problem_of(pair[1])}
            for name in more:
                problems[name] = "" if isinstance(row.get(name), str | None) else "must be a string"
            for name, problem in problems.items():
                if problem:
                    raise ConfigError(f"{path}, line {number}: {name} {problem}")
            rows.append((*pair, *map(row.get, more)))
    if not rows:
        raise ConfigError(f"{path} has no lines")
    return rows
