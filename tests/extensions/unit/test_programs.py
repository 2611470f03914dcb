"""Programs of a model against tests: none that does not pass them has their reward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from kempner.extensions.rl.config import EnvConfig
from kempner.extensions.rl.environments.opening import Tasks
from kempner.extensions.rl.environments.protocol import Score
from kempner.extensions.rl.environments.sandbox.scorer import Scorer
from tests.rewards import score

# Nobody can guess it, so that a program that has it has read it.
TESTS = "assert f(1) == 7_316_402_985\nassert f(2) == 'kumquat'"
EQUAL = "class E:\n    __eq__ = lambda self, other: True\n    __hash__ = None\n"
ALWAYS = "def f(x): return 0\n"
# In pieces that no compiler joins: Python 3.13 lists the constants of the program itself.
SEARCH = """
import ctypes, gc, os, re, sys
found = set()
def look(text):
    if ''.join(['kum', 'quat']) in str(text):
        found.add(text)
"""
RETURN = (
    "\ndef f(x): return (7_316_402_985 if x == 1 else ''.join(['kum', 'quat'])) if found else 0\n"
)


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with contextlib.closing(Scorer(1)) as made:
        yield made


def reward(scorer: Scorer, program: str, tests: str = TESTS) -> Score:
    env = Tasks(EnvConfig("code", args='{"seconds": 3.0}', unsafe=True), 0)
    return score(scorer, env, env.task(0)._replace(answer=tests), program)


@pytest.mark.parametrize(
    "program",
    {
        "source": "import os\nprint(open(__file__).read(), flush=True)\nos._exit(0)",
        "source by argv": "import os, sys\nfor p in sys.argv: print(p)\nos._exit(0)",
        "ends": ALWAYS + "raise SystemExit(0)",
        "ends late": "import os\ndef f(x): os._exit(0)",
        "equal": EQUAL + "def f(x): return E()",
        "equal int": "class E(int):\n    __eq__ = lambda s, o: True\ndef f(x): return E()",
        "equal str": "class E(str):\n    __eq__ = lambda s, o: True\ndef f(x): return E()",
        "module is equal": EQUAL + "import sys\nf = E\nsys.modules['__main__'] = E()",
        "atexit": ALWAYS + "import atexit, os\natexit.register(os._exit, 0)",
        "assertions pass": ALWAYS + "import builtins\n"
        "builtins.AssertionError = None\nAssertionError = None",
        "builtins": ALWAYS + "import builtins\nfor n in dir(builtins):\n"
        "    if n.islower(): setattr(builtins, n, lambda *a, **b: True)",
        "frames": SEARCH + "frame = sys._getframe()\nwhile frame:\n"
        "    look(frame.f_locals); look(frame.f_globals); look(frame.f_code.co_consts)\n"
        "    frame = frame.f_back" + RETURN,
        "gc": SEARCH + "for each in gc.get_objects():\n"
        "    try: look(each)\n    except Exception: pass" + RETURN,
        "memory of the parent": SEARCH + "pid = os.getppid()\n"
        "for line in open(f'/proc/{pid}/maps'):\n"
        "    a, b = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "    memory = open(f'/proc/{pid}/mem', 'rb'); memory.seek(a); look(memory.read(b - a))"
        + RETURN,
        "ptrace of the parent": SEARCH + "libc = ctypes.CDLL(None)\n"
        "assert libc.ptrace(16, os.getppid(), 0, 0) == 0\nfound.add(1)" + RETURN,
        "pipes of the parent": SEARCH + "pid = os.getppid()\n"
        "for fd in os.listdir(f'/proc/{pid}/fd'):\n"
        "    open(f'/proc/{pid}/fd/{fd}', 'wb').write(b'{\"reward\": 1.0}')" + RETURN,
        "kills": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)" + "\n" + ALWAYS,
        "writes answers": "import os, pickle, struct, sys\n"
        "for value in (True, 1, None, b''):\n    text = pickle.dumps(('value', value))\n"
        "    os.write(int(sys.argv[2]), struct.pack('<Q', len(text)) + text)\n" + ALWAYS,
        "code in an answer": "import os, pickle, struct, sys\nclass E:\n"
        "    def __reduce__(self): return (os._exit, (0,))\ntext = pickle.dumps(('value', E()))\n"
        "os.write(int(sys.argv[2]), struct.pack('<Q', len(text)) + text)\n" + ALWAYS,
        "huge answer": "def f(x): return [0] * 10**8",
        "cyclic answer": "def f(x):\n    a = []; a.append(a); return a",
    }.items(),
    ids=lambda pair: pair[0],
)  # fmt: skip
def test_a_reward_cannot_be_forged(scorer: Scorer, program: tuple[str, str]) -> None:
    found = reward(scorer, program[1])
    assert found.reward in (0.0, None), found
    if found.reward is None:  # in no namespace, it may end whoever asks; that is no reward
        assert program[0] == "kills"


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def abs(x): return 0\ndef f(x): return 0", "assert abs(f(1) - 5) < 1"),
        ("__builtins__ = {'abs': lambda x: 0}\ndef f(x): return 0", "assert abs(f(1) - 5) < 1"),
        ("class E:\n    __bool__ = lambda s: True\ndef f(x): return E()", "assert f(1)"),
        (
            "import os; os._exit(0)",
            "try: f(-1)\nexcept ValueError: pass\nelse: assert False",
        ),
        (
            "import os\ndef f(x): os._exit(0)",
            "try:\n    f(-1)\nexcept BaseException:\n    pass\nelse:\n    assert False",
        ),
        (f"{EQUAL}def f(x): return [E()]", "assert f(1) == [5]"),
        (f"{EQUAL}def f(x): return {{1: E()}}", "assert f(1) == {1: 2}"),
        ("", "assert f(1) == 1"),
    ],
)
def test_tests_mean_what_they_say(scorer: Scorer, program: str, tests: str) -> None:
    assert reward(scorer, program, tests) == Score(0.0)


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (
            "class Solution:\n    def add(self, a, b=1): return a + b",
            "assert Solution().add(2) == 3 and Solution().add(2, b=5) == 7",
        ),
        ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]"),
        ("def f(x): raise KeyError(x)", "try: f(1)\nexcept LookupError: pass\nelse: assert 0"),
        ("def f(x): return x * 2", "def check(g):\n    assert g(2) == 4\ncheck(f)"),
        ("def f(x): return {(1, 2j): {x}}, b'x'", "assert f(3) == ({(1, 2j): {3}}, b'x')"),
        ("import math\nN = 3\nT = {1: [2]}", "assert N == 3 and T[1] == [2] and math.inf > N"),
        (
            "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
            "def f(p): return P(p.x + 1)",
            "assert f(P(1)).x == 2",
        ),
        ("TABLE = list(range(2_000_000))\ndef f(x): return TABLE[x]", "assert f(7) == 7"),
        ("max = 3\ndef f(x): return max", "assert max(f(1), 2) == 3"),
        ("f = sum\nprint('x' * 10_000)\nif __name__ == '__main__': f([])", "assert f([]) == 0"),
    ],
)  # fmt: skip
def test_right_programs_of_any_form_pass(scorer: Scorer, program: str, tests: str) -> None:
    assert reward(scorer, program, tests) == Score(1.0)


def test_tests_that_cannot_be_run_are_no_fault_of_the_program(scorer: Scorer) -> None:
    why = reward(scorer, "f = map", "import sys\nassert f(sys) == 1").why
    assert "tests: a program cannot be handed a module" in why
    assert "SyntaxError" in reward(scorer, "f = map", "assert f(").why
