"""The heartbeat of a rank: a small process beside it, so that a rank whose interpreter, disk or
compiler is busy is not taken for dead. No torch, nothing of kempner: it starts at once.

    python beat.py SOCKET PARENT        the number of an open connection to the judge; its owner

It passes on what the rank writes to its standard input. It beats unless the rank is stopped
(SIGSTOP), and the kernel ends it with the rank, which closes the connection. It exits when the
judge closes the connection: the rank then knows that it was declared gone.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import time

REPLICA_HEARTBEAT_S = 0.5
BEAT_SET_PDEATHSIG = 1


def is_stopped(status: int) -> bool:
    """`status`: the open /proc/PID/stat. The state follows the name, which may be any string."""
    return os.pread(status, 4096, 0).rpartition(b")")[2].split()[0] == b"T"


def main() -> None:
    judge, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    ctypes.CDLL(None).prctl(BEAT_SET_PDEATHSIG, signal.SIGKILL)
    # The parent died before prctl() took effect.
    if os.getppid() != parent:
        return
    status = os.open(f"/proc/{parent}/stat", os.O_RDONLY)
    due, is_whole = 0.0, True  # whether the last line passed on is complete
    while True:
        now = time.monotonic()
        if now >= due:
            due = now + REPLICA_HEARTBEAT_S
            # Never inside a long line, which arrives in pieces.
            if is_whole and not is_stopped(status):
                judge.sendall(b".\n")
        ready, _, _ = select.select([0, judge.fileno()], [], [], due - now)
        # The judge never sends anything: a readable socket means that it has closed the connection.
        if judge.fileno() in ready:
            return
        if ready:
            data = os.read(0, 65536)
            if not data:
                return
            judge.sendall(data)
            is_whole = data.endswith(b"\n")


if __name__ == "__main__":
    main()
