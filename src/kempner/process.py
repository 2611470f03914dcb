"""When a process began, from /proc. No torch."""

from __future__ import annotations

import os
import time
from pathlib import Path


def birth(pid: int) -> str | None:
    """When a process of this host began, in ticks since boot; None when there is none of that
    id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def began() -> float | None:
    """Unix time when this process began, to some 10 ms; None where /proc does not tell."""
    try:
        ticks = int(birth(os.getpid()) or "")
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return round(time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK"), 3)
