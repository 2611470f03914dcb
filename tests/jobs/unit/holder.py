"""A process that holds the lock of a directory: holder.py DIRECTORY [NAME=VALUE]...

NAME=VALUE: `beat` in seconds; `kernel` and `born`, which another machine would have.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kempner.jobs import lock

if __name__ == "__main__":
    given = dict(word.split("=") for word in sys.argv[2:])
    lock.LOCK_HEARTBEAT_S = float(given.get("beat", "0.2"))
    if "kernel" in given:
        lock.pid_namespace = lambda: given["kernel"]
    if "born" in given:
        lock.birth_ticks = lambda pid: given["born"]  # type: ignore[assignment]
    held = lock.RunLock(Path(sys.argv[1]))
    print("held", flush=True)
    for line in sys.stdin:  # each one: what the holder does before it commits
        held.check()
        print(f"checked {line.strip()}", flush=True)
    time.sleep(1000)
