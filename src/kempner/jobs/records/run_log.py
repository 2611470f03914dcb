"""Log of a rank: its file, and on rank 0 the console."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

from kempner.jobs.ranks.placement import World
from kempner.jobs.system.background import Background
from kempner.jobs.system.files import LineFile, swap_link
from kempner.jobs.this_job import host_name

ONE_DIRECTORY = 64  # ranks; with more, the logs are in one directory per host


def log_path(run_dir: Path, attempt: int, world: World) -> Path:
    """Return logs/attempt-K/rank-R.log or, in a large world, logs/attempt-K/HOST/rank-R.log: on a
    shared file system, creating thousands of files at once in one directory is serialized."""
    logs = run_dir / "logs" / f"attempt-{attempt}"
    folder = logs / host_name() if world.size > ONE_DIRECTORY else logs
    return folder / f"rank-{world.rank}.log"


class RankLog:
    """The log of this rank. Rank 0 keeps the console; other ranks' output goes to their logs."""

    def __init__(self, run_dir: Path, attempt: int, world: World) -> None:
        """Raises OSError."""
        self.path = log_path(run_dir, attempt, world)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = LineFile(self.path)
        self.file: IO[str] = open(self.path, "a", buffering=1)  # noqa: SIM115
        # Kept for errors: on all ranks but the first, the log replaces it below.
        self.stderr = os.dup(2)
        self.background = Background(self.to_stderr)
        if world.rank == 0:
            swap_link(run_dir / "logs" / "latest", f"attempt-{attempt}")
        if not world.leads:
            # The descriptors themselves: NCCL and child processes bypass sys.stdout.
            os.dup2(self.file.fileno(), 1)
            os.dup2(self.file.fileno(), 2)

    def log(self, text: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}"
        self.background.put(lambda: self._lines.write(line), self.path)

    def to_stderr(self, text: str) -> None:
        """Write to the console, from any rank."""
        with contextlib.suppress(OSError):
            os.write(self.stderr, f"error: {text}\n".encode())


class Console:
    """Rank 0's lines on standard output, above a progress bar if that is a terminal."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._bar: Any = None

    def begin(self, step: int, max_steps: int) -> None:
        if sys.stdout.isatty() and step < max_steps:
            from tqdm import tqdm

            self._bar = tqdm(total=max_steps, initial=step, unit="step", file=sys.stdout)

    def emit(self, text: str) -> None:
        self._background.put(lambda: self._print(text))

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a closed terminal must not end the training
            if self._bar is not None:
                self._bar.write(text, file=sys.stdout)
            else:
                print(text, flush=True)

    def update(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
