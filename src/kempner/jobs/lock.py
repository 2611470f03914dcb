"""One live process for a run directory: a second one is refused, a dead one's lock does not block,
and one that was taken for dead while it lived leaves as soon as it looks.

The holder touches its lock at each beat and looks whether it is still its own (a fence: what others
believe of it may be wrong). Others take it over only once beats are missing, whatever Slurm says of
the holder, or when the kernel that it ran under says that it is gone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kempner.config.option import ConfigError
from kempner.jobs import this_job
from kempner.jobs.system.process import birth_ticks, pid_namespace
from kempner.jobs.this_job import host_name

LOCK_HEARTBEAT_S = 5.0  # the holder touches its lock, and looks at it, this often
MISSED_S = 12.0  # two beats, and more: so long a lock of a job that Slurm has ended must be still
DEAD_S = 45.0  # the same, where nobody knows anything of the holder
LOCK_POLL_S = 1.0  # between two looks at another's lock
# For the last words of one that has lost it: the file system may be what hangs.
LOST_LOCK_WORDS_S = 5.0
LOST_LOCK_EXIT = 77  # exit code of a process that has lost its lock
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


class RunLock:
    """The file `lock` in a run or checkpoint directory, held by rank 0 of the job that uses it."""

    def __init__(
        self,
        directory: Path,
        option: str = "--run.dir=runs/NAME",
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """Take the lock. `on_lost(why)` records that another has taken it; this process ends after
        that.

        Raises ConfigError if another job holds it, with the holder and the option that gives
        another directory, OSError if the file cannot be written."""
        self.path = directory / "lock"
        self.on_lost = on_lost
        self._self = _self()
        self._text = json.dumps(self._self).encode()
        # Shared by beats and release(): a beat after the unlink would find no file, and make one.
        self._busy, self._released = threading.Lock(), False
        self._take(directory, option)
        self._stop = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="run lock").start()

    def check(self) -> None:
        """End this process if it has lost the lock; call it before anything that only the holder
        may do. Raises OSError if that cannot be known."""
        with self._busy:
            if self._released or self._is_mine():
                return
        self._leave()

    def release(self) -> None:
        self._stop.set()
        if not self._busy.acquire(timeout=LOCK_HEARTBEAT_S):
            return  # the file system hangs
        with contextlib.suppress(OSError):
            self._released = True
            if self.path.read_bytes() == self._text:  # if it was lost, it is another's by now
                self.path.unlink()
        self._busy.release()

    # --- while it is held ---

    def _beat(self) -> None:
        while not self._stop.wait(LOCK_HEARTBEAT_S):
            # An error does not prove that the lock is lost; the next beat looks again.
            with contextlib.suppress(OSError):
                self.check()

    def _is_mine(self) -> bool:
        """Return whether the lock is ours, and touch it if so: the open file, never one that
        another has put there. If somebody has removed it, it is made again."""
        try:
            with open(self.path, "rb") as file:  # open() has an NFS client ask the server
                mine = file.read() == self._text
                if mine:
                    os.utime(file.fileno())
                return mine
        except FileNotFoundError:
            return self._create()

    def _leave(self) -> None:
        def tell() -> None:
            lock = _look(self.path)
            why = (
                f"{self.path.parent} is in use by {_name(lock.holder if lock else {})}, which has "
                "taken this process for dead, or is a later start of its job: this process ends"
            )
            if self.on_lost is not None:
                self.on_lost(why)
            else:
                print(f"error: {why}", file=sys.stderr, flush=True)

        telling = threading.Thread(target=tell, daemon=True)
        telling.start()
        # In a thread with a limit: the file system may be what hangs.
        telling.join(LOST_LOCK_WORDS_S)
        # Without finalisers: nothing that this process still does may touch the run.
        os._exit(LOST_LOCK_EXIT)

    # --- taking it ---

    def _take(self, directory: Path, option: str) -> None:
        missing = 0
        while not self._create():
            # Most starts find no lock: they do without this module.
            from kempner.jobs import lock_holder

            lock = _look(self.path)
            if lock is None:
                # It was removed in between; if that goes on, it is a dangling link.
                missing += 1
                if missing == LOCK_TRIES:
                    raise FileExistsError(errno.EEXIST, "is in the way: remove it", str(self.path))
                time.sleep(LOCK_POLL_S / 10)
            elif lock_holder.follows(self._self, lock.holder):
                # First the lock, then the wait: the earlier start sees its loss at its next beat.
                if self._replace(lock, though_it_beats=True) and self._outwait(lock.holder):
                    return
            elif lock_holder.is_gone(self._self, lock.holder) or self._is_still(lock):
                if self._replace(lock):
                    return
            # Refuse only if it is still the same holder; it may have left or been replaced
            # meanwhile.
            elif self._is(lock, though_it_beats=True):
                raise ConfigError(
                    f"{directory} is in use by {_name(lock.holder)}: wait for it or cancel it, or "
                    f"give this run a directory of its own: {option}"
                )

    def _create(self) -> bool:
        """Make the file, unless it is there. No hard link: some file systems have none."""
        try:
            # A reader that comes before the text sees an unknown holder, and looks again later.
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        try:
            os.write(file, self._text)
        except OSError:  # a full disk
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        return True

    def _is_still(self, lock: SeenLock) -> bool:
        """Return whether the holder has missed enough beats. By the clock of the file system alone:
        those of two hosts differ."""
        from kempner.jobs import lock_holder

        limit = MISSED_S if lock_holder.has_ended(self._self, lock.holder) else DEAD_S
        return self._stays(lock, limit)

    def _is(self, lock: SeenLock, though_it_beats: bool) -> bool:
        """Return whether this lock is there still."""
        now = _look(self.path)
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

    def _outwait(self, holder: dict[str, Any]) -> bool:
        """Wait until the earlier start of this job, which has lost its lock to this one, is gone or
        has had time to notice. Returns False if this one has lost the lock, too."""
        from kempner.jobs import lock_holder

        deadline = time.monotonic() + MISSED_S
        while time.monotonic() < deadline and not lock_holder.is_gone(self._self, holder):
            time.sleep(LOCK_POLL_S / 4)
        return self._is_mine()


def _self() -> dict[str, Any]:
    return {
        "cluster": os.environ.get("SLURM_CLUSTER_NAME", ""),
        "uid": os.getuid(),
        "job": this_job.job_name(),
        "slurm_id": this_job.own_job(),
        "restart": os.environ.get("SLURM_RESTART_COUNT") or "0",
        "step": os.environ.get("SLURM_STEP_ID"),
        "attempt": os.environ.get("KEMPNER_ATTEMPT_ID"),
        "host": host_name(),
        "kernel": pid_namespace(),
        "pid": os.getpid(),
        "born": birth_ticks(os.getpid()),
        "nonce": secrets.token_hex(8),  # no two locks have one text
    }


def _look(path: Path) -> SeenLock | None:
    """Read the lock as it is now, None if there is none. By open() and fstat(): from stat() alone
    an NFS client may answer out of its cache, for a minute and more."""
    try:
        with open(path, "rb") as file:
            return SeenLock(file.read(), os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError:
        return None
    except OSError:
        return SeenLock()


def _name(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    job, pid = holder.get("job"), holder.get("pid")
    return f"{f'job {job}' if job else f'process {pid}'} on {holder['host']}"
