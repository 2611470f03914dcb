"""Programs that a model has written, against the processes and files around them: whatever one
does, only its own sample is touched, and that is 0 where the program is the cause."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from kempner.extensions.rl.config import EnvConfig
from kempner.extensions.rl.environments.opening import Tasks
from kempner.extensions.rl.environments.protocol import Task
from kempner.extensions.rl.environments.sandbox.scorer import Scorer
from tests.rewards import talk

TESTS = "assert f(2) == 3\nassert f(5) == 6"
RIGHT, WRONG = "def f(x): return x + 1", "def f(x): return 0"
CODE = EnvConfig("code", args='{"seconds": 10.0}', timeout=30.0, memory=512)


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    said: list[str] = []
    with contextlib.closing(Scorer(1, said.append)) as made:
        rewards(made, RIGHT)
        if said:
            pytest.skip(f"this kernel does not isolate: {said}")
        yield made


def rewards(
    scorer: Scorer, *programs: str, tests: str = TESTS, cfg: EnvConfig = CODE
) -> list[float | None]:
    task = Task("p", tests)
    return [
        each.reward
        for each in scorer.score(Tasks(cfg, 0), task, [talk(task, text) for text in programs])
    ]


SIGNALS = {
    "its group": "import os\nos.killpg(0, 9)",
    "SIGINT": "import os, time\nos.kill(os.getppid(), 2)\ntime.sleep(0.3)",
    "all signals": (
        "import os\nfor number in range(1, 32):\n    for pid in (os.getppid(), 1):\n"
        "        if pid not in (0, os.getpid()):\n            os.kill(pid, number)"
    ),
    "everybody": "import os\nif os.fork() == 0: os.kill(-1, 9)\nos.kill(-1, 9)",
}


@pytest.mark.parametrize("program", SIGNALS.values(), ids=SIGNALS)
def test_signals_reach_nothing_but_the_program(scorer: Scorer, program: str) -> None:
    found = rewards(scorer, RIGHT, f"{program}\n{WRONG}", RIGHT, WRONG)
    assert found == [1.0, 0.0, 1.0, 0.0]


def test_limits_of_other_processes_stay(scorer: Scorer) -> None:
    program = (
        "import contextlib, os, resource\n"
        "for pid in {*range(1, 320), *map(int, filter(str.isdigit, os.listdir('/proc')))}:\n"
        "    for name in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE):\n"
        "        with contextlib.suppress(OSError):\n"
        "            if pid != os.getpid(): resource.prlimit(pid, name, (0, 0))\n"
    )
    assert rewards(scorer, RIGHT, program + WRONG, RIGHT) == [1.0, 0.0, 1.0]


def test_processes_do_not_run_out(scorer: Scorer) -> None:
    """Not after hundreds that have ended; a namespace gives low numbers to its first ones alone."""
    program = (
        "import os, time\nfor _ in range(400): os.waitpid(os.fork() or os._exit(0), 0)\n"
        "for pid in [os.fork() or os._exit(0) for _ in range(30)]: os.waitpid(pid, 0)\n"
    )
    assert rewards(scorer, program + RIGHT, RIGHT, program + RIGHT) == [1.0, 1.0, 1.0]


def test_nothing_of_a_program_goes_on(scorer: Scorer) -> None:
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        while True: open('/dev/shm/daemon', 'w'); time.sleep(0.001)\n    os._exit(0)\n"
        "while not os.path.exists('/dev/shm/daemon'): pass\n"
    )
    look = "import os, time\ntime.sleep(0.1)\nif os.listdir('/dev/shm'): 1 / 0\n"
    assert rewards(scorer, daemon + RIGHT, look + RIGHT) == [1.0, 1.0]


FAILURES = {
    "processes": (
        "import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(60)\n"
        "time.sleep(60)",
        TESTS,
    ),
    "memory": (
        "import os, time\nfor _ in range(4):\n"
        "    if os.fork() == 0:\n        held = b'x' * (200 << 20)\n        time.sleep(60)\n"
        "time.sleep(60)",
        TESTS,
    ),
    "memory of its tests": ("def f(x): return 10**12", "assert [0] * f(1) == 3"),
    "a crash of its tests": (RIGHT, "import ctypes\nf(1)\nctypes.string_at(0)"),
    "a test that ends": (RIGHT, "import os\nf(1)\nos._exit(0)"),
    "late tests": ("def f(x): return 10**10", "assert 7 ** f(1) == 3"),
}


@pytest.mark.parametrize(("program", "tests"), FAILURES.values(), ids=FAILURES)
def test_what_a_program_brings_about_is_0(scorer: Scorer, program: str, tests: str) -> None:
    cfg = EnvConfig("code", args='{"seconds": 20.0}', timeout=2.0, memory=512)
    cfg = cfg if "**" in tests else CODE
    assert rewards(scorer, program, tests=tests, cfg=cfg) == [0.0]
    assert rewards(scorer, RIGHT) == [1.0]


def test_what_the_host_brings_about_is_left_out(scorer: Scorer) -> None:
    """SIGKILL, as of the kernel where the host has no memory: a program cannot send it."""
    tests = "import os\nf(1)\nos.kill(os.getpid(), 9)"
    assert rewards(scorer, RIGHT, tests=tests) == [None]
    assert rewards(scorer, RIGHT) == [1.0]


def test_tests_leave_nothing_to_those_of_the_next_sample(scorer: Scorer) -> None:
    tests = "import sys\nassert not hasattr(sys, 'left')\nsys.left = f(1)"
    assert rewards(scorer, RIGHT, RIGHT, tests=tests) == [1.0, 1.0]


SCRATCH = {
    "a link": "os.symlink('/usr', 'link')",
    "a chain": "for _ in range(5000):\n    os.mkdir('d'); os.chdir('d')",
    "closed": "os.makedirs('a/b/c'); os.chmod('a/b', 0); os.chmod('a', 0)",
    "a loop": "os.symlink('loop', 'loop'); os.mkfifo('fifo')",
    "bytes": "open(b'\\xff\\xfe', 'w'); os.mkdir(b'\\xfd'); open('\\n', 'w')",
    "its own directory": "os.chmod('/dev/shm', 0)",
}


@pytest.mark.parametrize("program", SCRATCH.values(), ids=SCRATCH)
def test_files_that_a_program_leaves_are_no_fault(scorer: Scorer, program: str) -> None:
    program = f"import os\nos.chdir('/dev/shm')\n{program}\n{RIGHT}"
    empty = f"import os\nif os.listdir('/dev/shm'): 1 / 0\n{RIGHT}"
    write = f"open('/dev/shm/file', 'w').write('x')\n{RIGHT}"
    assert rewards(scorer, program, empty, write, empty) == [1.0, 1.0, 1.0, 1.0]


USUAL = {
    "sqlite": (
        "import sqlite3, os\nos.chdir('/dev/shm')\nwith sqlite3.connect('file.db') as base:\n"
        "    base.execute('create table t (x)'); base.execute('insert into t values (1)')\n"
        "assert sqlite3.connect('file.db').execute('select x from t').fetchall() == [(1,)]"
    ),
    "temporary files": (
        "import os, tempfile\nwith tempfile.TemporaryDirectory() as d:\n"
        "    open(d + '/a', 'w').write('x'); os.mkdir(d + '/b'); os.rename(d + '/a', d + '/b/a')\n"
        "    assert open(d + '/b/a').read() == 'x'\nassert not os.path.exists(d)"
    ),
    "processes": (
        "import multiprocessing, subprocess, sys\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "    assert pool.map(abs, [-1, -2]) == [1, 2]\n"
        "assert subprocess.check_output([sys.executable, '-c', 'print(1)']) == b'1\\n'\n"
        "assert subprocess.run('echo x > /dev/null', shell=True).returncode == 0"
    ),
    "asyncio": (
        "import asyncio\nasync def g():\n    await asyncio.sleep(0)\n    return 1\n"
        "assert asyncio.run(g()) == 1"
    ),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as pool: assert sum(pool.map(abs, range(9))) == 36"
    ),
    "locks": (
        "import fcntl, tempfile\nwith tempfile.TemporaryFile() as file:\n"
        "    fcntl.flock(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_EX)"
    ),
    "chance": "import os, secrets\nos.urandom(4); secrets.token_hex(); open('/dev/urandom')",
}


@pytest.mark.parametrize("program", USUAL.values(), ids=USUAL)
def test_what_programs_usually_do_works(scorer: Scorer, program: str) -> None:
    assert rewards(scorer, f"{program}\n{RIGHT}") == [1.0]
