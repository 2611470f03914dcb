"""Messages over pipes, with an end to every wait. A message is its length, then its bytes."""

from __future__ import annotations

import os
import select
import struct
import time

LENGTH = struct.Struct("<Q")
MOST = 1 << 28  # bytes of a message
EVER = float("inf")


class Late(Exception):
    """The other side has not answered in time."""


class Ended(Exception):
    """The other side has closed its pipe."""


def send(fd: int, message: bytes, end: float) -> None:
    """Send a message by the time `end`, of the monotonic clock. Raises Late or Ended."""
    os.set_blocking(fd, False)
    left = memoryview(LENGTH.pack(len(message)) + message)
    while left:
        _wait(fd, select.POLLOUT, end)
        try:
            left = left[os.write(fd, left) :]
        except BrokenPipeError:
            raise Ended from None
        except BlockingIOError:
            pass


def receive(fd: int, end: float, most: int = MOST) -> bytes:
    """Receive a message of at most `most` bytes. Raises Late or Ended."""
    (length,) = LENGTH.unpack(_read(fd, LENGTH.size, end))
    if length > most:
        raise Ended
    return _read(fd, length, end)


def _read(fd: int, count: int, end: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        _wait(fd, select.POLLIN, end)
        piece = os.read(fd, min(count - len(data), 1 << 20))
        if not piece:
            raise Ended
        data += piece
    return bytes(data)


def _wait(fd: int, event: int, end: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    left = None if end == EVER else max(0.0, end - time.monotonic()) * 1000
    if not poll.poll(left):
        raise Late
