"""Rewards and replies of environments, in limited processes. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kempner.config.option import ConfigError
from kempner.extensions.rl.environments.opening import Tasks, sandbox_refusal
from kempner.extensions.rl.environments.protocol import Message, Reply, Score, Task
from kempner.extensions.rl.environments.sandbox.pipes import (
    Late,
    PipeClosed,
    receive_message,
    send_message,
)
from kempner.extensions.rl.environments.sandbox.worker import OPEN_S, QUICK_S, RewardRequest
from kempner.jobs.system.process import module_command

SCORER_START_S = 60.0  # of a process, on a busy node
# All other variables, including tokens and Slurm's, are withheld from rewards.
KEPT_VARIABLES = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("PYTHONPATH", "PYTHONHOME", "HF_HOME", "XDG_CACHE_HOME"),
)
# One thread per reward. The hash seed keeps the order of sets equal in all processes.
SET = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    **{"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"},
    **{"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},  # the GPUs are the trainer's
}


class Scorer:
    """Processes that ask the environments. All methods may be called from any thread.

    One process takes all conversations of a group, because asking it costs more than most rewards.
    If rewards take longer, the rest of the group is spread over all processes.
    """

    def __init__(
        self, workers: int, tell: Callable[[str], object] = print, namespaces: bool = True
    ) -> None:
        """`workers`: processes, each started when first needed. `tell` takes a line for the log:
        which limits this host does not allow."""
        # Last in, first out: starts no more processes than work at the same time.
        self._free: queue.LifoQueue[_Process] = queue.LifoQueue()
        self._all = [_Process(self._tell_once, namespaces) for _ in range(workers)]
        for process in self._all:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(workers, "judge")
        self._tell, self._told, self._lock = tell, False, threading.Lock()

    def check(self, envs: Sequence[Tasks]) -> None:
        """Raise ConfigError if this host cannot isolate the programs of these environments."""
        process = self._free.get()
        lacks = process.lacks()
        self._free.put(process)
        problems = [sandbox_refusal(env.cfg, env.environment, lacks) for env in envs]
        if any(problems):
            raise ConfigError(problem for problem in problems if problem)

    def score(self, env: Tasks, task: Task, talks: Sequence[Sequence[Message]]) -> list[Score]:
        """Return the rewards of conversations that begin with the task's messages."""
        answers = self._ask("judge", env, task, talks)
        return [Score(answer.get("reward"), answer.get("why", "")) for answer in answers]

    def reply(
        self, env: Tasks, task: Task, talks: Sequence[Sequence[Message]]
    ) -> list[Reply | Score | None]:
        """Return the reply to the model's last turn of each conversation; None: it is over, ask for
        its score. A Score without a reward: the environment failed, and the sample is left out."""
        turns = [sum(each["role"] == "assistant" for each in talk) for talk in talks]
        before = sum(each["role"] == "assistant" for each in task.messages)
        going = [turn - before < env.environment.turns for turn in turns]
        open_talks = [talk for talk, goes in zip(talks, going, strict=True) if goes]
        answers = iter(self._ask("reply", env, task, open_talks))
        return [_reply(next(answers)) if goes else None for goes in going]

    def close(self) -> None:
        """End all processes, even while they work."""
        # First: a conversation waiting for its turn would restart a process.
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.end()

    def _ask(
        self, call: str, env: Tasks, task: Task, talks: Sequence[Sequence[Message]]
    ) -> list[dict[str, Any]]:
        def ask(part: Sequence[Sequence[Message]]) -> list[dict[str, Any]]:
            request = RewardRequest(env.cfg, call, len(part), pickle.dumps((task, part)))
            process = self._free.get()
            try:
                return process.ask(request)
            finally:
                self._free.put(process)

        answers = ask(talks) if talks else []
        rest = talks[len(answers) :]
        return answers + [each for (each,) in self._threads.map(lambda talk: ask([talk]), rest)]

    def _tell_once(self, lacks: list[str]) -> None:
        with self._lock:
            if lacks and not self._told:
                self._told = True
                self._tell(f"processes of rewards are less restricted here: {'; '.join(lacks)}")


class _Process:
    def __init__(self, tell: Callable[[list[str]], None], namespaces: bool) -> None:
        self._tell, self._process = tell, None  # type: Any, subprocess.Popen[bytes] | None
        self._words = [] if namespaces else ["--no-namespaces"]
        self._lacks: list[str] = []

    def ask(self, request: RewardRequest) -> list[dict[str, Any]]:
        """Return the answers for its first conversations, at least one; the others must
        be asked again."""
        try:
            process = self._process or self._start()
            assert process.stdin and process.stdout
            # A timeout for a stopped process; a running one answers in time by itself.
            end = time.monotonic() + OPEN_S + QUICK_S + request.env.timeout + SCORER_START_S
            send_message(process.stdin.fileno(), pickle.dumps(request), end)
            answers: list[dict[str, Any]] = json.loads(
                receive_message(process.stdout.fileno(), end)
            )
        except (Late, PipeClosed):
            answers = [{"why": "lost its process", "last": True}]
        if "last" in answers[-1]:
            self.end()
        return answers

    def _start(self) -> subprocess.Popen[bytes]:
        variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        # A separate session: Ctrl-C must reach only us, and the process ends when we do.
        process = self._process = subprocess.Popen(
            [*module_command("kempner.extensions.rl.environments.sandbox.worker"), *self._words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # pipes.py reads the descriptors: a Python buffer would hide data that have arrived.
            bufsize=0,
            env={**variables, **SET},
            start_new_session=True,
        )
        assert process.stdout
        self._lacks = json.loads(
            receive_message(process.stdout.fileno(), time.monotonic() + SCORER_START_S)
        )
        self._tell(self._lacks)
        return process

    def lacks(self) -> list[str]:
        """Return the limits that the kernel does not allow. Raises OSError if no process
        can be started."""
        try:
            self._process or self._start()
        except (Late, PipeClosed):
            self.end()
            raise OSError("a process for rewards cannot be started on this host") from None
        return self._lacks

    def end(self) -> None:
        """End it by closing its pipe, or by SIGKILL if it does not respond."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin and process.stdout
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Longer than the 10 s in which it may end its descendants.
            process.wait(15)
        process.kill()
        process.wait()
        process.stdout.close()


def _reply(answer: dict[str, Any]) -> Reply | Score | None:
    if "why" in answer:
        return Score(None, answer["why"])
    return Reply(*answer["reply"]) if answer["reply"] else None


class NoRewards:
    """A stand-in for the scorer: conversations have one turn, and nothing waits for rewards."""

    def check(self, envs: Sequence[Tasks]) -> None: ...

    def score(self, env: Tasks, task: Task, talks: Sequence[object]) -> list[Score]:
        return [Score(0.0)] * len(talks)

    def reply(self, env: Tasks, task: Task, talks: Sequence[object]) -> list[None]:
        return [None] * len(talks)

    def close(self) -> None: ...
