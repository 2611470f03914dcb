"""Tracker processes, started and ended by rank 0. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kempner.jobs.system.process import module_command


class Trackers:
    """Tracker processes, each in its own session, so that Ctrl-C does not end it before its last
    points. Each reads from a pipe that closes when this process ends, in any way."""

    def __init__(
        self, names: Sequence[str], run_dir: Path, logs: Path, announce: Callable[[str], None]
    ) -> None:
        self._run_dir, self._announce = run_dir, announce
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in names:
            command = [*module_command("kempner.jobs.trackers"), str(run_dir), name, "--follow"]
            log = logs / f"{name}.log"
            try:
                with open(log, "ab") as out:
                    self._processes[name] = subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=out,
                        stderr=out,
                        start_new_session=True,
                    )
            except OSError as error:
                announce(f"WARNING: tracker {name} could not be started: {error}")
            else:
                announce(f"tracker {name} is started; its log is {log}")

    def end(self, seconds: float) -> None:
        """Let them send the last points for at most `seconds`: the next attempt, or a manual start,
        sends the rest."""
        end = time.monotonic() + seconds
        for process in self._processes.values():
            assert process.stdin is not None
            # All are told first, so that they send their points in parallel.
            process.stdin.close()
        for name, process in self._processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # with its helpers
                    os.killpg(process.pid, signal.SIGKILL)
            if process.poll() != 0:
                again = f"{sys.orig_argv[0]} -m kempner.jobs.trackers {self._run_dir} {name}"
                self._announce(
                    f"WARNING: tracker {name} does not have the last points; the next attempt, or "
                    f"`{again}`, passes them on"
                )
