"""The commit protocol of checkpoints: a directory is complete or it is not there.

    step_00000100.partial/   being written
    step_00000100/           complete: its manifest.json lists every file with size and CRC-32
    latest                   link to the newest complete one, replaced by rename
    step_00000100.corrupt/   set aside, because loading it failed
    step_00000100.deleted/   being deleted

Everything that makes it true is here: fsync of files and directories, rename, and the order of the
two. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST = "manifest.json"
LATEST = "latest"
COMPLETE = re.compile(r"step_(\d{8,})")
CHUNK = 1 << 24


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def partial_of(root: Path, step: int) -> Path:
    return root / f"{name_of(step)}.partial"


def fsync(path: Path) -> None:
    """Make a file's data, or a directory's entries, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a crash, sees the old text or the new."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    with open(fresh, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    fsync(path.parent)


def checksum(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    size = crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return {"bytes": size, "crc32": crc}


def commit(root: Path, step: int, files: dict[str, dict[str, int]], about: dict[str, Any]) -> Path:
    """Turn step_X.partial, whose listed files are durable, into the checkpoint that `latest` names.

    A crash at any instant leaves the old `latest` or the new one, each of them complete. Called by
    rank 0 alone, when all ranks have written.
    """
    partial, final = partial_of(root, step), root / name_of(step)
    manifest = {**about, "format": FORMAT, "step": step, "files": files}
    write_atomic(partial / MANIFEST, json.dumps(manifest, indent=1))
    if final.exists():  # `latest` was moved back behind it, and the run has come here again
        remove(final)
    partial.rename(final)
    fsync(root)
    point_latest(root, final.name)
    return final


def point_latest(root: Path, target: str) -> None:
    link = root / LATEST
    if link.is_dir() and not link.is_symlink():  # a copy of the run that has followed links
        link.rename(unused(root, f"{LATEST}.copied"))
    fresh = root / f".{LATEST}.{os.getpid()}.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)
    fsync(root)


def unused(root: Path, name: str) -> Path:
    """`name`, or `name.1`, ... : the first that does not exist."""
    tries = (root / (f"{name}.{k}" if k else name) for k in range(1_000_000))
    return next(path for path in tries if not path.exists())


def latest(root: Path) -> Path | None:
    """The directory in `root` that `latest` names, None when there is none or it dangles."""
    target = root / (root / LATEST).resolve().name
    return target if COMPLETE.fullmatch(target.name) and (target / MANIFEST).is_file() else None


def complete(root: Path) -> list[Path]:
    """The checkpoints worth trying, best first: `latest`, then the others from new to old."""
    if not root.is_dir():
        return []
    newest_first = sorted(
        (p for p in root.iterdir() if COMPLETE.fullmatch(p.name) and p.is_dir()),
        key=lambda path: int(path.name[5:]),
        reverse=True,
    )
    first = latest(root)
    return sorted(newest_first, key=lambda path: path != first)


def read_manifest(path: Path) -> dict[str, Any]:
    """Raises ValueError when it is missing, torn, or of another format."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
        if not isinstance(manifest["files"], dict):
            raise ValueError("its list of files is damaged")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / MANIFEST}: {error}") from None
    return manifest  # type: ignore[no-any-return]


def verify(path: Path, files: dict[str, dict[str, int]]) -> list[str]:
    """What is wrong with these files of a checkpoint: missing, of another size, or changed."""
    wrong = []
    for name, expected in files.items():
        try:
            found = checksum(path / name)
        except OSError as error:
            wrong.append(f"{name}: {error.strerror}")
            continue
        if found != expected:
            what = "bytes" if found["bytes"] != expected["bytes"] else "crc32"
            wrong.append(f"{name}: {what} {found[what]}, the manifest says {expected[what]}")
    return wrong


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint out of the way; nothing is deleted."""
    target = unused(path.parent, f"{path.name}.corrupt")
    path.rename(target)
    fsync(path.parent)
    return target


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Hold a checkpoint against retention while it is read (a shared lock on its manifest)."""
    with contextlib.ExitStack() as held:
        # No manifest: the reader will say so. No locks on this file system: nobody is kept out.
        with contextlib.suppress(OSError):
            file = held.enter_context(open(path / MANIFEST))
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def is_read(path: Path) -> bool:
    try:
        with open(path / MANIFEST, "r+") as file:  # NFS locks for writing only what is open for it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def prune(root: Path, keep_last_n: int, keep_every: int) -> None:
    """Retention: the newest `keep_last_n`, multiples of `keep_every`, `latest`, and what somebody
    reads stay."""
    for path in complete(root)[keep_last_n:]:
        step = int(path.name[5:])
        if (keep_every and step % keep_every == 0) or is_read(path) or path == latest(root):
            continue
        with contextlib.suppress(OSError):  # it stays, and the next save tries again
            remove(path)


def remove(path: Path) -> None:
    """Delete a checkpoint: renamed first, so that none is ever half there."""
    doomed = path.with_name(f"{path.name}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    shutil.rmtree(path.rename(doomed), ignore_errors=True)


def clean(root: Path) -> list[str]:
    """Remove what a killed run has left; returns the names. At a start, before anything is read."""
    if not root.is_dir():
        return []
    left = [p for p in root.iterdir() if p.name.endswith((".partial", ".deleted", ".new"))]
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return sorted(path.name for path in left)
