"""Verdict on an attempt of a program, from how its ranks have ended. No torch."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kempner.jobs.program.channel import ChannelMessage
from kempner.jobs.records.events import FaultEvent

USAGE_ERROR_EXIT = 2  # argparse's exit code, and Python's for a missing script
NOT_STARTED = (2, 126, 127)  # the last two: a shell found no command
HUNG = 70  # as the trainer's watchdog
NAMED_CRASHES = 8  # ranks whose crash is recorded
SLOW_S = 20.0  # for a program to exit after a failure: exit handlers, a core dump
KILLED_S = 1.0  # a killed rank may be noticed so much later than those that lost it
# NCCL's watchdog aborts if a collective times out, and Slurm ends the remaining ranks of a step.
# Any other signal is the rank's own fault.
ENDED_BY_OTHERS = (-signal.SIGABRT, -signal.SIGTERM)

EndState = Literal["done", "interrupted", "stopped", "failed", ""]


@dataclass(frozen=True)
class Ending:
    """End of a rank's program. `gone`: its supervisor is dead and the end is unknown."""

    rank: int
    host: str
    code: int  # negative: the signal
    words: str  # its last error or line
    lost_peer: bool = False  # `words` only say that another rank is gone
    gone: bool = False
    torn: bool = False  # its supervisor ended it because of another rank
    failed_at: float = 0.0  # monotonic time of its last traceback, if it failed with one, or end

    @property
    def killed(self) -> bool:
        return self.code < 0 and self.code not in ENDED_BY_OTHERS

    @property
    def lost(self) -> bool:
        return self.lost_peer and not self.killed

    @property
    def reason(self) -> str:
        if self.gone:
            return f"rank {self.rank} on {self.host}: its supervisor is gone"
        how = f"exit code {self.code}"
        if self.code < 0:
            how = f"killed by {name_of_signal(-self.code)}"
        return f"rank {self.rank} on {self.host}: {how}{f': {self.words}' if self.words else ''}"


def name_of_signal(number: int) -> str:
    """Return the name of a signal; most real-time signals have none."""
    names = {each.value: each.name for each in signal.Signals}
    return names.get(number, f"signal {number}")


@dataclass(frozen=True)
class Outcome:
    """Outcome of an attempt. `state`: "" after a crash or a hang, when the batch script decides."""

    state: EndState
    reason: str
    code: int
    final: bool = False  # bad input: another start would end in the same way


def first_failure(bad: Sequence[Ending]) -> Ending:
    """Return the rank that failed first and by itself. A killed rank is preferred to those that
    failed at about the same time, which may have lost it."""
    # A rank that was ended because of another one counts only if there are no others.
    bad = sorted([e for e in bad if not e.torn] or bad, key=lambda e: e.failed_at)
    own = [e for e in bad if not e.gone and not e.lost and e.code not in ENDED_BY_OTHERS]
    lost_ranks = [e for e in bad if e.gone]
    if lost_ranks and not any(e.killed for e in own):
        return lost_ranks[0]
    return min(own, key=lambda e: e.failed_at - KILLED_S * e.killed, default=bad[0])


def judge_endings(
    endings: Sequence[Ending], request: str, unheard: bool, hung: bool, progressed: bool
) -> Outcome:
    """Judge the attempt. `request`: interrupt, stop or ""; `unheard`: the program ignored it and
    was not ended."""
    bad = [ending for ending in endings if ending.code != 0]
    if hung:
        return Outcome("", "no heartbeat", HUNG)
    # A user's stop counts however the program ended.
    if request == "stop":
        return Outcome("stopped", "stopped by the user", 0)
    # Slurm ends the step of a lost host, and its SIGTERM looks like a request to leave.
    has_lost_host = any(ending.gone for ending in bad)
    if request == "interrupt" and not has_lost_host and (bad or not unheard):
        return Outcome("interrupted", "asked to save and leave", 0)
    if not bad:
        return Outcome("done", "the program has ended with exit code 0 on all ranks", 0)
    first = first_failure(bad)
    reason = first.reason
    if first.lost:
        reason = f"which rank failed is unknown; one that has lost it: {reason}"
    # Exit code 2 after progress is not bad input: another start may succeed.
    if first.code in NOT_STARTED and not progressed and not first.gone:
        return Outcome("", reason, USAGE_ERROR_EXIT, final=True)
    code = 128 - first.code if first.code < 0 else first.code
    return Outcome("", reason, 1 if code == USAGE_ERROR_EXIT else code)  # 2 would end the job


def crash_faults(
    endings: Sequence[Ending], outcome: Outcome, request: str, head: Mapping[str, Any]
) -> list[FaultEvent]:
    """Return a fault for each rank that crashed by itself, in order. If a supervisor is gone, the
    other ranks only lost it; after a request, Slurm may have ended it. A later crash with a
    different error may only be the loss of the first rank."""
    own = [e for e in endings if e.code not in (0, -signal.SIGTERM) and not e.torn]
    own = [e for e in own if not (e.gone and request)]
    if outcome.state or not own or outcome.code == HUNG:
        return []
    first, has_lost_host = first_failure(own), any(ending.gone for ending in endings)
    others = [ending for ending in own if ending is not first][: NAMED_CRASHES - 1]
    return [
        FaultEvent(
            **head,
            kind="crash",
            ranks=(ending.rank,),
            hosts=(ending.host,),
            reason=ending.reason,
            lost_peer=ending.lost
            or (has_lost_host and not ending.gone)
            or (ending is not first and not ending.gone and ending.words != first.words),
            final=outcome.final,
        )
        for ending in (first, *others)
    ]


def hang_fault(
    answers: Mapping[int, ChannelMessage],
    hosts: Mapping[int, str],
    endings: Mapping[int, Ending],
    head: Mapping[str, Any],
) -> FaultEvent:
    """Find the hung ranks: those whose supervisor does not answer, else those that are stopped or
    wait for a disk, else those behind the others. If all are alike, they wait for each other and
    none is blamed."""
    quiet = [rank for rank in hosts if rank not in answers and rank not in endings]
    stuck = [rank for rank, m in answers.items() if m.get("condition") in ("T", "t", "D")]
    steps = {rank: m["step"] for rank, m in answers.items() if m.get("step") is not None}
    last = max(steps.values(), default=0)
    behind = [rank for rank, step in steps.items() if step < last]
    ranks = sorted(quiet or stuck or behind)
    silence = max((m.get("silence", 0.0) for m in answers.values()), default=0.0)
    reason = f"no heartbeat for {silence:.0f} s"
    if ranks:
        why = "do not answer" if quiet else "are stopped" if stuck else "are behind the others"
        reason += f"; ranks that {why}: {ranks[:16]}"
    if head["step"] is None:  # no rank has reported its progress yet
        head = {**head, "step": last or None}
    return FaultEvent(
        **head,
        kind="hang",
        ranks=tuple(ranks),
        hosts=tuple(sorted({hosts[rank] for rank in ranks})),
        reason=reason,
    )
