"""The commit protocol of checkpoints: a directory is complete or it is not there.

    step_00000100.ATTEMPT.partial/   being written by this attempt
    step_00000100/                   complete: its files are durable, manifest.json was written last
    latest                           link to where a start continues from, replaced by rename
    step_00000100.corrupt/           proved to be damaged, and set aside
    step_00000100.deleted/           being deleted
    .reading/step_00000100           locked by those who read it

This module has all that guarantees this: fsync of files and directories, rename, and their order.
Files of other runs (ownership.py) are left alone, whatever their names. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import re
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from kempner.checkpoint.config import is_power_of_two
from kempner.checkpoint.history import (
    CHECKPOINT_FORMAT,
    LATEST_LINK,
    MANIFEST,
    commit_time,
    latest_checkpoint,
    run_branches,
)
from kempner.checkpoint.history import (
    read_manifest as read_manifest,  # scripts of users, as docs/reference/checkpoints.md has it
)
from kempner.checkpoint.ownership import is_own, remove_directory
from kempner.config import toml
from kempner.jobs.system.directories import Kind, mark_directory, read_mark
from kempner.jobs.system.files import fsync, name_of_step, step_of_name, swap_link, write_atomic

READING = ".reading"
LEFTOVER_NAME = re.compile(  # by a killed save, deletion, or write of a small file
    r"step_\d{8,}\.(([\w.-]+\.)?partial|deleted(\.\d+)?)|\.(latest|skip\.json|\.kempner)\.\d+\.new"
)


def partial_of(root: Path, step: int, attempt: str = "") -> Path:
    """Return the path where an attempt writes the checkpoint. It contains the attempt's name, so
    that another attempt that believes it owns the run does not save into the same files."""
    return root / ".".join(filter(None, (name_of_step(step), attempt, "partial")))


# --- Writing ---


def begin_save(root: Path, step: int, attempt: str = "") -> Path:
    """Make partial_of() with the mark of the run that owns `root` and nothing else: files of an
    earlier attempt must not mix with ours. Raises OSError."""
    partial = partial_of(root, step, attempt)
    if partial.exists():
        _check_own(partial)
        remove_directory(partial)
    # The mark first: leftovers of a kill must show their owner.
    mark_directory(partial, Kind.CHECKPOINT, read_mark(root)[1])
    return partial


def commit_save(
    root: Path,
    step: int,
    texts: dict[str, bytes],
    facts: dict[str, Any],
    attempt: str = "",
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Turn the directory of begin_save(), whose data files are durable, into the checkpoint
    that `latest` names.

    `texts`: the small files beside them. `check()` does not return if the run now belongs to
    another process. A crash at any instant leaves the old `latest` or the new one, each complete.
    Rank 0 calls this when all ranks have written.
    """
    partial, final = partial_of(root, step, attempt), root / name_of_step(step)
    for name, content in texts.items():
        write_atomic(partial / name, content)
    # The data files are durable, but their names only once their folder is.
    for folder in partial.iterdir():
        if folder.is_dir():
            fsync(folder)
    # Only the small files: data files carry their own checksums.
    files = {
        name: {"bytes": len(content), "crc32": zlib.crc32(content)}
        for name, content in texts.items()
    }
    manifest = {
        **facts,
        "format": CHECKPOINT_FORMAT,
        "step": step,
        "time": _time_after(latest_checkpoint(root)),
        "files": files,
    }
    # The manifest comes last: a directory without one is not a checkpoint.
    write_atomic(partial / MANIFEST, json.dumps(manifest, indent=1))
    # Another attempt may have taken over the run during the write. An attempt that has lost the run
    # must not move `latest`.
    check()
    if final.exists():  # the run went back behind this step and has now reached it again
        _check_own(final)
        mark_for_deletion(final)
    # The order is the protocol: the directory is complete, gets its name, then `latest` names it.
    partial.rename(final)
    fsync(root)
    point_latest(root, final.name)
    return final


def _time_after(latest: Path | None) -> float:
    """Return the time, made later than that of `latest` whatever this host's clock says: a run
    identifies its own branch by it."""
    now = time.time()
    return max(now, commit_time(latest) + 0.001) if latest else now


def point_latest(root: Path, target: str) -> None:
    link = root / LATEST_LINK
    if link.is_dir() and not link.is_symlink():  # a copy of the run that followed links
        _check_own(link)
        link.rename(unused_name(root, f"{LATEST_LINK}.copied"))
    swap_link(link, target)


def _check_own(path: Path) -> None:
    if not is_own(path):
        raise FileExistsError(errno.EEXIST, "is not this run's: move it away", str(path))


def set_latest(path: Path) -> None:
    """Make `latest` name this checkpoint, if it does not already."""
    if latest_checkpoint(path.parent) != path:
        point_latest(path.parent, path.name)


def unused_name(root: Path, name: str) -> Path:
    """Return the first of `name`, `name.1`, ... that does not exist."""
    tries = (root / (f"{name}.{k}" if k else name) for k in range(1_000_000))
    return next(path for path in tries if not path.exists())


# --- Protecting what is read ---


@contextlib.contextmanager
def reading_lock(path: Path) -> Iterator[None]:
    """Protect a checkpoint from retention while it is read, by a shared lock. It may be deleted
    before the lock is taken: then it has no manifest. Without support or permission for locks,
    nothing is protected."""
    with contextlib.ExitStack() as locks:
        with contextlib.suppress(OSError):
            fcntl.flock(locks.enter_context(_open_lock(path)), fcntl.LOCK_SH)
        yield


def _open_lock(path: Path) -> IO[str]:
    """Open a lock file. Raises OSError. Whoever can open a lock can hold it for ever, even
    read-only. So the file must be private, separate from the files that others read."""
    path = path.resolve()
    if read_mark(path.parent)[0] is not Kind.CHECKPOINTS:
        raise FileNotFoundError(errno.ENOENT, "a copy, which no run deletes", str(path))
    folder = path.parent / READING
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)  # its user may have opened the whole run to others
    return open(folder / path.name, "a+")  # NFS asks for the right to write, or to read


def is_read(path: Path) -> bool:
    with deletion_lock(path) as free:
        return not free


@contextlib.contextmanager
def deletion_lock(path: Path) -> Iterator[bool]:
    """Yield whether nobody reads a checkpoint; if so, nobody can start while this is open."""
    with contextlib.ExitStack() as locks:
        free = True
        try:
            fcntl.flock(locks.enter_context(_open_lock(path)), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:
            pass
        yield free


# --- Removing ---


def set_checkpoint_aside(path: Path) -> Path:
    """Rename a damaged checkpoint; nothing is deleted. `latest` moves to the one before it, which
    only the manifest names."""
    branch, _ = run_branches(path.parent)
    if branch[1:] and branch[0] == path:
        # Before the rename below: at no instant may `latest` dangle.
        point_latest(path.parent, branch[1].name)
    target = unused_name(path.parent, f"{path.name}.corrupt")
    path.rename(target)
    fsync(path.parent)
    return target


def prune_checkpoints(
    root: Path, keep_last_n: int, keep_every: int, powers_of_two: bool = False
) -> None:
    """Apply retention. It keeps the newest `keep_last_n` of the run's own branch, multiples of
    `keep_every`, with `powers_of_two` step 0 and the powers of two, those saved earlier under that
    option, `latest`, and checkpoints being read."""
    branch, other_branches = run_branches(root)
    for path in branch[keep_last_n:] + other_branches:
        step = step_of_name(path.name)
        if (keep_every and step and step % keep_every == 0) or path == latest_checkpoint(root):
            continue
        if step is not None and is_power_of_two(step) and (powers_of_two or _is_for_good(path)):
            continue
        with contextlib.suppress(OSError):  # the next retention tries again
            if is_own(path):
                with deletion_lock(path) as free:
                    if free:
                        # Under the lock: the next to get it finds no manifest.
                        mark_for_deletion(path)
                        (root / READING / path.name).unlink(missing_ok=True)
    for path in root.glob("step_*.deleted*"):
        with contextlib.suppress(OSError):
            if LEFTOVER_NAME.fullmatch(path.name) and is_own(path):
                remove_directory(path)


def _is_for_good(path: Path) -> bool:
    """Return whether the run had checkpoint.powers_of_two when it saved this one."""
    try:
        config = toml.loads((path / "config.toml").read_text())
        return config["checkpoint"]["powers_of_two"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def mark_for_deletion(path: Path) -> None:
    """Rename a checkpoint before deleting it, so that none ever looks half complete."""
    path.rename(unused_name(path.parent, f"{path.name}.deleted"))


def clean_leftovers(root: Path) -> list[str]:
    """Remove the leftovers of a killed run; returns their names. Call it before
    anything is read."""
    if not root.is_dir():
        return []
    removed = []
    for path in [path for path in root.iterdir() if LEFTOVER_NAME.fullmatch(path.name)]:
        with contextlib.suppress(OSError):
            if not path.name.startswith("step_"):
                path.unlink(missing_ok=True)
            elif is_own(path):
                remove_directory(path)
            else:
                continue
            removed.append(path.name)
    return sorted(removed)
