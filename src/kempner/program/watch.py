"""What the coordinator looks at beside its ranks: the file STOP, the program's checkpoints, the end
of the job. In a thread, because a file system or a controller may not answer. No torch."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import threading
import time
from pathlib import Path
from typing import NamedTuple

from kempner import slurm

POLL_S = 1.0  # a checkpoint that has not changed between two looks is complete
END_POLL_S = 60.0


class Seen(NamedTuple):
    """The newest checkpoint: its path, its bytes, and when it was changed last."""

    path: str = ""
    size: int = 0
    changed: float = 0.0


def newest(pattern: str) -> Seen:
    """The checkpoint that was changed last; a directory counts with all that is in it."""
    paths = [path for path in glob.glob(pattern) if os.path.exists(path)]
    paths = [path for path in paths if not os.path.islink(path)] or paths  # latest -> another one
    found = [(os.path.getmtime(path), path) for path in paths]
    if not found:
        return Seen()
    path = max(found)[1]
    files = [Path(path), *(Path(path).rglob("*") if os.path.isdir(path) else ())]
    stats = [file.stat() for file in files]
    return Seen(path, sum(s.st_size for s in stats), max(s.st_mtime for s in stats))


def number_in(path: str, pattern: str) -> int | None:
    """The step in a checkpoint's name, from what the pattern leaves open: `ckpt-*` and ckpt-400
    give 400, `ckpt.pt` None. A number after the word step is it; else the last one."""
    wild = [place for place, letter in enumerate(pattern) if letter in "*?["]
    if not wild:
        return None
    after = len(pattern.rpartition("]" if pattern.rfind("]") > wild[-1] else pattern[wild[-1]])[2])
    text = path[wild[0] : len(path) - after]
    numbers = re.findall(r"step\D?(\d+)", text) or re.findall(r"\d+", text)
    return int(numbers[-1]) if numbers else None


def is_numbered(pattern: str) -> bool:
    """Whether the names of checkpoints say more than that there is one."""
    return any(letter in pattern for letter in "*?[")


class Watch(threading.Thread):
    """Start it once the ranks are there. What it finds is in its attributes."""

    def __init__(self, run_dir: Path, checkpoints: str) -> None:
        super().__init__(daemon=True, name="watch")
        self.asked: list[str] = []  # requests by file: STOP, or a signal of the batch script
        self.end: float | None = None  # of the job, unix seconds
        self.complete = Seen()  # the newest checkpoint of this attempt
        self.count = 0  # of complete checkpoints of this attempt
        self._files = (run_dir / "STOP", run_dir / f".ask-{os.environ.get('KEMPNER_ATTEMPT_ID')}")
        self._pattern = checkpoints
        self._last = self._first = Seen()
        if checkpoints:
            with contextlib.suppress(OSError):
                self._last = self._first = newest(checkpoints)

    def run(self) -> None:
        end = 0.0
        while True:
            now = time.monotonic()
            for file in self._files:
                with contextlib.suppress(OSError):
                    text = "STOP file" if file.name == "STOP" else file.read_text().strip()
                    if file.exists() and text:  # else it is being written
                        file.unlink()
                        self.asked.append(text)
            if self._pattern:
                with contextlib.suppress(OSError):  # one that is being pruned
                    self._look()
            if (job := slurm.job_name()) is not None and now > end:
                end = now + END_POLL_S
                self.end = slurm.end_of(slurm.job_fields(job)) or self.end
            time.sleep(POLL_S)

    def _look(self) -> None:
        """One that has not changed since the last look is complete, and one that has a successor:
        a program may save more often than this looks."""
        before, self._last = self._last, newest(self._pattern)
        if self._last == before or self._last.path != before.path:
            self._take(before)

    def look_at_last(self) -> None:
        """The program has left in order: nothing changes any more."""
        if self._pattern:
            with contextlib.suppress(OSError):
                self._take(newest(self._pattern))

    def _take(self, seen: Seen) -> None:
        if seen not in (Seen(), self._first, self.complete):
            self.complete = seen
            self.count += 1
