"""The router over all engines of a run: tracks which are alive and which weights each has, and
assigns requests to them. No torch.

If an engine is lost, its requests go to another one with the same seed, so that the samples are the
same. It is taken back when it answers again and has the newest weights. An engine that another run
uses counts as lost.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kempner.extensions.generate.config import Sampling
from kempner.extensions.rl.engines.client import (
    Busy,
    Cancelled,
    Closed,
    Completion,
    EngineLeased,
    Flight,
    GivenUp,
    Lost,
    NoEngines,
    Rejected,
    RouterEngine,
)
from kempner.extensions.rl.engines.members import Member, Waiter

BEAT_EVERY_S = 2.0
HEARTBEAT_MISSES = (
    2  # consecutive beats without an answer in time; one refused connection is enough
)
BUSY_S = 0.2  # before retrying an engine that accepts nothing now
UPDATE_TRIES = 5  # of an update to one version that an engine refuses
REQUEST_FAILURES = 5  # of a request, on any engines, before it is given up
RECENT = 0.1  # weight of a request in the running mean
SAY_EVERY_S = 60.0  # that there is no engine


class Router:
    def __init__(
        self,
        find: Callable[[], Mapping[str, str]],
        make: Callable[[str], RouterEngine],
        slots: int,
        queued: int,
        say: Callable[[str], None],
        silence: float,
        patience: float | None = None,
    ) -> None:
        """`find`: the URLs of the engines, by name; `slots`: samples that an engine processes at a
        time; `queued`: samples that wait there, so that it never runs out of work; `silence`:
        seconds after which an engine with work that neither reads nor writes a token is lost;
        `patience`: seconds without any engine before the run gives up; None: something else ensures
        that engines come, with weights of this run."""
        self._find, self._make, self._slots, self._queued = find, make, slots, queued
        self._say, self._silence, self._patience = say, silence, patience
        self._members: dict[str, Member] = {}
        self._held = 1.0  # mean share of a request's time that each of its samples holds a slot
        self._target: tuple[int, dict[str, Any]] = (-1, {})
        self._change = threading.RLock()
        self._waiting: deque[Waiter] = deque()  # requests, in the order in which they are assigned
        self._wake: dict[str, threading.Event] = {}
        self._closed = False
        self._failure: Exception | None = None
        self._last_alive = self._said = time.monotonic()
        self._began = time.monotonic()
        self._tokens = 0
        self._updates: list[float] = []  # seconds of each

    def start(self) -> None:
        threading.Thread(target=self._scan, daemon=True).start()

    def close(self) -> None:
        with self._change:
            self._closed = True
            members = list(self._members.values())
            self._hand_out()
        for member in members:
            self._wake[member.name].set()
            member.engine.abort()

    def release(self) -> None:
        """Free the engines that existed before this run, which has ended, for other runs."""
        for engine in self.alive() if self._patience is not None else []:
            with contextlib.suppress(Busy, Lost, Rejected):
                engine.release()

    # --- requests ---

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        least: int,
        flight: Flight | None = None,
    ) -> list[list[Completion]]:
        """Return `n` samples of each prompt, by weights of version `least` or later; waits
        for an engine as long as there may be one. Raises Cancelled, Closed, GivenUp,
        NoEngines or Rejected."""
        flight = flight or Flight()
        size, again, failures = len(prompts) * n, False, 0
        while True:
            member, engine, life = self._take(size, least, again)
            again = True
            try:
                flight.begin(member.version)
                found = engine.complete(prompts, n, sampling, flight)
            except Busy:
                # The place is given back after the pause; Busy is not a failure of the request.
                time.sleep(BUSY_S)
                continue
            except Lost as error:
                if flight.cancelled:
                    raise Cancelled from None
                # Its other requests may be long, and continue: the next beat finds out its state.
                self._lose(member, life, str(error), cut=False)
                self._wake[member.name].set()
                failures += 1
                if failures >= REQUEST_FAILURES:
                    raise GivenUp(f"engines have lost it {failures} times: {error}") from None
                continue
            finally:
                with self._change:
                    member.account()
                    member.progressed = time.monotonic()
                    member.load -= size
                    self._hand_out()
            texts = [text for each in found for text in each]
            oldest = min(min(text.versions, default=-1) for text in texts)
            with self._change:
                if oldest >= least:
                    self._learn([len(text.token_ids) for text in texts])
                    self._hand_out()
                    return found
                # It was restarted with older weights, between a beat and this request.
                if member.life == life:
                    member.version, member.trusted = -1, False
                    self._wake[member.name].set()

    def _take(self, size: int, least: int, again: bool) -> tuple[Member, RouterEngine, int]:
        """Take an engine for a request; a request that was lost with its engine goes first."""
        waiter = Waiter(size, least, threading.Condition(self._change))
        with self._change:
            # It has waited longest, and a batch waits for its slowest request.
            (self._waiting.appendleft if again else self._waiting.append)(waiter)
            self._hand_out()
            while waiter.member is None:
                if self._closed:
                    raise Closed
                if self._failure:
                    raise self._failure
                waiter.given.wait()
            return waiter.member, waiter.engine, waiter.life

    def _hand_out(self) -> None:
        """Assign engines to waiting requests after a change. Wakes each request separately, because
        thousands may wait. The lock is held."""
        if self._closed or self._failure:
            for waiter in self._waiting:
                waiter.given.notify()
            return
        # Samples that end early free their slots: during a request a slot serves 1 / held of them.
        capacity = self._slots / self._held + self._queued
        alive = [each for each in self._members.values() if each.alive]
        # Without room, skip the waiting requests: there may be thousands.
        room = any(each.load == 0 or each.load < capacity for each in alive)
        rest: deque[Waiter] = deque()
        # A request for at least as much as one of these gets no engine either.
        refused: list[Waiter] = []
        while self._waiting and room:
            waiter = self._waiting.popleft()
            if any(waiter.asks_more(each) for each in refused):
                rest.append(waiter)
            elif waiter.choose(alive, capacity) is None:
                rest.append(waiter)
                refused.append(waiter)
        # Put them back, in order, ahead of requests not yet examined.
        self._waiting.extendleft(reversed(rest))

    def _learn(self, lengths: Sequence[int]) -> None:
        """Learn the work of a request, which ends with its longest sample; the slots of the others
        are free earlier."""
        self._tokens += sum(lengths)
        share = sum(lengths) / max(1, len(lengths) * max(lengths))
        self._held += RECENT * (share - self._held)

    # --- weights ---

    def offer(self, version: int, body: dict[str, Any]) -> None:
        """Bring all engines to this version; `body` is the request sent to them."""
        with self._change:
            if version != self._target[0]:
                for member in self._members.values():
                    member.refused = 0
            self._target = (version, body)
            for wake in self._wake.values():
                wake.set()

    def reading(self) -> set[int]:
        """Return the versions that engines read now, or will read: each begins with the
        one offered last."""
        with self._change:
            members = self._members.values()
            return {self._target[0], *(each.reads for each in members if each.updating)}

    def alive(self) -> list[RouterEngine]:
        with self._change:
            return [each.engine for each in self._members.values() if each.alive]

    def with_version(self, version: int) -> RouterEngine | None:
        """Return the least loaded engine with exactly this version."""
        with self._change:
            candidates = [
                each for each in self._members.values() if each.alive and not each.updating
            ]
            candidates = [each for each in candidates if each.version == version]
            return min(candidates, key=lambda each: each.load).engine if candidates else None

    def figures(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        with self._change:
            members = list(self._members.values())
            times = {"idle": 0.0, "busy": 0.0}
            for member in members:
                member.account()
                for kind, seconds in member.seconds.items():
                    times[kind] += seconds
                member.seconds = {"idle": 0.0, "busy": 0.0}
            now = time.monotonic()
            updates = self._updates
            metrics = {
                "engines": float(sum(member.alive for member in members)),
                "engine_tokens_per_s": self._tokens / max(1e-9, now - self._began),
                "engine_idle": times["idle"] / (sum(times.values()) or 1.0),
                "update_seconds": sum(updates) / len(updates) if updates else 0.0,
            }
            self._began, self._tokens, self._updates = now, 0, []
            return metrics

    # --- threads that look after the engines ---

    def _scan(self) -> None:
        """Find engines that are new, or are back under another URL."""
        while not self._closed:
            # A shared file system may fail for a moment; this thread must stay.
            with contextlib.suppress(OSError):
                for name, url in self._find().items():
                    self._take_in(name, url)
            self._look_at_all()
            time.sleep(BEAT_EVERY_S / 4)

    def _take_in(self, name: str, url: str) -> None:
        member = self._members.get(name)
        if member is None:
            engine = self._make(url)
            # Before adding the member: whoever finds the member sets this event.
            self._wake[name] = threading.Event()
            member = Member(name, engine, trusted=self._patience is None)
            with self._change:
                self._members[name] = member
            threading.Thread(target=self._keep, args=(member,), daemon=True).start()
        elif member.engine.url != url:
            engine = self._make(url)
            self._lose(member, member.life, f"it is at {url} now")
            with self._change:
                member.engine, member.misses = engine, 0
            self._wake[name].set()

    def _look_at_all(self) -> None:
        now = time.monotonic()
        with self._change:
            if any(each.alive for each in self._members.values()):
                self._last_alive = now
            silent = now - self._last_alive
            reasons = [f"{each.name}: {each.why}" for each in self._members.values() if each.why]
            why = "; ".join(reasons) or "none has published its address"
            if self._patience is not None and silent > self._patience and not self._failure:
                self._failure = NoEngines(f"no engine for {silent:.0f} s: {why}")
                self._hand_out()
        if silent > SAY_EVERY_S and now - self._said > SAY_EVERY_S:
            self._said = now
            self._say(f"no engine for {silent:.0f} s: {why}")

    def _keep(self, member: Member) -> None:
        wake = self._wake[member.name]
        while not self._closed:
            self._beat(member)
            wake.wait(BEAT_EVERY_S)
            wake.clear()

    def _beat(self, member: Member) -> None:
        with self._change:
            # Noted before asking: an answer about an earlier life does not concern this one.
            engine, life = member.engine, member.life
            before = member.version, member.updating
        try:
            # Its version and progress come with the answer to the update.
            if member.updating:
                engine.alive()
                member.misses = 0
                return
            version = engine.version()
            progress = engine.progress()
        except EngineLeased as error:
            self._lose(member, life, str(error))
            return
        except Busy:  # without weights: they could not be read
            version, progress = -1, None
        except (Lost, Rejected) as error:
            with self._change:
                member.misses += 1
                # Only a timeout may be due to load; a refused connection means that it is gone.
                over = member.misses >= HEARTBEAT_MISSES or "timed out" not in str(error)
            if over:
                self._lose(member, life, str(error))
            return
        with self._change:
            member.misses = 0
            silent = member.silent(progress)
        if silent > self._silence:
            self._lose(member, life, f"has work, but made no token for {silent:.0f} s")
            return
        if version is not None:
            self._know(member, engine, version, before)

    def _know(
        self, member: Member, engine: RouterEngine, version: int, before: tuple[int, bool]
    ) -> None:
        """Record that an engine is alive, with this version; `before`: its version when asked, and
        whether it was updating."""
        with self._change:
            # It has meanwhile moved to another URL: this answer came from its old process.
            if self._closed or member.engine is not engine:
                return
            if not member.alive:
                self._say(f"{member.name} at {engine.url}: taken, with weights {version}")
            state_before = member.alive, member.version
            member.account()
            member.alive, member.why = True, ""
            # If an update has ended since the question, the answer may concern the older weights.
            if (member.version, member.updating) == before:
                member.version = version if member.trusted else -1
            target, body = self._target
            begin = not member.updating and member.version < target
            if begin:
                member.updating, member.reads = True, target
            # Most beats change nothing, and there are half as many per second as engines.
            if state_before != (True, member.version):
                self._hand_out()
        if begin:
            work = (member, engine, member.life, target, body)
            threading.Thread(target=self._update, args=work, daemon=True).start()

    def _update(
        self, member: Member, engine: RouterEngine, life: int, target: int, body: dict[str, Any]
    ) -> None:
        began = time.monotonic()
        problem, refused = "", False
        try:
            version = engine.update(body)
        except (Lost, EngineLeased) as error:
            self._lose(member, life, str(error), cut=False)
            version = -1
        except (Busy, Rejected) as error:
            version, problem, refused = -1, str(error), isinstance(error, Rejected)
        with self._change:
            member.updating = False
            if member.life != life or member.engine is not engine:
                return
            if version >= 0:
                member.version, member.trusted, member.refused = version, True, 0
                self._updates.append(time.monotonic() - began)
                if target != self._target[0]:  # a newer one has come meanwhile
                    self._wake[member.name].set()
            elif problem and target == self._target[0]:
                self._not_taken(member, target, problem, refused)
            self._hand_out()

    def _not_taken(self, member: Member, target: int, problem: str, refused: bool) -> None:
        """Note that an engine has not taken the newest weights. `refused`: not because it could not
        at this time, for example because a newer version had cut their transfer off. The lock
        is held."""
        verb = "refuses" if refused else "could not take"
        # Once per version, because the next beat tries again.
        if refused or member.unable != target:
            self._say(f"{member.name} at {member.engine.url} {verb} weights {target}: {problem}")
        member.refused += refused
        member.unable = target
        # The engine itself is at fault if another engine has taken these weights.
        taken = any(each.version >= target for each in self._members.values())
        if refused and member.refused >= UPDATE_TRIES and not taken:
            self._failure = Rejected(f"{member.name} refuses weights {target}: {problem}")

    def _lose(self, member: Member, life: int, why: str, cut: bool = True) -> None:
        """Mark an engine as lost. `cut`: also abort its requests."""
        with self._change:
            if member.life != life or self._closed:
                return
            if member.alive or member.why != why:
                self._say(f"{member.name} at {member.engine.url} is lost: {why}")
            member.account()
            member.alive, member.version, member.why = False, -1, why
            # Engines started by others may come back with any weights.
            member.trusted = self._patience is None
            # Requests and updates of the old life must not affect the new one.
            member.life += 1
            engine = member.engine
            self._hand_out()
        # Outside the lock, which the woken threads will need.
        if cut:
            engine.abort()
