"""Lock of a run directory for one live process: a second process is refused, a dead holder's lock
does not block, and a live holder that was declared dead exits as soon as it checks its lock.

At each beat the holder touches its lock and checks that it is still its own (a fence: others may
wrongly believe it dead). Others take the lock over only after missed beats, whatever Slurm says
about the holder, or if the holder's kernel says that the process is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kempner.jobs import this_job
from kempner.jobs.system.process import birth_ticks, pid_namespace
from kempner.jobs.this_job import host_name

LOCK_HEARTBEAT_S = 5.0  # interval at which the holder touches and checks its lock
# Limit for the last message of a process that has lost its lock: the file system may hang.
LOST_LOCK_WORDS_S = 5.0
LOST_LOCK_EXIT = 77  # exit code of a process that has lost its lock


class RunLock:
    """The file `lock` in a run or checkpoint directory, held by rank 0 of the job that uses it."""

    def __init__(
        self,
        directory: Path,
        option: str = "--run.dir=runs/NAME",
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """Take the lock. `on_lost(why)` records that another process has taken it; then this
        process exits.

        Raises ConfigError if another job holds it, naming the holder and the option for another
        directory, and OSError if the file cannot be written."""
        self.path = directory / "lock"
        self.on_lost = on_lost
        self._self = _self()
        self._text = json.dumps(self._self).encode()
        # Guards against a beat after release() has removed the file: it would create it again.
        self._busy, self._released = threading.Lock(), False
        if not self._create():
            # Imported here because most starts find no lock.
            from kempner.jobs.lock_takeover import Takeover

            Takeover(self.path, self._self, self._text).wait(self._create, self._is_mine, option)
        self._stop = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="run lock").start()

    def check(self) -> None:
        """Exit this process if it has lost the lock; call it before anything that only the holder
        may do. Raises OSError if the lock cannot be read."""
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
            if self.path.read_bytes() == self._text:  # another process may have taken it
                self.path.unlink()
        self._busy.release()

    # --- while it is held ---

    def _beat(self) -> None:
        while not self._stop.wait(LOCK_HEARTBEAT_S):
            # An error does not prove that the lock is lost; the next beat checks again.
            with contextlib.suppress(OSError):
                self.check()

    def _is_mine(self) -> bool:
        """Return whether the lock is ours, and touch it if so. Touches the open file, never a new
        file of another process. Creates the lock again if it was removed."""
        try:
            with open(self.path, "rb") as file:  # open() makes an NFS client ask the server
                mine = file.read() == self._text
                if mine:
                    os.utime(file.fileno())
                return mine
        except FileNotFoundError:
            return self._create()

    def _leave(self) -> None:
        def tell() -> None:
            from kempner.jobs.lock_takeover import look, name_holder

            lock = look(self.path)
            why = (
                f"{self.path.parent} is in use by {name_holder(lock)}, which has "
                "taken this process for dead, or is a later start of its job: this process ends"
            )
            if self.on_lost is not None:
                self.on_lost(why)
            else:
                print(f"error: {why}", file=sys.stderr, flush=True)

        telling = threading.Thread(target=tell, daemon=True)
        telling.start()
        telling.join(LOST_LOCK_WORDS_S)
        # Without finalisers, which might touch the run.
        os._exit(LOST_LOCK_EXIT)

    def _create(self) -> bool:
        """Create the file unless it exists. Not by a hard link: some file systems have none."""
        try:
            # A reader that comes before the text is written sees an unknown holder and retries.
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
        "nonce": secrets.token_hex(8),  # makes the text of each lock unique
    }
