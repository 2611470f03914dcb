"""Taking over the lock of a holder that is dead or has to make room; one that lives is refused."""

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

MISSED_S = 12.0  # two beats, and more: so long a lock of a job that Slurm has ended must be still
DEAD_S = 45.0  # the same, where nobody knows anything of the holder
LOCK_POLL_S = 1.0  # between two looks at another's lock
LOCK_TRIES = 100  # a file that cannot be made, and is not there


class SeenLock(NamedTuple):
    """A lock at one moment. One that could not be read is empty: then its age decides."""

    text: bytes = b""
    beat: int = -1  # when it was touched, in ns of the file system's clock

    @property
    def holder(self) -> dict[str, Any]:
        """The holder's record; {} if it cannot be understood."""
        with contextlib.suppress(ValueError):
            found = json.loads(self.text)
            return found if isinstance(found, dict) and "host" in found else {}
        return {}


class Takeover:
    """One process on its way to the lock of another."""

    def __init__(self, path: Path, me: dict[str, Any], text: bytes) -> None:
        """`text`: this process's own lock, and `me` the record in it."""
        self.path, self._self, self._text = path, me, text

    def wait(self, create: Callable[[], bool], is_mine: Callable[[], bool], option: str) -> None:
        """Return once the lock is ours: made by `create`, or taken over. Raises as RunLock."""
        missing = 0
        while not create():
            lock = look(self.path)
            if lock is None:
                # It was removed in between; if that goes on, it is a dangling link.
                missing += 1
                if missing == LOCK_TRIES:
                    raise FileExistsError(errno.EEXIST, "is in the way: remove it", str(self.path))
                time.sleep(LOCK_POLL_S / 10)
            elif lock_holder.follows(self._self, lock.holder):
                # First the lock, then the wait: the earlier start sees its loss at its next beat.
                if self._replace(lock, though_it_beats=True):
                    self._outwait(lock.holder)
                    if is_mine():
                        return
            elif lock_holder.is_gone(self._self, lock.holder) or self._is_still(lock):
                if self._replace(lock):
                    return
            # Refuse only if it is still the same holder; it may have left or been replaced
            # meanwhile.
            elif self._is(lock, though_it_beats=True):
                raise ConfigError(
                    f"{self.path.parent} is in use by {name_holder(lock)}: wait for it or cancel "
                    f"it, or give this run a directory of its own: {option}"
                )

    def _is_still(self, lock: SeenLock) -> bool:
        """Return whether the holder has missed enough beats. By the clock of the file system alone:
        those of two hosts differ."""
        limit = MISSED_S if lock_holder.has_ended(self._self, lock.holder) else DEAD_S
        return self._stays(lock, limit)

    def _is(self, lock: SeenLock, though_it_beats: bool) -> bool:
        """Return whether this lock is there still."""
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
        """Replace this lock by ours. Its text is unique: only the process that creates the file
        named after it may. If it dies before it has, the next file of that kind decides."""
        name = hashlib.sha256(lock.text).hexdigest()[:16]
        claims: list[Path] = []
        fresh = self.path.with_name(f".lock.{host_name()}.{os.getpid()}.{secrets.token_hex(4)}")
        for k in range(LOCK_TRIES):
            claims.append(self.path.with_name(f".lock.{name}.{k}"))
            try:
                os.close(os.open(claims[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
                break
            except FileExistsError:
                # Somebody else claims it. If nothing comes of that, its process has died: the next
                # claim.
                if not self._stays(lock, MISSED_S, though_it_beats):
                    return False
        try:
            fresh.write_bytes(self._text)
            # Once more, with the claim in hand: the holder may have come back.
            if not self._is(lock, though_it_beats):
                return False
            # By a rename in one directory: a reader sees the old text or the new one.
            fresh.replace(self.path)
            return True
        finally:
            # The claims last: until the rename is done they keep others off the same text.
            for file in (fresh, *claims):
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)

    def _outwait(self, holder: dict[str, Any]) -> None:
        """Wait until the earlier start of this job, which has lost its lock to this one, is gone or
        has had time to notice."""
        deadline = time.monotonic() + MISSED_S
        while time.monotonic() < deadline and not lock_holder.is_gone(self._self, holder):
            time.sleep(LOCK_POLL_S / 4)


def look(path: Path) -> SeenLock | None:
    """Read the lock as it is now, None if there is none. By open() and fstat(): from stat() alone
    an NFS client may answer out of its cache, for a minute and more."""
    try:
        with open(path, "rb") as file:
            return SeenLock(file.read(), os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError:
        return None
    except OSError:
        return SeenLock()


def name_holder(lock: SeenLock | None) -> str:
    """Return what a user reads of the holder."""
    holder = lock.holder if lock else {}
    if not holder:
        return "another process"
    job, pid = holder.get("job"), holder.get("pid")
    return f"{f'job {job}' if job else f'process {pid}'} on {holder['host']}"
