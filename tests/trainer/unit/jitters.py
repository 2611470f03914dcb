"""A hundred simulated hours of a run whose steps are late for reasons that are no hang.

    python -m tests.trainer.unit.jitters

prints how often each came, how often it was named, and how often a run was ended for it. Four ranks
on two nodes answer once in 2 s of a clock that nobody waits for; what a rank says of itself follows
from what it does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from kempner.train.resilience.inquiry import PATIENT_ROUNDS, QUIET_S, ROUND_S
from kempner.train.resilience.suspects import Answer, Call, Judge, Look, Seen, Suspect

RANKS, PER_NODE = 4, 2
LATE_S = 4.6  # after the last step of 0.2 s: 3 steps and 4 s
LOOK_S = 2.0
HOSTS = {rank: f"node{rank // PER_NODE + 1}" for rank in range(RANKS)}


@dataclass(frozen=True)
class Doing:
    """What a rank does. `cpu`: of a core; `reads`: bytes a second; `answers`: its watchdog's thread
    runs; `reached`: its answers and its neighbour's view of it come through."""

    state: str = "S"
    cpu: float = 0.0
    reads: float = 0.0
    waits: bool = False
    answers: bool = True
    reached: bool = True
    patient: bool = False
    compiles: bool = False


WAITS = Doing(waits=True)


def others(culprit: int, doing: Doing) -> dict[int, Doing]:
    return {rank: doing if rank == culprit else WAITS for rank in range(RANKS)}


def everybody(doing: Doing) -> dict[int, Doing]:
    return dict.fromkeys(range(RANKS), doing)


WORKS, HOLDS_GIL = Doing("R", 1.0), Doing("R", 1.0, answers=False)
COMPILES = Doing("R", 1.0, compiles=True)
VALIDATES, SAVES = Doing("R", 1.0, patient=True), Doing("D", patient=True)
STOPPED, CUT_OFF = Doing("T", answers=False), Doing(waits=True, reached=False)


def node_of(culprit: int, doing: Doing) -> dict[int, Doing]:
    """All ranks of the culprit's node do the same, or of the second where rank 0 would."""
    node = culprit // PER_NODE or 1
    return {rank: doing if rank // PER_NODE == node else WAITS for rank in range(RANKS)}


World = Callable[[int], dict[int, Doing]]
# Of each: the shortest and the longest in seconds, and what the ranks do, given a culprit.
JITTERS: dict[str, tuple[float, float, World]] = {
    "validation, and one rank is done before the others": (
        10,
        900,
        lambda r: {rank: WAITS if rank == r else VALIDATES for rank in range(RANKS)},
    ),
    "a save, and one rank writes to a slow disk": (10, 900, lambda r: others(r, SAVES)),
    "recompilation on one rank": (5, 110, lambda r: others(r, COMPILES)),
    "the same in processes of the compiler": (5, 110, lambda r: others(r, Doing(compiles=True))),
    "a compiler that keeps the GIL": (5, 25, lambda r: others(r, HOLDS_GIL)),
    "recompilation on all ranks": (5, 110, lambda _: everybody(COMPILES)),
    "garbage collection, which keeps the GIL": (5, 25, lambda r: others(r, HOLDS_GIL)),
    "no data for all ranks": (5, 110, lambda _: everybody(Doing())),
    "no data for one rank, which waits for a disk": (5, 55, lambda r: others(r, Doing("D"))),
    "one rank reads for long": (5, 110, lambda r: others(r, Doing("D", reads=2e6))),
    "no page of a mapped file for one rank, which keeps the GIL": (
        5,
        55,
        lambda r: others(r, Doing("D", answers=False)),
    ),
    "one rank computes for long": (5, 110, lambda r: others(r, WORKS)),
    "a look by a debugger": (5, 110, lambda r: others(r, Doing("t", answers=False))),
    "the network to a node is away": (5, 40, lambda r: node_of(r, CUT_OFF)),
    "the job is suspended, and a node wakes up later": (5, 12, lambda r: node_of(r, STOPPED)),
}
HANGS: dict[str, tuple[float, World]] = {  # and the longest time until the verdict
    "SIGSTOP": (20.0, lambda r: others(r, STOPPED)),
    "a killed process": (20.0, lambda r: others(r, Doing("", answers=False))),
    "a loop that keeps the GIL": (37.0, lambda r: others(r, HOLDS_GIL)),
    "a call of a file system": (70.0, lambda r: others(r, Doing("D"))),
    "a lost node": (56.0, lambda r: node_of(r, CUT_OFF)),
}


class Simulation:
    """One run. `now`: its clock, in seconds."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.judge, self.now, self.number = Judge(), 0.0, 0

    def late(self, seconds: float, doing: dict[int, Doing]) -> tuple[float, list[Suspect], bool]:
        """A step that is late for so long; returns the time when the run is ended (0: it is not),
        for whom, and whether somebody was named before."""
        self.judge, began, named = Judge(), self.now, False
        heard: dict[int, tuple[float, Answer]] = {}
        due = {rank: LATE_S + self.draw.random() for rank in doing}
        self.number += 1
        while self.now - began < seconds:
            self.now += LOOK_S
            age = self.now - began
            if age < LATE_S:
                continue
            for rank, what in doing.items():
                if age >= due[rank] and what.answers and what.reached:
                    due[rank] = age + ROUND_S * (PATIENT_ROUNDS if what.patient else 1)
                    heard[rank] = (age, self.answer(rank, age, doing))
            silent = {
                rank: quiet
                for rank in doing
                if (quiet := age - heard[rank][0] if rank in heard else age - LATE_S)
                > ROUND_S * (PATIENT_ROUNDS if doing[rank].patient else 1) + QUIET_S
            }
            answers = {rank: heard[rank][1] for rank in heard if rank not in silent}
            found = self.judge.look(age, Look(answers, silent, HOSTS))
            named = named or bool(found and age > LATE_S + ROUND_S)
            stuck = [suspect for suspect in found if suspect.is_stuck]
            if stuck:
                return age, stuck, named
        return 0.0, [], named

    def answer(self, rank: int, age: float, doing: dict[int, Doing]) -> Answer:
        self.number += 1
        beside = rank ^ 1
        call = Call("0", 812, "all_reduce", "[9] Double")
        what = doing[rank]
        return Answer(
            "1 1 x", self.number, 7, "after step 7", what.patient, what.compiles, 811 + what.waits,
            (replace(call, done=not what.waits),), self.seen(age, what), beside,
            self.seen(age, doing[beside]),
        )  # fmt: skip

    def seen(self, age: float, what: Doing) -> Seen:
        noise = self.draw.random() * 0.01
        cpu = age * what.cpu + noise
        return Seen(what.state, age, cpu, cpu, int(age * what.reads))


def hundred_hours(seed: int) -> dict[str, Counter[str]]:
    """What came of each kind: how often, how often named, how often ended."""
    run, table = Simulation(seed), {name: Counter[str]() for name in JITTERS}
    while run.now < 100 * 3600:
        run.now += run.draw.expovariate(1 / 60.0)
        name = run.draw.choice(list(JITTERS))
        low, high, world = JITTERS[name]
        seconds = low * (high / low) ** run.draw.random()
        ended, _, named = run.late(seconds, world(run.draw.randrange(RANKS)))
        table[name].update(came=1, named=int(named), ended=int(ended > 0))
    return table


if __name__ == "__main__":
    for name, counts in hundred_hours(0).items():
        low, high, _ = JITTERS[name]
        came, named, ended = counts["came"], counts["named"], counts["ended"]
        print(f"| {name} | {low:.0f} to {high:.0f} | {came} | {named} | {ended} |")
