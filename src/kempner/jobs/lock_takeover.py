"""Takeover of a lock whose holder is dead or must give way; any other live holder keeps it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kempner.config.option import ConfigError
from kempner.jobs import lock_holder
from kempner.jobs.this_job import host_name

MISSED_S = 12.0  # over two beats: time without a beat if Slurm says that the holder's job has ended
DEAD_S = 45.0  # time without a beat if nothing is known about the holder
LOCK_POLL_S = 1.0  # between two reads of another process's lock
LOCK_TRIES = 100  # before a file that neither exists nor can be created is an error


class SeenLock(NamedTuple):
    """Snapshot of a lock. It is empty if the lock could not be read: then its age decides."""

    text: bytes = b""
    beat: int = -1  # time of the last beat, in ns of the file system's clock

    @property
    def holder(self) -> dict[str, Any]:
        """The holder's record; {} if it cannot be parsed."""
        with contextlib.suppress(ValueError):
            found = json.loads(self.text)
            return found if isinstance(found, dict) and "host" in found else {}
        return {}


class Takeover:
    """An attempt of this process to take over the lock of another one."""

    def __init__(self, path: Path, me: dict[str, Any], text: bytes) -> None:
        """`text`: this process's lock; `me`: the record in it."""
        self.path, self._self, self._text = path, me, text

    def wait(self, create: Callable[[], bool], is_mine: Callable[[], bool], option: str) -> None:
        """Return once the lock is ours: created by `create` or taken over. Raises as RunLock."""
        missing = 0
        while not create():
            lock = look(self.path)
            if lock is None:
                # It was removed in between; if this repeats, it is a dangling link.
                missing += 1
                if missing == LOCK_TRIES:
                    raise FileExistsError(errno.EEXIST, "is in the way: remove it", str(self.path))
                time.sleep(LOCK_POLL_S / 10)
            elif lock_holder.follows(self._self, lock.holder):
                # Take the lock, then wait: the earlier start notices the loss at its next beat.
                if self._replace(lock, though_it_beats=True):
                    self._outwait(lock.holder)
                    if is_mine():
                        return
            elif lock_holder.is_gone(self._self, lock.holder) or self._is_still(lock):
                if self._replace(lock):
                    return
            # Refuse only for the same holder; it may have left or been replaced meanwhile.
            elif self._is(lock, though_it_beats=True):
                raise ConfigError(
                    f"{self.path.parent} is in use by {name_holder(lock)}: wait for it or cancel "
                    f"it, or give this run a directory of its own: {option}"
                )

    def _is_still(self, lock: SeenLock) -> bool:
        """Return whether the holder has missed enough beats. Uses only the file system's clock:
        clocks of two hosts differ."""
        limit = MISSED_S if lock_holder.has_ended(self._self, lock.holder) else DEAD_S
        return self._stays(lock, limit)

    def _is(self, lock: SeenLock, though_it_beats: bool) -> bool:
        """Return whether this lock is still there."""
        now = look(self.path)
        return now == lock or (though_it_beats and now is not None and now.text == lock.text)

    def _stays(self, lock: SeenLock, seconds: float, though_it_beats: bool = False) -> bool:
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(remaining, LOCK_POLL_S))
            if not self._is(lock, though_it_beats):
                return False
        return True

    def _replace(self, lock: SeenLock, though_it_beats: bool = False) -> bool:
        """Replace this lock by ours. Only the process that creates the claim file, named after the
        hash of the lock's unique text, may do so; if it dies first, the next claim file decides."""
        name = hashlib.sha256(lock.text).hexdigest()[:16]
        claims: list[Path] = []
        fresh = self.path.with_name(f".lock.{host_name()}.{os.getpid()}.{secrets.token_hex(4)}")
        for k in range(LOCK_TRIES):
            claims.append(self.path.with_name(f".lock.{name}.{k}"))
            try:
                os.close(os.open(claims[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
                break
            except FileExistsError:
                # Another process claims it. If the lock stays, that process has died: claim next.
                if not self._stays(lock, MISSED_S, though_it_beats):
                    return False
        try:
            fresh.write_bytes(self._text)
            # Check again while holding the claim: the holder may have come back.
            if not self._is(lock, though_it_beats):
                return False
            # A rename within a directory: a reader sees either the old text or the new one.
            fresh.replace(self.path)
            return True
        finally:
            # Claims go last: until the rename they keep others from replacing the same text.
            for file in (fresh, *claims):
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)

    def _outwait(self, holder: dict[str, Any]) -> None:
        """Wait until the earlier start of this job is gone or has had time to notice that it has
        lost the lock."""
        deadline = time.monotonic() + MISSED_S
        while time.monotonic() < deadline and not lock_holder.is_gone(self._self, holder):
            time.sleep(LOCK_POLL_S / 4)


def look(path: Path) -> SeenLock | None:
    """Read the current lock; None if there is none. Uses open() and fstat(): for stat() alone an
    NFS client may answer from its cache for over a minute."""
    try:
        with open(path, "rb") as file:
            return SeenLock(file.read(), os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError:
        return None
    except OSError:
        return SeenLock()


def name_holder(lock: SeenLock | None) -> str:
    """Describe the holder to the user."""
    holder = lock.holder if lock else {}
    if not holder:
        return "another process"
    job, pid = holder.get("job"), holder.get("pid")
    return f"{f'job {job}' if job else f'process {pid}'} on {holder['host']}"
