"""Signals reach a program whatever its main thread is doing."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from kempner.jobs.system.signals import TO_LEAVE
from tests.conftest import ROOT
from tests.waiting import LIMIT_S

PROGRAM = """
import signal, sys
from kempner.jobs.system.signals import leave_event
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
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_no_simple_queue_is_waited_for_with_a_limit() -> None:
    """Up to Python 3.12 its get(timeout=) waits for ever when a signal comes near the end of the
    time; that of a Queue does not."""
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    names = [name for text in sources for name in re.findall(r"(\w+)\S* = SimpleQueue\(\)", text)]
    names += [name for text in sources for name in re.findall(r"(\w+): SimpleQueue\[", text)]
    waits = [each for text in sources for each in re.findall(r"(\w+)\.get\(timeout", text)]
    assert "_come" in waits and "_inbox" in names
    assert not set(names) & set(waits)
