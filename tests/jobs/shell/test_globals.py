"""The shell's globals, KP_*: each is set in one file, where a reader finds all of its values, and a
function of that file sets it for the others. Their number does not grow. No line has over 100
columns."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SCRIPTS = Path(__file__).parents[3] / "scripts/slurm"
GLOBALS = 134
ASSIGNED = re.compile(r"(?<![\w$!{#])(KP_\w+)(\[[^]]*\])?\+?=(?!=|\*\))")
READ = re.compile(r"\b(?:printf -v |(?:read|mapfile)\b[^|;<$]*?)\b(KP_\w+)")
WORD = r"""(?:[^\s"'$\\]|"(?:[^"\\]|\\.)*"|'[^']*'|\$\((?:[^()]|\([^()]*\))*\)|\$|\\.)*"""
REST = re.compile(rf"{WORD}\s*(?:[\w\[\]]+={WORD}\s+)*(?P<next>\S*)")


def find_assignments(text: str) -> Iterator[str]:
    """The variables that this script sets; not those that it sets for one function or command."""
    local: set[str] = set()
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        if re.match(r"\w+\(\) [({]", line):
            local = set()
        if re.match(r"\s*local\b", line):
            local |= set(re.findall(r"(?<=\s)KP_\w+(?=[=\s]|$)", line))
            continue
        for found in ASSIGNED.finditer(line):
            rest = REST.match(line, found.end())
            assert rest is not None
            of_a_command = re.match(r"[a-z\"]", rest["next"]) and line[found.end()] != "("
            if found[1] not in local and not of_a_command:
                yield found[1]
        yield from set(READ.findall(line)) - local


def test_what_counts() -> None:
    text = """
KP_A=1 KP_B=$((1 + 2)) # both
KP_C="in words" kp_command x
f() {
    local KP_D=1 KP_E
    KP_D=2 KP_F+=("$1")
    [[ $KP_G == 1 ]] || KP_H[x]=$(one two)
}
mapfile -t KP_I < <(f)
"""
    assert list(find_assignments(text)) == ["KP_A", "KP_B", "KP_F", "KP_H", "KP_I"]


def test_each_variable_is_set_in_one_file() -> None:
    files = defaultdict(set)
    for path in SCRIPTS.rglob("*.sh"):
        if path.name != "task.sh":  # it is a process of its own, on each node
            for name in find_assignments(path.read_text()):
                files[name].add(path.name)
    assert len(files) > 50
    assert not {name: at for name, at in files.items() if len(at) > 1}


def test_there_are_no_more_globals_and_no_long_lines() -> None:
    whole = "\n".join(path.read_text() for path in SCRIPTS.rglob("*.sh"))
    assert len(set(re.findall(r"KP_[A-Z_]+", whole))) <= GLOBALS
    assert not [line for line in whole.splitlines() if len(line) > 100]
