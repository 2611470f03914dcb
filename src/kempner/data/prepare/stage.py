"""Copies of data sets on a host's own disk, for the time of a job: KEMPNER_STAGE=DIR.

    python -m kempner.data.prepare.stage --jobs 17,18 DIR/kempner-17 DATASET...

runs once on each host before the training. It removes the leftovers of finished jobs in DIR, keeps
the copies of this job's earlier attempts, and copies the rest. Data that cannot be copied is read
from its original place: one warning, exit code 0.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kempner.config.command_line import argument_parser
from kempner.config.option import ConfigError
from kempner.data.sidecar import SIDECAR, Sidecar
from kempner.jobs.system import private
from kempner.jobs.system.directories import (
    MARK_FILE,
    Kind,
    directory_kind,
    mark_directory,
    refuse_others,
)
from kempner.jobs.system.files import fsync
from kempner.jobs.system.front_door import run_program

COPIERS = 8  # threads: files from a parallel file system
COPY_CHUNK_BYTES = 16 << 20
OWN_FOLDER = re.compile(r"kempner-(\d+)")


class WrongCopy(OSError):
    """The copy read back from the disk differs from what was written."""


def staged_dir(directory: str | Path) -> Path:
    """Return the copy of a data set on this host's disk, if there is one that nobody else can
    change, else the data set itself."""
    path = Path(directory).expanduser()
    if root := os.environ.get("KEMPNER_STAGED"):
        copy = _copy_of(path, Path(root))
        # The sidecar is copied last: without it the copy is incomplete.
        if (copy / SIDECAR).is_file() and not private.why_not(Path(root)):
            return copy
    return path


def _copy_of(path: Path, root: Path) -> Path:
    """Return the path in `root` for the copy of a data set; data prepared again
    gets another path."""
    try:
        content = (path / SIDECAR).read_bytes()
    except OSError:
        content = b""
    digest = hashlib.sha256(os.fsencode(path.absolute()) + b"\0" + content)
    return root / f"{path.name}-{digest.hexdigest()[:16]}"


def claim_staging(root: Path) -> None:
    """Make the directory of this job. Raises ConfigError if something else is there, OSError if it
    cannot be made or others could change its contents."""
    private.make_private(root)
    if directory_kind(root) is not Kind.STAGE:
        refuse_others(root, "the directory of this job", (), "give another KEMPNER_STAGE")
        mark_directory(root, Kind.STAGE)


def stage_data(path: Path, root: Path) -> str:
    """Copy a data set unless it is there; returns what was done. Raises OSError."""
    copy, start_time = _copy_of(path, root), time.monotonic()
    sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
    total = sum(sizes.values())
    # By size, too: a truncated file must not pass for complete.
    whole = (copy / SIDECAR).is_file() and all(_size(copy / n) == sizes[n] for n in sizes)
    if whole and not private.why_not(root):
        return f"{path}: its copy in {copy} is kept"
    Sidecar.load(path / SIDECAR)  # complete, and of a format that can be read
    claim_staging(root)
    shutil.rmtree(copy, ignore_errors=True)
    if (free := shutil.disk_usage(root).free) < total:
        raise OSError(f"{total / 1e9:.3g} GB do not fit, {free / 1e9:.3g} GB are free")
    try:
        copy.mkdir()
        with ThreadPoolExecutor(COPIERS) as pool:
            names = [name for name in sizes if name != SIDECAR]
            # list() raises the errors of the copies.
            list(pool.map(lambda name: _copy(path / name, copy / name), names))
        # Last: to staged_dir() a copy with a sidecar is complete.
        _copy(path / SIDECAR, copy / SIDECAR)
    except OSError:
        shutil.rmtree(copy, ignore_errors=True)
        raise
    seconds = time.monotonic() - start_time
    return f"{path}: copied to {copy}, {total / 1e9:.3g} GB in {seconds:.1f} s"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _copy(source: Path, target: Path) -> None:
    """Copy a file, and read the copy back from the disk."""
    digest = hashlib.blake2b()
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while data := reader.read(COPY_CHUNK_BYTES):
            digest.update(data)
            writer.write(data)
    # Only data on the disk can be dropped from the page cache.
    fsync(target)
    again = hashlib.blake2b()
    with open(target, "rb") as reader:
        # Otherwise this would compare the page cache, not the disk.
        os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while data := reader.read(COPY_CHUNK_BYTES):
            again.update(data)
    if again.digest() != digest.digest():
        raise WrongCopy(f"{target} differs from what was written")


def remove_old(disk: Path, jobs: set[str]) -> None:
    """Remove the leftovers of this user's other jobs on the disk; `jobs` are those still alive."""
    for path in disk.iterdir() if disk.is_dir() else ():
        match = OWN_FOLDER.fullmatch(path.name)
        # lstat(): the disk is shared, and a link of this name may lead anywhere.
        if match and match[1] not in jobs and path.lstat().st_uid == os.getuid():
            remove_staging(path)


def remove_staging(root: Path) -> None:
    """Remove the directory of a job, if this kit made it; its mark last."""
    if root.is_symlink() or directory_kind(root) is not Kind.STAGE:
        return
    for path in root.iterdir():
        if path.name != MARK_FILE:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
    shutil.rmtree(root, ignore_errors=True)


def main(argv: list[str]) -> int:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})  # see task.sh
    parser = argument_parser("python -m kempner.data.prepare.stage", __doc__)
    parser.add_argument("--jobs", default="", help="the user's jobs, separated by commas")
    parser.add_argument("root", type=Path, help="the directory of this job")
    parser.add_argument("datasets", type=Path, nargs="*")
    options = parser.parse_args(argv)
    if options.jobs:
        remove_old(options.root.parent, set(options.jobs.split(",")))
    if not options.datasets:  # for stage_node.sh, which reports what it could not copy
        with contextlib.suppress(OSError, ConfigError):
            claim_staging(options.root)
    for path in options.datasets:
        try_staging(
            path, options.root, functools.partial(stage_data, path.expanduser(), options.root)
        )
    return 0


def try_staging(path: Path | str, root: Path, act: Callable[[], str]) -> None:
    host = os.uname().nodename
    try:
        print(f"stage: {host}: {act()}", flush=True)
    except Exception as error:
        reason = getattr(error, "strerror", None) or error
        what = f"{path} is not copied to {root} ({reason}); it is read from {path}"
        print(f"stage: WARNING: {host}: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program(main)
