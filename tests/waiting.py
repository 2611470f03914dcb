"""Waiting in a test: for as long as a loaded machine may take, and a fault alone takes that."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 900


def until(
    true: Callable[[], object],
    otherwise: Callable[[], object] = lambda: "",
    alive: tuple[subprocess.Popen[Any], ...] = (),
) -> None:
    """Wait until `true()` holds. Fails with `otherwise()` after LIMIT_S, and at once with the
    output of a process of `alive` that has ended."""
    end = time.monotonic() + LIMIT_S
    while not true():
        for process in alive:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"not so after {LIMIT_S} s: {otherwise()}"
        time.sleep(0.05)
