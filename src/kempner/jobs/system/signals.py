"""Signals handled in a thread. No torch.

A Python handler runs in the main thread between two of its instructions: never while that thread
waits in a collective, and possibly while it holds locks. Event.set() in a handler that interrupts
Event.wait() may deadlock.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Collection
from types import FrameType

TO_LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def on_signals(numbers: Collection[signal.Signals], act: Callable[[signal.Signals], None]) -> None:
    """Call `act` in a thread for each arrival of these signals, until the process exits. Call this
    once per process, from the main thread: there is one wake-up descriptor."""
    ours, wake_up = socket.socketpair()
    wake_up.setblocking(False)

    def listen(keep: socket.socket) -> None:  # garbage collection would end the wake-ups
        while received := ours.recv(64):
            for number in received:
                if number in numbers:
                    act(signal.Signals(number))

    signal.set_wakeup_fd(wake_up.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=listen, args=(wake_up,), daemon=True, name="signals").start()
    for number in numbers:
        signal.signal(number, _leave_it_to_the_thread)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # task.sh blocks them until here


def leave_event() -> threading.Event:
    """Return an event that is set once a signal asks this process to leave."""
    event = threading.Event()
    on_signals(TO_LEAVE, lambda _: event.set())
    return event


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: a Python handler keeps the signal from killing the process and lets the wake-up
    descriptor see it."""
