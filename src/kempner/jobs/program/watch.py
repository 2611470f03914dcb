"""The coordinator's watch over the file STOP, the program's checkpoints and the end of the job. In
a thread, because a file system or the controller may not answer. No torch."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kempner.jobs import slurm, this_job

CHECKPOINT_POLL_S = 1.0  # a checkpoint that has not changed between two polls is complete
WATCH_SHARE = 0.05  # largest share of the time spent on looking at checkpoint files
CHECKPOINT_END_POLL_S = 60.0
SAME_SIZE = 0.99  # of a complete checkpoint: steps and losses in it vary by a few bytes
GLANCED = 32  # files of a complete checkpoint that are checked for changes
COMPARED = 16  # checkpoint names compared to find the number that grows
GROWING = 4  # names needed to show that it grows

# Temporary names before a rename: orbax, Hugging Face, tempfile and others.
TEMPORARY = re.compile(r"tmp|(?<![a-z])(temp|partial|part|incomplete|new|deleted)(?![a-z])", re.I)
# Not 0.35 in val_loss=0.35, nor 7 in 7b or in a hash.
PATH_NUMBER = re.compile(r"(?<![\d.])\d+(?![a-z]|\.?\d)", re.I)
STEP_WORD = re.compile(r"(step|iter|iteration|batch|ba)s?[^a-z\d]?$", re.I)  # before the number
CHECKPOINT = re.compile(r"(ckpt|checkpoint|model|state|save|weights)s?[^a-z\d]?$", re.I)
EPOCH = re.compile(r"ep(och)?s?[^a-z\d]?$", re.I)
DATE = re.compile(r"20\d{6}(\d{4}(\d\d)?)?|1\d{9,}")  # 20261123, or a Unix time


class SeenCheckpoint(NamedTuple):
    """Snapshot of a checkpoint: path, bytes, time of change and inode."""

    path: str = ""
    size: int = 0
    changed: float = 0.0
    inode: int = 0


def open_part(path: str, pattern: str) -> str:
    """Return the part of a path that the pattern leaves open: `ckpt-*` and ckpt-400 give 400."""
    wild = [place for place, letter in enumerate(pattern) if letter in "*?["]
    if not wild:
        return ""
    after = len(pattern.rpartition("]" if pattern.rfind("]") > wild[-1] else pattern[wild[-1]])[2])
    return path[wild[0] : len(path) - after]


def list_checkpoints(pattern: str) -> list[tuple[float, str]]:
    """List the time and path of each checkpoint, newest last; of a directory only its own mtime
    counts. Omits files being written, and links unless there are only links."""
    paths = [path for path in glob.glob(pattern) if not TEMPORARY.search(open_part(path, pattern))]
    paths = [path for path in paths if not os.path.islink(path)] or paths  # latest -> step-40
    checkpoints = []
    for path in paths:
        with contextlib.suppress(OSError):  # being pruned
            checkpoints.append((os.path.getmtime(path), path))
    return sorted(checkpoints)


def stat_checkpoint(path: str) -> SeenCheckpoint:
    """Take a snapshot of a checkpoint, with all the contents of a directory. Raises OSError."""
    files = [Path(path), *(Path(path).rglob("*") if os.path.isdir(path) else ())]
    stats = [file.stat() for file in files]
    size, changed = sum(s.st_size for s in stats), max(s.st_mtime for s in stats)
    return SeenCheckpoint(path, size, changed, stats[0].st_ino)


def newest_seen(pattern: str) -> SeenCheckpoint:
    """Return the checkpoint changed last. Raises OSError if it is pruned meanwhile."""
    checkpoints = list_checkpoints(pattern)
    return stat_checkpoint(checkpoints[-1][1]) if checkpoints else SeenCheckpoint()


def number_in(paths: Sequence[str], pattern: str) -> int | None:
    """Return the step in the last of these names, oldest first, that has a number. It is the number
    after a word such as step, else after a word such as checkpoint, else one that grows from name
    to name. Returns None if there is no such number: for `ckpt.pt`, for names with only a date or
    an epoch, and for files made in any order."""
    paths = [path for path in paths[-COMPARED:] if PATH_NUMBER.search(open_part(path, pattern))]
    if not paths:
        return None
    texts, fixed = [open_part(path, pattern) for path in paths], re.split(r"[*?[]", pattern)[0]
    # Compare only names of the same form.
    shape = PATH_NUMBER.sub("0", texts[-1])
    rows = [PATH_NUMBER.findall(text) for text in texts if PATH_NUMBER.sub("0", text) == shape]
    dated = any(map(DATE.fullmatch, rows[-1]))
    found: dict[int, int] = {}  # by confidence, 0 is best
    for place, column in zip(PATH_NUMBER.finditer(texts[-1]), zip(*rows, strict=True), strict=True):
        word, numbers = fixed + texts[-1][: place.start()], [int(number) for number in column]
        drops = sum(b < a for a, b in itertools.pairwise(numbers))  # one: the run was started over
        if STEP_WORD.search(word) and drops <= 1:
            found.setdefault(0, numbers[-1])
        elif dated or EPOCH.search(word) or (len(numbers) > 1 and len({*numbers}) == 1):
            continue
        elif CHECKPOINT.search(word) and drops <= 1:
            found.setdefault(1, numbers[-1])
        elif len(numbers) >= GROWING and not drops:
            found.setdefault(2, numbers[-1])
    return found[min(found)] if found else None


class CheckpointWatch(threading.Thread):
    """A thread to start once all ranks have connected. Its attributes hold its findings."""

    def __init__(self, run_dir: Path, pattern: str) -> None:
        super().__init__(daemon=True, name="watch")
        self.asked: list[str] = []  # requests by file: STOP, or a signal of the batch script
        self.end: float | None = None  # of the job, unix seconds
        self.count = 0  # new checkpoints in this attempt
        self.number: int | None = None  # step in the name of the newest one, even of an old one
        # The newest complete one, after which the program may be ended.
        self.complete = SeenCheckpoint()
        self.completed = 0  # complete checkpoints in this attempt
        self.written = 0.0  # when the last of them was first seen unchanged, monotonic
        self._dir = run_dir
        self._files = ("STOP", f".ask-{os.environ.get('KEMPNER_ATTEMPT_ID')}")
        self._pattern = pattern
        # The newest at the start, at the last look, and the last one counted.
        self._first = self._last = self._counted = SeenCheckpoint()
        self._since = self._pause_until = 0.0
        self._paths: list[str] = []  # of complete checkpoints, newest last
        if pattern:
            with contextlib.suppress(OSError):
                self._paths = [path for _, path in list_checkpoints(pattern)][-COMPARED:]
                self._first = self._last = self._counted = self.complete = newest_seen(pattern)
            self.number = number_in(self._paths, pattern) if self._paths else None

    def run(self) -> None:
        end = 0.0
        while True:
            now = time.monotonic()
            self._read_requests()
            if self._pattern and now >= self._pause_until:
                with contextlib.suppress(OSError):  # being pruned
                    self._look()
                # Look less often at large checkpoints.
                self._pause_until = now + (time.monotonic() - now) / WATCH_SHARE
            if (job := this_job.job_name()) is not None and now > end:
                end = now + CHECKPOINT_END_POLL_S
                if fields := slurm.job_fields(job):  # else there is no answer
                    self.end = slurm.end_of(fields)  # None: the time limit was removed
            time.sleep(CHECKPOINT_POLL_S)

    def _read_requests(self) -> None:
        with contextlib.suppress(OSError):  # the file system may be unavailable for a while
            # List the directory: NFS caches for a long time that a file does not exist.
            present = set(os.listdir(self._dir))
            for file in (self._dir / name for name in self._files if name in present):
                # One request per line, as the batch script appends them.
                asked = ["STOP file"] if file.name == "STOP" else file.read_text().splitlines()
                if asked:  # an empty file is being written
                    file.unlink()
                    self.asked += asked

    def _look(self) -> None:
        """Look for progress. A checkpoint is complete if it has not changed since the last look, or
        if it has a successor: a program may save more often than this looks. A file that is
        rewritten all the time is progress, too, if it was replaced or has the same size again; it
        is complete if both hold."""
        checkpoints = list_checkpoints(self._pattern)
        path = checkpoints[-1][1] if checkpoints else ""
        if path and path == self.complete.path == self._last.path and not self._is_new(path):
            return
        before, self._last = self._last, stat_checkpoint(path) if path else SeenCheckpoint()
        if self._last != before:
            self._since = time.monotonic()
        # Unchanged since the last look, or the next one has begun: the one before is complete.
        if self._last == before or self._last.path != before.path:
            self._take(before, complete=True)
            return
        # New inode: written elsewhere and renamed. Same size: rewritten in place to its end.
        replaced, whole = self._last.inode != before.inode, self._last.size == before.size
        if replaced or whole:
            self._take(before, complete=replaced and whole)

    def _is_new(self, path: str) -> bool:
        """Return whether a complete checkpoint is being rewritten. Checks a few of its files: a
        directory may have many."""
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            times = [entry.stat().st_mtime for entry in itertools.islice(entries, GLANCED)]
            return max([os.path.getmtime(path), *times]) > self.complete.changed
        return stat_checkpoint(path) != self.complete  # a file

    def look_at_last(self, in_order: bool, end_time: float) -> None:
        """Look once more after the program has ended. Its last save is complete if it left in order
        or, after a crash at the monotonic time `end_time`, if the save was complete before."""
        if not self._pattern:
            return
        with contextlib.suppress(OSError):
            for _, path in list_checkpoints(self._pattern)[-2:]:
                save = stat_checkpoint(path)
                stayed = save == self._last and self._since < end_time - CHECKPOINT_POLL_S
                newer = save.changed >= self._counted.changed
                if newer and (in_order or stayed or self._is_whole(save)):
                    self._take(save, complete=True)

    def _is_whole(self, save: SeenCheckpoint) -> bool:
        """Return whether a checkpoint saved just before a crash has the size of a complete one. A
        file rewritten in place must have exactly that size: a log only grows."""
        one = self.complete
        if (save.path, save.inode) == (one.path, one.inode):
            return save.size == one.size
        return one.size > 0 and save.size >= SAME_SIZE * one.size

    def _take(self, save: SeenCheckpoint, complete: bool) -> None:
        """Count a checkpoint. `complete`: certainly complete, so the program may be ended now."""
        if save == SeenCheckpoint() or save == self._first:
            return
        if save != self._counted:
            self._counted = save
            self.count += 1
            self._paths = [*(p for p in self._paths if p != save.path), save.path][-COMPARED:]
            self.number = number_in(self._paths, self._pattern)
        if complete and save != self.complete:
            self.complete, self.completed = save, self.completed + 1
            self.written = self._since
