"""Signals reach a program whatever its main thread is doing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kempner.signals import TO_LEAVE

PROGRAM = """
import signal, sys
from kempner.signals import leave_event
event = leave_event()
with event._cond:  # as in the middle of event.wait()
    for _ in range(3):
        signal.raise_signal(int(sys.argv[1]))
print(event.wait(30))
"""


@pytest.mark.parametrize("number", TO_LEAVE)
def test_a_signal_in_the_middle_of_a_wait(number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(number))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
