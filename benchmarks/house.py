"""What a reader of this repository has to carry: a table of counts, of any checkout.

    python -m benchmarks.house                 this checkout
    python -m benchmarks.house ../other        another one, such as a worktree of an older commit

Lines and modules are those that a program really loads (python -X importtime): a training of two
steps of fake data, its check, and a look at a run. Nothing is timed.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.layers import LEVEL

HERE = Path(__file__).resolve().parents[1]
CONFIG = ["configs/train/debug.toml", "--data.dataset_path=fake:", "--distributed.device=cpu"]
FRAGMENTS = ("Of", "What", "Whether", "Where", "Without", "When", "Which", "Who", "Why", "How")


def main(root: Path) -> None:
    """Print the table."""
    source = root / "src" / "kempner"
    files = [path for path in sorted(source.rglob("*.py")) if path.stat().st_size]
    trees = {path: ast.parse(path.read_text()) for path in files}
    with tempfile.TemporaryDirectory() as place:
        run = [f"--run.dir={place}/run", "--train.max_steps=2"]
        rows = {
            "the library: lines (modules)": size(files),
            "train.py loads": loaded(root, ["scripts/train.py", *CONFIG, *run]),
            "train.py --check loads": loaded(root, ["scripts/train.py", *CONFIG, "--check"]),
            "status.py loads": loaded(root, ["scripts/status.py", f"{place}/run"]),
        }
    train = ast.parse((root / "scripts/train.py").read_text())
    names = {path: public_names(tree) for path, tree in trees.items()}
    count = Counter(name for each in names.values() for name in each)
    twice = sum(1 for number in count.values() if number > 1)
    docs = [text for tree in trees.values() for text in docstrings(tree)]
    bad = sum(1 for text in docs if text.split(maxsplit=1)[0].rstrip(",:") in FRAGMENTS)
    comments, code = (sum(each) for each in zip(*map(comment_lines, files), strict=True))
    # An older checkout has other layers.
    arrows = f"{len(list(arrows_up(source, trees)))}" if (source / "jobs").is_dir() else "-"
    rows |= {
        "modules and packages at the top": f"{len(doors(source))}",
        "options in train.py --help": f"{options(root)}",
        "imports of a layer above": arrows,
        "public names in two modules": f"{twice} of {len(count)} ({twice / len(count):.1%})",
        "docstrings that begin with a fragment": f"{bad} of {len(docs)} ({bad / len(docs):.1%})",
        "full-line comments, of code lines": f"{comments / code:.1%}",
        "README.md, lines": f"{len((root / 'README.md').read_text().splitlines())}",
        "scripts/train.py, lines": f"{len((root / 'scripts/train.py').read_text().splitlines())}",
        "its longest function, lines": f"{longest(train)}",
    }
    for name, value in rows.items():
        print(f"{name:40} {value}")


def size(files: list[Path]) -> str:
    return f"{sum(len(path.read_text().splitlines()) for path in files):,} ({len(files)})"


def loaded(root: Path, words: list[str]) -> str:
    """Lines and modules of the library that a program imports."""
    command = [sys.executable, "-X", "importtime", *words]
    env = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    found = set(re.findall(r"\| +(kempner[\w.]*)$", done.stderr, re.MULTILINE))
    paths = [root / "src" / Path(*name.split(".")) for name in sorted(found)]
    return size(
        [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths]
    )


def options(root: Path) -> int:
    env = {**os.environ, "PYTHONPATH": str(root / "src")}
    command = [sys.executable, "scripts/train.py", "--help"]
    text = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True).stdout
    return len(re.findall(r"^  --\w+\.", text, re.MULTILINE))


def doors(source: Path) -> list[Path]:
    """What a reader meets at the top of the package."""
    packages = [path for path in source.iterdir() if (path / "__init__.py").is_file()]
    return packages + [path for path in source.glob("*.py") if path.name != "__init__.py"]


def arrows_up(source: Path, trees: dict[Path, ast.Module]) -> Iterator[tuple[str, str]]:
    """Pairs of modules, the second in a layer above, also in functions and for annotations."""
    names = {".".join(path.relative_to(source).with_suffix("").parts): path for path in trees}

    for name, path in names.items():
        targets = set()
        for node in ast.walk(trees[path]):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kempner"):
                inner = (node.module or "").removeprefix("kempner").lstrip(".")
                within = [f"{inner}.{alias.name}".lstrip(".") for alias in node.names]
                # `from a import b` names a module only where there is one of that name.
                targets |= {each if each in names else inner for each in within}
        for other in sorted(targets - {""}):
            if (
                not name.endswith("__init__")
                and LEVEL[other.split(".")[0]] > LEVEL[name.split(".")[0]]
            ):
                yield name, other


def public_names(tree: ast.Module) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {x.name for x in tree.body if isinstance(x, kinds) and not x.name.startswith("_")}


def docstrings(tree: ast.Module) -> Iterator[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


def comment_lines(path: Path) -> tuple[int, int]:
    """Lines that are comments alone, and lines of code."""
    comments, code = set(), set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    with open(path, "rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                comments.add(token.start[0])
            elif token.type not in {*skipped, tokenize.ENCODING, tokenize.ENDMARKER}:
                code.update(range(token.start[0], token.end[0] + 1))
    # A comment behind code is none of its own.
    return len(comments - code), len(code)


def longest(tree: ast.Module) -> int:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return max((node.end_lineno or 0) - node.lineno + 1 for node in functions)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if sys.argv[1:] else HERE)
