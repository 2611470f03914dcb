"""A process as /proc shows it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from kempner.jobs.system.process import birth_ticks

# The first thread ends, the second one goes on. PyDLL keeps the GIL: nothing else runs meanwhile.
EXITING = """
import ctypes, threading
threading.Thread(target=ctypes.CDLL(None).sleep, args=(1000,)).start()
print("runs", flush=True)
ctypes.PyDLL(None).pthread_exit(None)
"""


def test_a_process_is_there_until_its_last_thread_has_ended() -> None:
    """A lock's new holder looks: a thread of the old one may still be in a system call."""
    process = subprocess.Popen([sys.executable, "-c", EXITING], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "runs\n"
        stat = Path(f"/proc/{process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        assert birth_ticks(process.pid) is not None and process.poll() is None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert birth_ticks(process.pid) is None, "a zombie"
    finally:
        process.kill()
        process.communicate()
    assert birth_ticks(process.pid) is None
