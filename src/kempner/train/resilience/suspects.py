"""Judgement of a late step: which rank the others wait for, and whether it is stuck. Pure: no
clock, no store, no torch.

Each look has the answers of every rank's watchdog, how long silent ranks have been silent, and what
the kernel reports of a process. A run is ended before its limit only when two sources that do not
depend on each other accuse the same rank, look after look, for as long as HOLD_S says; a rank that
computes, compiles, saves or validates is never stuck, only named.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace

# How long two sources must agree, in seconds, by what the rank does. The longer ones outlast
# temporary stalls: garbage collection, the failover of a switch or file server.
HOLD_S = {
    "stopped": 10.0,
    "gone": 10.0,
    "differs": 10.0,
    "busy": 25.0,  # its main thread runs and holds the GIL
    "unseen": 45.0,  # no neighbour can tell whether it exists
    "still": 60.0,  # in a call that does not return, e.g. of a file system
}
ANSWERS, RECORDERS, KERNEL, RAS = "answers", "flight recorders", "kernel", "NCCL's RAS"
STILL_CPU = 0.05  # of a core: less is no work
STILL_BYTES = 1 << 20  # between two looks; a lock and a log take fewer
GAP_S = 10.0  # between two looks: the judge itself was stopped
# The input has the same size on all ranks.
EVEN = ("all_reduce", "allreduce", "broadcast", "gather_base", "scatter_base")
NAMED_SUSPECTS = 16


@dataclass(frozen=True)
class Seen:
    """A process as seen by the kernel: the state of its main thread (R, S, D, T, Z; "": it
    is gone), the CPU seconds of that thread and of all, the bytes read and written, the
    kernel function it sleeps in, and its place in the code, if available. `at`: seconds of
    its node's clock."""

    state: str
    at: float = 0.0
    cpu: float = 0.0
    cpu_all: float = 0.0
    moved: int = 0
    wchan: str = ""
    place: str = ""


@dataclass(frozen=True)
class Call:
    """A collective that a rank has launched, or a message to another rank. `number`:
    in its group."""

    group: str
    number: int
    name: str
    shape: str = ""
    done: bool = False
    is_message: bool = False  # from one rank to another: its name differs

    @property
    def kind(self) -> str:
        """Name and, if it must be the same on all ranks, shape."""
        even = any(word in self.name for word in EVEN)
        return f"{self.name} {self.shape}".strip() if even else self.name


@dataclass(frozen=True)
class Answer:
    """One rank's answer. `process`: pid, birth and namespace; `number` grows with each answer, 0 is
    the one of the start; `calls`: the last ones of each group and all in flight, None if not
    recorded; `other`: a rank on the same node, and what the kernel reports of it."""

    process: str
    number: int = 0
    step: int = -1
    place: str = ""
    patient: bool = False
    compiles: bool = False
    launched: int = -1
    calls: tuple[Call, ...] | None = None
    seen: Seen | None = None
    other: int = -1
    other_seen: Seen | None = None

    @classmethod
    def parse(cls, text: str) -> Answer:
        """Read the JSON of write(). Raises ValueError, TypeError."""
        values = json.loads(text)
        for name in ("seen", "other_seen"):
            values[name] = Seen(**seen) if (seen := values.get(name)) else None
        if (calls := values.get("calls")) is not None:
            values["calls"] = tuple(Call(**call) for call in calls)
        return cls(**values)

    def write(self) -> str:
        return json.dumps(asdict(self))

    @property
    def is_waiting(self) -> bool:
        """True if it waits for other ranks, by its flight recorder or, without one,
        by its place."""
        if self.calls is None:
            return "distributed" in self.place
        return not all(call.done for call in self.calls)


@dataclass(frozen=True)
class Look:
    """Facts at one time. `silent`: seconds of silence, of silent ranks; `hosts`: of all ranks.
    `behind`: ranks that NCCL's RAS misses, or that have launched fewer collectives."""

    answers: Mapping[int, Answer]
    silent: Mapping[int, float] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    behind: frozenset[int] = frozenset()

    def seen(self, rank: int) -> Seen | None:
        """Return what the kernel reports of a rank, by its own answer or its neighbour's."""
        if rank in self.answers:
            return self.answers[rank].seen
        beside = (a.other_seen for a in self.answers.values() if a.other == rank)
        return next((seen for seen in beside if seen is not None), None)


@dataclass(frozen=True)
class Suspect:
    """A rank that the others wait for. `doing`: a key of HOLD_S, else it is not stuck."""

    rank: int
    doing: str
    words: str
    sources: tuple[str, ...]
    held: float = 0.0  # seconds that this has been so

    @property
    def is_stuck(self) -> bool:
        """True once two sources have agreed long enough."""
        return len(self.sources) > 1 and self.held >= HOLD_S.get(self.doing, float("inf"))


class Judge:
    """Looks repeatedly, from when a step is late until it is done."""

    def __init__(self) -> None:
        self._last = float("-inf")
        self._since: dict[tuple[int, bool], float] = {}  # by rank and two sources
        self._seen: dict[int, Seen] = {}  # the last sample
        self._still: set[int] = set()  # ranks whose main thread does nothing
        self._places: tuple[float, dict[int, str]] = (0.0, {})

    def look(self, now: float, look: Look) -> list[Suspect]:
        """Return the ranks that the others wait for; none while some rank saves or validates.
        `now`: seconds of any clock."""
        if now - self._last > GAP_S:
            # The judge was stopped: earlier observations may no longer hold.
            self._since, self._seen, self._still = {}, {}, set()
        self._last = now
        places = {rank: answer.place for rank, answer in look.answers.items()}
        if places != self._places[1]:
            self._places = (now, places)
        for rank in (*look.answers, *look.silent):
            self._watch(rank, look.seen(rank))
        # The others may wait for that rank, for an unknown time.
        if any(answer.patient for answer in look.answers.values()):
            self._since = {}
            return []
        found = list(self._accused(now, look))
        # The time of two sources starts when the second joins, and restarts when one drops out.
        keys = {(s.rank, len(s.sources) > 1) for s in found}
        self._since = {key: self._since.get(key, now) for key in keys}
        return [replace(s, held=now - self._since[s.rank, len(s.sources) > 1]) for s in found]

    def _watch(self, rank: int, seen: Seen | None) -> None:
        """Record whether a rank's main thread has done anything between two samples."""
        before = self._seen.get(rank)
        if seen is None:
            self._still.discard(rank)
            self._seen.pop(rank, None)
            return
        seconds = seen.at - before.at if before is not None else 0.0
        if before is not None and 0.0 <= seconds < 1.0:
            return  # no new sample yet
        # Ready to run counts as work: on a busy core the thread may get little time.
        worked = seen.state == "R"
        if before is not None and seconds > 0:
            worked = worked or seen.cpu - before.cpu > STILL_CPU * seconds
            # Half a core on other threads: the main thread may be waiting for them.
            worked = worked or seen.cpu_all - before.cpu_all > 10 * STILL_CPU * seconds
            worked = worked or seen.moved - before.moved > STILL_BYTES
        (self._still.discard if worked else self._still.add)(rank)
        self._seen[rank] = seen

    def _accused(self, now: float, look: Look) -> Iterable[Suspect]:
        ranks = len(look.answers) + len(look.silent)
        # A rank without an open call waits for nobody, and may be whom the others wait for.
        idle = [r for r, answer in look.answers.items() if not answer.is_waiting]
        waiting = len(look.answers) - len(idle)
        all_wait = bool(waiting) and not idle
        # If most are silent, this side of the network may be cut off.
        few = 2 * len(look.silent) <= ranks
        for rank in look.silent:
            yield self._silent(rank, look, all_wait and few)
        if 0 < len(idle) <= waiting:
            for rank in idle:
                yield self._idle(rank, look)
        if all_wait and not look.silent:
            yield from self._different(now, look)

    def _silent(self, rank: int, look: Look, all_wait: bool) -> Suspect:
        """Return the suspect for a rank whose watchdog is silent."""
        seen, sources = look.seen(rank), [ANSWERS]
        at = f" in {seen.place}" if seen is not None and seen.place else ""
        if seen is None:
            doing, words = "unseen", "does not answer"
        elif seen.state == "t":
            doing, words = "traced", "is stopped by a debugger"
        elif seen.state == "T":
            doing, words = "stopped", "is stopped (SIGSTOP)"
        elif seen.state in ("", "Z", "X"):
            doing, words = "gone", "has ended"
        elif rank in self._still:
            doing, words = "still", f"does not answer and does nothing{at}{_kernel(seen)}"
        else:
            doing, words = "busy", f"does not answer: its main thread runs and keeps the GIL{at}"
        # A running main thread is no evidence: such a rank needs that of the recorders.
        if doing not in ("unseen", "busy"):
            sources.append(KERNEL)
        return self._suspect(rank, look, doing, words, [*sources, *[RECORDERS] * all_wait])

    def _idle(self, rank: int, look: Look) -> Suspect:
        """Return the suspect for a rank that answers and has joined all its collectives, while
        others wait in one."""
        answer, sources = look.answers[rank], [RECORDERS]
        doing = "works"
        if answer.compiles:
            doing = "compiles"
        elif rank in self._still:
            doing = "still"
            sources.append(KERNEL)
        launched = max(a.launched for a in look.answers.values())
        how = {"works": "", "compiles": ", compiling"}.get(doing, ", doing nothing")
        words = f"lags: {answer.place}{how}"
        if answer.seen is not None and doing == "still":
            words += _kernel(answer.seen)
        if launched > answer.launched >= 0:
            words += f", has launched {answer.launched:,} of {launched:,} collectives"
        return self._suspect(rank, look, doing, words, sources)

    def _different(self, now: float, look: Look) -> Iterable[Suspect]:
        """Yield ranks whose call differs from the others', at a number of a group at which
        some rank waits."""
        calls: dict[tuple[str, int], dict[int, Call]] = {}
        for rank, answer in look.answers.items():
            for call in answer.calls or ():
                # Sender and receiver of one message make calls of different names.
                if not call.is_message:
                    calls.setdefault((call.group, call.number), {})[rank] = call
        still = now - self._places[0] > 2.0
        for (group, number), by_rank in calls.items():
            counts = Counter(call.kind for call in by_rank.values()).most_common()
            if len(counts) < 2 or all(call.done for call in by_rank.values()):
                continue
            # Without a majority, nobody can tell who is right: name all.
            most = "" if counts[0][1] == counts[1][1] else counts[0][0]
            whose = most or " or ".join(sorted(kind for kind, _ in counts))
            for rank, call in by_rank.items():
                if call.kind != most:
                    words = (
                        f"has launched {call.kind} as collective {number:,} of group {group}, "
                        f"where others have {whose}: {look.answers[rank].place}"
                    )
                    sources = [RECORDERS, *[ANSWERS] * still]
                    yield self._suspect(rank, look, "differs", words, sources)

    def _suspect(
        self, rank: int, look: Look, doing: str, words: str, sources: list[str]
    ) -> Suspect:
        if rank in look.behind:
            sources.append(RAS)
        on = f" on {host}" if (host := look.hosts.get(rank)) else ""
        return Suspect(rank, doing, f"rank {rank}{on} {words}", tuple(sources))


def _kernel(seen: Seen) -> str:
    where = f" in {seen.wchan}" if seen.wchan else ""
    return f" (state {seen.state}{where})"


def in_words(suspects: list[Suspect]) -> list[str]:
    """Return a line for each suspect, of at most NAMED_SUSPECTS."""
    lines = [suspect.words for suspect in suspects[:NAMED_SUSPECTS]]
    more = len(suspects) - len(lines)
    return [*lines, f"and {more} more ranks"] if more else lines
