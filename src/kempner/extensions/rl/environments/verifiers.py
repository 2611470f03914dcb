"""Tasksets of the package verifiers, if a completion is one turn and its rewards need
only the conversation."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import random
from collections.abc import Sequence
from typing import Any

from kempner.config.option import ConfigError
from kempner.extensions.rl.environments.protocol import Environment, Message, Task


class Verifiers(Environment):
    def __init__(self, taskset: str, limit: int = 10_000, **config: Any) -> None:
        """`taskset`: a module with a taskset, as `verifiers` finds it; `limit`: most tasks to read;
        `config`: of the taskset."""
        try:
            self._package = importlib.import_module("verifiers.v1")
            loaders = importlib.import_module("verifiers.v1.utils.loaders")
        except ImportError:
            raise ConfigError(
                "the package verifiers is not installed, or older than 0.4; install it with "
                "`.venv/bin/pip install -c constraints.txt -e '.[rl-envs]'`"
            ) from None
        try:
            taskset_config = loaders.taskset_config_type(taskset)(id=taskset, **config)
            loaded = loaders.load_taskset(taskset_config)
            self._tasks = list(itertools.islice(loaded, limit))
        except Exception as error:  # from the package, pydantic, or the taskset
            raise ConfigError(f"verifiers: {taskset}: {error}") from None
        if not self._tasks:
            raise ConfigError(f"verifiers: {taskset} has no tasks")
        self.size = len(self._tasks)
        first = self._tasks[0]
        hooks = [*first.hooks("reward"), *(judge.score for judge in first.plugged_judges())]
        # The names complete the sentence of the message below: it must have ...
        lacks = {
            "rewards": not hooks,
            "no container": first.NEEDS_CONTAINER or any(map(_needs_runtime, hooks)),
            "no tools": bool(loaded.toolsets(taskset_config) or type(first).toolsets(first.config)),
            "no judge": bool(first.plugged_judges()),
            "prompts": first.data.prompt is None,
        }
        if needs := [name for name, missing in lacks.items() if missing]:
            raise ConfigError(f"verifiers: {taskset}: it must have {', '.join(needs)}")

    def task(self, number: int, rng: random.Random) -> Task:
        data = self._tasks[number].data
        messages = [{"role": "user", "content": data.prompt}]
        if not isinstance(data.prompt, str):
            messages = [message.model_dump(exclude_none=True) for message in data.prompt]
        if data.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": data.system_prompt})
        return Task(messages, number)

    def score(self, task: Task, completion: str) -> float:
        return self.judge(task, [*task.messages, {"role": "assistant", "content": completion}])

    def judge(self, task: Task, messages: Sequence[Message]) -> float:
        theirs, package = self._tasks[task.answer], self._package
        nodes = [
            {
                "message": message,
                "parent": number - 1 if number else None,
                "sampled": number >= len(task.messages),
            }
            for number, message in enumerate(messages)
        ]
        trace = package.Trace(
            task={"type": type(theirs).__name__, "data": theirs.data},
            agent={"config": package.AgentConfig()},
            nodes=nodes,
        )
        asyncio.run(theirs.score(trace))
        return float(trace.reward)


def _needs_runtime(hook: Any) -> bool:
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty
