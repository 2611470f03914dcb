"""Changes of the code and the packages since the last attempt of a run. No torch."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterator
from pathlib import Path

from kempner.jobs.code import ORIGIN, REPOSITORY, CodeVersion

MOST_FILES = 3  # names of differing files in a message


def code_differences(before: CodeVersion, now: CodeVersion, root: Path = REPOSITORY) -> str:
    """Describe the differences in code or versions, "" for none."""
    differences = []
    if before.hash and now.hash and before.hash != now.hash:
        files = differing_files(root.with_name(before.hash), root)
        differences.append(f"code {before.hash} -> {now.hash}{_shown(files)}")
    elif before.commit and now.commit and before.commit != now.commit:
        differences.append(f"commit {before.commit[:7]} -> {now.commit[:7]}")
    had, has = (
        {name: number for name, _, number in (text.rpartition(" ") for text in each.versions)}
        for each in (before, now)
    )
    for name in dict.fromkeys([*had, *has]) if had and has else ():
        one, other = had.get(name, "none"), has.get(name, "none")
        if one != other:
            differences.append(f"{name} {one} -> {other}")
    return "; ".join(differences)


def _shown(files: list[str] | None) -> str:
    if files is None:
        return ""
    count = "1 file differs" if len(files) == 1 else f"{len(files)} files differ"
    return f", {count}: {', '.join(files[:MOST_FILES])}{', ...' if len(files) > MOST_FILES else ''}"


def differing_files(one: Path, other: Path) -> list[str] | None:
    """List the files that differ between two copies; None if one copy is gone."""
    if not (one.is_dir() and other.is_dir()):
        return None
    names = sorted({*files_of(one), *files_of(other)})
    return [
        name
        for name in names
        # shallow=True would treat files of equal size and time as equal.
        if not ((one / name).is_file() and (other / name).is_file())
        or not filecmp.cmp(one / name, other / name, shallow=False)
    ]


def files_of(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            if name != ORIGIN:
                yield str((Path(folder) / name).relative_to(root))
