"""Writes in a separate thread, so that an unresponsive file system does not stop training.

On a shared file system a write may block for minutes while a server fails over. Steps do not depend
on the files written here (log lines, metrics, status.json), so they do not wait for them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

MOST_WRITES = 10_000  # pending writes; more are dropped
BEHIND_S = 5.0  # a longer write is reported


class Background:
    """A thread that performs writes in order."""

    def __init__(self, complain: Callable[[str], None]) -> None:
        """`complain`: tells the user by other means that something is not written."""
        self._complain = complain
        self._waiting: queue.Queue[tuple[Callable[[], object], Path | None]]
        self._waiting = queue.Queue(MOST_WRITES)
        self._now: tuple[float, Path | None] | None = None  # start and path of the current write
        self._blocked = False  # the user has been told
        self._dropped = 0
        self._failed: set[str] = set()  # problems that the user has been told
        threading.Thread(target=self._work, daemon=True, name="writer").start()

    def put(self, write: Callable[[], object], path: Path | None = None) -> None:
        """Queue this write; never waits. `path`: its target, for messages. If it raises an
        exception, the user is told once and the write is dropped."""
        try:
            self._waiting.put_nowait((write, path))
        except queue.Full:
            self._dropped += 1
        now = self._now
        if now is not None and not self._blocked and time.monotonic() - now[0] > BEHIND_S:
            self._blocked = True
            text = (
                f"{now[1]}: no answer from the file system for {BEHIND_S:.0f} s; training continues"
            )
            # In a thread: standard error may be on the same file system.
            threading.Thread(target=self._complain, args=(text,), daemon=True).start()

    def flush(self, seconds: float) -> bool:
        """Wait until all writes so far are done; False if that takes longer than `seconds`."""
        done = threading.Event()
        try:
            # Writes are done in order: once this one is done, so are all before it.
            self._waiting.put((done.set, None), timeout=seconds)
        except queue.Full:
            return False
        return done.wait(seconds)

    def _work(self) -> None:
        while True:
            write, path = self._waiting.get()
            began = time.monotonic()
            self._now = (began, path)
            try:
                write()
            except OSError as error:
                self._tell_once(f"{error.filename or path}: {error.strerror}")
            except Exception as error:  # keep the thread alive for later writes
                self._tell_once(f"{path}: {error!r}")
            self._now = None
            if self._blocked:
                self._blocked, dropped, self._dropped = False, self._dropped, 0
                note = f"; {dropped:,} lines are lost" if dropped else ""
                self._complain(
                    f"{path}: the file system answers again, after {time.monotonic() - began:.0f} s"
                    f"{note}"
                )

    def _tell_once(self, problem: str) -> None:
        if problem not in self._failed:
            self._failed.add(problem)
            self._complain(f"{problem}: what was to be written there is lost; no step waits for it")
