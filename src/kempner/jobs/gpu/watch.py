"""A rank's handle on the sampler of its node. No torch."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from kempner.jobs.system.process import module_command

WATCH_LAST_READ_S = 6.0
SAMPLER_END_S = 2.0


class GpuWatch:
    """The sampler of a node, started by its first rank. It always ends with this process."""

    def __init__(self, run_dir: Path, attempt: int, interval: float, stderr: int) -> None:
        """Raises OSError."""
        command = [*module_command("kempner.jobs.gpu.sampler"), str(run_dir), str(attempt)]
        self._process = subprocess.Popen(
            [*command, str(interval)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            # Keeps out signals to the rank's process group, such as Ctrl-C.
            start_new_session=True,
        )

    def look_once_more(self) -> None:
        """Take a last reading after this rank has failed: the GPU may be at fault."""
        assert self._process.stdin is not None
        # The end of its input requests the last reading.
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(WATCH_LAST_READ_S)
        self.end()

    def end(self) -> None:
        for stop in (self._process.terminate, self._process.kill):
            if self._process.poll() is None:
                stop()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(SAMPLER_END_S)


def start_watch(run_dir: Path, attempt: int, interval: float, stderr: int = 2) -> GpuWatch | None:
    """Start the sampler; None if that fails. `stderr`: where it reports findings."""
    with contextlib.suppress(OSError):
        return GpuWatch(run_dir, attempt, interval, stderr)
    return None
