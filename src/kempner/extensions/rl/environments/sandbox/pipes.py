"""Messages over pipes, with a limit on every wait. A message is its length, then its bytes."""

from __future__ import annotations

import os
import select
import struct
import time

PIPE_LENGTH = struct.Struct("<Q")
LARGEST_PIPE_MESSAGE = 1 << 28  # of one message
EVER = float("inf")


class Late(Exception):
    """The other side has not answered in time."""


class PipeClosed(Exception):
    """The other side has closed its pipe."""


def send_message(fd: int, message: bytes, end: float) -> None:
    """Send a message by the time `end` of the monotonic clock. Raises Late or PipeClosed."""
    # A pipe with little room is writable: a blocking write of everything would outlast `end`.
    os.set_blocking(fd, False)
    rest = memoryview(PIPE_LENGTH.pack(len(message)) + message)
    while rest:
        _wait(fd, select.POLLOUT, end)
        try:
            rest = rest[os.write(fd, rest) :]
        except BrokenPipeError:
            raise PipeClosed from None
        except BlockingIOError:
            pass


def receive_message(fd: int, end: float, most: int = LARGEST_PIPE_MESSAGE) -> bytes:
    """Receive a message of at most `most` bytes. Raises Late or PipeClosed."""
    (length,) = PIPE_LENGTH.unpack(_read(fd, PIPE_LENGTH.size, end))
    # A model's program may have written any length, which must not cost memory.
    if length > most:
        raise PipeClosed
    return _read(fd, length, end)


def _read(fd: int, count: int, end: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        _wait(fd, select.POLLIN, end)
        # In pieces: os.read() allocates the requested size, and the length may be a lie.
        piece = os.read(fd, min(count - len(data), 1 << 20))
        if not piece:
            raise PipeClosed
        data += piece
    return bytes(data)


def _wait(fd: int, event: int, end: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    timeout = None if end == EVER else max(0.0, end - time.monotonic()) * 1000
    if not poll.poll(timeout):
        raise Late
