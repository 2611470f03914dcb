"""Names and functions shared by the watchdog and its inquiry."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kempner.jobs.system.process import birth_ticks, pid_namespace

WRITE_S = 5.0  # for the logs of a hang: the file system itself may hang
EXIT_CODE = 70
STACKS_SIGNAL = signal.SIGRTMAX - 4  # makes a process write its stacks, even if the GIL is held
# Keys of the store: a rank's last answer, and the leading rank's orders.
HANG_AT, HANG_ORDER = "hang/at/", "hang/order"

_T = TypeVar("_T")


def within(seconds: float, act: Callable[[], _T]) -> _T | None:
    """Return the result of `act`, None if it takes longer or fails."""
    results: list[_T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            results.append(act())

    # A daemon, because a call that never returns must not keep the process alive.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def own_process() -> str:
    """Return this process's pid, birth, and the namespace of both."""
    return f"{os.getpid()} {birth_ticks(os.getpid())} {pid_namespace()}"


def bytes_moved(pid: int | str = "self") -> int:
    """Return the bytes that a process has read and written so far, also by mapped files;
    0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        counts = {name: int(n) for name, n in (line.split(": ") for line in lines)}
        # rchar and wchar count the calls of read and write; mapped pages are in read_bytes.
        return counts["rchar"] + counts["wchar"] + counts["read_bytes"]
    return 0
