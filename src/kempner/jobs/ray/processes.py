"""The processes that Ray starts on a node: all of them can be found, and all of them end."""

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
        # Kept: a Popen that is deleted, or found by the next one, takes its process's exit code.
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        command: list[str],
        fds: tuple[int, ...] = (),
        output: int | None = None,
        **env: str,
    ) -> int:
        """Start a command that inherits `fds` and has `env` on top of ours; returns its pid.
        `output`: where it writes to, unless it is to our own."""
        # In its own session: a signal that it sends to its process group must not reach us.
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
        """The exit code of a child that has ended; reaps all that have."""
        with contextlib.suppress(ChildProcessError):
            # Any child: a subreaper has to reap the orphans that it was given, too.
            while (result := os.waitpid(-1, os.WNOHANG))[0]:
                self.codes[result[0]] = os.waitstatus_to_exitcode(result[1])
        return self.codes.get(pid)

    @staticmethod
    def children(pid: int) -> list[int]:
        text = ""
        with contextlib.suppress(OSError):
            # Each thread has a list of the children that it has started itself.
            for task in os.listdir(f"/proc/{pid}/task"):
                text += Path(f"/proc/{pid}/task/{task}/children").read_text()
        return [int(child) for child in text.split()]

    def descendants(self, pid: int) -> Iterator[int]:
        for child in self.children(pid):
            yield child
            yield from self.descendants(child)

    def terminate(self, main: int) -> None:
        """SIGTERM to `main`, time for it to end its own children, SIGKILL to all that are left."""
        if main and self.exit_code(main) is None:
            os.kill(main, signal.SIGTERM)
            end = time.monotonic() + RAY_STOPS_S
            while self.exit_code(main) is None and time.monotonic() < end:
                time.sleep(0.05)
        end = time.monotonic() + RAY_STOPS_S
        # Again until there is none: a process may start another between the look and its end.
        while (pids := list(self.descendants(os.getpid()))) and time.monotonic() < end:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.exit_code(0)
            time.sleep(0.02)
