"""Environments for the tests of the orchestrator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kempner.extensions.rl.environments.protocol import Environment, Message, Reply, Task


class Digits(Environment):
    """The reward is the parity of what was said; that of every third prompt is always 0."""

    held_out = 0.25

    def task(self, number: int, rng: Any) -> Task:
        return Task(f"{number} {rng.randrange(1000)}:", number)

    def score(self, task: Task, completion: str) -> float:
        return 0.0 if task.answer % 3 == 0 else float(sum(completion.encode()) % 2)


class Flat(Digits):
    def score(self, task: Task, completion: str) -> float:
        return 0.5


class Broken(Digits):
    """Every fourth task has no reward."""

    def score(self, task: Task, completion: str) -> float:
        if task.answer % 4 == 0:
            raise RuntimeError("no reward here")
        return super().score(task, completion)


class Dead(Digits):
    def score(self, task: Task, completion: str) -> float:
        raise RuntimeError("no reward at all")


class Sparse(Digits):
    """Only the first task has rewards."""

    def score(self, task: Task, completion: str) -> float:
        if task.answer:
            raise RuntimeError("no reward here")
        return super().score(task, completion)


class Cut(Digits):
    def score(self, task: Task, completion: str) -> float:
        if "5" in completion:
            raise RuntimeError("5 ends a completion")
        return super().score(task, completion)


class Few(Digits):
    size, held_out = 24, 0.5


class Holes(Digits):
    """Some of its tasks raise, others have a prompt that is none."""

    size, held_out = 400, 0.5

    def task(self, number: int, rng: Any) -> Task:
        if number % 10 == 3:
            raise KeyError("answer")
        none: Any = None
        return Task(none if self.size and number % 10 == 4 else f"{rng.random()}:", number)


class Drawn(Holes):
    size = None


class AllHoles(Digits):
    def task(self, number: int, rng: Any) -> Task:
        raise KeyError("answer")


class NotMade(Digits):
    def __init__(self) -> None:
        raise KeyError("HOME")


class Talk(Digits):
    turns = 3

    def reply(self, task: Task, messages: Sequence[Message]) -> Reply | None:
        return Reply(" more? ")


class Chatty(Talk):
    """Its replies leave no room for another turn, or do not fit a row themselves."""

    def reply(self, task: Task, messages: Sequence[Message]) -> Reply | None:
        return Reply("x" * (80 if task.answer % 2 else 200))

    def judge(self, task: Task, messages: Sequence[Message]) -> float:
        if messages[-1]["role"] != "assistant" and task.answer % 2:
            raise RuntimeError("a reply is no answer")
        return super().judge(task, messages)
