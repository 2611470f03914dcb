"""Messages between the ranks of a program and their coordinator: a JSON object a line. No torch."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

from kempner.jobs.ranks import peers

ChannelMessage = dict[str, Any]
LONGEST_MESSAGE = 1 << 20  # bytes of a message; more is none of ours
CHANNEL_SEND_S = 10.0


class Channel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.open = True
        self._text = b""
        # A peer that is stopped takes no bytes: it must not hold up the others for long.
        connection.settimeout(CHANNEL_SEND_S)

    @classmethod
    def connect(cls, address: str, port: int, seconds: float) -> Channel:
        """Connect to an Entrance of this job. Raises OSError, ConfigError without the job's key."""
        return cls(peers.connect_peer(address, port, peers.job_key(), seconds))

    def send(self, **message: Any) -> None:
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.open = False

    def receive(self) -> list[ChannelMessage]:
        """Return the messages that have come, once select() says that there are some; closes if the
        other end has."""
        data = b""
        with contextlib.suppress(OSError):
            data = self.socket.recv(1 << 16)
        self._text += data
        # recv() returns nothing when the other end has closed; a line without an end is not ours.
        self.open = self.open and bool(data) and len(self._text) < LONGEST_MESSAGE
        *lines, self._text = self._text.split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if isinstance(message, dict):
                messages.append(message)
            else:
                self.open = False
        return messages

    def close(self) -> None:
        self.socket.close()
