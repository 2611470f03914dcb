"""Start time and kernel of a process, from /proc. No torch."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def module_command(name: str) -> list[str]:
    """Return the words that start a module of ours as a program: see src/kempner_module.py."""
    return [sys.executable, str(Path(__file__).resolve().parents[3] / "kempner_module.py"), name]


def birth_ticks(pid: int) -> str | None:
    """Return the start of a process of this host, in ticks since boot; None if no process has that
    id, or only a zombie."""
    try:
        # After the name, which may have blanks: state (3 in proc(5)), num_threads (20), starttime.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # While a process exits, its first thread is a zombie before its last one has ended.
        state, threads = fields[0], int(fields[17])
        return None if state in "ZX" and threads <= 1 else fields[19]
    except (OSError, IndexError, ValueError):
        return None


def pid_namespace() -> str | None:
    """Return the scope of process ids: this boot of this machine and, in a container, its
    namespace; None if /proc does not have it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def start_time() -> float | None:
    """Return the Unix time when this process began, to some 10 ms; None if /proc lacks it."""
    try:
        ticks = int(birth_ticks(os.getpid()) or "")
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return round(time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK"), 3)
