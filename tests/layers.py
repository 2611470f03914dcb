"""The list of ARCHITECTURE.md, made from the docstrings of the folders:

python -m tests.layers
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kempner"

# From the bottom up. A module imports its own layer and those below.
LAYERS = (
    ("config",),
    ("jobs",),
    ("model", "data", "parallel", "optim", "checkpoint"),
    ("train",),
    ("extensions",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
INDENT = " " * 4  # a block of code


def folders(parent: Path = SOURCE, depth: int = 0) -> Iterator[tuple[int, Path]]:
    """Every package with its depth, the top ones in the order of LAYERS."""
    found = [path.parent for path in parent.glob("*/__init__.py")]
    for path in sorted(
        found, key=lambda path: (list(LEVEL).index(path.name) if not depth else 0, path)
    ):
        yield depth, path
        yield from folders(path, depth + 1)


def docstring(folder: Path) -> str:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    return " ".join(text.split())


def drawn() -> str:
    """One line a folder: its name, and its docstring."""
    rows = [("  " * depth + f"{path.name}/", docstring(path)) for depth, path in folders()]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{INDENT}{name:{width}}{text}" for name, text in rows) + "\n"


if __name__ == "__main__":
    print(drawn(), end="")
