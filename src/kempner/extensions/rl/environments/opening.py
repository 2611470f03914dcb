"""Open environments from the configuration, by name or FILE.py:CLASS, and number their tasks."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import random
import sys
import typing
from pathlib import Path
from typing import Any

import numpy as np

from kempner.config.option import ConfigError
from kempner.config.values import NOUN, did_you_mean
from kempner.data.permute import shuffled_indices
from kempner.extensions.rl.config import EnvConfig, RlConfig
from kempner.extensions.rl.environments.protocol import Environment, Task

ENVIRONMENTS_PACKAGE = "kempner.extensions.rl.environments"
BUILT_IN = {
    "arithmetic": "puzzles:Arithmetic",
    "reverse": "puzzles:Reverse",
    "sort": "puzzles:Sort",
    "copy": "puzzles:CopyLetters",
    "format": "puzzles:Format",
    "qa": "qa:Qa",
    "code": "programs:CodeEnvironment",
    "guess": "dialogues:Guess",
    "calculator": "dialogues:Calculator",
    "reasoning_gym": "reasoning_gym:ReasoningGym",
    "verifiers": "verifiers:Verifiers",
}
# With an eighth of the prompts held out, all of these draws miss them with probability 1e-58.
PROMPT_DRAWS = 1000  # one of which must be a new prompt of the requested part
PROMPT_MISSES = 100  # consecutive draws of known prompts: there are no more


class Tasks:
    """An environment of the configuration, and its tasks by number.

    The hash of a prompt, which no seed changes, decides whether it is for training or held out for
    evaluation: no run, and no entry of [[rl.env]] with the same prompts, trains on held-out ones.
    """

    def __init__(self, cfg: EnvConfig, seed: int) -> None:
        """Open the environment. Raises ConfigError."""
        self.cfg, self.seed = cfg, seed
        self.environment = make_environment(cfg.id, cfg.args)

    @property
    def label(self) -> str:
        return self.cfg.label

    def task(self, number: int, held_out: bool = False) -> Task:
        """Return a task, which rl.seed and the number alone determine."""
        if self.environment.size is None:
            task = self._draw(number, held_out)
        else:
            part = self._parts[held_out]
            if not part:
                raise self._none_left(held_out)
            place = shuffled_indices(
                np.array([number]), len(part), self.seed
            )  # no list is shuffled
            task = self._raw(part[int(place[0])])
        return task._replace(number=number, held_out=held_out)

    def try_task(self, number: int, held_out: bool = False) -> Task | Exception:
        """Return a task, or the error that it raises, since a task is the user's code and data.
        Raises ConfigError if no such task exists."""
        try:
            return self.task(number, held_out)
        except ConfigError:
            raise
        except Exception as error:
            return error

    def evaluation(self, count: int) -> list[Task | Exception]:
        """Return `count` tasks that training never sees, each with a different prompt, or the
        errors of tasks that raise; fewer if there are no more, or they are too hard to find."""
        if self.environment.size is not None:
            count = min(count, len(self._parts[1]))
            return [self.try_task(number, True) for number in range(count)]
        tasks: dict[str | int, Task | Exception] = {}
        misses = number = 0
        while len(tasks) < count and misses < PROMPT_MISSES:
            task = self.try_task(number, True)
            key = number if isinstance(task, Exception) else task.key
            misses = misses + 1 if key in tasks else 0
            tasks.setdefault(key, task)
            number += 1
        return list(tasks.values())

    def check(self) -> None:
        """Raise ConfigError if no task is left to train on, or to evaluate as requested."""
        for held_out, use in ((False, "train"), (True, "eval")):
            if self.cfg.use in (use, "both"):
                self.try_task(0, held_out)

    def _draw(self, number: int, held_out: bool) -> Task:
        for attempt in range(PROMPT_DRAWS):
            # The seed depends only on the task, not on the order of requests. It is a string, which
            # Random hashes by SHA-512, the same in every process.
            seed = f"{self.seed} {self.cfg.label} {held_out} {number} {attempt}"
            task = self.environment.task(number, random.Random(seed))
            if self._is_held_out(task) == held_out:
                return task
        raise self._none_left(held_out)

    @functools.cached_property
    def _parts(self) -> tuple[list[int], list[int]]:
        """Return the numbers of the training tasks, and of the held-out ones. A task that raises
        has no prompt: it counts as a training task, if there are others.
        """
        parts: tuple[list[int], list[int]] = [], []
        for number in range(self.environment.size or 0):
            try:
                held_out = self._is_held_out(self._raw(number))
            except Exception:
                held_out = self.environment.held_out >= 1
            parts[held_out].append(number)
        return parts

    def _raw(self, number: int) -> Task:
        return self.environment.task(number, random.Random(f"{self.seed} {number}"))

    def _is_held_out(self, task: Task) -> bool:
        # A key is 16 hexadecimal digits of a hash, uniform below 2**64.
        return int(task.key, 16) < self.environment.held_out * 2**64

    def _none_left(self, held_out: bool) -> ConfigError:
        kind = "held out for evaluation" if held_out else "for training"
        return ConfigError(
            f'rl.env "{self.label}": no task is {kind}; give it more tasks, or another `use`'
        )


def open_environments(rl: RlConfig) -> list[Tasks]:
    """Open the environments of [[rl.env]], in order. Raises ConfigError with all problems."""
    opened, problems = [], []
    for cfg in rl.env:
        try:
            opened.append(Tasks(cfg, rl.seed))
            opened[-1].check()
        except ConfigError as error:
            problems += error.problems
    labels = [cfg.label for cfg in rl.env]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        problems.append(f'rl.env: two are called "{label}"; give each its own `name`')
    if problems:
        raise ConfigError(problems)
    return opened


def sandbox_refusal(cfg: EnvConfig, environment: Environment, lacks: list[str]) -> str:
    """Return why its rewards are not computed on a host whose kernel does not allow these limits;
    "" if they are."""
    if not lacks or cfg.unsafe or not environment.runs_code:
        return ""
    return (
        f'rl.env "{cfg.label}": runs programs that the model has written, and this host cannot '
        f"isolate them: {'; '.join(lacks)}; use a host that allows user namespaces, or give this "
        "entry `unsafe = true`: such a program can then delete whatever you may delete "
        '(docs/extensions/rl.md, "Limits of a reward")'
    )


def make_environment(identifier: str, args: str) -> Environment:
    """Make the environment of an `id` and `args` of [[rl.env]]; raises ConfigError."""
    where = f'rl.env "{identifier}"'
    maker = _find(identifier, where)
    arguments = _arguments(maker, args, where)
    try:
        return maker(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{where}: {line}" for line in error.problems) from None
    except Exception as error:
        # A mistake of ours needs its traceback.
        if identifier in BUILT_IN:
            raise
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from None


def _find(identifier: str, where: str) -> type[Environment]:
    file, colon, name = identifier.rpartition(":")
    if colon:
        path = Path(file).expanduser()
        found = getattr(_module(path, where), name, None)
        where = f"{where}: {path}"
    else:
        if identifier not in BUILT_IN:
            raise ConfigError(
                f"{where}: no environment has this name{did_you_mean(identifier, BUILT_IN)}; give "
                f"one of {', '.join(BUILT_IN)}, or your own as FILE.py:CLASS"
            )
        module, _, name = BUILT_IN[identifier].partition(":")
        found = getattr(importlib.import_module(f"{ENVIRONMENTS_PACKAGE}.{module}"), name)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(f"{where} has no class {name} that derives from Environment")
    return found


def _module(path: Path, where: str) -> Any:
    """Import a user's file once; it may import its neighbours."""
    # Its own name may clash with another file or a module of Python.
    name = f"environment_{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: {path} is not a .py file")
    module = importlib.util.module_from_spec(spec)
    # pickle looks up the classes of a task's values here; a reward's process uses the same name.
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # user code may raise anything
        sys.modules.pop(name)
        raise ConfigError(f"{where}: {path}: {type(error).__name__}: {error}") from None
    finally:
        sys.path.pop(0)
    return module


def _arguments(maker: type[Environment], args: str, where: str) -> dict[str, Any]:
    """Convert `args` to arguments of the class's __init__."""
    try:
        arguments = json.loads(args or "{}")
    except ValueError as error:
        raise ConfigError(f"{where}: args is not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ConfigError(f'{where}: args must be a JSON object, such as {{"below": 100}}')
    parameters = dict(inspect.signature(maker).parameters)
    # **config takes any name: the environment itself reports unknown ones.
    rest = [name for name in parameters if parameters[name].kind is inspect.Parameter.VAR_KEYWORD]
    for name in rest:
        del parameters[name]
    problems = [
        f"{where}: unknown argument {name}{did_you_mean(name, parameters)}; "
        f"it takes {', '.join(parameters) or 'none'}"
        for name in arguments
        if name not in parameters and not rest
    ]
    problems += [
        f"{where}: the argument {name} is required"
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in arguments
    ]
    types = typing.get_type_hints(maker.__init__)
    problems += [
        f"{where}: the argument {name} must be {NOUN[types[name]]}, not {json.dumps(value)}"
        for name, value in arguments.items()
        if types.get(name) in NOUN and not _fits(value, types[name])
    ]
    if problems:
        raise ConfigError(problems)
    return arguments


def _fits(value: object, kind: type) -> bool:
    """Return whether a value has a type of NOUN; an int is a float, but true is not a number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
