"""Environments with several turns."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Sequence

from kempner.config.option import ConfigError
from kempner.extensions.rl.environments.protocol import Environment, Message, Reply, Task
from kempner.extensions.rl.environments.qa import number_value

INTEGER = re.compile(r"-?\d+")
CALL = re.compile(r"calc:(.*)")
# No powers: 9**9**9 would exhaust the host's time and memory.
ARITHMETIC: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Guess(Environment):
    """The model guesses a number, and is told whether it is higher or lower."""

    runs_code = False

    def __init__(self, numbers: int = 8, turns: int = 4) -> None:
        if numbers < 2 or turns < 1:
            raise ConfigError("numbers must be at least 2, and turns at least 1")
        self.numbers, self.turns = numbers, turns

    def task(self, number: int, rng: random.Random) -> Task:
        first = rng.randrange(100)
        last = first + self.numbers - 1
        return Task(f"Guess my number from {first} to {last}.\n", rng.randint(first, last))

    def reply(self, task: Task, messages: Sequence[Message]) -> Reply | None:
        found = INTEGER.findall(messages[-1]["content"])
        if not found:
            return Reply("\nA number, please.\n")
        # int() refuses texts of more than 4300 digits.
        guess = int(found[-1][:20])
        if guess == task.answer:
            return None
        return Reply("\nHigher.\n" if guess < task.answer else "\nLower.\n")

    def score(self, task: Task, completion: str) -> float:
        found = INTEGER.findall(completion)
        return float(bool(found) and int(found[-1][:20]) == task.answer)


class Calculator(Environment):
    """A product too large for mental arithmetic, and a calculator to ask for it."""

    runs_code = False
    turns = 4

    def __init__(self, below: int = 1000) -> None:
        if below < 2:
            raise ConfigError("below must be at least 2")
        self.below = below

    def task(self, number: int, rng: random.Random) -> Task:
        a, b, c = (rng.randrange(self.below) for _ in range(3))
        prompt = (
            f"What is {a}*{b}+{c}? A line such as `calc: 2*3` asks the calculator. "
            "Answer with the number alone.\n"
        )
        return Task(prompt, str(a * b + c))

    def reply(self, task: Task, messages: Sequence[Message]) -> Reply | None:
        call = CALL.search(messages[-1]["content"])
        return Reply(f"\n{evaluate_arithmetic(call[1])}\n") if call else None

    def score(self, task: Task, completion: str) -> float:
        return float(number_value(completion.strip()) == int(task.answer))


def evaluate_arithmetic(text: str) -> str:
    """Evaluate numbers with + - * / and parentheses; returns the value, or what is wrong."""
    try:
        result = _value(ast.parse(text.strip()[:200], mode="eval").body)
        return str(int(result)) if result == int(result) else str(result)  # int() refuses inf
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return ARITHMETIC[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only numbers with + - * / and parentheses")
