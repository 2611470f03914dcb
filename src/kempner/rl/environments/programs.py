"""Programs that a model writes, run against tests."""

from __future__ import annotations

import random
import re
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from kempner.config.option import ConfigError
from kempner.rl.environments.protocol import Environment, Task
from kempner.rl.environments.qa import read_rows

PROMPT = "Write a Python function f(x) that returns {}. Answer with the code alone.\n"
TESTS = 4  # of each function
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
    """A Python program is run with the tests after it; it has the reward 1 when all hold."""

    def __init__(self, file: str = "", seconds: float = 3.0, held_out: float = 0.125) -> None:
        """`file`: JSON lines with "prompt" and "tests", which is Python with assert statements;
        unset: small functions of lists. `seconds`: that a program may take with its tests."""
        if seconds <= 0:
            raise ConfigError("seconds must be over 0")
        self.seconds, self.held_out = seconds, held_out
        self.rows = read_rows(file, ("prompt",), ("tests",)) if file else []
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
        # A program that ends before the tests does not print the word.
        word = secrets.token_hex(16)
        with tempfile.TemporaryDirectory() as directory, open(f"{directory}/out", "w+b") as out:
            program = Path(directory, "program.py")
            source = f"{blocks[-1] if blocks else completion}\n{task.answer}\nprint('{word}')\n"
            program.write_text(source, errors="replace")
            try:
                subprocess.run(
                    [sys.executable, "-I", str(program)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.DEVNULL,
                    cwd=directory,
                    timeout=self.seconds,
                )
            except subprocess.TimeoutExpired:
                return 0.0
            out.seek(max(0, out.seek(0, 2) - 100))
            return float(word in out.read().decode(errors="replace"))
