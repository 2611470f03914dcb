"""One live job for a run directory: a second one is refused, a dead one's lock does not block."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from kempner import slurm
from kempner.config.option import ConfigError
from kempner.process import birth
from kempner.slurm import host_name

BEAT_S = 5.0  # the holder touches its lock this often
DEAD_S = 45.0  # a lock that nobody has touched for so long is a dead one's


class RunLock:
    """The file `lock` in a run or checkpoint directory, held by rank 0 of the job that uses it."""

    def __init__(self, directory: Path, option: str = "--run.dir=runs/NAME") -> None:
        """Take it. Raises ConfigError when another job holds it, which names the holder and the
        option that gives another directory."""
        self.path = directory / "lock"
        self._text = json.dumps(_self())
        while not self._create():
            holder = _read(self.path)
            if holder is not None and not _is_dead(self.path, holder):
                name = f"job {holder['job']}" if holder["job"] else f"process {holder['pid']}"
                raise ConfigError(
                    f"{directory} is in use by {name} on {holder['host']}: wait for it or cancel "
                    f"it, or give this run a directory of its own: {option}"
                )
            self._remove(holder)
        self._stop = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="run lock").start()

    def release(self) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            if self.path.read_text() == self._text:  # if it was lost, it is another's by now
                self.path.unlink()

    def _create(self) -> bool:
        """Made whole under another name and linked: a link is atomic on NFS too, and never half
        there."""
        fresh = self.path.with_name(f".lock.{host_name()}.{os.getpid()}")
        try:
            fresh.write_text(self._text)
            os.link(fresh, self.path)
        except FileExistsError:
            return False
        finally:
            fresh.unlink(missing_ok=True)
        return True

    def _remove(self, dead: dict[str, Any] | None) -> None:
        """Take a dead lock away, unless another job has done so and put its own there."""
        if _read(self.path) == dead:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self.path)


def _self() -> dict[str, Any]:
    return {
        "job": slurm.job_name(),
        "slurm_id": slurm.own_job(),
        "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        "step": os.environ.get("SLURM_STEP_ID"),
        "host": host_name(),
        "pid": os.getpid(),
        "born": birth(os.getpid()),
    }


def _read(path: Path) -> dict[str, Any] | None:
    """The holder, None when the file is gone or not ours to understand (then its age decides)."""
    try:
        holder = json.loads(path.read_text())
        return holder if isinstance(holder, dict) and "host" in holder else None
    except (OSError, ValueError):
        return None


def _is_dead(path: Path, holder: dict[str, Any]) -> bool:
    """Its process is gone, its job or its step has ended, its job has been started again, or it
    beats no more."""
    if holder["host"] == host_name() and birth(holder["pid"]) != holder["born"]:
        return True
    if holder["slurm_id"] is not None:
        here = (slurm.own_job(), os.environ.get("SLURM_RESTART_COUNT", "0"))
        if here[0] == holder["slurm_id"] and here[1] != holder["restart"]:
            return True
        if here[0] != holder["slurm_id"] and slurm.is_running(holder["slurm_id"]) is False:
            return True
        if here[0] == holder["slurm_id"] and slurm.step_runs(holder.get("step")) is False:
            return True
    # The file system's clock against itself: hosts' clocks differ.
    first = _mtime(path)
    deadline = time.monotonic() + DEAD_S
    while time.monotonic() < deadline:
        time.sleep(1.0)
        if _mtime(path) != first:
            return first is None or not path.exists()
    return True


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
