"""Questions from the driver to the tasks, one JSON object per line, over connections authenticated
on both sides (kempner.jobs.ranks.peers).

They use srun's own network, so that a node without the fast network or the shared directory can
still report what it lacks. The all-reduces meet in a TCPStore, which has no authentication: its
data is used only as figures, never written or run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import select
import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from kempner.jobs.ranks import peers
from kempner.jobs.ranks.port_range import listen_in_range, store_server

NodeAnswer = dict[str, Any]
PREFLIGHT_POLL_S = 0.2
PREFLIGHT_SEND_S = 10.0
PREFLIGHT_LEAVE_S = 10.0  # for the tasks to confirm that they leave
LONGEST_ANSWER = 1 << 24  # bytes of an answer: a node may have thousands of packages


def new_token() -> str:
    """Return the token that the first node writes for the others to see. It is never sent."""
    return hashlib.sha256(f"preflight {peers.job_key()}".encode()).hexdigest()[:16]


def token_file(folder: Path) -> Path:
    """Return the token's file in the shared directory, unique to this job: several jobs may check
    the same directory at once."""
    return folder / f".preflight-{new_token()}"


class Driver:
    """The driver's side: asks questions."""

    def __init__(self) -> None:
        port, server = store_server()
        limit = timedelta(seconds=60)
        self.store = dist.TCPStore(
            "localhost", port, None, True, limit, wait_for_workers=False, master_listen_fd=server
        )
        self._entrance = peers.Entrance(listen_in_range(), peers.job_key())
        self.port = self._entrance.port
        # Not select(), which is limited to descriptors up to 1023: each task has a connection.
        self._poll = select.poll()
        self._poll.register(self._entrance, select.POLLIN)
        self._links: dict[int, _Lines] = {}  # by file descriptor
        self._tasks: dict[int, _Lines] = {}  # by rank
        self._questions: dict[int, list[bytes]] = {}  # all questions to each rank
        self._answers: dict[str, NodeAnswer] = {}

    def ask(self, ranks: Iterable[int], question: dict[str, Any]) -> dict[int, str]:
        """Ask some ranks a question. Returns the key of each rank's answer."""
        # Encoded once for all ranks: a question to all tasks lists all their numbers.
        keys, text = {}, json.dumps(question).encode() + b"\n"
        for rank in ranks:
            questions = self._questions.setdefault(rank, [])
            questions.append(text)
            keys[rank] = f"answer/{rank}/{len(questions) - 1}"
            if rank in self._tasks:
                self._tasks[rank].send(text)
        return keys

    def answers(self, keys: dict[int, str], deadline: float) -> dict[int, NodeAnswer]:
        """Return the answers that arrive before the deadline (time.monotonic)."""
        while not all(key in self._answers for key in keys.values()):
            remaining = deadline - time.monotonic()
            # Once more after the deadline, for answers that are already there.
            self._listen(max(0.0, min(remaining, PREFLIGHT_POLL_S)))
            if remaining <= 0:
                break
        return {rank: self._answers[key] for rank, key in keys.items() if key in self._answers}

    def end(self, ranks: Iterable[int]) -> None:
        """Tell these ranks to leave and wait until they do."""
        self.answers(self.ask(ranks, {"what": "end"}), time.monotonic() + PREFLIGHT_LEAVE_S)

    def _listen(self, seconds: float) -> None:
        for fd, _ in self._poll.poll(seconds * 1000):
            if fd == self._entrance.fileno():
                for peer in self._entrance.take():
                    link = _Lines(peer)
                    self._links[peer.fileno()] = link
                    self._poll.register(peer, select.POLLIN)
            else:
                self._hear(self._links[fd])

    def _hear(self, link: _Lines) -> None:
        for message in link.receive():
            if link.rank is None:
                rank = message.get("rank")
                # The first connection keeps the rank: answers are numbered per connection.
                if type(rank) is not int or rank in self._tasks:
                    link.open = False
                    break
                link.rank, self._tasks[rank] = rank, link
                # Questions that were asked before it connected.
                for question in self._questions.get(rank, []):
                    link.send(question)
            elif isinstance(message.get("answer"), dict):
                # Answers arrive in the order of the questions.
                self._answers[f"answer/{link.rank}/{link.count}"] = message["answer"]
                link.count += 1
        if not link.open:
            self._poll.unregister(link.socket)
            del self._links[link.socket.fileno()]
            link.socket.close()


class _Lines:
    """The connection to a task."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.open = connection, True
        self.rank: int | None = None
        self.count = 0  # of its answers
        self._text = b""
        connection.settimeout(PREFLIGHT_SEND_S)

    def send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # it has gone
            self.socket.sendall(line)

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages received. Closes the connection if the peer sends anything else."""
        data = b""
        with contextlib.suppress(OSError):
            data = self.socket.recv(1 << 16)
        *lines, self._text = (self._text + data).split(b"\n")
        self.open = bool(data) and len(self._text) < LONGEST_ANSWER
        messages = []
        for line in lines:
            message = None
            with contextlib.suppress(ValueError, RecursionError):
                message = json.loads(line)
            if isinstance(message, dict):
                messages.append(message)
            else:
                self.open = False
        return messages


class TaskChannel:
    """The task's side: answers questions."""

    def __init__(self, address: str, port: int, rank: int) -> None:
        """Raises OSError, ConfigError."""
        self._link = peers.connect_peer(address, port, peers.job_key(), 120.0)
        # The next question may come minutes later, after measurements of other nodes.
        self._link.settimeout(None)
        self._lines = self._link.makefile("rb")
        self._say({"rank": rank})

    def question(self) -> dict[str, Any]:
        """Wait for the next question; "end" if the driver is gone."""
        line = b""
        with contextlib.suppress(OSError):
            line = self._lines.readline()
        # A partial line: the driver died while sending a question.
        question: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {"what": "end"}
        return question

    def answer(self, answer: NodeAnswer) -> None:
        self._say({"answer": answer})

    def _say(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the driver no longer waits
            self._link.sendall(json.dumps(what).encode() + b"\n")
