"""Signals handled in a thread. No torch.

A Python handler runs in the main thread between two of its instructions: never while that thread
waits in a collective, and with whatever locks it holds. Event.set() in a handler that came in the
middle of Event.wait() waits for ever.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Collection
from types import FrameType

TO_LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def on_signals(numbers: Collection[signal.Signals], act: Callable[[signal.Signals], None]) -> None:
    """Call `act` in a thread with each of these signals that comes, until the process exits. Call
    it once in a process, from its main thread: there is one wake-up descriptor."""
    ours, wake_up = socket.socketpair()
    wake_up.setblocking(False)

    def listen(keep: socket.socket) -> None:  # collected, it would end the wake-ups
        while received := ours.recv(64):
            for number in received:
                if number in numbers:
                    act(signal.Signals(number))

    signal.set_wakeup_fd(wake_up.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=listen, args=(wake_up,), daemon=True, name="signals").start()
    for number in numbers:
        signal.signal(number, _leave_it_to_the_thread)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # task.sh lets them wait until here


def leave_event() -> threading.Event:
    """Return an event that is set once a signal asks this process to leave."""
    event = threading.Event()
    on_signals(TO_LEAVE, lambda _: event.set())
    return event


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: a handler in Python keeps the signal from killing the process, and lets the
    wake-up descriptor see it."""
