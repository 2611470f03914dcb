"""A process of a Scorer: `python -m kempner.rl.environments.worker`. No torch.

It is two. The inner one asks the environments; whatever it runs may hang, fork or take all memory.
The outer one, which runs nothing of theirs, watches it, kills it with all that it has started, and
answers in every case. When the inner one is gone the outer one ends, too; so it does when the
Scorer's end of its pipe is closed, as the kernel does when that process is killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from kempner.config.option import ConfigError
from kempner.rl.config import EnvConfig
from kempner.rl.environments import limits
from kempner.rl.environments.opening import make
from kempner.rl.environments.pipes import EVER, Ended, Late, receive, send
from kempner.rl.environments.protocol import Environment

OPEN_S = 120.0  # that an environment may take to be made
LOOK_S = 0.05  # between two looks at a reward that takes longer
BEGIN = b"begin"  # the environment is there: from now on the limits of the reward hold


class Request(NamedTuple):
    env: EnvConfig
    call: str  # judge or reply
    arguments: bytes  # pickled: a task may hold what only the environment's module defines


class Outer:
    def __init__(self, requests: int, answers: int, lacks: list[str]) -> None:
        """Starts the inner process, and tells what the kernel does not allow."""
        self.requests, self.answers, self.isolated = requests, answers, not lacks
        self.scratch = limits.SCRATCH
        if lacks:
            self.scratch = tempfile.mkdtemp(prefix="kempner-reward-")
        os.environ["TMPDIR"] = self.scratch
        self.inner, self.to_inner, self.from_inner = self._start()
        lacks += json.loads(receive(self.from_inner, EVER))
        send(self.answers, json.dumps(lacks).encode(), EVER)

    def run(self) -> None:
        try:
            last = False
            while not last:
                message = receive(self.requests, EVER)
                answer = self._ask(message)
                last = "last" in answer
                send(self.answers, json.dumps(answer).encode(), EVER)
        except Ended:
            pass
        finally:
            self._end()

    def _ask(self, message: bytes) -> dict[str, Any]:
        """The inner process's answer, or why there is none; "last" when it is gone."""
        request: Request = pickle.loads(message)
        try:
            answer: dict[str, Any] = json.loads(self._watch(request.env, message))
            fine = limits.end_descendants(self.inner, 1.0)
        except (Late, ValueError) as error:
            answer, fine = {"why": str(error)}, False
        if not fine:
            self._end()
            answer["last"] = True
        return answer

    def _watch(self, env: EnvConfig, message: bytes) -> bytes:
        """Raises Late with the reason when it has gone over a limit, or has ended."""
        end, reason = time.monotonic() + OPEN_S, f"was not open within {OPEN_S:.0f} s"
        before = 0
        try:
            send(self.to_inner, message, end)
            while True:
                if self._answers():
                    answer = receive(self.from_inner, end)
                    if answer != BEGIN:
                        return answer
                    end = time.monotonic() + env.timeout
                    reason = f"took more than {env.timeout:g} s"
                    before = limits.memory([self.inner])
                    continue
                family = limits.descendants(self.inner, limits.PROCESSES + 1)
                if len(family) > limits.PROCESSES:
                    raise Late(f"had more than {limits.PROCESSES} processes")
                if limits.memory([self.inner, *family]) - before > env.memory:
                    raise Late(f"took more than {env.memory} MiB")
                if os.waitid(os.P_PID, self.inner, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    raise Ended
                if time.monotonic() > end:
                    raise Late(reason)
        except Ended:
            raise Late(_how(os.waitpid(self.inner, 0)[1])) from None
        except Late as error:
            raise Late(str(error) or reason) from None

    def _answers(self) -> bool:
        poll = select.poll()
        for fd in (self.from_inner, self.requests):
            poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(LOOK_S * 1000)]
        if self.requests in ready:  # the Scorer sends nothing while it waits: it is gone
            raise SystemExit
        return self.from_inner in ready

    def _start(self) -> tuple[int, int, int]:
        theirs, requests = os.pipe()
        answers, ours = os.pipe()
        pid = os.fork()
        if pid:
            os.close(theirs)
            os.close(ours)
            return pid, requests, answers
        code = 1
        try:
            for fd in (requests, answers, self.requests, self.answers):
                os.close(fd)
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):  # what an environment prints is nobody's
                os.dup2(nothing, fd)
            serve(theirs, ours, self.scratch, self.isolated)
            code = 0
        finally:
            os._exit(code)

    def _end(self) -> None:
        """With the init of a namespace the kernel kills all that are in it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.inner, signal.SIGKILL)
        limits.end_descendants(os.getpid(), 10.0)
        if not self.isolated:
            shutil.rmtree(self.scratch, ignore_errors=True)


def serve(requests: int, answers: int, scratch: str, isolated: bool) -> None:
    """The inner process."""
    send(answers, json.dumps(limits.confine(isolated)).encode(), EVER)
    environments: dict[EnvConfig, Environment] = {}
    with contextlib.suppress(Ended):
        while True:
            request: Request = pickle.loads(receive(requests, EVER))
            limits.reap()
            try:
                if request.env not in environments:
                    environments[request.env] = make(request.env.id, request.env.args)
                send(answers, BEGIN, EVER)
                with limits.address_space(request.env.memory):
                    answer = ask(environments[request.env], request)
            except ConfigError as error:
                answer = {"why": str(error)}
            except BaseException as error:  # also SystemExit, MemoryError, RecursionError
                answer = {"why": f"{type(error).__name__}: {error}"[:1500]}
            send(answers, json.dumps(answer).encode(), EVER)
            for path in Path(scratch).iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def ask(environment: Environment, request: Request) -> dict[str, Any]:
    task, messages = pickle.loads(request.arguments)
    if request.call == "reply":
        reply = environment.reply(task, messages)
        return {"reply": reply and [str(reply.content), str(reply.role)]}
    reward = float(environment.judge(task, messages))
    if not math.isfinite(reward):
        return {"why": f"its reward is {reward}"}
    return {"reward": reward}


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return (
        f"ended its process with exit code {code}"
        if code >= 0
        else (f"ended its process by {signal.Signals(-code).name}")
    )


def main() -> None:
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    lacks = ["no namespaces (not wanted)"] if "--no-namespaces" in sys.argv else limits.isolate()
    limits.subreaper()
    Outer(requests, answers, lacks).run()


if __name__ == "__main__":
    main()
