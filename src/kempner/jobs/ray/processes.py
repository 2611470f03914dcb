"""The processes that Ray starts on a node: all can be found, and all are ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

RAY_STOPS_S = 2.0  # from SIGTERM to SIGKILL; must be shorter than Slurm's own KillWait
RAY_SET_CHILD_SUBREAPER = 36


class Processes:
    """All descendants of this process. It is their subreaper: a daemon that detaches from its
    parent becomes a child of this process, so nothing can escape."""

    def __init__(self) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(RAY_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.codes: dict[int, int] = {}
        # Kept: a deleted Popen, or the next one's cleanup, would consume the exit code.
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        command: list[str],
        fds: tuple[int, ...] = (),
        output: int | None = None,
        **env: str,
    ) -> int:
        """Start a command that inherits `fds` and has `env` on top of ours; returns its pid.
        `output`: its output, by default ours."""
        # In its own session: signals that it sends to its process group must not reach us.
        process = subprocess.Popen(
            command,
            pass_fds=fds,
            stdout=output,
            stderr=output,
            env={**os.environ, **env},
            start_new_session=True,
        )
        self._started.append(process)
        return process.pid

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of an ended child, or None; reaps all ended children."""
        with contextlib.suppress(ChildProcessError):
            # Any child: a subreaper must also reap adopted orphans.
            while (result := os.waitpid(-1, os.WNOHANG))[0]:
                self.codes[result[0]] = os.waitstatus_to_exitcode(result[1])
        return self.codes.get(pid)

    @staticmethod
    def children(pid: int) -> list[int]:
        text = ""
        with contextlib.suppress(OSError):
            # Each thread lists only the children that it has started.
            for task in os.listdir(f"/proc/{pid}/task"):
                text += Path(f"/proc/{pid}/task/{task}/children").read_text()
        return [int(child) for child in text.split()]

    def descendants(self, pid: int) -> Iterator[int]:
        for child in self.children(pid):
            yield child
            yield from self.descendants(child)

    def terminate(self, main: int) -> None:
        """Send SIGTERM to `main`, give it time to end its own children, then SIGKILL the rest."""
        if main and self.exit_code(main) is None:
            os.kill(main, signal.SIGTERM)
            end = time.monotonic() + RAY_STOPS_S
            while self.exit_code(main) is None and time.monotonic() < end:
                time.sleep(0.05)
        end = time.monotonic() + RAY_STOPS_S
        # Repeat until none is left: a process may start another before it is killed.
        while (pids := list(self.descendants(os.getpid()))) and time.monotonic() < end:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.exit_code(0)
            time.sleep(0.02)
