"""Replicas that are lost again and again (lowcomm.mode = steps), and what that costs the others:
one sbatch, N faults, no hand.

    python -m benchmarks.soak_replicas --faults 30 --seed 1 --out soak.md       15 to 20 minutes

Needs root: it boots a Slurm of three hosts (scripts/slurm/testbed.sh) and trains a small model
there, a replica on each, of which two must be left. The faults are drawn from the seed before the
start, each for a round, and printed, and every kind is among the first 20; about a third of them
strike while an earlier one is not over. One that names a replica which is away strikes the next one
that is there. The exchanges run behind the steps (tau = 2).

Exit code 0 when the run has ended as done, from one submission, and its log of rounds
(RUN/replicas.jsonl) is in order; else 1, and what is not:

- after each round all replicas that took part have the same weights, and after a requeue the
  weights with which the round ended from which they go on
- no round counts twice: one that was done, and not saved, is done again, and only that counts
- the samples of each round are those that follow the round before, and each third of them belongs
  to a member or is said to be left out

Columns per fault: the round it struck in; seconds from it until the judge declared a replica gone;
until the next round counted; until all replicas were members again; rounds done again because of
it, and whether the job was requeued. As soak.py does, it sets `StartTime=now` for a requeued job.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.soak import (
    STEP_S,
    Broken,
    Fault,
    Kinds,
    Soak,
    Struck,
    cluster_of,
    draw,
    live,
    revived,
    say,
    table,
)
from kempner.jobs.system.reading import read_jsonl
from tests.cluster import Cluster
from tests.conftest import status

REPLICAS, H, BATCH = 3, 6, 12
GAP = (4, 16)  # rounds between faults; one that is killed needs about 8 to come back
LONGEST_REPLICA_START_S = 60.0
MEMBERSHIP = "kempner.extensions.lowcomm.membership"
POINTS = {  # of a round
    "kill before the exchange": f"{MEMBERSHIP}:Membership.round:before",
    "kill in the exchange": f"{MEMBERSHIP}:ReplicaGroup.mean:before",
    "kill before the vote": f"{MEMBERSHIP}:ReplicaGroup.mean:after",
    "kill after the vote": f"{MEMBERSHIP}:Membership._settle:after",
}
SLOTS = tuple(f"replica {number}" for number in range(REPLICAS))
NODES = tuple(f"node{number + 1}" for number in range(REPLICAS))
BATCH_HOST, *OTHERS = NODES

# How often in a bag of 20, and where it may strike.
KINDS: Kinds = {
    "kill": (2, SLOTS),
    "kill of two": (1, SLOTS),
    **dict.fromkeys(POINTS, (1, SLOTS)),
    "freeze of 2 s": (1, SLOTS),
    "freeze of 12 s": (2, SLOTS),
    "cut of 2 s": (1, tuple(OTHERS)),
    "cut of 20 s": (2, tuple(OTHERS)),
    "cut of 20 s, batch host": (1, (BATCH_HOST,)),
    "crash of a host": (1, tuple(OTHERS)),
    "crash of the batch host": (1, (BATCH_HOST,)),
    "warning": (1, ("batch shell",)),
    "preemption": (1, NODES),
    "scontrol requeue": (1, ("job",)),
    "time limit": (1, ("job",)),
}
Line = dict[str, Any]  # of replicas.jsonl


class ReplicaSoak(Soak):
    """A fault's `step` is a round here."""

    def start(self) -> None:
        self.submissions += 1
        self._changed = time.monotonic()
        rounds = int(self.plan[-1].step) + GAP[1]
        self.submit(
            f"--lowcomm.replicas={REPLICAS}",
            "--lowcomm.mode=steps",
            "--lowcomm.min_replicas=2",
            f"--lowcomm.interval={H}",
            "--lowcomm.fragments=2",
            "--lowcomm.tau=2",
            f"--train.global_batch={BATCH}",
            f"--train.max_steps={rounds * H}",
            f"--checkpoint.interval={2 * H}",
            options=[f"--nodes={REPLICAS}", "--time=2:00:00"],
            script="replicas.sh",
            faults=f"slow ms={1000 * STEP_S:.0f}\n{self._armed_kills()}",
        )

    def _armed_kills(self) -> str:
        lines = []
        for fault in self.plan:
            if point := POINTS.get(fault.kind):
                file = self._fuse(fault)
                file.touch()
                words = f"replica={fault.target.split()[1]} once={file}"
                lines.append(f"kill at={point} nth=0 {words}")
        return "\n".join(lines)

    def last(self) -> Line:
        """The newest round."""
        lines = reversed(read_jsonl(self.dir / "replicas.jsonl", 16384))
        return {"step": next((x["round"] for x in lines if x.get("event") == "round"), 0)}

    def _strike(self, fault: Fault) -> None:
        what, where = fault.kind, fault.target
        number = int(where[-1]) if where[-1].isdigit() else 0
        if what in POINTS:
            self._fuse(fault).unlink()
        elif what.startswith("freeze"):
            self._freeze(self._living(number)[0], what.split()[2])
        elif what.startswith("cut"):
            self._cut(what.split()[2], where)
        elif what.startswith("crash"):
            self._crash(where)
        else:
            do: dict[str, Callable[[], object]] = {
                "kill": lambda: self._signal(signal.SIGKILL, self._living(number)[:1]),
                "kill of two": lambda: self._signal(signal.SIGKILL, self._living(number)[:2]),
                "warning": self._warn,
                "preemption": lambda: self._preempt(where),
                "scontrol requeue": lambda: self.cluster.ask("scontrol", "requeue", self.job),
                "time limit": self._end_soon,
            }
            do[what]()

    def _living(self, first: int) -> list[int]:
        """The processes of the replicas that are there, that of `first` in front."""
        end = time.monotonic() + LONGEST_REPLICA_START_S
        while time.monotonic() < end:
            order = [(first + i) % REPLICAS for i in range(REPLICAS)]
            if found := [pid for replica in order for pid in self.pids(0, replica)]:
                return found
            self.tend()
        raise Broken("no replica is there to be struck")

    def _signal(self, number: signal.Signals, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _freeze(self, pid: int, duration: str) -> None:
        self._signal(signal.SIGSTOP, [pid])
        self._tend_for(duration)
        self._signal(signal.SIGCONT, [pid])

    def _crash(self, node: str) -> None:
        """Until Slurm has noticed: a host that is back at once can leave a step waiting."""
        self.cluster.testbed("crash", node)
        end = time.monotonic() + 60
        while "DOWN" not in self.cluster.ask("scontrol", "show", "node", node):
            if time.monotonic() > end:
                raise Broken(f"Slurm has not noticed the crash of {node}")
            self.tend()
        self.cluster.testbed("revive", node)

    def _end_soon(self) -> None:
        """Until the time limit, or its warning, has ended the job; requeued, it has its old one."""
        *_, hours, minutes, _ = self.cluster.field(self.job, "RunTime").split(":")
        limit = 60 * int(hours.rpartition("-")[2]) + int(minutes) + 1

        def set_limit(minutes: int) -> None:
            self.cluster.ask("scontrol", "update", f"JobId={self.job}", f"TimeLimit={minutes}")

        self._in_a_pause = lambda: set_limit(120)
        set_limit(limit)
        end = time.monotonic() + 240  # Slurm looks at limits once a minute or so
        while self.state() == "RUNNING":
            if time.monotonic() > end:
                raise Broken("the time limit has not struck")
            self.tend()


# --- What the log of rounds says ----------------------------------------------------------------


class Rounds(NamedTuple):
    """`counted`: one line of each round that counts, by number. `starts`: of the job that came to
    a round: when, and how many rounds it had to do again."""

    counted: dict[int, Line]
    starts: list[tuple[float, int]]
    wrong: list[str]


def starts_of(lines: list[Line]) -> list[list[Line]]:
    """The lines of each start of the job: each judge names the replicas from 1 on."""
    found: list[list[Line]] = [[]]
    names: set[str] = set()
    for line in lines:
        if line["event"] == "here":
            if line["name"] in names:
                found.append([])
                names = set()
            names.add(line["name"])
        found[-1].append(line)
    return found


def count_rounds(lines: list[Line]) -> Rounds:
    counted: dict[int, Line] = {}
    starts: list[tuple[float, int]] = []
    wrong: list[str] = []
    for start in starts_of(lines):
        told: dict[tuple[bool, int], list[Line]] = {}
        for line in start:
            if line["event"] == "round":
                told.setdefault((line["entry"], line["round"]), []).append(line)
        before = 0
        for (entry, number), same in told.items():
            wrong += [f"round {number}: {problem}" for problem in problems_of(same)]
            if entry:
                # Rounds after the last save are done again.
                undone = [n for n in counted if n > number]
                starts.append((same[0]["time"], len(undone)))
                for n in undone:
                    del counted[n]
                # A round that is saved may be on no record: the host of its judge was lost.
                known = counted.setdefault(number, same[0]) if number else same[0]
                if known["weights"] != same[0]["weights"]:
                    wrong.append(f"the job goes on after round {number} with other weights")
            else:
                if number != before + 1:
                    wrong.append(f"round {number} comes after round {before}")
                counted[number] = same[0]
            before = number
    return Rounds(counted, starts, wrong)


def problems_of(same: list[Line]) -> list[str]:
    """Of what replicas have said of one round."""
    wrong = []
    for what in ("weights", "members", "joiners", "samples", "left_out"):
        if len({str(line[what]) for line in same}) > 1:
            wrong.append(f"replicas differ in {what}: {[line[what] for line in same]}")
    first, names = same[0], [line["name"] for line in same]
    if len(set(names)) < len(names) or set(names) - {*first["members"], *first["joiners"]}:
        wrong.append(f"{names} have said that it counts")
    if not first["entry"]:
        members = [int(name.partition(".")[0]) for name in first["members"]]
        if sorted([*members, *first["left_out"]]) != list(range(REPLICAS)):
            wrong.append(f"samples of {members} taken, of {first['left_out']} left out")
        number = first["round"]
        if first["samples"] != [BATCH * H * (number - 1), BATCH * H * number]:
            wrong.append(f"samples {first['samples']}")
    return wrong


class Cost(NamedTuple):
    """Of one fault. Seconds; None where there was none."""

    noticed: float | None
    next_round: float | None
    all_back: float | None
    repeated: int
    requeued: bool


def costs(struck: list[Struck], lines: list[Line], rounds: Rounds) -> list[Cost]:
    done = [line for line in lines if line["event"] == "round" and not line["entry"]]
    gone = [line["time"] for line in lost(lines)]
    full = [line["time"] for line in done if len(line["members"]) == REPLICAS]
    found = []
    for now, after in itertools.zip_longest(struck, struck[1:]):
        until = after.time if after else float("inf")
        noticed = next((t for t in gone if now.time < t <= until), None)
        starts = [(at, again) for at, again in rounds.starts if now.time < at <= until]
        following = next((x["time"] for x in done if x["time"] > now.time), None)
        back = next((t for t in full if t > (noticed or now.time)), None)
        since = [t and t - now.time for t in (noticed, following, back)]
        found.append(Cost(*since, sum(again for _, again in starts), bool(starts)))
    return found


def lost(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["event"] == "gone" and line["reason"] != "left"]


def fault_table(soak: ReplicaSoak, lines: list[Line], rounds: Rounds) -> str:
    seconds = ("noticed (s)", "next round (s)", "all back (s)")
    rows = [["", "round", "fault", *seconds, "rounds repeated", "requeued"]]
    for struck, cost in zip(soak.struck, costs(soak.struck, lines, rounds), strict=True):
        fault, times = struck.fault, cost[:3]
        rows.append([
            str(fault.number), str(struck.reached), f"{fault.kind}: {fault.target}",
            *("-" if t is None else f"{t:.1f}" for t in times),
            str(cost.repeated), "yes" if cost.requeued else "",
        ])  # fmt: skip
    return table(rows)


def summary(soak: ReplicaSoak, lines: list[Line], rounds: Rounds) -> str:
    counted = [rounds.counted[number] for number in sorted(rounds.counted)]
    pairs = list(itertools.pairwise(counted))
    laps = [b["time"] - a["time"] for a, b in pairs]
    requeues = [at for at, _ in rounds.starts[1:]]
    pauses = [
        b["time"] - a["time"]
        for a, b in pairs
        if not any(a["time"] < at < b["time"] for at in requeues)
    ]
    left_out = sum(len(line["left_out"]) for line in counted)
    facts = {
        "faults": len(soak.struck),
        "submitted by hand": soak.submissions,
        "requeues": len(rounds.starts) - 1,
        "replicas lost": len(lost(lines)),
        "starts of replicas": sum(line["event"] == "here" for line in lines),
        "rounds that count": len(counted),
        "rounds repeated": sum(again for _, again in rounds.starts),
        "samples left out": f"{left_out / REPLICAS / max(1, len(counted)):.1%}",
        "median time of a round": f"{statistics.median(laps or [0.0]):.1f} s",
        "longest time of a round without a requeue": f"{max(pauses, default=0.0):.1f} s",
        "time from the first round to the last": f"{sum(laps):.0f} s",
    }
    return table([["", ""], *([name, str(value)] for name, value in facts.items())])


def problems(soak: ReplicaSoak, rounds: Rounds) -> list[str]:
    wrong, state = list(rounds.wrong), status(soak.dir)
    if state["state"] != "done":
        wrong.append(f"the run is {state['state']}: {state['reason']}")
    expected = set(range(1, int(soak.plan[-1].step) + GAP[1] + 1))
    if missing := sorted(expected ^ set(rounds.counted)):
        wrong.append(f"rounds {missing[:10]} are not on record")
    if left := [path.name for path in soak.dir.glob(".door*")]:
        wrong.append(f"left behind: {left}")
    return wrong + revived(soak.dir)


def run(cluster: Cluster, folder: Path, plan: list[Fault]) -> tuple[str, list[str]]:
    """Returns the tables, and what went wrong."""
    soak = ReplicaSoak(cluster, folder, "kit", plan, 0.0)
    wrong = live(soak)
    lines = read_jsonl(soak.dir / "replicas.jsonl")
    rounds = count_rounds(lines)
    wrong += rounds.wrong if wrong else problems(soak, rounds)
    return f"{fault_table(soak, lines, rounds)}\n\n{summary(soak, lines, rounds)}", wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="Markdown of the figures")
    args = parser.parse_args()
    if args.faults < 1:
        parser.error(f"--faults {args.faults}: at least 1")
    plan = draw(args.faults, args.seed, KINDS, GAP)
    say("\n".join(map(str, plan)).replace("step", "round"))
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    with cluster_of(REPLICAS, folder) as cluster:
        text, wrong = run(cluster, folder, plan)
    text = f"python -m benchmarks.soak_replicas {' '.join(sys.argv[1:])}\n\n{text}"
    say(f"\n{text}\n")
    if args.out:
        args.out.write_text(text + "\n")
    if wrong:
        say("\n".join([*wrong, f"the run is in {folder}"]))
        return 1
    shutil.rmtree(folder)
    say("all replicas had the same weights after every round, and every round counts once")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Broken as error:
        sys.exit(f"error: {error}")
