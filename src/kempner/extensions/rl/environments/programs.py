"""Programs written by a model, run against tests."""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

from kempner.config.option import ConfigError
from kempner.extensions.rl.environments.protocol import Environment, Task
from kempner.extensions.rl.environments.qa import read_rows
from kempner.extensions.rl.environments.sandbox import limits, run_program
from kempner.extensions.rl.environments.sandbox.pipes import (
    Late,
    PipeClosed,
    receive_message,
    send_message,
)
from kempner.extensions.rl.environments.sandbox.run_program import (
    BASES,
    ERRORS,
    JUDGES,
    ORDERS,
    TELLS,
    TYPES,
    is_error,
)

PROMPT = "Write a Python function f(x) that returns {}. Answer with the code alone.\n"
TESTS = 4  # per function
LARGEST_VALUE_BYTES = 1 << 24  # of a value in a program's answer
# Specifications of f(x) for a list of ints, in words and in Python; {0} is a small number.
FUNCTION_KINDS = {
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
CODE_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


OPEN = {"__name__", "__qualname__", "__annotations__", "__defaults__"}
MODULES = {**{name: name for name in (*sys.stdlib_module_names, "numpy")}, "np": "numpy"}
# Predicates of strings and sets: a test asks them of a value, not of the program.
QUESTIONS = {name for kind in (str, set, float) for name in dir(kind) if name.startswith("is")}
QUESTIONS |= {"startswith", "endswith"}


class Checks(NamedTuple):
    """Python with assert statements."""

    source: str
    name: str = ""  # is the program's, even if Python has it, too
    row: int = 0  # in the file


class CodeEnvironment(Environment):
    """An environment in which the model writes a Python program, and tests call its definitions;
    the reward is 1 if all tests hold."""

    failed = 0.0

    def __init__(self, file: str = "", seconds: float = 3.0, held_out: float = 0.125) -> None:
        """`file`: JSON lines with "prompt" and "tests", which is Python with assert statements;
        "entry_point" names the program's definition if Python has that name, too. Unset: small
        functions of lists. `seconds`: the time limit of a program with its tests."""
        if seconds <= 0:
            raise ConfigError("seconds must be over 0")
        self.file, self.seconds, self.held_out = file, seconds, held_out
        rows = (
            read_rows(file, ("prompt",), "tests", problem_of_tests, "entry_point") if file else []
        )
        self.rows = [Task(p, Checks(t, name or "", n)) for n, (p, t, name) in enumerate(rows, 1)]
        self.size = len(self.rows) or None

    def task(self, number: int, rng: random.Random) -> Task:
        if self.rows:
            return self.rows[number]
        text, result = rng.choice(list(FUNCTION_KINDS.items()))
        number = rng.randint(2, 9)
        function = eval(f"lambda x: {result.format(number)}")
        lists = [[rng.randint(0, 30) for _ in range(rng.randint(1, 9))] for _ in range(TESTS)]
        tests = "\n".join(f"assert f({x}) == {function(x)}" for x in lists)
        return Task(PROMPT.format(text.format(number)), Checks(tests))

    def score(self, task: Task, completion: str) -> float:
        blocks = CODE_BLOCK.findall(completion)
        tests = task.answer if isinstance(task.answer, Checks) else Checks(task.answer)
        try:
            with ModelProgram(blocks[-1] if blocks else completion, self.seconds) as program:
                return float(program.passes(tests))
        except (NotPlain, SyntaxError) as error:
            where = f"row {tests.row} of {self.file}: " if tests.row else ""
            raise type(error)(f"{where}tests: {error}") from None


def problem_of_tests(tests: Any) -> str:
    """Return what is wrong with the tests; "" if nothing."""
    if not isinstance(tests, str):
        return "must be a string"
    try:
        compile(tests, "tests", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"are not Python: {error}"
    return ""


class Over(BaseException):
    """The program has ended, or is late: no `except Exception` of the tests may catch this."""


class NotPlain(BaseException):
    """Tests hand the program a value that cannot be sent."""


class ModelProgram(run_program.Peer):
    """A program in a separate process, as tests see it. The tests run in this process, so that
    expected values and verdicts are out of the program's reach."""

    # Lets Over and NotPlain, which end the tests, pass.
    caught = Exception

    def __init__(self, source: str, seconds: float) -> None:
        super().__init__()
        self._source, self._end = source, time.monotonic() + seconds
        self._classes: dict[int, StandInType | None] = {}
        self._objects: dict[tuple[int, bool], StandIn] = {}
        self._unfit: NotPlain | None = None
        self._failed = False

    def __enter__(self) -> ModelProgram:
        theirs, self._requests = os.pipe()
        self._answers, ours = os.pipe()
        with limits.own_processes():
            self._process = subprocess.Popen(
                # -I: PYTHON* variables, the user's packages and the current directory do not
                # affect its imports.
                [sys.executable, "-I", run_program.__file__, str(theirs), str(ours)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=tempfile.gettempdir(),
                pass_fds=(theirs, ours),
                start_new_session=True,
            )
        os.close(theirs)
        os.close(ours)
        return self

    def __exit__(self, *_: object) -> None:
        # It is the init of its namespace: the kernel kills all of its children with it.
        self._process.kill()
        self._process.wait()
        os.close(self._requests)
        os.close(self._answers)

    def passes(self, tests: Checks) -> bool:
        """Return whether the tests hold. Raises NotPlain if they hand the program a value that
        cannot be sent."""
        self._failed, self._unfit = False, None
        tree = ast.parse(tests.source)
        # The tests must not inherit the `annotations` future of this module.
        code = compile(tree, "tests", "exec", dont_inherit=True)
        # Tests may use modules without importing them, as in math.pi.
        parts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        modules = {node.id for node in parts if isinstance(node, ast.Name)} & MODULES.keys()
        try:
            # Lone surrogates, which a completion may contain, cannot be sent.
            self.ask("run", self._source.encode(errors="replace").decode())
            exec(code, Names(self, modules - {tests.name}, tests.name))
            self.ask("truth", None)  # it must not have ended inside an `except` of the tests
        except (Exception, Over, NotPlain, SystemExit):
            self._failed = True
        if self._unfit:
            raise self._unfit
        return not self._failed

    def ask(self, what: str, /, *arguments: Any, **keywords: Any) -> Any:
        try:
            return super().ask(what, *arguments, **keywords)
        except (StopIteration, StopAsyncIteration) as error:  # would end a loop of the tests
            if what == "__next__":
                raise
            raise RuntimeError(f"the program raised {type(error).__name__}") from None

    def send(self, message: bytes) -> None:
        try:
            send_message(self._requests, message, self._end)
        except (PipeClosed, Late):
            raise Over from None

    def receive(self) -> bytes:
        try:
            return receive_message(self._answers, self._end, LARGEST_VALUE_BYTES)
        except (PipeClosed, Late):
            raise Over from None

    def serve(self, what: str, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
        """Execute the program's call of a function that the tests have handed to it."""
        if what not in ("__call__", "__next__") or id(function) not in self.numbers:
            raise TypeError(what)
        try:
            return getattr(type(function), what)(function, *arguments, **keywords)
        except AssertionError:  # the program must not catch it
            self._failed = True
            raise

    def find(self, key: str) -> Any:
        # The program names the type: any other name would import a module into this process.
        if key not in TYPES | ERRORS and not key.startswith("builtins."):
            raise TypeError(key)
        found = run_program.import_name(key)
        if is_error(found):
            # A KeyboardInterrupt would end this process.
            return found if issubclass(found, (Exception, SystemExit)) else RuntimeError
        if key not in TYPES:
            raise TypeError(key)
        return found

    def foreign(self, value: Any, items: Any) -> list[Any]:
        if isinstance(value, StandInType):
            return ["home", value._kind_.number]
        if isinstance(value, StandIn):
            return ["home", value._self_[0]]
        name = str(getattr(value, "__name__", ""))
        if getattr(builtins, name, None) is value:
            return ["type", f"builtins.{name}"]
        what = "__next__" if hasattr(type(value), "__next__") else "__call__"
        if what == "__next__" or callable(value):
            return ["foreign", self.keep(value), what, name]
        error = f"a program cannot be handed a {type(value).__name__}"
        if self.depth > 1:  # by an answer, which chose the question
            raise TypeError(error)
        self._unfit = NotPlain(error)
        raise self._unfit

    def stand_in(self, number: int, *rest: Any) -> StandIn:
        of, base, items = rest
        kind = self.class_of(of)
        if kind is None:
            raise TypeError("of no class")
        return self._object(kind, number, items(base), False)

    def _object(self, kind: StandInType, number: int, base: list[Any], by_tests: bool) -> StandIn:
        by_tests = by_tests and kind._kind_.judges
        # One stand-in per object, so that `is` behaves in the tests as in one process.
        if (number, by_tests) not in self._objects:
            new: Any = kind.__new__(kind, *base)  # type: ignore[arg-type]
            # StandIn.__setattr__() would ask the program.
            object.__setattr__(new, "_self_", (number, base, by_tests))
            self._objects[number, by_tests] = new
        return self._objects[number, by_tests]

    def made(self, value: Any) -> Any:
        """Mark an object that the tests made from a class that they name."""
        if not isinstance(value, StandIn) or not value._kind_.named:
            return value
        return self._object(type(value), value._self_[0], value._self_[1], True)

    def class_of(self, number: int) -> StandInType | None:
        if number not in self._classes:
            found = self.ask("class_of", number)
            self._classes[number] = found and self._class(number, *found)
        return self._classes[number]

    def _class(
        self, number: int, name: str, bases: Any, methods: Any, changed: bool
    ) -> StandInType:
        found: list[Any] = [
            self.find(each) if type(each) is str else self.class_of(each) for each in bases
        ]
        above = [each for kind in found for each in kind.__mro__]
        fixed = next((each for each in above if each in BASES or is_error(each)), object)
        if not all(isinstance(each, StandInType) or each is fixed for each in found):
            raise TypeError(name)
        has = {each for each in methods if each in TELLS | JUDGES}
        # StandIn has these three itself.
        own = has if fixed in BASES else has - {"__eq__", "__bool__", "__hash__"}
        space = {each: special_name(each, fixed) for each in own}
        if "__eq__" in space:
            # Python makes it None in a class that defines only __eq__.
            space.setdefault("__hash__", fixed.__hash__)
        space["__doc__"] = property(lambda self: self._kind_.program.ask("get", self, "__doc__"))
        space["_kind_"] = SimpleNamespace(
            program=self,
            number=number,
            named=False,
            changed=bool(changed),
            truth=bool(has & {"__bool__", "__len__"}),
            judges=bool(has & JUDGES - {"__eq__"} or "__len__" in has),
        )
        if not any(isinstance(each, StandInType) for each in found):
            found.append(StandIn)
        return StandInType(name, tuple(found), space)

    def attribute(self, of: Any, name: str) -> Any:
        if (name.startswith("__") and name not in OPEN) or name == "_self_":
            raise AttributeError(name)
        if name in QUESTIONS and not of._kind_.named:
            raise AttributeError(f"tests may not ask an object of the program for {name}")
        return self.named(name, self.ask("get", of, name))

    def named(self, name: str, value: Any) -> Any:
        """Return the value of a name in the tests: a capitalized name may be a class."""
        if name[:1].isupper() and isinstance(value, StandIn):
            kind = self.class_of(value._self_[0])
            if kind is not None:
                kind._kind_.named = True
                return kind
        return value


class Names(dict[str, Any]):
    """Names in the tests: undefined ones are Python's own, or else the program's."""

    def __init__(self, program: ModelProgram, modules: set[str], own: str) -> None:
        super().__init__(__name__="tests")
        self.program, self.modules, self.own = program, modules, own

    # CPython calls this for globals that are a subclass of dict, even inside functions.
    def __missing__(self, name: str) -> Any:
        if name in self.modules:
            return importlib.import_module(MODULES[name])
        if name.startswith("__") or (hasattr(builtins, name) and name != self.own):
            raise KeyError(name)  # a program must not redefine the tests' abs() or len()
        try:
            value = self.program.named(name, self.program.ask("name", name))
        except NameError:
            raise KeyError(name) from None
        # Other values than functions and classes may change: ask for them each time.
        if callable(value):
            self[name] = value
        return value


class StandInType(type):
    """A class of the program."""

    _kind_: Any

    def __new__(cls, name: str, bases: Any, space: dict[str, Any]) -> StandInType:
        # A class statement in the tests, with a base class of the program.
        if bases and "_kind_" not in space:
            program = next(each for each in bases if isinstance(each, cls))._kind_.program
            program._unfit = NotPlain("their classes may not derive from the program's")
            raise program._unfit
        return super().__new__(cls, name, bases, space)

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        program = cls._kind_.program
        return program.made(program.ask("__call__", cls, *arguments, **keywords))

    def __getattr__(cls, name: str) -> Any:
        # StandIn itself, which belongs to no program.
        if cls.__dict__.get("_kind_") is None:
            raise AttributeError(name)
        return cls._kind_.program.attribute(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        cls._kind_.program.ask("set", cls, name, value)

    def __delattr__(cls, name: str) -> None:
        cls._kind_.program.ask("delete", cls, name)

    def __iter__(cls) -> Any:
        return cls._kind_.program.ask("__iter__", cls)

    def __len__(cls) -> int:
        return int(cls._kind_.program.ask("__len__", cls))

    def __getitem__(cls, key: Any) -> Any:
        return cls._kind_.program.ask("__getitem__", cls, key)

    # Otherwise Python would ask __len__() for a class's truth.
    def __bool__(cls) -> bool:
        return True


class StandIn(metaclass=StandInType):
    """An object of the program. The program decides equality and truth only for objects of classes
    that the tests name with a capital; all others equal nothing, and are neither true nor false."""

    _self_: tuple[int, list[Any], bool]  # its number, the value that it carries, made by the tests
    __dict__ = property(lambda self: self._kind_.program.ask("get", self, "__dict__"))

    def __getattr__(self, name: str) -> Any:
        return self._kind_.program.attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._kind_.program.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._kind_.program.ask("delete", self, name)

    def __hash__(self) -> int:
        has_name = self._kind_.named
        return self._kind_.program.ask("__hash__", self) if has_name else object.__hash__(self)

    def __eq__(self, other: object) -> Any:
        if may_judge("__eq__", self, other):
            return self._kind_.program.ask("__eq__", self, other)
        if self._kind_.changed and not isinstance(other, StandIn):
            return self._kind_.program.ask("plain", self) == other
        return NotImplemented

    def __bool__(self) -> bool:
        kind = self._kind_
        if self._self_[2]:
            return kind.program.ask("truth", self) is True
        if kind.changed:
            return bool(kind.program.ask("plain", self))
        if kind.named and not kind.truth:
            return True
        raise ValueError("an object of the program is neither true nor false")


def may_judge(name: str, one: StandIn, *others: Any) -> bool:
    """Return whether the program decides how an object compares or computes with others: if the
    tests made it, or name the classes of all of them."""
    have_names = one._kind_.named and all(isinstance(e, StandIn) and e._kind_.named for e in others)
    return (
        one._self_[2]
        if name == "__contains__"
        else have_names or (one._self_[2] and name != "__eq__")
    )


def special_name(name: str, base: type) -> Any:
    """Make a method of a stand-in that the program answers, if it may; else that of `base`."""
    own = getattr(base, name, None)

    def method(self: Any, /, *arguments: Any, **keywords: Any) -> Any:
        program = self._kind_.program
        if name in JUDGES and not may_judge(name, self, *arguments):
            if name == "__contains__" and own is None:
                return arguments[0] in iter(self)
            if name == "__bool__" and own is None:
                return len(self) > 0
            return own(self, *arguments) if own else NotImplemented
        if name == "__exit__":  # an exception of the tests propagates: it must not swallow it
            program.ask(
                name, self, *(arguments[:2] if is_error(arguments[0]) else (None, None)), None
            )
            return None
        value = program.ask(name, self, *arguments, **keywords)
        return program.made(value) if name in JUDGES - ORDERS else value

    return method
