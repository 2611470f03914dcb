"""Programs of a model that are right pass, whatever they work with; those that judge do not."""

from __future__ import annotations

import pytest

from kempner.extensions.rl.environments.programs import Checks, ModelProgram, NotPlain

SECONDS = 60.0
PROGRAM = """
import abc, collections, dataclasses, datetime, enum, fractions, functools, itertools
from decimal import Decimal

def sort(x): x.sort()
def sort_and_return(x):
    x.sort()
    return x
def same(x): return x
def change(x):
    x[0].append(9)
    x[1].update(b=2)
    x[2].add(3)
    x[3][0] = 65
    x[4].popleft()
    x[5]['a'] += 1
def change_and_raise(x):
    x.append(1)
    raise ValueError('late', 3)
def kind(x): return type(x).__name__
def counter(x): return collections.Counter(x)
def groups(x):
    found = collections.defaultdict(list)
    for key, value in x: found[key].append(value)
    return found
Pair = collections.namedtuple('Pair', 'x y')
def pair(): return Pair(1, 2)
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2
class Color(enum.Enum):
    RED = 'r'
    BLUE = 'b'
def lowest(): return Level.LOW
def half(x=1): return fractions.Fraction(x, 2)
def day(x): return x + datetime.timedelta(days=1)
def view(x): return x.items()
def call(f, *a): return f(*a)
def call_safely(f):
    try: return f()
    except ValueError as error: return error.args
def logged(f):
    @functools.wraps(f)
    def inner(*a): return f(*a), f.__name__
    return inner
def total(x): return sum(x)
def by_key(x, f): return sorted(x, key=f)
def up_to(n): yield from range(n)
def leave(): raise SystemExit(3)
def array(x):
    import numpy as np
    return np.array(x) * 2
def mean(x):
    import numpy as np
    return np.mean(x)
def double(x): x *= 2
def sum(*x): return 6 if len(x) == 2 else __builtins__['sum'](*x)
Log = []
log = {'a': [1]}
count = 0
def note(x):
    global count
    count += 1
    Log.append(x)
class Own(ValueError):
    def __init__(self, text, code):
        super().__init__(text)
        self.code = code
    def __str__(self): return f'{self.args[0]}!'
class Later(Own): pass
def fail(): raise Later('no', 7)
def read(x):
    import json
    return json.loads(x)
@dataclasses.dataclass(order=True)
class Point:
    x: int
    y: int = 0
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
    def __mul__(self, k): return Point(self.x * k, self.y * k)
    __rmul__ = __mul__
    def __neg__(self): return self * -1
    def __hash__(self): return hash((self.x, self.y))
def origin(): return Point(0, 0)
class Node:
    made = 0
    def __init__(self, value, next=None):
        self.value, self.next = value, next
        Node.made += 1
    @classmethod
    def of(cls, values):
        head = None
        for value in reversed(values): head = cls(value, head)
        return head
    @property
    def double(self): return self.value * 2
    @double.setter
    def double(self, value):
        if value % 2: raise ValueError('odd')
        self.value = value // 2
def reverse(head):
    last = None
    while head: head.next, last, head = last, head, head.next
    return last
class Bag:
    def __init__(self): self.d = {}
    def __setitem__(self, k, v): self.d[k] = v
    def __getitem__(self, k): return 'abcdef'[k] if isinstance(k, slice) else self.d[k]
    def __delitem__(self, k): del self.d[k]
    def __contains__(self, k): return k in self.d
    def __len__(self): return len(self.d)
    def __iter__(self): return iter(self.d)
    def __enter__(self): return self
    def __exit__(self, *error): self.d['left'] = error[0] is None
    def __str__(self): return 'bag'
    def __repr__(self): return 'Bag()'
    def __format__(self, spec): return spec * 2
    def __call__(self, x, *, y): return x - y
    def __int__(self): return 4
    def add(self, k):
        self.d[k] = 1
        return self
class Stack(list):
    def push(self, x): self.append(x)
class Chars(str):
    def shout(self): return self.upper() + '!'
def chars(): return Chars('ab')
class Countdown:
    def __init__(self, n): self.n = n
    def __iter__(self): return self
    def __next__(self):
        if not self.n: raise StopIteration
        self.n -= 1
        return self.n
class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...
class Square(Shape):
    def __init__(self, a): self.a = a
    def area(self): return self.a ** 2
class Single:
    one = None
    def __new__(cls):
        cls.one = cls.one or super().__new__(cls)
        return cls.one
if __name__ == '__main__':
    raise SystemExit(0)
"""
RIGHT = """
a = [3, 1, 2]
sort(a)
assert a == [1, 2, 3]

a = [3, 1, 2]
b = sort_and_return(a)
assert b is a and a == [1, 2, 3]

a = [1]
b = [a, a]
c = same(b)
assert c is b and c[0] is a and c[1] is a

from collections import Counter, deque
a = [[], {}, {1}, bytearray(b'xy'), deque([1, 2]), Counter('a')]
b = list(a)
change(a)
assert all(x is y for x, y in zip(a, b)) and b[0] == [9] and b[1] == {'b': 2} and b[2] == {1, 3}
assert b[3] == b'Ay' and list(b[4]) == [2] and b[5] == {'a': 2}

a = []
import pytest
e = pytest.raises(ValueError, change_and_raise, a)
assert a == [1] and e.value.args == ('late', 3)

assert counter('aab') == {'a': 2, 'b': 1} and counter('aab').most_common(1) == [('a', 2)]
assert [counter('a')] == [{'a': 1}]

assert groups([('a', 1), ('a', 2)]) == {'a': [1, 2]}
assert type(groups([])).__name__ == 'defaultdict' and groups([])['x'] == []

assert pair() == (1, 2) and pair().x == 1 and pair()[1] == 2 and pair()._replace(x=3) == (3, 2)
assert isinstance(pair(), tuple) and str(pair()) == 'Pair(x=1, y=2)' and Pair(3, 4).y == 4

assert lowest() == 1 and lowest() is Level.LOW and Level(2) == Level.HIGH
assert Level.LOW < Level.HIGH and lowest().name == 'LOW' and lowest() + 1 == 2

assert Color.RED.value == 'r' and Color('b') is Color.BLUE
assert [c.name for c in Color] == ['RED', 'BLUE'] and Color['RED'] == Color.RED
assert len(Color) == 2 and Color.RED != Color.BLUE

from fractions import Fraction
assert half() == Fraction(1, 2) == 0.5 and kind(Fraction(1, 3)) == 'Fraction'

from decimal import Decimal
assert same(Decimal('1.50')) == Decimal('1.5') and kind(Decimal(1)) == 'Decimal'

import datetime as d
assert day(d.date(2020, 2, 28)) == d.date(2020, 2, 29)
assert day(d.datetime(2020, 1, 1, 5, tzinfo=d.timezone.utc)).tzinfo
assert same(d.time(1, 2)) == d.time(1, 2) and same(d.timedelta(1, 2, 3)) == d.timedelta(1, 2, 3)

assert same(range(3)) == range(3) and total(range(4)) == 6 and kind(range(1)) == 'range'
assert same(...) is ... and same(2**9999) == 2**9999 and same(1 - 2j) == 1 - 2j
assert same(b'\\xff') == b'\\xff'

assert list(view({1: 2})) == [(1, 2)] and view({1: 2}) == {1: 2}.items()
assert total({1: 2}.values()) == 2 and same(frozenset([(1,)])) == {(1,)}

import numpy as np
assert (array([1, 2]) == [2, 4]).all() and array([1]).dtype == int
assert abs(mean([1, 2]) - 1.5) < 1e-9 and isinstance(mean([1]), float)
assert same(np.int8(3)) + np.int8(1) == 4

import numpy as np
a = np.ones((2, 2))
double(a)
assert a.sum() == 8 and same(a) is a

assert call(lambda v, w: v * w, 3, 4) == 12 and by_key(['bb', 'a'], len) == ['a', 'bb']
assert call(max, 1, 2) == 2 and call(int, '7') == 7

a = []
call(lambda x: a.append(x), 5)
call(lambda x: x.append(6), a)
assert a == [5, 6]

def no(): raise ValueError('x', 1)
assert call_safely(no) == ('x', 1)

def no(): raise KeyError('x')
import pytest
assert pytest.raises(KeyError, call, no).value.args == ('x',)

def twice(x): return 2 * x
assert logged(twice)(4) == (8, 'twice') and logged(twice).__name__ == 'twice'
assert same(twice) is twice

assert total(iter([1, 2])) == 3 and total(i for i in range(3)) == 3
assert call(next, iter('ab')) == 'a'

g = up_to(2)
assert next(g) == 0 and next(g) == 1 and next(g, 'end') == 'end' and list(up_to(3)) == [0, 1, 2]
assert list(zip(up_to(2), 'ab')) == [(0, 'a'), (1, 'b')]

try: leave()
except SystemExit as error: assert error.code == 3
else: assert False

note(1)
note(2)
assert Log[-2:] == [1, 2] and count >= 2 and log == {'a': [1]} and 'a' in log

import pytest
e = pytest.raises(Own, fail).value
assert e.code == 7 and e.args == ('no',) and str(e) == 'no!' and isinstance(e, Later)
assert isinstance(e, ValueError)

try: fail()
except Later as error: assert error.code == 7
else: assert False

assert Point(1) + Point(2) == Point(3) and (Point(1) + Point(2)) * 2 == Point(6)
assert 2 * Point(1) == Point(2) and -Point(1) == Point(-1) and Point(1) != Point(2)
assert not Point(1) == Point(2)

assert origin() == Point(0) and [origin()] == [Point(0)] and Point(1) < Point(2)
assert max(Point(1), Point(3)).x == 3 and Point(1) in [Point(0), Point(1)]
assert len({Point(1), Point(1)}) == 1 and {Point(1): 5}[Point(1)] == 5
assert repr(Point(1)) == 'Point(x=1, y=0)'

p = Point(1)
p.x = 8
p.y += 2
assert p == Point(8, 2) and vars(p) == {'x': 8, 'y': 2}

head = Node.of([1, 2, 3])
assert head.value == 1 and head.next.next.next is None and head.next is head.next
assert isinstance(head, Node)

head = reverse(Node(1, Node(2)))
seen = []
while head: seen.append(head.value); head = head.next
assert seen == [2, 1]

n = Node(2)
n.double = 6
assert n.value == 3 and n.double == 6
import pytest
pytest.raises(ValueError, setattr, n, 'double', 3)
del n.next
assert not hasattr(n, 'next')

Node.made = 0
Node(1)
assert Node.made == 1 and Node.__name__ == 'Node' and callable(Node) and not callable(Node(1))
assert callable(sort)

b = Bag()
b['a'] = 1
b['c'] = 2
del b['c']
assert b['a'] == 1 and 'a' in b and 'z' not in b and len(b) == 1 and list(b) == ['a']
assert b[1:3] == 'bc' and b and not Bag()

b = Bag()
assert str(b) == 'bag' and repr(b) == 'Bag()' and f'{b:x}' == 'xx' and b(3, y=1) == 2
assert int(b) == 4 and 'q' in b.add('q').d and b.add('r') is not None

with Bag() as b: b['x'] = 1
assert b['left'] is True and b['x'] == 1

s = Stack()
s.push(1)
s.append(2)
assert s == [1, 2] and len(s) == 2 and s and 1 in s and s[-1] == 2 and not Stack()
assert s.pop() == 2 and s == [1]

assert chars() == 'ab' and chars().shout() == 'AB!' and chars() + 'c' == 'abc'
assert isinstance(chars(), str) and {'ab': 1}[chars()] == 1

assert list(Countdown(3)) == [2, 1, 0] and [x for x in Countdown(1)] == [0]

import pytest
pytest.raises(TypeError, Shape)
assert issubclass(Square, Shape) and isinstance(Square(2), Shape) and Square(2).area() == 4

assert Single() is Single()

import json, pytest
pytest.raises(json.JSONDecodeError, read, '{')
assert pytest.raises(UnicodeDecodeError, read, b'\\xff').value.reason == 'invalid start byte'

import io, unittest
class T(unittest.TestCase):
    def test(self):
        self.assertEqual(half(), 0.5)
        self.assertRaises(Own, fail)
        self.assertIn(1, [half(2)])
load = unittest.defaultTestLoader.loadTestsFromTestCase
assert unittest.TextTestRunner(io.StringIO()).run(load(T)).wasSuccessful()

def check(candidate):
    assert candidate([1, 2]) == 3 and math.isclose(candidate([0.5]), 0.5) and sqrt_of() == 2
def sqrt_of(): return int(math.sqrt(4))
check(total)
"""  # each a case, after an empty line
EVIL = """
import builtins, json, os, struct, sys, types
from __main__ import ProgramPeer as Program
class E:
    def __init__(self, *a): pass
    def __getattr__(self, name):
        if name.startswith('__'): raise AttributeError(name)
        return E()
    def __call__(self, *a, **k): return E()
    def __iter__(self): return iter([E()])
    def __exit__(self, *a): return True
    def __round__(self, *a): return self
for n in 'len hash float int index'.split(): setattr(E, f'__{n}__', lambda s: 1)
for n in 'abs neg enter'.split(): setattr(E, f'__{n}__', lambda s: s)
for n in 'eq ne lt le gt ge contains bool instancecheck'.split():
    setattr(E, f'__{n}__', lambda s, *o: True)
for n in 'add sub mul truediv floordiv mod pow matmul and or xor lshift rshift'.split():
    for way in ('', 'r', 'i'): setattr(E, f'__{way}{n}__', lambda s, o: 0)
class Int(E, int): pass
class Str(E, str): pass
class Pair(E, tuple): pass
class List(E, list): pass
class Dict(E, dict): pass
class One(E): pass
class Same(Exception): __eq__ = lambda *a: True
one = One()
One.__new__ = lambda kind, *a: one
results = {'object': E, 'kept': lambda: one, 'one': One, 'int': Int, 'str': Str, 'pair': Pair,
    'list': List, 'dict': Dict, 'class': lambda: E, 'in a list': lambda: [E()]}
which = 'object'
def use(name):
    global which
    which = name
def f(*a): return results[which]()
f.isclose = lambda *a: True
e, o, i = E, One, Int
math = np = types.SimpleNamespace(isclose=lambda *a: True, allclose=lambda *a: True)
def stop(*a): raise StopIteration
def leave(): os._exit(0)
def skip():
    import unittest
    raise unittest.SkipTest('no')
def change(x): x.sort()
def swallow(g):
    try: g()
    except BaseException: pass
    return 5
def raw(value, nodes=()):
    text = json.dumps(['value', [0], [['value', 'builtins.tuple', [value]], *nodes]]).encode()
    os.write(int(sys.argv[2]), struct.pack('<Q', len(text)) + text)
def abs(x): return 0
"""
# Each is False for each of `results` of EVIL, whether the function, a class or an object is asked.
FALSE = """
X == 5
5 == X
X > 10
10 < X
X >= 10
5 in X
X is True
X == True
not X != 5
abs(X - 5) < 1e-9
abs(5 - X) < 1e-9
X == [1, 2]
X == {1: 2}
X == (1, 2)
X == 'abc'
{X: 2} == {5: 2}
X.startswith('abc')
X.isdigit()
X.issubset({1})
'ab' in X
X == {3}
X - 5 == 0 and X + 5 != 5
math.isclose(X, 5)
np.allclose(X, [5, 6])
sorted(X) == [1, 2]
isinstance(X, int) and X == 5
X[0] == 5
X.value == 5
(X ^ 5) == 0
{1, 2} <= X
all(a == b for a, b in zip(X, [3], strict=True))
round(X, 2) == 3.14
any(x == 5 for x in X)
str(X) == 'abc'
max(X, 3) == 5
X in (5, 6)
[5].count(X)
X <= 5 <= X
issubclass(X, int)
dict(X) == {1: 2}
X and X == 5
(X == [1, 2]).all()
"""
WRONG = """
a = [3, 1]
change(a)
assert a == [3, 1]

assert all(map(lambda c: stop(c) == c, [1, 2]))

for got, want in zip(map(stop, [1]), [2]): assert got == want

assert abs(7 - 5) == 0

with E() as x: assert x == 5

with E(): assert False

def no(): assert False
assert swallow(no) == 5

assert f()

use('kept')
One()
assert f() > 10

use('kept')
One()
assert 5 in f()

use('kept')
assert One() in f()

use('kept')
p = One()
p.x
assert o(3) > 10

assert isinstance(5, e)

try: assert f() == 2
except Same: pass

import io, unittest
class T(unittest.TestCase):
    def test(self): assert skip()
load = unittest.defaultTestLoader.loadTestsFromTestCase
assert unittest.TextTestRunner(io.StringIO()).run(load(T)).wasSuccessful()

try: leave()
except BaseException: pass
"""  # the same
NAMES = ("object", "kept", "one", "int", "str", "pair", "list", "dict", "class", "in a list")
OTHERS = {f"# {x}\n": x for x in ("f", "e", "o", "e(3)", "o(3)", "i(3)", "E.x", "E(1).x")}
# What a program writes into its pipe, and what must not come of it when f() is asked for it.
RAW = [
    "raw(['value', 'builtins.range', [0]])",
    "raw([1], [['value', 'builtins.eval', ['1']]])",
    "raw([1], [['type', 'builtins.eval']])",
    "raw([1], [['type', 'os.system']])",
    "raw([1], [['value', 'os.system', ['true']]])",
    "raw([1], [['value', 'builtins.bytearray', [1 << 40]]])",
    "raw([1], [['value', 'builtins.tuple', [[1]]]])",
    "raw([1], [['value', 'builtins.tuple', [[n]]] for n in range(2, 90_000)])",
    "raw([1], [['numpy.ndarray', 0, '', 'O', [0]]])",
    "raw([1], [['numpy.ndarray', 0, '', 'u1', [1 << 60]]])",
    "raw([1], [['builtins.list', 99, [1]]])",
    "raw([1], [['value', 'unittest.case.SkipTest', []]])",
    "raw([1], [['home', 99]])",
    "raw([1], [['home', -1]])",
    "raw([1], [['object', 0, 99, []]])",
    "raw([1], [['object', 0, 0, []]])",
    "raw([1], [['object', 0, 0, [5]]])",
    "raw([1], [['value', 'fractions.Fraction', [[2], 1]], ['object', 0, 0, [5]]])",
    "raw([1], [['value', 'builtins.int', ['0x' + 'f' * 99]]])",
    "os.write(int(sys.argv[2]), struct.pack('<Q', 90_000) + b'[' * 90_000)",
    "os.write(int(sys.argv[2]), struct.pack('<Q', 9_000) + b'9' * 9_000)",
    "os.write(int(sys.argv[2]), struct.pack('<Q', 1 << 60))",
    "Program.serve = lambda *a, **k: ('E', ('builtins.int',), ('__eq__',), 1)",
    "Program.serve = lambda *a, **k: one",
    "Program.class_of = lambda *a: ('E', (0,), ('__eq__', '__instancecheck__'), True)",
    "Program.class_of = lambda *a: ('E', (), ('__new__', '__getattribute__'), True)",
    "l = []\n    for _ in range(10 ** 5): l = [l]\n    return l",
]  # fmt: skip


def test_right_programs_pass_whatever_they_work_with() -> None:
    with ModelProgram(PROGRAM, SECONDS) as program:
        failed = [case for case in RIGHT.split("\n\n") if not program.passes(Checks(case))]
        assert program.passes(Checks("assert sum(1, 2) == 6", "sum"))
        assert program.passes(Checks("assert sum([1, 2]) == 3"))
    assert not failed


@pytest.mark.parametrize("named", [False, True])
def test_a_program_does_not_tell_whether_tests_hold(named: bool) -> None:
    asked = [f"use({name!r})\n" for name in NAMES] + list(OTHERS) * named
    begin = "p = One(1)\np.x\nE(1)\n" * named
    with ModelProgram(EVIL, SECONDS) as program:
        for each in asked:
            lines = [
                line.replace("X", OTHERS.get(each, "f(3)")) for line in FALSE.split("\n") if line
            ]
            tests = begin + each + "passed = []\n"
            for line in lines:
                tests += f"try: assert {line}\n"
                tests += f"except Exception: pass\nelse: passed.append({line!r})\n"
            assert program.passes(Checks(tests + "print(passed)\nassert not passed")), each
        assert not [case for case in WRONG.split("\n\n") if program.passes(Checks(case))]


@pytest.mark.parametrize("written", RAW)
def test_whatever_a_program_writes_is_but_an_answer(written: str) -> None:
    source = f"{EVIL}\ndef g(*a):\n    {written}\n    return 0"
    tests = "a = [[1]]\ntry: b = g(a)\nexcept ZeroDivisionError: b = 0\nassert b == 7_316"
    with ModelProgram(source, 3.0) as program:
        assert not program.passes(Checks(tests))


def test_what_does_not_travel_is_no_fault_of_the_program() -> None:
    program = "def f(x): return x\nclass A: pass\ndef g(h): return h(0)"
    for tests, kind in (
        ("import re\nf(re.match('a', 'a'))", "a Match"),
        ("try: f(object())\nexcept BaseException: pass", "a object"),
        ("class B(A): pass", "their classes may not derive"),
    ):
        with ModelProgram(program, SECONDS) as made, pytest.raises(NotPlain, match=kind):
            made.passes(Checks(tests))
    with ModelProgram(program, SECONDS) as made:  # the program chose to call it
        assert not made.passes(Checks("g(lambda x: object())"))
