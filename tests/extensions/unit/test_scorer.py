"""Rewards in limited processes: whatever an environment does, the next reward is right, and nothing
of it is left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from kempner.extensions.rl.config import EnvConfig
from kempner.extensions.rl.environments.opening import Tasks
from kempner.extensions.rl.environments.protocol import Reply, Score
from kempner.extensions.rl.environments.sandbox.limits import list_descendants
from kempner.extensions.rl.environments.sandbox.scorer import Scorer
from kempner.jobs.system.process import birth_ticks
from tests.conftest import ROOT, clean_env
from tests.rewards import score, talk

HOSTILE = EnvConfig(
    f"{ROOT}/tests/hostile_environment.py:Hostile", timeout=30.0, memory=200, unsafe=True
)
# A name that no other process has, in its command.
MARK = f"mark-{os.getpid()}"
SLEEP = (
    f"import subprocess\nsubprocess.Popen(['sh', '-c', 'sleep 60; : {MARK}'], "
    "start_new_session=True)"
)
Run = Callable[[str], Score]


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module", params=[True, False], ids=["namespaces", "none"])
def scorer(request: pytest.FixtureRequest, said: list[str]) -> Iterator[Scorer]:
    said.clear()
    with contextlib.closing(Scorer(1, said.append, namespaces=request.param)) as made:
        score(made, Tasks(EnvConfig("copy"), 0), Tasks(EnvConfig("copy"), 0).task(0), "")
        if request.param and said:
            pytest.skip(f"this kernel allows no namespaces: {said}")
        yield made


@pytest.fixture
def run(scorer: Scorer) -> Run:
    def run(code: str) -> Score:
        env = Tasks(replace(HOSTILE, timeout=1.0) if "while True" in code else HOSTILE, 0)
        return score(scorer, env, env.task(0), code)

    return run


def marked(mark: str) -> list[int]:
    """The `sleep` of SLEEP."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_text(errors="replace").startswith(f"sh\0-c\0sleep 60; : {mark}\0"):
                found.append(int(path.parent.name))
    return found


def running(pid: int) -> bool:
    """It may have ended, and wait for whoever inherited it."""
    with contextlib.suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def left(mark: str) -> list[int]:
    """Those that are there, once they have had time to end."""
    end = time.monotonic() + 20
    while (found := marked(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("while True: pass", "took more than 1 s"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        (
            "import os, time\nos.fork()\nx = b'x' * (150 << 20)\ntime.sleep(60)",
            "used more than 200 MiB",
        ),
        (
            "import subprocess\nfor _ in range(70): s = subprocess.Popen(['sleep', '9'])\ns.wait()",
            "had more than 64 processes",
        ),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os._exit(3)", "ended its process with exit code 3"),
        ("import ctypes; ctypes.string_at(0)", "ended its process by SIGSEGV"),
        ("import os; os.closerange(0, 100)", "ended its process with exit code 1"),
        ("result = float('nan')", "its reward is nan"),
        ("result = 'much'", "ValueError: could not convert string to float: 'much'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(): f()\nf()", "RecursionError"),
    ],
)
def test_what_fails_has_no_reward_and_the_next_one_has(run: Run, code: str, why: str) -> None:
    score = run(code)
    assert score.reward is None and why in score.why
    assert run("result = 0.5") == Score(0.5)


def test_processes_may_have_any_name(run: Run) -> None:
    name = "ctypes.CDLL(None).prctl(15, bytes([255, 254]))"  # PR_SET_NAME; not UTF-8
    child = f"import ctypes, os, time\nif not os.fork():\n  {name}\n  time.sleep(0.5)"
    assert run(f"{child}\n  os._exit(0)\nos.wait()\nresult = 0.5") == Score(0.5)


def test_what_is_printed_is_dropped(run: Run) -> None:
    assert run("import os\nprint('x' * 10**8)\nos.write(1, b'{}')\nos.write(2, b'{}')") == Score(
        1.0
    )


def test_nothing_that_a_reward_has_started_goes_on(run: Run) -> None:
    assert run(SLEEP) == Score(1.0)
    assert not left(MARK)
    assert "took more" in run(f"{SLEEP}\nwhile True: pass").why
    assert not left(MARK)


def test_what_this_process_knows_stays_here(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    for name in ("SLURM_JOB_ID", "HF_TOKEN", "KEMPNER_SERVE_TOKEN"):
        monkeypatch.setenv(name, "secret")
    env = Tasks(HOSTILE, 0)
    code = (
        "import os, subprocess, sys\n"
        "result = 'secret' in str(os.environ)\n"
        "result += 2 * ('secret' in subprocess.run([sys.executable, '-c', 'import os; print(dict("
        "os.environ))'], capture_output=True, text=True).stdout)"
    )
    with contextlib.closing(Scorer(1)) as scorer:
        assert score(scorer, env, env.task(0), code) == Score(0.0)


@pytest.mark.parametrize("scorer", [True], indirect=True, ids=["namespaces"])
def test_network_files_and_other_processes_are_out_of_reach(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = run("import socket; socket.create_connection(('192.0.2.1', 80), 1)").why
    assert "Network is unreachable" in why
    assert "Read-only file system" in run(f"open('{tmp_path}/file', 'w')").why
    assert run("import tempfile; tempfile.mkdtemp()") == Score(1.0)
    assert run("import os, tempfile; result = len(os.listdir(tempfile.gettempdir()))") == Score(0.0)
    assert "No such file" in run(f"open('/proc/{os.getpid()}/environ').read()").why
    # A program that it runs cannot write a reward into its pipes.
    code = (
        "import os, subprocess\npipes = f'/proc/{os.readlink(\"/proc/self\")}/fd'\n"
        "result = sum(subprocess.call(['sh', '-c', f': > {pipes}/{n}']) == 0 for n in range(9))"
    )
    assert run(code) == Score(0.0)


@pytest.mark.parametrize("scorer", [False], indirect=True, ids=["none"])
def test_missing_limits_are_said_once(run: Run, said: list[str]) -> None:
    run("import os; os._exit(1)")
    run("")
    assert len(said) == 1 and "no namespaces" in said[0]


def test_turns_and_files_of_ones_own_go_through_the_processes(scorer: Scorer) -> None:
    env = Tasks(HOSTILE, 0)
    task = env.task(0)
    messages = [*task.messages, {"role": "assistant", "content": "x = 1"}]
    assert scorer.reply(env, task, [messages]) == [Reply("And now?")]
    messages[-1]["content"] = "1 / 0"
    assert scorer.reply(env, task, [messages]) == [
        Score(None, "ZeroDivisionError: division by zero")
    ]
    messages += [{"role": "user", "content": "?"}, {"role": "assistant", "content": ""}]
    assert scorer.reply(env, task, [messages]) == [None]  # that was the last of its turns
    assert scorer.score(env, task, [messages]) == [Score(1.0)]


def test_a_group_is_scored_as_one_by_one(scorer: Scorer) -> None:
    """Whatever one of them does: what it leaves is gone before the next one, and each has its own
    limits."""
    env = Tasks(replace(HOSTILE, timeout=2.0), 0)
    task = env.task(0)
    quick = [f"result = {number}" for number in range(9)]
    assert scorer.score(env, task, []) == []
    found = scorer.score(env, task, [talk(task, code) for code in quick])
    assert found == [Score(float(number)) for number in range(9)]
    children = (
        "import os\ntry:\n    os.waitpid(-1, os.WNOHANG)\nexcept ChildProcessError:\n    result = 0"
    )
    file = "import os, tempfile; result = len(os.listdir(tempfile.gettempdir()))"
    codes = [
        "result = 1", "import tempfile; tempfile.mkdtemp()", file, SLEEP, children, "1 / 0",
        "import os; os._exit(3)", "while True: pass", "import time; time.sleep(1.2)",
        "import time; time.sleep(1.2)", "result = 2",
    ]  # fmt: skip
    found = scorer.score(env, task, [talk(task, code) for code in codes])
    rewards = [1.0, 1.0, 0.0, 1.0, 0.0, None, None, None, 1.0, 1.0, 2.0]
    assert [each.reward for each in found] == rewards, found
    assert [found[number].why for number in (5, 6, 7)] == [
        "ZeroDivisionError: division by zero", "ended its process with exit code 3",
        "took more than 2 s",
    ]  # fmt: skip
    talks = [[*talk(task, "x = 1"), *talk(task, "")], talk(task, "x = 1"), talk(task, "1 / 0")]
    over, goes_on, failed = scorer.reply(env, task, talks)
    assert over is None and goes_on == Reply("And now?") and isinstance(failed, Score)
    assert not left(MARK)


def test_quick_rewards_of_a_group_take_one_process_and_slow_ones_all() -> None:
    env = Tasks(HOSTILE, 0)
    task = env.task(0)
    with contextlib.closing(Scorer(2)) as scorer:
        pid = "import os; result = os.stat('/proc/self').st_ctime_ns"
        quick = scorer.score(env, task, [talk(task, pid)] * 6)
        assert len(set(quick)) == 1
        slow = scorer.score(env, task, [talk(task, f"{pid}; import time; time.sleep(0.3)")] * 6)
        assert len(set(slow)) == 2


def test_threads_share_the_processes() -> None:
    env = Tasks(EnvConfig("arithmetic"), 0)
    with contextlib.closing(Scorer(2)) as scorer, ThreadPoolExecutor(8) as pool:
        tasks = [env.task(number) for number in range(64)]
        scores = pool.map(lambda task: score(scorer, env, task, task.answer), tasks)
        assert list(scores) == [Score(1.0)] * 64


def test_a_program_that_hangs_forks_or_writes_much_has_the_reward_0() -> None:
    env = Tasks(EnvConfig("code", args='{"seconds": 1.0}', memory=512, unsafe=True), 0)
    task = env.task(0)
    with contextlib.closing(Scorer(1)) as scorer:
        for program in (
            "while True: pass",
            "x = bytearray(1 << 30)",
            "print('x' * 100_000_000)",
            "import os\nif os.fork(): os._exit(0)\nwhile True: pass",
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        ):
            assert score(scorer, env, task, program) == Score(0.0), program


@pytest.mark.parametrize("namespaces", [True, False])
def test_nothing_is_left_when_the_parent_is_killed(namespaces: bool) -> None:
    mark = f"{MARK}-{namespaces}"
    hang = f"{SLEEP.replace(MARK, mark)}\nimport time; time.sleep(60)"
    code = (
        "from kempner.extensions.rl.environments.sandbox.scorer import *\n"
        "from kempner.extensions.rl.config import EnvConfig\n"
        f"env = Tasks(EnvConfig({HOSTILE.id!r}, timeout=60.0, unsafe=True), 0)\n"
        f"Scorer(1, namespaces={namespaces}).score(env, env.task(0), [[{{'content': {hang!r}}}]])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=clean_env())
    with process:
        while not (family := list_descendants(process.pid)) or not marked(mark):
            assert process.poll() is None
            time.sleep(0.05)
        born = {pid: birth_ticks(pid) for pid in family}
        process.kill()
    assert len(born) >= 3  # two processes of the worker, and sh or sleep
    end = time.monotonic() + 20
    while there := [pid for pid, when in born.items() if birth_ticks(pid) == when and running(pid)]:
        assert time.monotonic() < end, there
        time.sleep(0.05)
