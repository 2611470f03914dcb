"""The protocol of environments: tasks, and rewards for a model's answers to them. No torch.

class Vowels(Environment):
    def task(self, number, rng):
        word = "".join(rng.choices("abcdefgh", k=5))
        return Task(f"Vowels in {word}: ", answer=sum(letter in "ae" for letter in word))

    def score(self, task, completion):
        return float(completion.strip() == str(task.answer))
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]
"""role (system, user, assistant or tool) and content, as chat templates take them."""


class Task(NamedTuple):
    prompt: str | list[Message]  # text that the model continues, or a conversation
    answer: Any = None  # what score() needs; must be picklable
    number: int = 0  # with `held_out`, reproduces the task; set when it is handed out
    held_out: bool = False

    @property
    def key(self) -> str:
        """Hash of the prompt, independent of the task's number."""
        # Not hash(), which differs between processes.
        return hashlib.sha256(json.dumps(self.prompt).encode()).hexdigest()[:16]

    @property
    def messages(self) -> list[Message]:
        """Return the prompt as the start of a conversation: a text is the user's message."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return list(self.prompt)


class Reply(NamedTuple):
    """An environment's answer to a turn of the model. After a plain-text prompt it is plain text,
    too, and directly follows the model's."""

    content: str
    role: str = "user"  # or tool


class Score(NamedTuple):
    reward: float | None  # None: there is none, and the sample is left out
    why: str = ""  # reason why there is no reward


class Environment:
    """Base class of an environment. The arguments of its __init__ are `args` in [[rl.env]]."""

    size: int | None = None
    """Number of tasks: each is seen once before any is seen again. None: unlimited."""
    held_out: float = 0.125
    """Share of the prompts, chosen by their hash, that only evaluation sees."""
    turns: int = 1
    """Maximum number of turns of the model."""
    runs_code: bool = True
    """Rewards may run programs that the model has written. False: they only read texts, and are
    computed even if the kernel cannot isolate a program."""
    failed: float | None = None
    """The reward if its process crashes, is late, or has too much memory or too many processes, for
    environments where only the model's program can cause that. Each reward then has its own
    process. None: the environment may be at fault, and the sample is left out."""

    def task(self, number: int, rng: random.Random) -> Task:
        """Return task `number`. With `size`, number < size; without, any task, drawn only from
        `rng`, so that it is the same in every run with the same rl.seed."""
        raise NotImplementedError

    def score(self, task: Task, completion: str) -> float:
        """Return the reward of the model's last turn."""
        raise NotImplementedError

    def judge(self, task: Task, messages: Sequence[Message]) -> float:
        """Return the reward of a whole conversation, which begins with the task's messages."""
        return self.score(task, messages[-1]["content"])

    def reply(self, task: Task, messages: Sequence[Message]) -> Reply | None:
        """Answer the model's turn at the end of `messages`; None: the conversation is over. Not
        called after the last of `turns`."""
        return None
