"""The errors (Xid) that NVIDIA's driver writes to the kernel log. No torch.

NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

from kempner.jobs.gpu.reading import short_bus_id

XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+),?\s*(.*)")
JOURNAL = ("journalctl", "--dmesg", "--follow", "--lines=0", "--output=cat", "--quiet")


class KernelLog:
    """The kernel log from now on: /dev/kmsg if readable, else this user's journal, else nothing.
    KEMPNER_KERNEL_LOG names another file, for tests."""

    def __init__(self) -> None:
        self._journal: subprocess.Popen[bytes] | None = None
        self._file, self._rest = -1, b""
        path = os.environ.get("KEMPNER_KERNEL_LOG", "/dev/kmsg")
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            # Skip messages from before the run.
            os.lseek(self._file, 0, os.SEEK_END)
        if self._file < 0 and (program := shutil.which(JOURNAL[0])):
            self._journal = subprocess.Popen(
                [program, *JOURNAL[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert self._journal.stdout is not None
            self._file = self._journal.stdout.fileno()
            os.set_blocking(self._file, False)

    @property
    def source(self) -> str:
        """Name of the source, for people; "" if there is none."""
        if self._journal is not None:
            return "journalctl" if self._journal.poll() is None else ""
        return "kernel log" if self._file >= 0 else ""

    def xids(self) -> Iterator[tuple[str, int, str]]:
        """Yield bus, number and text of each error since the last call."""
        self._rest += b"".join(self._read()) if self._file >= 0 else b""
        # The journal's pipe may split a line: keep its beginning for the next call.
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if found := XID.search(line.decode(errors="replace")):
                yield short_bus_id(found[1]), int(found[2]), found[3].strip()

    def _read(self) -> Iterator[bytes]:
        """Yield new records. /dev/kmsg returns one per read; EPIPE: some were overwritten."""
        while True:
            try:
                part = os.read(self._file, 1 << 16)
            except BrokenPipeError:
                continue
            except OSError:
                return
            if not part:
                return
            yield part

    def close(self) -> None:
        if self._journal is not None:
            self._journal.kill()
