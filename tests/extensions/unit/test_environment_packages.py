"""Environments of other packages, the real ones; without them the message that says what to do."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kempner.config.option import ConfigError
from kempner.extensions.rl.config import EnvConfig
from kempner.extensions.rl.environments.opening import Tasks, make_environment
from kempner.extensions.rl.environments.protocol import Score
from kempner.extensions.rl.environments.sandbox.scorer import Scorer
from tests.rewards import score

TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Config(vf.TasksetConfig):
    count: int = 20

class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 3)

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for n in range(self.config.count):
            yield Sum(Data(prompt=f"{n} + 1", system_prompt="Add.", answer=str(n + 1)))

__all__ = ["Sums"]
"""


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed (extra rl-envs)")


def opened(identifier: str, **args: Any) -> Tasks:
    return Tasks(EnvConfig(identifier, args=json.dumps(args), use="both"), 0)


@needs("reasoning_gym")
def test_reasoning_gym() -> None:
    env = opened("reasoning_gym", dataset="chain_sum", min_terms=2, max_terms=3)
    tasks = [env.task(number) for number in range(4)]
    again = opened("reasoning_gym", dataset="chain_sum", min_terms=2, max_terms=3)
    assert [again.task(number).prompt for number in range(4)] == [task.prompt for task in tasks]
    right = tasks[0].answer["answer"]
    with contextlib.closing(Scorer(1)) as scorer:
        assert score(scorer, env, tasks[0], f"So <answer>{right}</answer>") == Score(1.0)
        assert score(scorer, env, tasks[0], right) == Score(1.0)
        assert score(scorer, env, tasks[0], "no").reward == 0.0
    with pytest.raises(ConfigError, match="'nope' not registered"):
        opened("reasoning_gym", dataset="nope")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'terms'"):
        opened("reasoning_gym", dataset="chain_sum", terms=2)


@pytest.mark.soak
@needs("verifiers")
def test_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums_of_a_test.py").write_text(TASKSET)
    tools = TASKSET.replace(
        "class Sum(vf.Task[Data]):", "class Sum(vf.Task[Data]):\n    NEEDS_CONTAINER = True"
    )
    (tmp_path / "boxed_sums_of_a_test.py").write_text(tools)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the processes
    env = opened("verifiers", taskset="sums_of_a_test", count=30)
    task = env.task(3)
    assert env.environment.size == 30
    assert [message["role"] for message in task.messages] == ["system", "user"]
    right = str(task.answer + 1)
    with contextlib.closing(Scorer(1)) as scorer:
        assert score(scorer, env, task, right) == Score(1.5)
        assert score(scorer, env, task, "wrong") == Score(0.0)
    with pytest.raises(ConfigError, match="no_such_taskset"):
        opened("verifiers", taskset="no_such_taskset")
    with pytest.raises(ConfigError, match="it must have no container"):
        opened("verifiers", taskset="boxed_sums_of_a_test")


@pytest.mark.parametrize(
    ("identifier", "package", "args"),
    [
        ("reasoning_gym", "reasoning_gym", '{"dataset": "chain_sum"}'),
        ("verifiers", "verifiers.v1", '{"taskset": "x"}'),
    ],
)
def test_without_the_package(
    identifier: str, package: str, args: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"is not installed.*\[rl-envs\]") as error:
        make_environment(identifier, args)
    assert len(error.value.problems) == 1
