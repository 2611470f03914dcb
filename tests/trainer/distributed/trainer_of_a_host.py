"""scripts/train.py as on a host of its own: its kernel knows no process of another one's, and what
it sees of a lock may be old, or nothing. For test_two_trainers.py, by the environment:

    LOCK="DEAD_S=15 ..."     other times of kempner.jobs.lock and lock_takeover
    KERNEL=NAME              the kernel that it runs under
    SEES=cached, nothing     the first looks at the lock: stat() from a cache; EIO
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from kempner.jobs import lock, lock_takeover

BLIND = 4  # looks
FAULTY = Path(__file__).parents[2] / "trainer/fault/faulty_train.py"


def cached_stat() -> None:
    """As an NFS client with actimeo=60."""
    real: Any = Path.stat
    cache: dict[Path, os.stat_result] = {}

    def stat(self: Path, **options: Any) -> os.stat_result:
        if self.name != "lock":
            return real(self, **options)
        return cache.setdefault(self, real(self, **options))

    Path.stat = stat  # type: ignore[method-assign]


def blind() -> None:
    look, looks = lock_takeover.look, [lock_takeover.SeenLock()] * BLIND
    lock_takeover.look = lambda path: looks.pop() if looks else look(path)


if __name__ == "__main__" and "--check" not in sys.argv:
    for word in os.environ["LOCK"].split():
        name, _, value = word.partition("=")
        module = lock if hasattr(lock, name) else lock_takeover
        assert hasattr(module, name), name
        setattr(module, name, float(value))
    lock.pid_namespace = lambda: os.environ["KERNEL"]
    if os.environ.get("SEES") == "cached":
        cached_stat()
    elif os.environ.get("SEES") == "nothing":
        blind()
    sys.argv[0] = str(FAULTY)
    runpy.run_path(str(FAULTY), run_name="__main__")
