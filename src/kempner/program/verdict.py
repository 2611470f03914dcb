"""How an attempt of a program has ended, from how its ranks have. No torch."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kempner.history.events import Fault
from kempner.program.channel import Message

BAD_INPUT = 2  # argparse's exit code, and Python's for a file that is not there
NOT_STARTED = (2, 126, 127)  # the last two: a shell found no command
HUNG = 70  # as the trainer's watchdog
NAMED = 8  # ranks whose crash is recorded

State = Literal["done", "interrupted", "stopped", "failed", ""]


@dataclass(frozen=True)
class Ending:
    """How a rank's program has ended; `gone`: its supervisor is dead, and nobody knows."""

    rank: int
    host: str
    code: int  # negative: the signal
    words: str  # the last ones
    lost_peer: bool = False  # they only say that another rank is gone
    gone: bool = False

    @property
    def reason(self) -> str:
        if self.gone:
            return f"rank {self.rank} on {self.host}: its supervisor is gone"
        how = f"exit code {self.code}"
        if self.code < 0:
            how = f"killed by {name_of_signal(-self.code)}"
        return f"rank {self.rank} on {self.host}: {how}{f': {self.words}' if self.words else ''}"


def name_of_signal(number: int) -> str:
    """Most of the real-time signals have none."""
    known = {each.value: each.name for each in signal.Signals}
    return known.get(number, f"signal {number}")


@dataclass(frozen=True)
class Outcome:
    """`state` is empty after a crash or a hang: the batch script decides then."""

    state: State
    reason: str
    code: int
    final: bool = False  # bad input: another start would end in the same way


def culprit(bad: Sequence[Ending]) -> Ending:
    """The rank that failed first and by itself. `bad` is in the order in which they ended. Being
    killed is nobody else's doing, but for SIGABRT and SIGTERM: NCCL's watchdog aborts when a
    collective times out, and the supervisors end the others."""
    others = (-signal.SIGABRT, -signal.SIGTERM)
    killed = [e for e in bad if e.code < 0 and e.code not in others]
    own = [e for e in bad if not e.lost_peer and not e.gone and e.code not in others]
    gone = [e for e in bad if e.gone]
    return (killed or gone or own or list(bad))[0]


def judge(
    ended: Sequence[Ending], asked: str, unheard: bool, hung: bool, progressed: bool
) -> Outcome:
    """`asked`: interrupt, stop or nothing; `unheard`: the program listened to no such request, and
    nobody ended it."""
    bad = [ending for ending in ended if ending.code != 0]
    if hung:
        return Outcome("", "no heartbeat", HUNG)
    if asked == "stop":
        return Outcome("stopped", "stopped by the user", 0)
    if asked == "interrupt" and (bad or not unheard):
        return Outcome("interrupted", "asked to make room", 0)
    if not bad:
        return Outcome("done", "the program has ended with exit code 0 on all ranks", 0)
    first = culprit(bad)
    if first.code in NOT_STARTED and not progressed and not first.gone:
        return Outcome("", first.reason, BAD_INPUT, final=True)
    return Outcome("", first.reason, 128 - first.code if first.code < 0 else first.code)


def crash_faults(ended: Sequence[Ending], outcome: Outcome, head: Mapping[str, Any]) -> list[Fault]:
    """Of each rank that crashed, the first one first. srun tells of a supervisor that is gone."""
    bad = [e for e in ended if e.code != 0 and not e.gone and e.code != -signal.SIGTERM]
    if outcome.state or not bad or outcome.code == HUNG:
        return []
    first = culprit(bad)
    others = [ending for ending in bad if ending is not first][: NAMED - 1]
    return [
        Fault(
            **head,
            kind="crash",
            ranks=(ending.rank,),
            hosts=(ending.host,),
            reason=ending.reason,
            lost_peer=ending.lost_peer,
            final=outcome.final,
        )
        for ending in (first, *others)
    ]


def hang_fault(
    told: Mapping[int, Message],
    hosts: Mapping[int, str],
    endings: Mapping[int, Ending],
    head: Mapping[str, Any],
) -> Fault:
    """Who hangs: a rank whose supervisor does not answer; else one that is stopped or waits for a
    disk; else one that is behind the others. When all are alike they wait for each other, and
    nobody is blamed."""
    quiet = [rank for rank in hosts if rank not in told and rank not in endings]
    stuck = [rank for rank, m in told.items() if m.get("condition") in ("T", "t", "D")]
    steps = {rank: m["step"] for rank, m in told.items() if m.get("step") is not None}
    last = max(steps.values(), default=0)
    behind = [rank for rank, step in steps.items() if step < last]
    ranks = sorted(quiet or stuck or behind)
    silence = max((m.get("silence", 0.0) for m in told.values()), default=0.0)
    reason = f"no heartbeat for {silence:.0f} s"
    if ranks:
        why = "do not answer" if quiet else "are stopped" if stuck else "are behind the others"
        reason += f"; ranks that {why}: {ranks[:16]}"
    return Fault(
        **head,
        kind="hang",
        ranks=tuple(ranks),
        hosts=tuple(sorted({hosts[rank] for rank in ranks})),
        reason=reason,
    )
