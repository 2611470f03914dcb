"""Messages between a program's ranks and their coordinator: one JSON object per line. No torch."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

from kempner.jobs.ranks import peers

ChannelMessage = dict[str, Any]
LONGEST_MESSAGE = 1 << 20  # bytes; a longer message is not one of ours
CHANNEL_SEND_S = 10.0


class Channel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.open = True
        self._text = b""
        # A stopped peer reads nothing: it must not hold up the others for long.
        connection.settimeout(CHANNEL_SEND_S)

    @classmethod
    def connect(cls, address: str, port: int, seconds: float) -> Channel:
        """Connect to an Entrance of this job. Raises OSError; ConfigError without the job's key."""
        return cls(peers.connect_peer(address, port, peers.job_key(), seconds))

    def send(self, **message: Any) -> None:
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.open = False

    def receive(self) -> list[ChannelMessage]:
        """Return the messages received; call it once select() reports data. Marks the channel as
        closed if the other end has closed."""
        data = b""
        with contextlib.suppress(OSError):
            data = self.socket.recv(1 << 16)
        self._text += data
        # recv() returns nothing if the other end has closed; an endless line is not ours.
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
