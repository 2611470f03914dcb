"""An environment that runs what it is given in the process of the reward itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kempner.extensions.rl.environments.protocol import Environment, Message, Reply, Task


class Answer:
    """A class that only this file has."""


class Hostile(Environment):
    turns = 2

    def task(self, number: int, rng: random.Random) -> Task:
        return Task(f"Break out, {rng.random()}.", Answer())

    def score(self, task: Task, completion: str) -> float:
        names: dict[str, Any] = {"result": 1.0}
        exec(completion, names)
        assert isinstance(task.answer, Answer)
        return names["result"]  # type: ignore[no-any-return]

    def reply(self, task: Task, messages: Sequence[Message]) -> Reply | None:
        exec(messages[-1]["content"], {})
        return Reply("And now?")
