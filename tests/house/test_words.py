"""Docstrings and messages read as English: no fragments, no "is no number"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("scripts/*.py")])
# Words that begin neither a verb phrase nor a noun phrase.
FRAGMENT = re.compile(
    r"\W*(After|Also|And|As|At|Because|Before|Between|But|By|For|From|How|If|In|Into|It|Its|Like"
    r"|Nor|Not|Of|On|Once|Only|Or|Out|Over|Since|So|Than|That|There|They|Those|Through|To|Too"
    r"|Under|Unless|Until|Up|What|When|Where|Whether|Which|While|Who|Whose|Why|With|Within"
    r"|Without)\b"
)
# Not "there is no": a message may name what is missing.
IS_NO = re.compile(r"(?<![Tt]here )\b(is|are|was|were) no (?!(longer|more|other)\b)")


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in FILES:
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node):
            statement = node.body[0]
            assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            yield statement.value


def test_a_docstring_begins_with_a_verb_or_a_noun_phrase() -> None:
    found = [
        f"{name}:{node.lineno}: {str(node.value)[:60]!r}"
        for name, tree in trees()
        for node in docstrings(tree)
        if FRAGMENT.match(str(node.value))
    ]
    assert not found, "\n".join(found)


def test_a_message_says_is_not_a() -> None:
    found = []
    for name, tree in trees():
        known = {*docstrings(tree)}
        found += [
            f"{name}:{node.lineno}: {node.value!r}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if node not in known and IS_NO.search(node.value)
        ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["'a' is no number", "x are no options", "is no name; write lr"])
def test_is_no_is_found(text: str) -> None:
    assert IS_NO.search(text)


@pytest.mark.parametrize("text", ["there is no file", "is no longer used", "is not a number"])
def test_english_is_not_found(text: str) -> None:
    assert not IS_NO.search(text)
