"""A reward of one text, as the tests ask for it."""

from __future__ import annotations

from kempner.extensions.rl.environments.opening import Tasks
from kempner.extensions.rl.environments.protocol import Message, Score, Task
from kempner.extensions.rl.environments.sandbox.scorer import Scorer


def talk(task: Task, text: str) -> list[Message]:
    return [*task.messages, {"role": "assistant", "content": text}]


def score(scorer: Scorer, env: Tasks, task: Task, text: str) -> Score:
    (found,) = scorer.score(env, task, [talk(task, text)])
    return found
