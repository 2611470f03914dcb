"""Copies of Ray's own logs, made before a node's temporary directory is removed."""

from __future__ import annotations

import contextlib
import shutil
import stat
import threading
import time
from pathlib import Path

COPY_S = 5.0  # for the last copy: ray.sh and Slurm wait for it


def copy_if_newer(source: Path, target: Path) -> None:
    """Copy a regular file, unless the copy already has its size and time."""
    was = source.stat()
    if not stat.S_ISREG(was.st_mode):
        return
    with contextlib.suppress(FileNotFoundError):
        there = target.stat()
        if (there.st_size, there.st_mtime) == (was.st_size, was.st_mtime):
            return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


class LogCopier:
    """Copies <temp>/session_*/logs to <logs>/ray/<node>/, and the head's dashboard.log to <logs>.

    Runs in a thread: the shared file system may hang, but the node must still end in time.
    """

    def __init__(self, temp: Path, logs: Path, node: str, is_head: bool) -> None:
        self.temp, self.logs, self.node, self.is_head = temp, logs, node, is_head
        self.thread: threading.Thread | None = None
        self.failed = 0  # files that could not be copied

    def start(self) -> None:
        """Start a copy, unless one is still running."""
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self.copy, daemon=True)
            self.thread.start()

    def copy(self) -> None:
        self.failed = 0
        # Not session_latest, a link to one of them.
        for source in self.temp.glob("session_2*/logs"):
            # The top-level files first: they matter most, and time may run out.
            for file in sorted(source.rglob("*"), key=lambda file: len(file.parts)):
                target = self.logs / "ray" / self.node / file.relative_to(source)
                try:
                    copy_if_newer(file, target)
                    if self.is_head and target.name == "dashboard.log":
                        copy_if_newer(file, self.logs / file.name)
                except OSError:  # a log that Ray has just rotated, or a full disk
                    self.failed += file.exists()

    def finish(self) -> str:
        """Copy one last time, for at most COPY_S; returns what is missing, or ""."""
        end = time.monotonic() + COPY_S
        if self.thread is not None:  # a periodic copy that is still running
            self.thread.join(COPY_S)
        self.start()
        assert self.thread is not None
        self.thread.join(max(0.0, end - time.monotonic()))
        if self.thread.is_alive():
            return f"copying takes longer than {COPY_S:.0f} s: see RAY_LOG_SYNC_FREQUENCY"
        return f"{self.failed} file(s) could not be copied" if self.failed else ""
