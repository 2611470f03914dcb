"""The judge of which replicas are alive: one process on the batch host keeps the store and judges,
and each rank of a replica is connected to it.

    python -m kempner.extensions.lowcomm.judge runs/x/.door 10.0.0.1 --log runs/x/replicas.jsonl

A small process beside each rank holds the connection (beat.py). A replica is gone at once when its
connection closes: the kernel closes it when the rank is killed. It is gone after `--silence`
seconds without a beat: it was stopped, or its host or cable failed. Neither applies to a busy rank.
There is one judge, because replicas that judge each other can disagree; it runs where the job's
script runs, whose end is the end of the job anyway.

Its note has mode 600 and contains a key: peers without the key are dropped
(kempner.jobs.ranks.peers). torch's store beside it cannot authenticate. All replicas need the
judge, so only the end of its parent ends it: no peer, no full disk under the batch log or the run
directory, no lack of file descriptors.

The judge never revokes a verdict. A replica that wakes up finds its connection closed and leaves;
it must be started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kempner.config.command_line import argument_parser
from kempner.extensions.lowcomm.beat import REPLICA_HEARTBEAT_S
from kempner.extensions.lowcomm.config import REPLICA_SILENCE_S
from kempner.extensions.lowcomm.door import FIRST_EPOCH_KEY, GONE_KEY, HERE_KEY, is_name, slot_of
from kempner.jobs import this_job
from kempner.jobs.ranks import peers, process_group
from kempner.jobs.ranks.port_range import listen_in_range, store_server
from kempner.jobs.system.files import LineFile, write_atomic
from kempner.jobs.system.front_door import run_program

LONGEST_LINE = 1 << 16  # in bytes


class JudgeServer:
    """The server: the store, and the connections of the replicas."""

    def __init__(
        self,
        addresses: Iterable[str],
        silence: float,
        log: Path | None,
        on: Callable[[str], object] = lambda event: None,
    ) -> None:
        """`addresses`: of this host, the preferred one first. `on`: receives events: "here.I",
        replica I has come; "silent.I", it was declared gone, but its processes may still run;
        "over", all replicas are gone after a round, so a new one would find nobody to join."""
        import torch.distributed as dist

        # Any: append() and clone() are not in torch's stubs.
        port, server = store_server()
        self.store: Any = dist.TCPStore(
            "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=server
        )
        self._silence, self._on = silence, on
        self._log = LineFile(log) if log is not None else None
        self._names: dict[socket.socket, str] = {}
        self._heard: dict[socket.socket, float] = {}
        self._begun: dict[socket.socket, bytes] = {}  # incomplete lines
        self._gone: set[str] = set()
        self._weights: dict[int, str] = {}  # after each round, as first reported by a replica
        self._untold: list[str] = []  # events not yet sent
        key = peers.new_key()
        self._entrance = peers.Entrance(listen_in_range(), key)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._entrance, selectors.EVENT_READ)
        ports = {"store": self.store.port, "beats": self._entrance.port}
        self.note = json.dumps({"addresses": list(addresses), **ports, "key": key})
        self.store.set(GONE_KEY, "")
        self.store.set(HERE_KEY, "")
        self.store.set(FIRST_EPOCH_KEY, "0")

    def serve(self, while_true: Callable[[], bool]) -> None:
        awake = time.monotonic()
        while while_true():
            for key, _ in self._selector.select(REPLICA_HEARTBEAT_S / 2):
                try:
                    self._take(key.fileobj)
                except Exception as error:
                    _say(f"error: {type(error).__name__}: {error}")
                    if key.fileobj in self._heard:
                        # Close the connection, because its next bytes would fail again.
                        self._lose(key.fileobj, "not understood")
            self._tell()
            before, awake = awake, time.monotonic()
            # This process itself was stopped, and heard nobody.
            if awake - before > self._silence / 2:
                # Its own pause must not count against the replicas.
                self._heard = dict.fromkeys(self._heard, awake)
            for peer, last in list(self._heard.items()):
                if peer in self._heard and awake - last > self._silence:
                    if name := self._names.get(peer):
                        self._untold.append(f"silent.{slot_of(name)}")
                    self._lose(peer, f"silent for {awake - last:.1f} s")

    def _take(self, ready: object) -> None:
        if ready is self._entrance:
            self._admit()
        elif isinstance(ready, socket.socket):
            self._hear(ready)

    def _tell(self) -> None:
        """Send events to the script, retrying while its file system is full or away."""
        with contextlib.suppress(OSError):
            while self._untold:
                self._on(self._untold[0])
                # Only after sending: an event may be sent twice, but is never lost.
                del self._untold[0]

    def _admit(self) -> None:
        for peer in self._entrance.take():
            peer.setblocking(False)
            self._selector.register(peer, selectors.EVENT_READ)
            self._heard[peer], self._begun[peer] = time.monotonic(), b""

    def _hear(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(4096)
        except OSError as error:
            return self._lose(peer, f"its process ended ({error.strerror})")
        if not data:
            return self._lose(peer, "its process ended")
        self._heard[peer] = time.monotonic()
        *lines, rest = (self._begun[peer] + data).split(b"\n")
        # A peer that never ends its line must not fill the batch host's memory.
        self._begun[peer] = rest[:LONGEST_LINE]
        for line in lines:
            word = line.decode(errors="replace")
            if word == "bye":
                return self._lose(peer, "left")
            if word.startswith("{"):
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    self._note_round(json.loads(word))
            elif is_name(word) and peer not in self._names:
                self._greet(peer, word)
                # _greet() has closed this connection: ignore its other lines.
                if peer not in self._heard:
                    return None
        return None

    def _greet(self, peer: socket.socket, name: str) -> None:
        """Register a replica's name, SLOT.START. Earlier starts of the slot are gone, even if
        they believe otherwise."""
        if name in self._gone:  # through another rank of it
            return self._lose(peer, "")
        for other, other_name in list(self._names.items()):
            if other_name != name and slot_of(other_name) == slot_of(name):
                self._lose(other, f"started again as {name}")
        if name not in self._names.values():
            self._record("here", name, "")
            self._untold.append(f"here.{slot_of(name)}")
        self._names[peer] = name
        return None

    def _note_round(self, event: dict[str, Any]) -> None:
        """Record a replica's report of a round, and check that all replicas have
        the same weights."""
        number, weights, name, text = (event[key] for key in ("round", "weights", "name", "text"))
        self._append({"event": "round", "time": round(time.time(), 3), **event})
        first_weights = self._weights.setdefault(number, weights)
        # Identity means that this is the first report of the round.
        if first_weights is weights:
            _say(f"round {number}: {text}; weights {weights}")
        elif first_weights != weights:
            _say(f"error: round {number}: {name} has weights {weights}")

    def _lose(self, peer: socket.socket, reason: str) -> None:
        if self._heard.pop(peer, None) is None:  # lost with another rank of its replica
            return
        name = self._names.pop(peer, None)
        del self._begun[peer]
        self._selector.unregister(peer)
        peer.close()
        if name is None or name in self._gone:
            return
        # Before dropping its other ranks below, each of which calls this function again.
        self._gone.add(name)
        self.store.append(GONE_KEY, f"{name} {reason}\n")
        self._record("gone", name, reason)
        # A goodbye concerns one rank; the others of its replica are about to send theirs.
        if reason != "left":
            for other in [x for x, other_name in self._names.items() if other_name == name]:
                self._lose(other, reason)
        # After a round, the state is lost with its last holder.
        if self._weights and not self._names:
            self._untold.append("over")

    def _record(self, event: str, name: str, reason: str) -> None:
        _say(f"replica {name}: {event}{f': {reason}' if reason else ''}")
        self._append(
            {"event": event, "time": round(time.time(), 3), "name": name, "reason": reason}
        )

    def _append(self, line: dict[str, Any]) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the replicas
                self._log.write(json.dumps(line))


def _say(line: str) -> None:
    """Write to the batch log; a write that fails on a full disk is dropped."""
    with contextlib.suppress(OSError):
        os.write(1, f"{line}\n".encode(errors="backslashreplace"))


def main(argv: list[str]) -> None:
    parser = argument_parser("python -m kempner.extensions.lowcomm.judge", __doc__)
    parser.add_argument("note", type=Path, help="where to publish the address")
    parser.add_argument("address", nargs="*", help="of this host, beside that of its fast network")
    parser.add_argument("--silence", type=float, default=REPLICA_SILENCE_S)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # The same signals ask the replicas to leave, and they need the judge until they have saved.
        signal.signal(number, signal.SIG_IGN)
    # Each rank holds two connections.
    process_group.allow_open_files()
    # First the replicas' fast network: a replica whose cable there is cut falls silent.
    fast = this_job.fast_address()
    addresses = dict.fromkeys([*([fast] if fast else []), *(options.address or ["localhost"])])
    note, parent = options.note, os.getppid()
    # The script that started the judge watches these files, and ends the step of a silent replica.
    judge = JudgeServer(
        addresses,
        options.silence,
        options.log,
        on=lambda event: note.with_name(f"{note.name}.{event}").touch(),
    )
    write_atomic(note, judge.note, 0o600)
    judge.serve(lambda: os.getppid() == parent)  # nothing stays on the node after the script


if __name__ == "__main__":
    run_program(main)
