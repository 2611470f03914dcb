"""Rewards and replies of environments, in limited processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kempner.rl.environments.opening import Tasks
from kempner.rl.environments.protocol import Message, Reply, Score, Task


class Scorer:
    """Processes that ask the environments. All of its methods may be called from any thread; one
    call takes one process, and waits for one that is free."""

    def __init__(self, workers: int, tell: Callable[[str], object] = print) -> None:
        """`workers`: processes, each made when it is first needed. `tell` takes lines for the log:
        which limits this host does not allow."""
        self.workers, self.tell = workers, tell

    def score(self, env: Tasks, task: Task, completion: str | Sequence[Message]) -> Score:
        """The reward of a text, or of a conversation that begins with the task's messages."""
        if isinstance(completion, str):
            messages = [*task.messages, {"role": "assistant", "content": completion}]
        else:
            messages = list(completion)
        return Score(env.environment.judge(task, messages))

    def reply(self, env: Tasks, task: Task, messages: Sequence[Message]) -> Reply | Score | None:
        """What follows the model's last turn; None: the conversation is over, ask for its score.
        A Score without a reward: the environment has failed, and the sample is left out."""
        ours = messages[len(task.messages) :]
        if sum(message["role"] == "assistant" for message in ours) >= env.environment.turns:
            return None
        return env.environment.reply(task, messages)

    def close(self) -> None:
        """Ends all processes."""
