"""Authentication of peers: any user of the network can reach a socket that listens beyond the
loopback, so each side of a connection first proves that it has the key of this job. No torch.

The key is 128 random bits: in KEMPNER_PEER_KEY, which the batch script generates at each start and
only processes of this user can read, or in a file of mode 600. It is never sent: the server sends
16 random bytes, the client 16 of its own and HMAC-SHA256(key, "client" + both), the server
HMAC-SHA256(key, "server" + both). The rest is plain TCP: this keeps out other users, but not an
attacker who can change packets on the wire.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator

from kempner.config.option import ConfigError

PEER_KEY_VARIABLE = "KEMPNER_PEER_KEY"
PEER_MAGIC = b"kempner1"
NONCE, PROOF = 16, 32  # bytes
HELLO_S = 20.0  # for a peer to prove itself
MOST_PEERS = 4096  # unauthenticated peers; beyond this, the oldest is dropped
PEERS_TICK_S = 1.0


def new_key() -> str:
    """Generate 128 random bits, as text."""
    return secrets.token_hex(16)


def job_key() -> str:
    """Return the key of this start of the job. Raises ConfigError."""
    if len(key := os.environ.get(PEER_KEY_VARIABLE, "")) < 32:
        raise ConfigError(
            f"{PEER_KEY_VARIABLE} is not set, so the processes of this job cannot prove who they "
            f"are: start them by the scripts in scripts/slurm, or export "
            f"{PEER_KEY_VARIABLE}=$(openssl rand -hex 16) before srun"
        )
    return key


def _proof(key: str, side: bytes, nonces: bytes) -> bytes:
    # With the side: otherwise a peer could prove itself by reflecting the other side's proof.
    return hmac.digest(key.encode(), side + nonces, "sha256")


class Entrance:
    """A listener that admits peers with the key, in a separate thread, so that no peer can block it
    or its owner. A peer that sends anything else, too little or nothing is dropped. Owns the
    listening socket."""

    def __init__(self, server: socket.socket, key: str) -> None:
        self.port = int(server.getsockname()[1])
        self._server, self._key, self._open = server, key, True
        self._guests: dict[socket.socket, _Guest] = {}  # oldest first
        self._let_in: deque[socket.socket] = deque()
        # The bell is a socket, so that the owner can poll() it together with its connections.
        self._here, self._bell = socket.socketpair()
        self._here.setblocking(False)
        self._bell.setblocking(False)
        # The thread waits in select(): close() wakes it by closing the other end of this pair.
        self._end, self._close = socket.socketpair()
        server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._selector.register(self._end, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="entrance")
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor for poll() and selectors, readable if take() has new peers."""
        return self._here.fileno()

    def take(self) -> list[socket.socket]:
        """Return the peers admitted since the last call, as blocking connections."""
        with contextlib.suppress(BlockingIOError):
            while self._here.recv(4096):
                pass
        connections = []
        while self._let_in:
            connections.append(self._let_in.popleft())
        return connections

    def close(self) -> None:
        """Stop admitting peers; admitted ones stay connected."""
        self._open = False
        self._close.close()
        self._thread.join(2 * PEERS_TICK_S)
        own = (self._server, self._here, self._bell, self._end)
        for each in (*own, *self._guests, *self._let_in):
            each.close()

    def __enter__(self) -> Entrance:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while self._open:
            for ready, _ in self._selector.select(PEERS_TICK_S):
                if ready.fileobj is self._server:
                    self._admit()
                elif isinstance(ready.fileobj, socket.socket):
                    self._hear(ready.fileobj)
            now = time.monotonic()
            for guest in [g for g in self._guests.values() if now > g.since + HELLO_S]:
                self._drop(guest.peer)

    def _admit(self) -> None:
        try:
            peer = self._server.accept()[0]
        except OSError:  # the peer is gone, or there are no descriptors left
            if not self._drop_oldest():
                time.sleep(0.05)
            return
        try:
            peer.setblocking(False)
            guest = _Guest(peer)
            # 24 bytes fit into any new socket's buffer: no need to wait until it is writable.
            peer.send(PEER_MAGIC + guest.nonce)
            self._selector.register(peer, selectors.EVENT_READ)
        except OSError:
            peer.close()
            return
        self._guests[peer] = guest
        # Silent peers must not use up this process's descriptors.
        if len(self._guests) > MOST_PEERS:
            self._drop_oldest()

    def _hear(self, peer: socket.socket) -> None:
        if (guest := self._guests.get(peer)) is None:
            return
        try:
            # Never read beyond the proof: the rest is for the owner of the connection.
            data = peer.recv(NONCE + PROOF - len(guest.said))
            guest.said += data
            if data and len(guest.said) < NONCE + PROOF:
                return
            theirs, proof = guest.said[:NONCE], guest.said[NONCE:]
            nonces = guest.nonce + theirs
            if not hmac.compare_digest(proof, _proof(self._key, b"client", nonces)):
                raise PermissionError
            peer.send(_proof(self._key, b"server", nonces))
        except OSError:
            return self._drop(peer)
        del self._guests[peer]
        self._selector.unregister(peer)
        peer.setblocking(True)
        self._let_in.append(peer)
        with contextlib.suppress(BlockingIOError):  # it has unread rings
            self._bell.send(b"1")
        return None

    def _drop(self, peer: socket.socket) -> None:
        del self._guests[peer]
        self._selector.unregister(peer)
        peer.close()

    def _drop_oldest(self) -> bool:
        for peer in self._guests:
            self._drop(peer)
            return True
        return False


class _Guest:
    """A peer that is not authenticated yet."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer, self.since = peer, time.monotonic()
        self.nonce, self.said = secrets.token_bytes(NONCE), b""


def connect_peer(address: str, port: int, key: str, seconds: float) -> socket.socket:
    """Connect to an Entrance with this key, with a limit of `seconds` for each call. Raises
    OSError; PermissionError means that the other side does not have the key."""
    peer = socket.create_connection((address, port), timeout=seconds)
    try:
        # The other side drops a guest after HELLO_S, and then never answers.
        peer.settimeout(min(seconds, HELLO_S))
        hello = _exactly(peer, len(PEER_MAGIC) + NONCE)
        ours = secrets.token_bytes(NONCE)
        nonces = hello[len(PEER_MAGIC) :] + ours
        if not hello.startswith(PEER_MAGIC):
            raise PermissionError(f"{address}:{port} is not one of ours")
        peer.sendall(ours + _proof(key, b"client", nonces))
        if not hmac.compare_digest(_exactly(peer, PROOF), _proof(key, b"server", nonces)):
            raise PermissionError(f"{address}:{port} does not have the key of this job")
        peer.settimeout(seconds)
    except BaseException:
        peer.close()
        raise
    return peer


def _exactly(peer: socket.socket, count: int) -> bytes:
    return b"".join(_parts(peer, count))


def _parts(peer: socket.socket, remaining: int) -> Iterator[bytes]:
    while remaining:
        part = peer.recv(remaining)
        if not part:
            raise PermissionError("the connection was closed: the other side has another key")
        remaining -= len(part)
        yield part
