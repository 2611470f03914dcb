"""A rank's handle on the sampler of its node. No torch."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from kempner.jobs.system.process import module_command

WATCH_LAST_READ_S = 6.0
SAMPLER_END_S = 2.0


class GpuWatch:
    """The sampler of a node, started by its first rank. It ends with this process, however that
    ends."""

    def __init__(self, run_dir: Path, attempt: int, interval: float, stderr: int) -> None:
        """Raises OSError."""
        command = [*module_command("kempner.jobs.gpu.sampler"), str(run_dir), str(attempt)]
        self._process = subprocess.Popen(
            [*command, str(interval)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            # Signals to the rank's process group, such as that of Ctrl-C, are not for it.
            start_new_session=True,
        )

    def look_once_more(self) -> None:
        """Take a last look after this rank has failed: it may be the GPU's fault."""
        assert self._process.stdin is not None
        # It waits for its input, and takes the end of it for this request.
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
    """Start the sampler. `stderr`: where it reports its findings. None if the node has no room for
    another process."""
    with contextlib.suppress(OSError):
        return GpuWatch(run_dir, attempt, interval, stderr)
    return None
