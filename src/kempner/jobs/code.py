"""Code and packages of a run. The code is RUN/code/HASH, the copy of the repository that the batch
script made (scripts/slurm/lib/code.sh), or the repository itself. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from kempner.config import toml

REPOSITORY = Path(__file__).parents[3]
ORIGIN = ".kempner-origin"  # in a copy: the path of the repository it was made from
CODE_PACKAGES = ("torch", "numpy", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


class CodeVersion(NamedTuple):
    """Code of an attempt; "" and () if unknown."""

    hash: str  # name of the copy; "" for the repository itself
    commit: str
    versions: tuple[str, ...]  # of packages, each "NAME VERSION"


def current_code(root: Path = REPOSITORY) -> CodeVersion:
    """Return the code of this process."""
    packages = [f"python {platform.python_version()}"]
    for name in CODE_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            packages.append(f"{name} {version(name)}")
    copy = (root / ORIGIN).exists()
    return CodeVersion(root.name if copy else "", commit_of(root, copy), tuple(packages))


def commit_of(root: Path, copy: bool) -> str:
    """Return the commit of a repository, or of a copy when it was made; "" if unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, subprocess.TimeoutExpired):
        if copy:
            # lib/code.sh writes it beside the copy, which has no .git.
            return str(json.loads(root.with_name(f"{root.name}.json").read_text())["commit"])
        git = ("git", "-C", str(root), "rev-parse", "HEAD")
        done = subprocess.run(git, capture_output=True, text=True, timeout=5)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def input_files(arguments: Sequence[str]) -> list[Path]:
    """Return the configuration files among these words, and their base files."""
    words = [word for word in arguments if word.endswith(".toml") and not word.startswith("-")]
    files: list[Path] = []
    queue = [Path(os.path.abspath(word)) for word in words]
    while queue:
        path = queue.pop()
        if path in files or not path.is_file():
            continue
        files.append(path)
        with contextlib.suppress(OSError, ValueError):
            base = toml.loads(path.read_text()).get("base", [])
            names = [base] if isinstance(base, str) else base
            queue += [Path(os.path.abspath(path.parent / name)) for name in names]
    return files
