"""Environments of short texts that a program makes and checks. Even a tiny model can learn them."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from kempner.config.option import ConfigError
from kempner.extensions.rl.environments.protocol import Environment, Task

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
PUZZLE_WORDS = (
    "river",
    "stone",
    "cloud",
    "tiger",
    "lamp",
    "seven",
    "green",
    "music",
    "bread",
    "north",
)


def partial_reward(text: str, answer: str, partial: float) -> float:
    """Return 1 for the answer; else `partial` times the share of correct characters before the
    first wrong one, so that a model that has never been right learns from near misses."""
    if text == answer:
        return 1.0
    right = next((i for i, (a, b) in enumerate(zip(text, answer, strict=False)) if a != b), None)
    shorter = min(len(text), len(answer))
    return partial * (shorter if right is None else right) / max(len(text), len(answer), 1)


def check_fraction(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must be from 0 to 1")
    return value


class Arithmetic(Environment):
    """Small sums: 7 follows 3+4=."""

    runs_code = False

    def __init__(
        self,
        below: int = 10,
        operations: str = "+",
        modulo: int = 0,
        partial: float = 0.0,
        held_out: float = Environment.held_out,
    ) -> None:
        """Make tasks of two numbers below `below`. `modulo` over 0: the result is
        taken modulo it."""
        if below < 2 or modulo < 0:
            raise ConfigError("below must be at least 2, and modulo not negative")
        if not operations or set(operations) - set(OPERATIONS):
            raise ConfigError(f"operations must be some of {''.join(OPERATIONS)}")
        self.below, self.operations, self.modulo = below, operations, modulo
        self.partial = check_fraction("partial", partial)
        self.held_out = check_fraction("held_out", held_out)

    def task(self, number: int, rng: random.Random) -> Task:
        left, right = (rng.randrange(self.below) for _ in range(2))
        operation = rng.choice(self.operations)
        result = OPERATIONS[operation](left, right)
        answer = result % self.modulo if self.modulo else result
        return Task(f"{left}{operation}{right}=", str(answer))

    def score(self, task: Task, completion: str) -> float:
        return partial_reward(completion.strip(), task.answer, self.partial)


class Letters(Environment):
    """A word, >, and its transformation."""

    runs_code = False

    def __init__(
        self,
        length: int = 3,
        alphabet: int = 26,
        partial: float = 0.0,
        held_out: float = Environment.held_out,
    ) -> None:
        """Make words of `length`, from the first `alphabet` letters."""
        if length < 1 or not 2 <= alphabet <= 26:
            raise ConfigError("length must be at least 1, and alphabet from 2 to 26")
        self.length, self.letters = length, string.ascii_lowercase[:alphabet]
        self.partial = check_fraction("partial", partial)
        self.held_out = check_fraction("held_out", held_out)

    def change(self, word: str) -> str:
        raise NotImplementedError

    def task(self, number: int, rng: random.Random) -> Task:
        word = "".join(rng.choices(self.letters, k=self.length))
        return Task(f"{word}>", self.change(word))

    def score(self, task: Task, completion: str) -> float:
        return partial_reward(completion.strip(), task.answer, self.partial)


class Reverse(Letters):
    def change(self, word: str) -> str:
        return word[::-1]


class Sort(Letters):
    def change(self, word: str) -> str:
        return "".join(sorted(word))


class CopyLetters(Letters):
    def change(self, word: str) -> str:
        return word


class Format(Environment):
    """Instructions about the form of a text; the reward is the share of them that it follows."""

    runs_code = False

    def __init__(self, instructions: int = 2) -> None:
        if not 1 <= instructions <= len(LETTER_RULES):
            raise ConfigError(f"instructions must be from 1 to {len(LETTER_RULES)}")
        self.instructions = instructions

    def task(self, number: int, rng: random.Random) -> Task:
        topic = rng.choice(PUZZLE_WORDS)
        rules = [
            (name, _parameter(name, rng))
            for name in rng.sample(list(LETTER_RULES), self.instructions)
        ]
        lines = [f"- {LETTER_RULES[name][0].format(value)}" for name, value in rules]
        return Task("\n".join((f"Write about a {topic}.", *lines, "")), rules)

    def score(self, task: Task, completion: str) -> float:
        text = completion.strip()
        # Otherwise an empty text would be rewarded for the capitals and commas it lacks.
        followed = [
            bool(text) and LETTER_RULES[name][1](text, value) for name, value in task.answer
        ]
        return sum(followed) / len(followed)


def _parameter(name: str, rng: random.Random) -> str:
    return rng.choice(PUZZLE_WORDS) if name in ("contains", "ends") else str(rng.randint(3, 12))


LETTER_RULES: dict[str, tuple[str, Callable[[str, str], bool]]] = {
    "words": ("Use exactly {} words.", lambda text, n: len(text.split()) == int(n)),
    "lines": ("Use exactly {} lines.", lambda text, n: len(text.splitlines()) == int(n)),
    "lower": (
        "Use no capital letters, and at most {} commas.",
        lambda text, n: text == text.lower() and text.count(",") <= int(n),
    ),
    "contains": ("Use the word {}.", lambda text, word: word in text.lower()),
    "ends": ("End with the word {}.", lambda text, word: text.lower().rstrip(".!").endswith(word)),
    "quoted": (
        "Put all of it in double quotes, at least {} characters.",
        lambda text, n: len(text) >= int(n) and len(text) > 1 and text[0] == text[-1] == '"',
    ),
}
