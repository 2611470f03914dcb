"""The processes of the trackers, as rank 0 starts and ends them. No torch."""

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
    """Tracker processes, each in a session of its own, so that no Ctrl-C ends it before its last
    points. Each reads from a pipe that ends with this process, however that ends."""

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
        """Let them pass on the last points for at most `seconds`: the rest then comes with the next
        attempt, or by hand."""
        end = time.monotonic() + seconds
        for process in self._processes.values():
            assert process.stdin is not None
            # All are told first: they pass on their points side by side.
            process.stdin.close()
        for name, process in self._processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # with the helpers that it has
                    os.killpg(process.pid, signal.SIGKILL)
            if process.poll() != 0:
                again = f"{sys.orig_argv[0]} -m kempner.jobs.trackers {self._run_dir} {name}"
                self._announce(
                    f"WARNING: tracker {name} does not have the last points; the next attempt, or "
                    f"`{again}`, passes them on"
                )
