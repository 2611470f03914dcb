"""Membership in the rounds of low-communication training, in which each replica is a separate world
that may be lost.

The members of a round are fixed before its collective, which runs on copies of the data sent. Then
each replica votes, and the round counts only if all vote yes. If a replica dies before its vote,
the others repeat the round without it, with the same numbers; if it dies later, the round stands.
So no round counts for some replicas only, and none counts twice.

    here          each replica that came, and how many rounds it has done
    gone          replicas that the judge has declared gone (door.py)
    arrived/E     replicas ready for the collective of epoch E
    epoch/E       its members, fixed by the first to write it
    votes/E       yes or no from each member
    outcome/E     commit or abort, fixed by the first to write it

    first         the oldest epoch whose keys are kept

An epoch is one attempt at an exchange, and lists the replicas that wait to join. At the end of a
round, after its outer step, the members hold one more epoch with these, in which they receive the
state. An epoch is forgotten once all of its members have come to the next one, because the store
takes memory of the batch host.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from kempner.checkpoint.ranks import PeerFailed
from kempner.extensions.lowcomm.door import FIRST_EPOCH_KEY, GONE_KEY, HERE_KEY, Door

if TYPE_CHECKING:
    from torch import Tensor

MEMBERSHIP_POLL_S = 0.02
WATCH_S = 0.1  # in the collective, where our own error shows first
ATTEMPTS = 4  # at one round without a loss
# A bound for abandoned threads: the judge reports a stopped peer within seconds.
COLLECTIVE_S = 600.0
WITHIN_S = 3600.0  # the watchdog detects hangs
NO_VALUE = "-"  # marks a key without a value

_T = TypeVar("_T")


class TooFew(PeerFailed):
    """Fewer replicas are left than the run needs to continue."""


class Epoch(NamedTuple):
    """One attempt at an exchange, as all members see it. `round`: rounds done if it counts.
    `entry`: it only brings replicas together, and `joiners` receive the state."""

    number: int
    round: int
    members: tuple[str, ...]
    joiners: tuple[str, ...]
    entry: bool
    about: dict[str, Any]  # the first member's facts about the run, for the joiners
    waiting: tuple[str, ...]  # to join

    @property
    def everyone(self) -> tuple[str, ...]:
        return self.members + self.joiners

    @classmethod
    def of(cls, number: int, text: str) -> Epoch:
        rounds, members, joiners, entry, about, waiting = json.loads(text)
        return cls(number, rounds, tuple(members), tuple(joiners), entry, about, tuple(waiting))


class ReplicaGroup(NamedTuple):
    """This rank and its counterparts in the other replicas, for one epoch."""

    gloo: Any  # dist.ProcessGroupGloo
    place: int
    epoch: Epoch

    @property
    def joins(self) -> bool:
        return self.place >= len(self.epoch.members)

    @property
    def size(self) -> int:
        return len(self.epoch.everyone)

    def share(self, tensors: list[Tensor]) -> int:
        """Fill the joiners' tensors with those of the first member; returns the bytes sent."""
        joiners = range(len(self.epoch.members), self.size)
        for tensor in tensors:
            if self.joins:
                self.gloo.recv([tensor], 0, 0).wait()
            elif self.place == 0:
                for work in [self.gloo.send([tensor], to, 0) for to in joiners]:
                    work.wait()
        return 0 if self.place else len(joiners) * sum(tensor.nbytes for tensor in tensors)

    def mean(self, tensor: Tensor) -> Tensor:
        """Average over the members, in place."""
        self.gloo.allreduce([tensor]).wait()
        tensor /= self.size
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather the members' tensors, in their order."""
        parts = [tensor.new_empty(tensor.shape) for _ in self.epoch.everyone]
        self.gloo.allgather([parts], [tensor]).wait()
        return parts


_Exchange = Callable[[ReplicaGroup], _T]  # on copies: may be abandoned midway and repeated


class Membership:
    """Membership of this replica. Each of its ranks makes one, and calls its methods in the same
    order as the replica's other ranks, one at a time, on any thread."""

    def __init__(
        self, door: Door, slot: int, replicas: int, least: int, start_timeout: float
    ) -> None:
        """`slot`: of this replica among `replicas` at the start; the run needs `least` to go on."""
        import torch.distributed as dist

        self.door, self.replicas, self.least = door, replicas, least
        self._start_timeout = start_timeout
        alone = not dist.is_initialized()
        self.rank, self._ranks = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        # A group of this replica's ranks for decisions, since the steps use the default group.
        limit = timedelta(seconds=WITHIN_S)
        self._within = dist.new_group(timeout=limit, backend="gloo") if self._ranks > 1 else None
        self.store = door.store
        self.me = self._from_first(lambda: door.new_name(slot))
        door.greet(self.me)
        self.roster: tuple[str, ...] = ()  # everyone in the last committed epoch
        self._next = 0  # the next epoch to be fixed
        self._last: Epoch | None = None  # the last fixed epoch with this replica
        self._joining: tuple[str, ...] = ()  # joiners of the last epoch without this replica
        # Reused by the groups: a new connection resolves names, 5 s with a slow name server.
        # An abandoned exchange keeps its connection.
        self._connections = [self.store.clone(), self.store.clone()]

    # --- what a replica does ---

    def enter(
        self, rounds: int, about: dict[str, Any], exchange: _Exchange[_T]
    ) -> tuple[Epoch, _T] | None:
        """Join the others with `rounds` rounds done, in an entry epoch. `about`: facts for replicas
        that join; its "weights" distinguish this replica's weights from others.

        Replicas that start together wait for each other. Those with the most rounds and the same
        weights are members, and the others receive their state. A replica that comes later waits
        for the end of a round. Returns None if the run has ended before. Raises TooFew if not
        enough replicas come."""
        if self.rank == 0:
            # The store appends atomically: two replicas that come at once lose no line.
            self.store.append(HERE_KEY, json.dumps([self.me, rounds]) + "\n")
        return self._commit(rounds, about, exchange, entry=True)

    def round(self, rounds: int, exchange: _Exchange[_T]) -> tuple[Epoch, _T]:
        """Run an exchange of the round that brings the count to `rounds`: repeats `exchange(group)`
        with the remaining replicas until all of them have its result. Raises TooFew."""
        done = self._commit(rounds, {}, exchange, entry=False)
        assert done is not None
        return done

    def admit(
        self, rounds: int, about: dict[str, Any], exchange: _Exchange[_T]
    ) -> tuple[Epoch, _T]:
        """Admit the replicas that wait, at the end of a round. Raises TooFew."""
        done = self._commit(rounds, about, exchange, entry=True)
        assert done is not None
        return done

    def over(self) -> None:
        """Announce the end of the run, so that replicas waiting to join stop waiting."""
        if self.rank == 0:
            self.store.set("over", "")

    def close(self) -> None:
        self.door.close()

    # --- one round, until it counts ---

    def _commit(
        self, rounds: int, about: dict[str, Any], exchange: _Exchange[_T], entry: bool
    ) -> tuple[Epoch, _T] | None:
        same, before = 0, None
        while True:
            answer = self._from_first(lambda: self._fixed(rounds, about, entry))
            if isinstance(answer, str):
                if answer:
                    raise TooFew(answer)
                return None
            epoch = answer
            result, problem = self._attempt(epoch, exchange)
            # One vote per replica: rank 0 must know about a failed rank first.
            problem = self._any(problem)
            self._next = epoch.number + 1
            self._forget(epoch)
            committed = self._from_first(lambda: self._settle(epoch, problem))  # noqa: B023
            if committed:
                self.roster = epoch.everyone
                assert result is not None
                return epoch, result[0]
            # The first epoch was aborted. Without a roster, its members would wait for others
            # to admit them.
            if not self.roster and self.me in epoch.members:
                self.roster = epoch.members
            same = same + 1 if epoch.everyone == before else 0
            before = epoch.everyone
            if same >= ATTEMPTS:
                raise RuntimeError(
                    f"round {rounds}: {ATTEMPTS} exchanges in a row have failed although all of "
                    f"{', '.join(epoch.everyone)} are alive: {problem}"
                )

    def _forget(self, epoch: Epoch) -> None:
        """Delete the keys of the epoch before this one. Since this one is fixed, its members have
        moved on; a replica outside it is gone, or was to join and finds the other epoch over."""
        last, self._last = self._last, epoch
        if last is None or epoch.members[0] != self.me:
            return
        # gloo publishes each peer's address under these keys: device 0, and the peer's index.
        keys = [f"group/{last.number}/{self.rank}/0/{i}" for i in range(len(last.everyone))]
        if self.rank == 0:
            self.store.set(FIRST_EPOCH_KEY, str(epoch.number))
            keys += [f"{of}/{last.number}" for of in ("arrived", "epoch", "votes", "outcome")]
        for key in keys:
            self.store.delete_key(key)

    def _fixed(self, rounds: int, about: dict[str, Any], entry: bool) -> Epoch | str:
        """Wait, on rank 0, until this replica's next epoch is fixed and return it; or return why
        there is none, "" if the run is over."""
        # The keys of older epochs are deleted: a late replica would wait for them for ever.
        self._next = max(self._next, self._first_kept())
        # Only members arrive. A joining replica is known from HERE_KEY, and waits for an entry.
        if self.roster or self._next == 0:
            line = json.dumps([self.me, about])
            self.store.append(f"arrived/{self._next}", f"{line}\n")
        began = time.monotonic()
        while True:
            self._next = max(self._next, self._first_kept())
            if text := self._read(f"epoch/{self._next}"):
                epoch = Epoch.of(self._next, text)
                if self.me in epoch.everyone:
                    return epoch
                if self.roster:
                    self.door.fence("a round was agreed on without it")
                self._next, self._joining = self._next + 1, epoch.everyone
                continue
            departures = self._gone()
            if self.me in departures:
                self.door.fence(departures[self.me])
            late = time.monotonic() - began > self._start_timeout
            proposed = self._propose(rounds, departures, entry, late)
            if isinstance(proposed, str):
                return proposed
            if proposed is not None:
                # compare_set() with "" sets a key only if it does not exist. The first proposal
                # wins; a later replica reads that proposal in its next turn.
                self.store.compare_set(f"epoch/{self._next}", "", json.dumps(proposed))
                continue
            time.sleep(MEMBERSHIP_POLL_S)

    def _propose(
        self, rounds: int, departures: dict[str, str], entry: bool, late: bool
    ) -> list[Any] | str | None:
        """Propose the next epoch, or say why there will be none; None: not yet."""
        if self.roster:
            return self._next_round(rounds, departures, entry)
        if self._next == 0:
            return self._first(departures, late)
        if self.store.check(["over"]):
            return ""
        if self._joining and set(self._joining) <= departures.keys():
            return f"none of the replicas that it was to join is left: {', '.join(self._joining)}"
        return None

    def _first(self, departures: dict[str, str], late: bool) -> list[Any] | str | None:
        """Propose the first epoch: all expected replicas, or those that came in time."""
        here = self._here(departures)
        arrived = self._arrived()
        if len(here) < self.replicas and not late:
            return None
        if len(here) < self.least:
            return f"{len(here)} of {self.replicas} replicas arrived within the start timeout"
        most = max(here.values())
        # Only replicas with the most rounds: a round that counted must not be repeated.
        members = sorted(name for name, rounds in here.items() if rounds == most)
        if not set(members) <= arrived.keys():
            return None
        # Equal rounds may have different histories: one may have been repeated without a replica.
        first = arrived[members[0]]
        members = [m for m in members if arrived[m].get("weights") == first.get("weights")]
        joiners = sorted(here.keys() - set(members))
        return [most, members, joiners, True, first, []]

    def _next_round(
        self, rounds: int, departures: dict[str, str], entry: bool
    ) -> list[Any] | str | None:
        """Return the remaining members, once all have arrived, and who joins or waits."""
        members = [name for name in self.roster if name not in departures]
        if len(members) < self.least:
            losses = ", ".join(
                f"{name} ({departures[name]})" for name in self.roster if name in departures
            )
            return f"{len(members)} replicas are left, {self.least} are needed; lost: {losses}"
        arrived = self._arrived()
        if not set(members) <= arrived.keys():
            return None
        others = sorted(self._here(departures).keys() - set(members))
        joiners, waiting = (others, []) if entry else ([], others)
        return [rounds, members, joiners, entry, arrived[members[0]], waiting]

    def _attempt(self, epoch: Epoch, exchange: _Exchange[_T]) -> tuple[tuple[_T] | None, str]:
        """Run the exchange; returns its result, or why it failed. It runs in a thread that
        is abandoned if another replica is lost, because gloo would wait for that replica
        until its timeout."""
        results: list[_T] = []
        problems: list[str] = []
        over = threading.Event()

        def work() -> None:
            connection = self._connections.pop() if self._connections else self.store.clone()
            try:
                results.append(exchange(self._group(epoch, connection)))
            except Exception as error:
                problems.append(f"{type(error).__name__}: {error}".splitlines()[0])
            over.set()
            self._connections.append(connection)

        threading.Thread(target=work, daemon=True, name=f"epoch {epoch.number}").start()
        while not over.wait(WATCH_S):
            if names := [name for name in epoch.everyone if name in self._gone()]:
                return None, f"lost {', '.join(names)}"
            # The epoch stays open until this replica votes, unless another one votes no.
            if self._outcome(epoch.number):
                return None, "another replica could not finish"
        return (None, problems[0]) if problems else ((results[0],), "")

    def _group(self, epoch: Epoch, connection: Any) -> ReplicaGroup:
        import torch.distributed as dist

        # One prefix per epoch and rank: an abandoned group never meets the next one.
        store = dist.PrefixStore(f"group/{epoch.number}/{self.rank}", connection)
        place, limit = epoch.everyone.index(self.me), timedelta(seconds=COLLECTIVE_S)
        gloo = dist.ProcessGroupGloo(store, place, len(epoch.everyone), limit)
        return ReplicaGroup(gloo, place, epoch)

    def _settle(self, epoch: Epoch, problem: str) -> bool:
        """Vote, on rank 0, and wait for the outcome. Losing a replica after its yes changes
        nothing: by then every member has the result."""
        number = epoch.number
        self.store.append(f"votes/{number}", f"{self.me} {'no' if problem else 'yes'}\n")
        while not (outcome := self._outcome(number)):
            # Read before the votes, so that a replica that left after voting has its vote counted.
            departures = self._gone()
            votes = dict(line.split() for line in self._lines(f"votes/{number}"))
            if "no" in votes.values() or any(
                name in departures and name not in votes for name in epoch.everyone
            ):
                self.store.compare_set(f"outcome/{number}", "", "abort")
            elif len(votes) == len(epoch.everyone):
                self.store.compare_set(f"outcome/{number}", "", "commit")
            else:
                time.sleep(MEMBERSHIP_POLL_S)
        # Declared gone while waiting: the others may have begun the next round without it.
        if self.me in (departures := self._gone()):
            self.door.fence(departures[self.me])
        return outcome == "commit"

    def _outcome(self, number: int) -> str:
        """Return an epoch's outcome, "" while it is open. A forgotten epoch was aborted: this
        replica had neither voted to commit it nor moved on."""
        outcome = self._read(f"outcome/{number}")
        return outcome or ("abort" if self._first_kept() > number else "")

    # --- the store's lists ---

    def _read(self, key: str) -> str:
        """Read a key; "" if it does not exist. get() would wait if a key is deleted after check();
        compare_set() then returns the expected value, and sets nothing."""
        value = self.store.compare_set(key, NO_VALUE, NO_VALUE)
        return "" if value == NO_VALUE.encode() else str(value.decode())

    def _first_kept(self) -> int:
        return int(self.store.get(FIRST_EPOCH_KEY))

    def _lines(self, key: str) -> list[str]:
        return self._read(key).splitlines()

    def _gone(self) -> dict[str, str]:
        """Map the names of lost replicas to the reasons."""
        lines = (line.partition(" ") for line in self._lines(GONE_KEY))
        return {name: reason for name, _, reason in lines}

    def _here(self, departures: dict[str, str]) -> dict[str, int]:
        """Map the names of replicas to rounds done."""
        here = dict(map(json.loads, self._lines(HERE_KEY)))
        return {name: rounds for name, rounds in here.items() if name not in departures}

    def _arrived(self) -> dict[str, dict[str, Any]]:
        """Map names to the facts that each replica reported on arrival."""
        return dict(map(json.loads, self._lines(f"arrived/{self._next}")))

    # --- the ranks of this replica, which decide as one ---

    def _tell(self, value: _T) -> _T:
        """Broadcast rank 0's value."""
        import torch.distributed as dist

        if self._ranks == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._within)
        return box[0]

    def _from_first(self, ask: Callable[[], _T]) -> _T:
        return self._tell(cast(_T, ask() if self.rank == 0 else None))

    def _any(self, problem: str) -> str:
        """Return the problem of any rank on all ranks."""
        import torch.distributed as dist

        if self._ranks == 1:
            return problem
        problems: list[str] = [""] * self._ranks
        dist.all_gather_object(problems, problem, group=self._within)
        return next(filter(None, problems), "")
