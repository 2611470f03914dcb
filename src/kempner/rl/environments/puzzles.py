"""Environments of short texts that a program makes and checks. A tiny model can learn them, too."""

from __future__ import annotations

import random

from kempner.config.option import ConfigError
from kempner.rl.environments.protocol import Environment, Task

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


class Arithmetic(Environment):
    """3+4= is followed by 7."""

    def __init__(self, digits: int = 1, operations: str = "+", modulo: int = 0) -> None:
        """Numbers of at most `digits` digits; `modulo` over 0: the result is taken modulo it."""
        if digits < 1:
            raise ConfigError("digits must be at least 1")
        if not operations or set(operations) - set(OPERATIONS):
            raise ConfigError(f"operations must be some of {''.join(OPERATIONS)}")
        if modulo < 0:
            raise ConfigError("modulo must not be negative")
        self.digits, self.operations, self.modulo = digits, operations, modulo

    def task(self, number: int, rng: random.Random) -> Task:
        left, right = (rng.randrange(10**self.digits) for _ in range(2))
        operation = rng.choice(self.operations)
        result = OPERATIONS[operation](left, right)
        answer = result % self.modulo if self.modulo else result
        return Task(f"{left}{operation}{right}=", str(answer))

    def score(self, task: Task, completion: str) -> float:
        return float(completion.strip() == task.answer)
