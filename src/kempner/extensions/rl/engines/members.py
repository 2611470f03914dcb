"""The router's records of engines and of requests that wait for one. No torch.

Both change under the router's lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from kempner.extensions.rl.engines.client import RouterEngine


@dataclass
class Member:
    """One engine."""

    name: str
    engine: RouterEngine
    version: int = -1  # -1: unknown
    alive: bool = False
    trusted: bool = True  # its version is known to be of this run
    load: int = 0  # samples requested from it
    life: int = 0  # times that it was lost
    misses: int = 0
    updating: bool = False
    reads: int = -1  # version that it is updating to
    refused: int = 0  # updates to the present target that it has refused
    unable: int = -1  # version that it could not take when last tried
    progress: int | None = None  # tokens, when last asked
    progressed: float = field(default_factory=time.monotonic)  # time of its last progress
    why: str = ""  # reason why it is not alive
    seconds: dict[str, float] = field(default_factory=lambda: {"idle": 0.0, "busy": 0.0})
    since: float = field(default_factory=time.monotonic)

    def account(self) -> None:
        """Book the time since the last call as idle or busy, according to the present state."""
        now = time.monotonic()
        if self.alive:
            self.seconds["busy" if self.load else "idle"] += now - self.since
        self.since = now

    def silent(self, progress: int | None) -> float:
        """Return the seconds for which it has had work but made no progress. An engine that does
        not count its tokens makes progress with each request that ends."""
        now = time.monotonic()
        # Without work, or while it reads weights, an engine rightly makes no token.
        if progress != self.progress or not self.load or self.updating:
            self.progress, self.progressed = progress, now
        return now - self.progressed


@dataclass
class Waiter:
    """One request."""

    size: int  # samples
    least: int  # version of the weights
    given: threading.Condition  # on the router's lock
    member: Member | None = None
    life: int = 0  # of the member when assigned

    @property
    def engine(self) -> RouterEngine:
        assert self.member is not None
        return self.member.engine

    def asks_more(self, other: Waiter) -> bool:
        """Return whether this request needs at least as much as the other."""
        return self.size >= other.size and self.least >= other.least

    def choose(self, members: Iterable[Member], capacity: float) -> Member | None:
        """Take the least loaded member that has room, and wake the request."""
        free = [
            each
            for each in members
            # A request over the capacity goes to an idle engine, or would wait for ever.
            if each.version >= self.least and (each.load == 0 or each.load + self.size <= capacity)
        ]
        if not free:
            return None
        self.member = min(free, key=lambda each: each.load)
        self.life = self.member.life
        self.member.account()
        # Its silence counts from here: without work it had nothing to report.
        if not self.member.load:
            self.member.progressed = self.member.since
        self.member.load += self.size
        self.given.notify()
        return self.member
