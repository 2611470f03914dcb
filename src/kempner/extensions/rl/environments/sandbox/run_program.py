"""The process of a program that a model has written: runs the program, then serves the requests of
tests in another process. `python -I run_program.py REQUESTS ANSWERS`: two pipes. Only the values in
its answers are trusted; see programs.py, which speaks the same protocol.

A message is JSON: its kind, a value, and a list of nodes. A value is a plain atom, or [n] for node
n: values may be shared or cyclic, and reading them runs no code.
"""

from __future__ import annotations

import builtins
import json
import os
import resource
import struct
import sys
import types

TYPE_CHECKING = False  # importing typing takes a tenth of a reward's time
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

VALUE_LENGTH = struct.Struct("<Q")
SMALL_TYPES = {type(None), bool, float, str}
ATOMS = {*SMALL_TYPES, int}
LARGE = 1 << 63  # Python reads at most 4300 digits of a decimal number
BASES = (int, float, complex, str, bytes, tuple, frozenset)
"""An instance of a class derived from one of these is sent with its value, which never changes."""
CHANGED = {f"collections.{name}" for name in ("deque", "Counter", "OrderedDict", "defaultdict")}
CHANGED |= {f"builtins.{name}" for name in ("list", "dict", "set", "bytearray")} | {"numpy.ndarray"}
"""Types passed by value; changes made by the other side are applied in place."""
VALUE_PARTS: dict[
    str, tuple[Any, Any]
] = {  # the parts of a value, and what makes it from them, if not its type
    "builtins.int": (lambda v: (hex(v),), lambda text: int(text, 16)),
    "builtins.complex": (lambda v: (v.real, v.imag), None),
    "builtins.bytes": (lambda v: (v.hex(),), "fromhex"),
    "builtins.ellipsis": (lambda v: (), lambda: ...),
    "builtins.NotImplementedType": (lambda v: (), lambda: NotImplemented),
    "builtins.range": (lambda v: (v.start, v.stop, v.step), None),
    "builtins.slice": (lambda v: (v.start, v.stop, v.step), None),
    "fractions.Fraction": (lambda v: (v.numerator, v.denominator), None),
    "decimal.Decimal": (lambda v: (str(v),), None),
    "datetime.date": (lambda v: (v.isoformat(),), "fromisoformat"),
    "datetime.datetime": (lambda v: (v.isoformat(),), "fromisoformat"),
    "datetime.time": (lambda v: (v.isoformat(),), "fromisoformat"),
    "datetime.timedelta": (lambda v: (v.days, v.seconds, v.microseconds), None),
    "numpy.generic": (lambda v: (v.tobytes().hex(), v.dtype.str), lambda *p: array_of_text(*p)[()]),
    "builtins.tuple": (tuple, lambda *parts: parts),
    "builtins.frozenset": (tuple, lambda *parts: frozenset(parts)),
    "builtins.dict_keys": (tuple, lambda *parts: dict.fromkeys(parts).keys()),
    "builtins.dict_values": (tuple, lambda *parts: dict(enumerate(parts)).values()),
    "builtins.dict_items": (tuple, lambda *parts: dict(parts).items()),
}
HOLDERS = {
    f"builtins.{n}" for n in ("tuple", "frozenset", "dict_keys", "dict_values", "dict_items")
}
"""Their parts may be anything."""
ERRORS = {"json.decoder.JSONDecodeError", "dataclasses.FrozenInstanceError"}
ERRORS |= {"decimal.InvalidOperation", "_queue.Empty", "queue.Full"}
"""Exceptions beside the built-in ones; none that a test runner takes for a skipped test."""
TYPES = {
    *CHANGED,
    *VALUE_PARTS,
    *(f"builtins.{name}" for name in ("bool", "float", "str", "object")),
}
_NAMES = "str repr format len hash iter next reversed call getitem setitem delitem enter exit abs "
_NAMES += "neg pos invert int float complex index round trunc floor ceil bytes"
TELLS = {f"__{name}__" for name in _NAMES.split()}
"""Methods that return a value, which the tests compare themselves."""
_NAMES = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift"
ORDERS = {f"__{name}__" for name in ("eq", "lt", "le", "gt", "ge", "bool", "contains")}
JUDGES = ORDERS | {f"__{side}{name}__" for name in _NAMES.split() for side in ("", "r", "i")}
"""Methods that decide whether a test holds, or learn what it compares with."""


def type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def key_of(kind: type) -> str:
    scalar = kind.__module__ == "numpy" and "numpy.generic" in map(type_name, kind.__mro__)
    return "numpy.generic" if scalar else type_name(kind)


def import_name(key: str) -> Any:
    module, name = key.rsplit(".", 1)
    __import__(module)
    return getattr(sys.modules[module], name)


def array_of_text(text: str, kind: str, shape: Iterable[int] = ()) -> Any:
    import numpy as np

    if not is_plain(np.dtype(kind)):
        raise TypeError(kind)
    return np.frombuffer(bytes.fromhex(text), kind).reshape(tuple(shape)).copy()


def is_plain(kind: Any) -> bool:
    """Return whether arrays of this numpy type hold only numbers or strings."""
    return kind.names is None and kind.kind in "biufcmMSU"


def is_error(kind: Any) -> bool:
    """Return whether both sides have this exception class."""
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        return False
    return type_name(kind) in ERRORS or getattr(builtins, kind.__name__, None) is kind


class Peer:
    """One of two sides. Each may call the other, even while it serves a call."""

    caught: type[BaseException] = BaseException

    def __init__(self) -> None:
        # The lists also keep their values alive: the id() of a deleted one may be reused.
        self.kept: list[Any] = []  # known to the other side by number
        self.numbers: dict[int, int] = {}  # by id()
        self.depth = 0
        self.shared: list[Any] = []  # mutable values in all messages of the outermost call
        self.places: dict[int, int] = {}  # by id()
        self.received: list[Any] = []  # mutable values in the last message

    # `/`: the called function may have keywords named `what` or `self`.
    def ask(self, what: str, /, *arguments: Any, **keywords: Any) -> Any:
        if not self.depth:
            self.shared, self.places = [], {}
        self.depth += 1
        try:
            self.send(self.pack("ask", (what, arguments, tuple(keywords.items()))))
            while (message := self.unpack(self.receive()))[0] == "ask":
                self.answer(*message[1])
        finally:
            self.depth -= 1
        if message[0] == "error":
            raise message[1][0]
        return message[1][0]

    def answer(self, what: str, arguments: Any, keywords: Any) -> None:
        """Answer a call, with all mutable values that came with it."""
        # Noted before the call, because messages within it replace the list.
        changed = self.received
        self.depth += 1
        try:
            text = self.pack("value", (self.serve(what, *arguments, **dict(keywords)), *changed))
        except self.caught as error:
            try:
                text = self.pack("error", (error, *changed))
            except Exception:
                # The exception, or a changed value, cannot be sent.
                text = self.pack("error", (RuntimeError(type(error).__name__),))
        finally:
            self.depth -= 1
        self.send(text)

    def keep(self, value: Any) -> int:
        number = self.numbers.setdefault(id(value), len(self.kept))
        if number == len(self.kept):
            self.kept.append(value)
        return number

    def pack(self, kind: str, value: Any) -> bytes:
        objects: list[Any] = []
        numbers: dict[int, int] = {}

        def refer(value: Any) -> Any:
            # By type(): an instance of a subclass of int may be more than a number.
            if type(value) in SMALL_TYPES or (type(value) is int and -LARGE < value < LARGE):
                return value
            if id(value) not in numbers:
                numbers[id(value)] = len(objects)
                objects.append(value)
            return [numbers[id(value)]]

        def items(values: Iterable[Any]) -> list[Any]:
            values = list(values)
            kinds = set(map(type, values))
            # A list of plain values, as most large lists are, is sent as it is, without a
            # node for each.
            if kinds <= SMALL_TYPES or (
                kinds == {int} and -LARGE < min(values) <= max(values) < LARGE
            ):
                return values
            return list(map(refer, values))

        root = refer(value)
        nodes = [self.node(each, items) for each in objects]  # which grows meanwhile
        return json.dumps([kind, root, nodes], separators=(",", ":")).encode()

    def node(self, value: Any, items: Any) -> list[Any]:
        key = key_of(type(value))
        if key in CHANGED and (key != "numpy.ndarray" or is_plain(value.dtype)):
            place = self.places.setdefault(id(value), len(self.shared))
            if place == len(self.shared):
                self.shared.append(value)
            return [key, place, *value_contents(value, items)]
        if key in VALUE_PARTS and (key != "numpy.generic" or is_plain(value.dtype)):
            return ["value", key, items(VALUE_PARTS[key][0](value))]
        if is_error(type(value)):
            return ["value", key, items(value.args)]
        if isinstance(value, type) and (is_error(value) or type_name(value) in TYPES):
            return ["type", type_name(value)]
        return self.foreign(value, items)

    def unpack(self, message: bytes) -> tuple[str, Any]:
        kind, root, nodes = json.loads(message)
        objects: dict[int, Any] = {}

        def get(value: Any) -> Any:
            if type(value) is not list:
                return value
            if value[0] not in objects:
                objects[value[0]] = self.make(nodes[value[0]], items)
            return objects[value[0]]

        def items(values: list[Any]) -> list[Any]:
            return list(map(get, values)) if list in set(map(type, values)) else values

        # A new outermost call: the other side has just reset its lists in ask(), so that the places
        # of both agree.
        if not self.depth:
            self.shared, self.places = [], {}
        changed = [number for number, node in enumerate(nodes) if node[0] in CHANGED]
        # Make all objects before filling any: they may contain each other.
        for number in changed:
            objects[number] = self.place(*nodes[number])
        for number in changed:
            fill_value(objects[number], nodes[number][2:], items)
        root = get(root)
        self.received = [objects[number] for number in changed]
        return kind, root

    def place(self, key: str, place: int, *payload: Any) -> Any:
        if place == len(self.shared):
            new = array_of_text(*payload) if key == "numpy.ndarray" else import_name(key)()
            self.shared.append(new)
            self.places[id(new)] = place
        # The message may come from a program that lies about what it was handed.
        if type(self.shared[place]) is not import_name(key):
            raise TypeError(key)
        return self.shared[place]

    def make(self, node: list[Any], items: Any) -> Any:
        kind, key, *rest = node
        if kind == "type":
            return self.find(key)
        if kind == "home":
            return self.kept[key]
        if kind != "value":
            return self.stand_in(key, *rest, items)
        parts = items(rest[0])
        # In place of an atom there may be a stand-in for a program's object, whose methods would
        # then be called.
        if key in VALUE_PARTS.keys() - HOLDERS and not set(map(type, parts)) <= ATOMS:
            raise TypeError(key)
        how = VALUE_PARTS[key][1] if key in VALUE_PARTS else None
        if callable(how):
            return how(*parts)
        kind = self.find(key)
        if is_error(kind):
            return make_exception(kind, parts)
        if key not in VALUE_PARTS:
            raise TypeError(key)
        return getattr(kind, how)(*parts) if how else kind(*parts)

    def find(self, key: str) -> Any:
        return import_name(key)

    def send(self, message: bytes) -> None:
        raise NotImplementedError

    def receive(self) -> bytes:
        raise NotImplementedError

    def serve(self, what: str, /, *arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError

    def foreign(self, value: Any, items: Any) -> list[Any]:
        """Return the node for a value that cannot be sent."""
        raise NotImplementedError

    def stand_in(self, number: int, *rest: Any) -> Any:
        raise NotImplementedError


def make_exception(kind: Any, arguments: list[Any]) -> BaseException:
    """Make an exception with these `args`, which its __init__ may not accept."""
    try:
        error: BaseException = kind(*arguments)
    except TypeError:
        error = kind.__new__(kind, *arguments)
    error.args = tuple(arguments)
    return error


def value_contents(value: Any, items: Any) -> list[Any]:
    if isinstance(value, dict):
        factory = items([getattr(value, "default_factory", None)])
        return [items(value), items(value.values()), factory]
    if isinstance(value, bytearray):
        return [value.hex()]
    if hasattr(value, "dtype"):
        return [value.tobytes().hex(), value.dtype.str, value.shape]
    return [items(value)]


def fill_value(value: Any, payload: list[Any], items: Any) -> None:
    if isinstance(value, bytearray):
        value[:] = bytes.fromhex(payload[0])
    elif hasattr(value, "dtype"):
        value[...] = array_of_text(*payload)
    elif isinstance(value, dict):
        value.clear()
        for key, each in zip(items(payload[0]), items(payload[1]), strict=True):
            value[key] = each
        if hasattr(value, "default_factory"):
            (value.default_factory,) = items(payload[2])
    else:
        value.clear()
        add = value.update if isinstance(value, set) else value.extend
        add(items(payload[0]))


class Function:
    """A function of the tests, in the program."""

    def __init__(self, peer: Peer, number: int, name: str) -> None:
        self._peer, self._number = peer, number
        self.__name__ = self.__qualname__ = name

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        return self._peer.ask("__call__", self, *arguments, **keywords)


class Iterator(Function):
    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        return self._peer.ask("__next__", self)


class ProgramPeer(Peer):
    def __init__(self, requests: int, answers: int) -> None:
        super().__init__()
        self.asked, self.answers = os.fdopen(requests, "rb"), os.fdopen(answers, "wb")
        self.module = types.ModuleType("program")  # not __main__, so that main guards do not run
        self.theirs: dict[int, Any] = {}
        sys.modules["program"] = self.module

    def send(self, message: bytes) -> None:
        self.answers.write(VALUE_LENGTH.pack(len(message)) + message)
        self.answers.flush()

    def receive(self) -> bytes:
        (length,) = VALUE_LENGTH.unpack(self.asked.read(VALUE_LENGTH.size))
        return self.asked.read(length)

    def serve(self, what: str, /, *arguments: Any, **keywords: Any) -> Any:
        if what.startswith("__"):
            # On the type, where Python itself looks up special methods.
            return getattr(type(arguments[0]), what)(*arguments, **keywords)
        return getattr(self, what)(*arguments)

    def run(self, source: str) -> None:
        # A program must not inherit the `annotations` future of this file.
        exec(compile(source, "program.py", "exec", dont_inherit=True), self.module.__dict__)

    def name(self, name: str) -> Any:
        if name not in self.module.__dict__:
            raise NameError(name)
        return self.module.__dict__[name]

    get = staticmethod(getattr)
    set = staticmethod(setattr)
    delete = staticmethod(delattr)
    truth = staticmethod(bool)

    def plain(self, value: Any) -> Any:
        return plain_value(value, changed_base(type(value)))

    def class_of(self, number: int) -> Any:
        """Return name, bases, methods of TELLS and JUDGES, and whether it derives from a type of
        CHANGED; None: it is not a class."""
        kind = self.kept[number]
        if not isinstance(kind, type):
            return None
        bases = tuple(
            type_name(each) if each in BASES or is_error(each) else self.keep(each)
            for each in kind.__bases__
            if each is not object and key_of(each) not in CHANGED
        )
        base = next(each for each in kind.__mro__ if each in (*BASES, object) or is_error(each))
        methods = tuple(
            n for n in TELLS | JUDGES if base_method(kind, n) not in (None, base_method(base, n))
        )
        return kind.__name__, bases, methods, changed_base(kind) is not None

    def foreign(self, value: Any, items: Any) -> list[Any]:
        if isinstance(value, Function):
            return ["home", value._number]
        base = next((each for each in type(value).__mro__ if each in BASES), None)
        own = (
            value.args
            if isinstance(value, BaseException)
            else (base and [plain_value(value, base)])
        )
        return ["object", self.keep(value), self.keep(type(value)), items(own or [])]

    def stand_in(self, number: int, what: str, name: str, items: Any) -> Any:
        if number not in self.theirs:
            self.theirs[number] = (Iterator if what == "__next__" else Function)(self, number, name)
        return self.theirs[number]


def plain_value(value: Any, base: Any) -> Any:
    """Convert an instance of a subclass of `base` to `base` itself."""
    if base is complex:
        return complex(value.real, value.imag)
    # By the base's methods, because the subclass may override them.
    if base in (int, float, str):
        return getattr(base, f"__{base.__name__}__")(value)
    return base(base.items(value) if issubclass(base, dict) else base.__iter__(value))


def changed_base(kind: type) -> Any:
    return next((each for each in kind.__mro__ if key_of(each) in CHANGED), None)


def base_method(kind: type, name: str) -> Any:
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def main(requests: int, answers: int) -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))  # cannot be raised again
    program = ProgramPeer(requests, answers)
    while True:
        _, request = program.unpack(program.receive())
        program.answer(*request)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
