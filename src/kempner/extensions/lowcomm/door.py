"""A rank's connection to the judge of liveness (judge.py), and to the store that it keeps."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NoReturn

from kempner.extensions.lowcomm import beat
from kempner.jobs.ranks import peers

JUDGE_CONNECT_S = 5.0
GONE_KEY, HERE_KEY = "gone", "here"  # keys of the store: one line per replica, "name ..."
FIRST_EPOCH_KEY = "first"  # the oldest epoch that the store still has
FENCED = 76  # exit code of a replica that was declared gone


class Door:
    """A rank's connection to the judge, and to the store."""

    def __init__(self, note: Path, timeout: float) -> None:
        """Connect. Call it on the main thread: the heartbeat lives as long as the thread
        that started it.

        Raises RuntimeError if the judge is not reached within `timeout` seconds."""
        import torch.distributed as dist

        self.name, self._leaves = "", False
        address, ports, self._connection = _connect(note, timeout)
        # First, because a slow name server can delay the next line for seconds.
        self._beat = _start_beat(self._connection.fileno())
        self._watch = threading.Thread(target=self._wait, daemon=True, name="heartbeat")
        self._watch.start()
        limit = timedelta(seconds=timeout)
        self.store: Any = dist.TCPStore(address, ports["store"], None, False, limit)

    def new_name(self, slot: int) -> str:
        """Make a name for this start of a replica. Its first rank calls it and tells the others."""
        return f"{slot}.{self.store.add(f'starts/{slot}', 1)}"

    def greet(self, name: str) -> None:
        """Tell the judge the name directly: this process may be killed before the heartbeat runs.
        From here on only the heartbeat holds the connection, which closes with it."""
        self.name = name
        self._connection.sendall(f"{name}\n".encode())
        self._connection.close()

    def close(self) -> None:
        """Leave in an orderly way."""
        # Set before the goodbye, at which the judge closes the connection: _wait() would otherwise
        # fence this rank.
        self._leaves = True
        self._say("bye")
        with contextlib.suppress(OSError):
            self._input.close()
        self._watch.join(JUDGE_CONNECT_S)

    def tell(self, event: dict[str, Any]) -> None:
        """Report a round, for the log of the replicas."""
        self._say(json.dumps({"name": self.name, **event}))

    @property
    def _input(self) -> IO[bytes]:
        assert self._beat.stdin is not None
        return self._beat.stdin

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the heartbeat has ended, and this process will, too
            self._input.write(f"{line}\n".encode())

    def _wait(self) -> None:
        self._beat.wait()
        if not self._leaves:
            self.fence("the judge has closed the connection, or the batch host is gone")

    def fence(self, reason: str) -> NoReturn:
        """End this process, because nothing it does may count any more. Skips an orderly exit,
        which a collective with a stopped replica would block."""
        with contextlib.suppress(OSError):
            os.write(2, f"error: replica {self.name} leaves: {reason}\n".encode())
        os._exit(FENCED)


def _start_beat(connection: int) -> subprocess.Popen[bytes]:
    """Start the heartbeat with the requests to save and stop blocked: they are for the rank."""
    blocked = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    # A mask survives exec(), a handler does not; every process of the step gets the requests.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        return subprocess.Popen(
            # Without site-packages, often on a slow file system, and without PYTHON* variables.
            [sys.executable, "-S", "-I", beat.__file__, str(connection), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(connection,),
            bufsize=0,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _connect(note: Path, timeout: float) -> tuple[str, dict[str, int], socket.socket]:
    """Connect to the first address of the judge that answers."""
    deadline, problem = time.monotonic() + timeout, "no such file"
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, KeyError):
            # Read on every attempt, because an older note may not have been replaced yet.
            contents = json.loads(note.read_text())
            for address in contents["addresses"]:
                try:
                    peer = peers.connect_peer(
                        address, contents["beats"], contents["key"], JUDGE_CONNECT_S
                    )
                    return address, contents, peer
                except OSError as error:
                    problem = f"{address}: {error}"
        time.sleep(0.1)
    raise RuntimeError(
        f"the store of the replicas, {note}, was not reached within {timeout:.0f} s: {problem}; "
        "is the batch host alive, and is the network to it up?"
    )


def is_name(word: str) -> bool:
    """Return whether new_name() may have made this word."""
    return re.fullmatch(r"[0-9]{1,9}\.[0-9]{1,9}", word) is not None


def slot_of(name: str) -> int:
    return int(name.partition(".")[0])
