"""Procedural tasks of the package reasoning-gym, which need no download."""

from __future__ import annotations

import importlib
import random
from typing import Any

from kempner.config.option import ConfigError
from kempner.extensions.rl.environments.protocol import Environment, Task

DEFAULTS = {"seed": 0, "size": 10_000}


class ReasoningGym(Environment):
    """Tasks of reasoning-gym. An answer counts in <answer></answer>, or as the whole completion."""

    runs_code = False

    def __init__(self, dataset: str, **config: Any) -> None:
        """`dataset`: one of the package's names, such as chain_sum; `config`: its parameters.
        `size` is the number of tasks to draw from."""
        try:
            package = importlib.import_module("reasoning_gym")
        except ImportError:
            raise ConfigError(
                "the package reasoning-gym is not installed; install it with "
                "`.venv/bin/pip install -c constraints.txt -e '.[rl-envs]'`"
            ) from None
        self._extract = importlib.import_module("reasoning_gym.utils").extract_answer
        try:
            self._dataset = package.create_dataset(dataset, **{**DEFAULTS, **config})
        except Exception as error:  # ValueError, TypeError, AssertionError, by dataset
            raise ConfigError(f"reasoning-gym: {dataset}: {error}") from None

    def task(self, number: int, rng: random.Random) -> Task:
        entry = self._dataset[rng.randrange(len(self._dataset))]
        return Task(entry["question"], entry)

    def score(self, task: Task, completion: str) -> float:
        answer = self._extract(completion) or completion.strip()
        return float(self._dataset.score_answer(answer, task.answer))
