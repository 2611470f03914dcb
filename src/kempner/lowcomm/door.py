"""Who of the replicas lives: one process on the batch host keeps the store and judges, and each
replica holds a connection to it.

    python -m kempner.lowcomm.door runs/x/.door 10.0.0.1 --log runs/x/replicas.jsonl

A connection that closes is a replica that is gone, at once: the kernel closes it for a process that
was killed. One on which nothing comes is a replica that was stopped, or whose host or cable is
gone: after `--silence` seconds. One judge, because replicas that judge each other can disagree; and
where it runs is where the job's script runs, whose end is the job's end in any case.

The judge never takes its word back. A replica that wakes up finds its connection closed, and
leaves: it is to be started again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from kempner.files import LineFile, write_atomic

BEAT_S = 0.5
SILENCE_S = 10.0
CONNECT_S = 5.0
GONE, HERE = "gone", "here"  # keys of the store: a line each, "name ..."
FENCED = 76  # the exit code of a replica that was declared gone
SIOCGIFADDR = 0x8915


class Judge:
    """The server: the store, and the connections of the replicas."""

    def __init__(
        self,
        addresses: Iterable[str],
        silence: float,
        log: Path | None,
        on_silence: Callable[[int], object] = lambda slot: None,
    ) -> None:
        """`addresses`: of this host, the one to try first in front. `on_silence(replica)`: its
        processes may still be there."""
        import torch.distributed as dist

        # Any: append() and clone() are not in torch's stubs.
        self.store: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._silence, self._on_silence = silence, on_silence
        self._log = LineFile(log) if log is not None else None
        self._names: dict[socket.socket, str] = {}
        self._heard: dict[socket.socket, float] = {}
        self._begun: dict[socket.socket, bytes] = {}  # a line that has not come whole
        self._gone: set[str] = set()
        self._weights: dict[int, str] = {}  # after each round, as the first replica has told them
        self._entrance = socket.create_server(("", 0), backlog=1024)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._entrance, selectors.EVENT_READ)
        ports = {"store": self.store.port, "beats": self._entrance.getsockname()[1]}
        self.note = json.dumps({"addresses": list(addresses), **ports})
        self.store.set(GONE, "")
        self.store.set(HERE, "")

    def serve(self, while_true: Callable[[], bool]) -> None:
        awake = time.monotonic()
        while while_true():
            for key, _ in self._selector.select(BEAT_S / 2):
                if key.fileobj is self._entrance:
                    self._admit()
                else:
                    self._hear(key.fileobj)  # type: ignore[arg-type]
            before, awake = awake, time.monotonic()
            if awake - before > self._silence / 2:  # it was this process that was stopped
                self._heard = dict.fromkeys(self._heard, awake)
            for peer, last in list(self._heard.items()):
                if awake - last > self._silence:
                    if name := self._names.get(peer):
                        self._on_silence(int(name.partition(".")[0]))
                    self._lose(peer, f"silent for {awake - last:.1f} s")

    def _admit(self) -> None:
        peer, _ = self._entrance.accept()
        peer.setblocking(False)
        self._selector.register(peer, selectors.EVENT_READ)
        self._heard[peer], self._begun[peer] = time.monotonic(), b""

    def _hear(self, peer: socket.socket) -> None:
        try:
            said = peer.recv(4096)
        except OSError as error:
            return self._lose(peer, f"its process ended ({error.strerror})")
        if not said:
            return self._lose(peer, "its process ended")
        self._heard[peer] = time.monotonic()
        *lines, self._begun[peer] = (self._begun[peer] + said).split(b"\n")
        for word in map(bytes.decode, lines):
            if word == "bye":
                return self._lose(peer, "left")
            if word.startswith("{"):
                self._note_round(json.loads(word))
            elif word != "." and peer not in self._names:
                self._greet(peer, word)
        return None

    def _greet(self, peer: socket.socket, name: str) -> None:
        """A replica's name is SLOT.START. Its earlier starts are gone, whatever they think."""
        self._names[peer] = name
        slot = name.partition(".")[0]
        for other, known in list(self._names.items()):
            if other is not peer and known.partition(".")[0] == slot:
                self._lose(other, f"started again as {name}")
        self._record("here", name, "")

    def _note_round(self, event: dict[str, Any]) -> None:
        """What a replica says after a round. All of them must have the same weights then."""
        self._append({"event": "round", "time": round(time.time(), 3), **event})
        number, weights = event["round"], event["weights"]
        known = self._weights.setdefault(number, weights)
        if known is weights:
            print(f"round {number}: {event['text']}; weights {weights}", flush=True)
        elif known != weights:
            print(f"error: round {number}: {event['name']} has weights {weights}", flush=True)

    def _lose(self, peer: socket.socket, reason: str) -> None:
        name = self._names.pop(peer, None)
        del self._heard[peer], self._begun[peer]
        self._selector.unregister(peer)
        peer.close()
        if name is not None and name not in self._gone:
            self._gone.add(name)
            self.store.append(GONE, f"{name} {reason}\n")
            self._record("gone", name, reason)

    def _record(self, event: str, name: str, reason: str) -> None:
        print(f"replica {name}: {event}{f': {reason}' if reason else ''}", flush=True)
        self._append(
            {"event": event, "time": round(time.time(), 3), "name": name, "reason": reason}
        )

    def _append(self, line: dict[str, Any]) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the replicas
                self._log.write(json.dumps(line))


class Door:
    """A replica's connection to the judge, and to the store."""

    def __init__(self, note: Path, slot: int | None, timeout: float) -> None:
        """`slot`: the replica's number; None: another rank of the replica, which needs the store
        alone. Raises RuntimeError when the judge is not reached within `timeout` seconds."""
        import torch.distributed as dist

        self.name, self._said_bye, self._lock = "", threading.Event(), threading.Lock()
        address, ports, self._socket = _connect(note, timeout)
        if slot is None:
            self._socket.close()
        else:  # before all else: a name server that is slow can hold up the next line for seconds
            threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()
        limit = timedelta(seconds=timeout)
        self.store: Any = dist.TCPStore(address, ports["store"], None, False, limit)
        if slot is not None:
            self.name = f"{slot}.{self.store.add(f'starts/{slot}', 1)}"
            self._socket.sendall(f"{self.name}\n".encode())

    def close(self) -> None:
        """Leave in order."""
        self._said_bye.set()
        if self.name:
            with contextlib.suppress(OSError):
                self._socket.sendall(b"bye\n")
            self._socket.close()

    def tell(self, event: dict[str, Any]) -> None:
        """Of a round, for the log of the replicas."""
        with contextlib.suppress(OSError), self._lock:
            self._socket.sendall(json.dumps({"name": self.name, **event}).encode() + b"\n")

    def _beat(self) -> None:
        """Nothing ever comes back: what can be read is the end."""
        self._socket.settimeout(BEAT_S)
        while not self._said_bye.is_set():
            try:
                with self._lock:
                    self._socket.sendall(b".\n")
                if not self._socket.recv(1):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        if not self._said_bye.is_set():
            self.fence("the judge has closed the connection, or the batch host is gone")

    def fence(self, reason: str) -> NoReturn:
        """End this process: nothing that it does may count any more. Not in order: a collective
        with a replica that is stopped would keep it."""
        with contextlib.suppress(OSError):
            os.write(2, f"error: replica {self.name} leaves: {reason}\n".encode())
        os._exit(FENCED)


def _connect(note: Path, timeout: float) -> tuple[str, dict[str, int], socket.socket]:
    """Over the first address of the judge that answers."""
    deadline, problem = time.monotonic() + timeout, "no such file"
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(note.read_text())
            for address in found["addresses"]:
                try:
                    peer = socket.create_connection((address, found["beats"]), CONNECT_S)
                    return address, found, peer
                except OSError as error:
                    problem = f"{address}: {error}"
        time.sleep(0.1)
    raise RuntimeError(
        f"the store of the replicas, {note}, was not reached within {timeout:.0f} s: {problem}; "
        "does the batch host live, and is the network to it up?"
    )


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("note", type=Path, help="where to publish the address")
    parser.add_argument("address", nargs="*", help="of this host, beside that of its fast network")
    parser.add_argument("--silence", type=float, default=SILENCE_S)
    parser.add_argument("--log", type=Path)
    given = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the replicas need it until they have saved
    # The network that the replicas use first: a replica whose cable there is cut falls silent.
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    fast = address_of(interface) if interface else None
    addresses = dict.fromkeys([*([fast] if fast else []), *(given.address or ["localhost"])])
    note, parent = given.note, os.getppid()
    # The script that started us ends the step then.
    judge = Judge(
        addresses,
        given.silence,
        given.log,
        on_silence=lambda slot: note.with_name(f"{note.name}.silent.{slot}").touch(),
    )
    write_atomic(note, judge.note)
    judge.serve(lambda: os.getppid() == parent)  # nothing is left on the node when the script ends


if __name__ == "__main__":
    main()
