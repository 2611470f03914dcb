"""Questions from the driver to the tasks, through a TCPStore that the driver's host serves.

The store goes over the network that srun itself uses, so that a node without the fast network or
without the shared directory can still say what it lacks.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Answer = dict[str, Any]
POLL_S = 0.005
LEAVE_S = 10.0  # for the tasks to say that they leave


class Driver:
    """The driver's side: asks questions."""

    def __init__(self) -> None:
        self.store = dist.TCPStore(
            "localhost", 0, None, True, timedelta(seconds=60), wait_for_workers=False
        )
        self.port = self.store.port
        self._asked: dict[int, int] = {}

    def ask(self, ranks: Iterable[int], question: dict[str, Any]) -> dict[int, str]:
        """Put a question to some ranks; returns the key under which each will answer."""
        keys = {}
        for rank in ranks:
            number = self._asked[rank] = self._asked.get(rank, -1) + 1
            self.store.set(f"ask/{rank}/{number}", json.dumps(question))
            keys[rank] = f"answer/{rank}/{number}"
        return keys

    def answers(self, keys: dict[int, str], deadline: float) -> dict[int, Answer]:
        """The answers that come before the deadline (time.monotonic)."""
        found: dict[int, Answer] = {}
        while len(found) < len(keys):
            for rank, key in keys.items():
                if rank not in found and self.store.check([key]):
                    found[rank] = json.loads(self.store.get(key))
            if time.monotonic() > deadline:
                break
            if len(found) < len(keys):
                time.sleep(POLL_S)
        return found

    def end(self, ranks: Iterable[int]) -> None:
        """Tell these ranks to leave, and wait until they do: the store goes with this process, and
        a task that still waits in it prints the stack of its client."""
        self.answers(self.ask(ranks, {"what": "end"}), time.monotonic() + LEAVE_S)


class Task:
    """A task's side: answers them."""

    def __init__(self, address: str, port: int, rank: int) -> None:
        self.store = dist.TCPStore(address, port, None, False, timedelta(seconds=120))
        self.rank = rank
        self._next = 0

    def question(self) -> dict[str, Any]:
        """Wait for the next question; "end" when the driver is gone."""
        try:
            question: dict[str, Any] = json.loads(self.store.get(f"ask/{self.rank}/{self._next}"))
        except dist.DistError:
            return {"what": "end"}
        return question

    def answer(self, answer: Answer) -> None:
        with contextlib.suppress(dist.DistError):  # the driver no longer waits
            self.store.set(f"answer/{self.rank}/{self._next}", json.dumps(answer))
        self._next += 1
