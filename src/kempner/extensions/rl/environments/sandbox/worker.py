"""A process of a Scorer: `python -m kempner.extensions.rl.environments.sandbox.worker`. No torch.

It is two processes. The inner one asks the environments, whose code may hang, fork or take all
memory. The outer one, which runs none of their code, watches it, kills it with all that it has
started, and always answers. The outer one ends when the inner one is gone, or when the Scorer's end
of its pipe is closed, which the kernel does when that process is killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import select
import signal
import sys
import tempfile
import time
from typing import Any, NamedTuple

from kempner.config.option import ConfigError
from kempner.extensions.rl.config import EnvConfig
from kempner.extensions.rl.environments.opening import make_environment, sandbox_refusal
from kempner.extensions.rl.environments.protocol import Environment, Message, Task
from kempner.extensions.rl.environments.sandbox import limits
from kempner.extensions.rl.environments.sandbox.pipes import (
    EVER,
    Late,
    PipeClosed,
    receive_message,
    send_message,
)
from kempner.extensions.rl.environments.sandbox.scratch import empty_directory

OPEN_S = 120.0  # to make an environment
REWARD_POLL_S = 0.05  # between two checks of a longer reward
QUICK_S = 0.05  # for one request's conversations; then other processes take a share of the rest
REWARD_BEGIN = b"begin"  # the environment exists: from now on the limits of the reward apply


class RewardRequest(NamedTuple):
    env: EnvConfig
    call: str  # judge or reply
    size: int  # conversations
    arguments: bytes  # pickled task and conversations: only the environment may know their classes


class OuterProcess:
    def __init__(self, requests: int, answers: int, lacks: list[str]) -> None:
        """Start the inner process, and report what the kernel does not allow."""
        self.requests, self.answers, self.lacks = requests, answers, lacks
        self.inner, self.to_inner, self.from_inner = self._start()
        lacks, self.directory = json.loads(receive_message(self.from_inner, EVER))
        send_message(self.answers, json.dumps(lacks).encode(), EVER)

    def run(self) -> None:
        try:
            last = False
            while not last:
                answers = self._ask(receive_message(self.requests, EVER))
                last = "last" in answers[-1]
                send_message(self.answers, json.dumps(answers).encode(), EVER)
        except PipeClosed:
            pass
        finally:
            self._end()

    def _ask(self, message: bytes) -> list[dict[str, Any]]:
        """Return the inner process's answers for the first conversations, or why there is none for
        the next one; "last" if the process is gone."""
        request: RewardRequest = pickle.loads(message)
        try:
            answer: dict[str, Any] = json.loads(self._watch(request.env, message))
            fine = "last" not in answer and limits.end_descendants(self.inner, 1.0)
        except (Late, ValueError) as error:
            answer, fine = {"why": str(error)}, False
        if not fine:
            self._end()
            answer["last"] = True
        return [*self._noted()[: request.size - 1], answer]

    def _noted(self) -> list[dict[str, Any]]:
        text = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.notes, 1 << 16):
                text += part
        return [json.loads(line) for line in text.splitlines()]

    def _watch(self, env: EnvConfig, message: bytes) -> bytes:
        """Return the last answer. Raises Late, with the reason, if the inner process has exceeded a
        limit or ended."""
        end, reason = time.monotonic() + OPEN_S, f"did not open within {OPEN_S:.0f} s"
        before, failed = 0, None
        try:
            send_message(self.to_inner, message, end)
            while True:
                if self._answers():
                    answer = receive_message(self.from_inner, end)
                    if not answer.startswith(REWARD_BEGIN):
                        return answer
                    failed = json.loads(answer[len(REWARD_BEGIN) :])
                    end = time.monotonic() + QUICK_S + env.timeout
                    reason = f"took more than {env.timeout:g} s"
                    # Memory that a forked reward's process shares with it counts for both.
                    before = limits.process_memory([self.inner]) * (1 if failed is None else 2)
                    continue
                # Not all: the processes of a fork bomb appear faster than they are listed.
                family = limits.list_descendants(self.inner, limits.PROCESSES + 1)
                if len(family) > limits.PROCESSES:
                    raise Late(f"had more than {limits.PROCESSES} processes")
                if limits.process_memory([self.inner, *family]) - before > env.memory:
                    raise Late(f"used more than {env.memory} MiB")
                # WNOWAIT keeps the exit code for the reason below.
                if os.waitid(os.P_PID, self.inner, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    raise PipeClosed
                if time.monotonic() > end:
                    raise Late(reason)
        except PipeClosed:
            raise Late(_how(os.waitpid(self.inner, 0)[1])) from None
        except Late as error:
            if failed is not None:
                return json.dumps({"reward": failed, "last": True}).encode()
            raise Late(str(error) or reason) from None

    def _answers(self) -> bool:
        poll = select.poll()
        for fd in (self.from_inner, self.requests):
            poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(REWARD_POLL_S * 1000)]
        # The Scorer sends nothing while it waits for an answer: it has ended.
        if self.requests in ready:
            raise SystemExit
        return self.from_inner in ready

    def _start(self) -> tuple[int, int, int]:
        theirs, requests = os.pipe()
        answers, ours = os.pipe()
        self.notes, notes = os.pipe()
        os.set_blocking(self.notes, False)
        pid = os.fork()
        if pid:
            for fd in (theirs, ours, notes):
                os.close(fd)
            return pid, requests, answers
        code = 1
        try:
            for fd in (requests, answers, self.notes, self.requests, self.answers):
                os.close(fd)
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):  # discards what an environment prints
                os.dup2(nothing, fd)
            serve_rewards(theirs, ours, notes, self.lacks)
            code = 0
        finally:
            # Skip the interpreter's cleanup: its exit handlers are copies of the outer process's.
            os._exit(code)

    def _end(self) -> None:
        """Kill the inner process; if it is the init of a namespace, the kernel kills all
        others in it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.inner, signal.SIGKILL)
        # Of this process: as the subreaper it inherits the inner one's orphans.
        limits.end_descendants(os.getpid(), 10.0)
        if self.directory:
            empty_directory(self.directory)
            with contextlib.suppress(OSError):
                os.rmdir(self.directory)


def serve_rewards(requests: int, answers: int, notes: int, lacks: list[str]) -> None:
    """Run the inner process. `lacks`: what the kernel has not allowed before."""
    # A signal to our group must not reach the outer process.
    os.setsid()
    # The init of a namespace gets only signals that it handles: this removes Python's handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    more, own = limits.confine_process(not lacks)
    lacks = lacks + more
    # Only a directory made for it is ever emptied: its private file system, or else a new one.
    directory = "" if own else tempfile.mkdtemp(prefix="kempner-reward-")
    scratch = own or directory
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    send_message(answers, json.dumps([lacks, directory]).encode(), EVER)
    # The outer process reads them only after the last answer: a full pipe would block for ever.
    os.set_blocking(notes, False)
    environments: dict[EnvConfig, Environment] = {}
    with contextlib.suppress(PipeClosed):
        while True:
            request: RewardRequest = pickle.loads(receive_message(requests, EVER))
            limits.reap_children()
            empty_directory(scratch)  # leftovers of a process that had to be ended
            try:
                if request.env not in environments:
                    environments[request.env] = make_environment(request.env.id, request.env.args)
                environment = environments[request.env]
                if problem := sandbox_refusal(request.env, environment, lacks):
                    raise ConfigError(problem)
                task, talks = pickle.loads(request.arguments)
            except BaseException as error:
                send_message(answers, json.dumps({"why": _why(error)}).encode(), EVER)
                continue
            failed = environment.failed if request.call == "judge" else None
            send_message(answers, REWARD_BEGIN + json.dumps(failed).encode(), EVER)
            until = time.monotonic() + QUICK_S
            for number, talk in enumerate(talks, 1):
                how = ask_environment if failed is None else ask_apart
                found = how(environment, request, task, talk)
                # Leftover processes must be gone before the next conversation begins.
                alone = limits.reap_children()
                if not empty_directory(scratch):
                    found["last"] = True
                answer = json.dumps(found).encode()
                last = number == len(talks) or "last" in found or time.monotonic() > until
                if last or not alone or not leave_answer(notes, answer):
                    send_message(answers, answer, EVER)
                    break


def leave_answer(notes: int, answer: bytes) -> bool:
    """Put an answer into the pipe, which the outer process reads even if this one is gone, without
    waking it: that takes longer than most rewards. Returns False if there is no room."""
    try:
        # Writes of up to PIPE_BUF bytes to a pipe are atomic (pipe(7)).
        return len(answer) < select.PIPE_BUF and os.write(notes, answer + b"\n") > 0
    except BlockingIOError:
        return False


def ask_apart(
    environment: Environment, request: RewardRequest, task: Task, talk: list[Message]
) -> dict[str, Any]:
    """Ask in a separate process for this conversation. If it dies, the program is to blame, except
    for SIGKILL, which it cannot send: the kernel does, when the host runs out of memory."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(ours)
            send_message(
                theirs, json.dumps(ask_environment(environment, request, task, talk)).encode(), EVER
            )
        finally:
            os._exit(0)
    os.close(theirs)
    found: dict[str, Any] = {"reward": environment.failed}
    with contextlib.suppress(PipeClosed, ValueError):
        found = json.loads(receive_message(ours, EVER))
    os.close(ours)
    # The pipe alone does not show how it ended.
    status = os.waitpid(pid, 0)[1]
    return {"why": _how(status)} if status == signal.SIGKILL else found


def ask_environment(
    environment: Environment, request: RewardRequest, task: Task, talk: list[Message]
) -> dict[str, Any]:
    try:
        with limits.address_space(request.env.memory):
            if request.call == "reply":
                reply = environment.reply(task, talk)
                return {"reply": reply and [str(reply.content), str(reply.role)]}
            reward = float(environment.judge(task, talk))
    except BaseException as error:  # including SystemExit, MemoryError, RecursionError
        if isinstance(error, MemoryError) and environment.failed is not None:
            return {"reward": environment.failed}
        return {"why": _why(error)}
    return {"reward": reward} if math.isfinite(reward) else {"why": f"its reward is {reward}"}


def _why(error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    return f"{type(error).__name__}: {error}"[:1500]


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
    # Printed text goes to the log: on 1 it would mix with the answers.
    os.dup2(2, 1)
    lacks = (
        ["no namespaces (not wanted)"]
        if "--no-namespaces" in sys.argv
        else limits.isolate_children()
    )
    limits.become_subreaper()
    OuterProcess(requests, answers, lacks).run()


if __name__ == "__main__":
    main()
