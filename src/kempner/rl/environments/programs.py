"""Programs that a model writes, run against tests."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from types import CodeType
from typing import Any

from kempner.config.option import ConfigError
from kempner.rl.environments import run_program
from kempner.rl.environments.pipes import Ended, Late, receive, send
from kempner.rl.environments.protocol import Environment, Task
from kempner.rl.environments.qa import read_rows

PROMPT = "Write a Python function f(x) that returns {}. Answer with the code alone.\n"
TESTS = 4  # of each function
MOST_BYTES = 1 << 22  # of a value that a program answers with
# What f(x) returns for a list of ints, {0} a small number; the same as Python.
FUNCTIONS = {
    "the sum of the numbers in the list x that {0} divides": "sum(v for v in x if v % {0} == 0)",
    "how many numbers of the list x are larger than {0}": "sum(v > {0} for v in x)",
    "the list x without the numbers below {0}": "[v for v in x if v >= {0}]",
    "the list x with each number multiplied by {0}": "[v * {0} for v in x]",
    "every number of the list x whose index is a multiple of {0}": "x[::{0}]",
    "the largest of the first {0} numbers of the list x": "max(x[:{0}])",
    "the list x, sorted by the remainders of a division by {0}, then by size": (
        "sorted(x, key=lambda v: (v % {0}, v))"
    ),
}
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


class Code(Environment):
    """A Python program is run, and tests call what it defines; the reward is 1 when all hold."""

    def __init__(self, file: str = "", seconds: float = 3.0, held_out: float = 0.125) -> None:
        """`file`: JSON lines with "prompt" and "tests", which is Python with assert statements;
        unset: small functions of lists. `seconds`: that a program may take with its tests."""
        if seconds <= 0:
            raise ConfigError("seconds must be over 0")
        self.seconds, self.held_out = seconds, held_out
        self.rows = read_rows(file, ("prompt",), "tests", problem_of_tests) if file else []
        self.size = len(self.rows) or None

    def task(self, number: int, rng: random.Random) -> Task:
        if self.rows:
            return Task(*self.rows[number])
        text, result = rng.choice(list(FUNCTIONS.items()))
        number = rng.randint(2, 9)
        function = eval(f"lambda x: {result.format(number)}")
        lists = [[rng.randint(0, 30) for _ in range(rng.randint(1, 9))] for _ in range(TESTS)]
        tests = "\n".join(f"assert f({x}) == {function(x)}" for x in lists)
        return Task(PROMPT.format(text.format(number)), tests)

    def score(self, task: Task, completion: str) -> float:
        blocks = BLOCK.findall(completion)
        tests = read_tests(task.answer)
        with ModelProgram(blocks[-1] if blocks else completion, self.seconds) as program:
            return float(program.passes(tests))


def read_tests(text: str) -> CodeType:
    return compile(text, "tests", "exec", dont_inherit=True)


def problem_of_tests(tests: Any) -> str:
    """Empty: there is none."""
    if not isinstance(tests, str):
        return "must be a text"
    try:
        read_tests(tests)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"are not Python: {error}"
    return ""


class Over(BaseException):
    """The program has ended, or is late: no `except Exception` of the tests goes on after it."""


class ModelProgram:
    """A program in a process of its own, as tests see it. They run in ours: what they compare with,
    and whether they hold, is nowhere where the program could read or change it."""

    def __init__(self, source: str, seconds: float) -> None:
        self._source, self._end = source, time.monotonic() + seconds

    def __enter__(self) -> ModelProgram:
        theirs, self._requests = os.pipe()
        self._answers, ours = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", run_program.__file__, str(theirs), str(ours)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=tempfile.gettempdir(),
            pass_fds=(theirs, ours),
        )
        os.close(theirs)
        os.close(ours)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._requests)
        os.close(self._answers)

    def passes(self, tests: CodeType) -> bool:
        """Whether they hold. Raises TypeError when they hand the program what cannot travel."""
        try:
            self._send(self._source.encode(errors="replace").decode())
            kind, found = self._receive()
            if kind != "names" or type(found) is not dict:
                return False
            # A program must not change what the tests mean by abs() or len().
            own = {
                name: value
                for name, value in found.items()
                if type(name) is str and not name.startswith("__") and not hasattr(builtins, name)
            }
            exec(tests, {"__name__": "tests", **own})
            self.ask("length", [])  # it has not ended inside an `except` of the tests
        except NotPlain:
            raise
        except (Exception, Over, SystemExit):
            return False
        return True

    def ask(self, what: str, *arguments: object) -> Any:
        self._send((what, arguments))
        kind, value = self._receive()
        if kind != "error":
            return value
        names, text = value
        found = [getattr(builtins, str(name), None) for name in names]
        kinds = [each for each in found if isinstance(each, type) and issubclass(each, Exception)]
        try:
            error = kinds[0](str(text))
        except (TypeError, IndexError):  # some take more than a text
            error = RuntimeError(str(text))
        raise error

    def _send(self, value: object) -> None:
        file = io.BytesIO()
        _Writer(file, self).dump(value)
        try:
            send(self._requests, file.getvalue(), self._end)
        except (Ended, Late):
            raise Over from None

    def _receive(self) -> Any:
        try:
            text = receive(self._answers, self._end, MOST_BYTES)
        except (Ended, Late):
            raise Over from None
        return _Reader(io.BytesIO(text), self).load()


class KeptObject:
    """What the program has, and cannot send: a function, a class, an object. It has no value here:
    it equals nothing, and is neither true nor false."""

    def __init__(self, program: ModelProgram, number: int) -> None:
        self._program, self._number = program, number

    def __call__(self, *args: object, **named: object) -> Any:
        return self._program.ask("call", self, args, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.ask("attribute", self, name)

    def __getitem__(self, key: object) -> Any:
        return self._program.ask("item", self, key)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._program.ask("iterate", self)
        while True:
            try:
                value = self._program.ask("next", iterator)
            except StopIteration:
                return
            yield value

    def __len__(self) -> int:
        return int(self._program.ask("length", self))

    def __bool__(self) -> bool:
        raise ValueError("an object of the program is neither true nor false")


class NotPlain(TypeError):
    """What tests hand to the program must be of the types that travel, or its own."""


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, program: ModelProgram) -> None:
        super().__init__(file, 5)
        self._program = program

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is KeptObject:
            return value._number
        if type(value) not in run_program.PLAIN and value is not complex:
            raise NotPlain(f"tests: a program cannot be handed a {type(value).__name__}")
        return None


class _Reader(pickle.Unpickler):
    """Makes values of the plain types, and nothing else."""

    def __init__(self, file: io.BytesIO, program: ModelProgram) -> None:
        super().__init__(file)
        self._program = program

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "complex"):
            return complex
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, number: Any) -> KeptObject:
        if type(number) is not int:
            raise pickle.UnpicklingError("no number")
        return KeptObject(self._program, number)
