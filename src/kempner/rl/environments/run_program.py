"""The process of a program that a model has written: it runs the program, and then does what tests
in another process ask of it. `python -I run_program.py REQUESTS ANSWERS`: two pipes. Nothing of it
is believed but the values that it answers with; see programs.py."""

from __future__ import annotations

import io
import operator
import os
import pickle
import resource
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct("<Q")
SMALL = (type(None), bool, int, float, complex, str)
PLAIN = (*SMALL, bytes, bytearray, list, tuple, dict, set, frozenset)
"""Types whose values travel; the program keeps all others, and hands out their numbers."""
ASKED: dict[str, Callable[..., Any]] = {
    "call": lambda function, args, named: function(*args, **named),
    "attribute": getattr,
    "item": operator.getitem,
    "iterate": iter,
    "next": next,
    "length": len,
}


class Stays:
    """A global that does not travel: a table may be large."""

    def __init__(self, value: Any) -> None:
        self.value = value


class ValueWriter(pickle.Pickler):
    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file, 5)
        self.kept = kept

    def persistent_id(self, value: Any) -> int | None:
        if type(value) in PLAIN or value is complex:  # which pickle makes by its name
            return None
        value = value.value if type(value) is Stays else value
        self.kept.append(value)
        return len(self.kept) - 1


class ValueReader(pickle.Unpickler):
    def __init__(self, text: bytes, kept: list[Any]) -> None:
        super().__init__(io.BytesIO(text))
        self.kept = kept

    def persistent_load(self, number: int) -> Any:
        return self.kept[number]


def main(requests: int, answers: int) -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))  # it cannot raise it again
    kept: list[Any] = []
    asked, answer = os.fdopen(requests, "rb"), os.fdopen(answers, "wb")

    def send(kind: str, value: Any) -> None:
        file = io.BytesIO()
        ValueWriter(file, kept).dump((kind, value))
        answer.write(LENGTH.pack(file.tell()) + file.getvalue())
        answer.flush()

    def receive() -> Any:
        (length,) = LENGTH.unpack(asked.read(LENGTH.size))
        return ValueReader(asked.read(length), kept).load()

    source = receive()
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(source, "program.py", "exec"), module.__dict__)
    own = {name: value for name, value in module.__dict__.items() if not name.startswith("__")}
    send("names", {k: v if type(v) in SMALL else Stays(v) for k, v in own.items()})
    while True:
        what, arguments = receive()
        try:
            send("value", ASKED[what](*arguments))
        except Exception as error:
            names = [each.__name__ for each in type(error).__mro__]
            send("error", (names, str(error)[:1000]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
