"""Reinforcement learning that is broken again and again: one sbatch, N faults, no hand.

    python -m benchmarks.soak_rl --faults 20 --seed 1        10 to 20 minutes

Needs root: it boots a Slurm of three hosts (scripts/slurm/testbed.sh); one trains a tiny model, the
other two have two engines each. The faults are drawn from the seed before the start, each for a
step, and printed. Exit code 0 when the run has ended as done, from one submission, each step
counts, its samples were drawn for it, and no process is left; else 1, and what is not.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.soak import Broken, Fault, Kinds, Soak, cluster_of, draw, live, revived, say
from kempner.jobs.records.run_history import load_history
from kempner.jobs.system.reading import read_jsonl
from tests.conftest import status
from tests.extensions.fault.rl_run import ROLES, RlRun
from tests.extensions.fault.test_rl_kills import FAULTY, words

GAP = (4, 12)  # steps between faults
SLOW, STEP_S = (
    "kempner.extensions.rl.trainer.feed:Feed.next",
    1.0,
)  # a step: the run must not end before the last fault
ENGINES = tuple(f"engine {number}" for number in range(4))
# How often in a bag of 20, and where it may strike. The trainer and the batch script are on node1.
KINDS: Kinds = {
    "kill": (6, ("trainer", "orchestrator", *ENGINES)),
    "kill of all engines": (1, ("engines",)),
    "freeze": (3, ("orchestrator", *ENGINES)),
    "ib0 cut": (2, ("node1", "node2", "node3")),
    "crash of a host": (2, ("node2", "node3")),
    "warning": (2, ("batch shell",)),
    "preemption": (2, ("node1", "node2")),
    "scontrol requeue": (2, ("job",)),
}


class RlSoak(Soak):
    stuck_s = 400

    def start(self) -> None:
        self.submissions += 1
        self.parts = RlRun(self.cluster, self.folder)
        steps = int(self.plan[-1].step) + GAP[1]
        more = ["--checkpoint.interval=5", "--rl.eval_interval=50", "--rl.max_async=1"]
        more += ["--rl.inference.restarts=20"]
        options = ("--nodes=3", "--time=2:00:00")
        env = {name: str(FAULTY / file) for name, file in ROLES.values()}
        env["FAULTS"] = f"hold program=rl at={SLOW}:before nth=0 s={STEP_S}"
        self.job = self.parts.start(
            *words(self.folder, steps), *more, options=options, fake=False, **env
        )

    def last(self) -> dict[str, Any]:
        return next((line for line in reversed(self.parts.lines())), {"step": 0})

    def _strike(self, fault: Fault) -> None:
        what, _, number = fault.target.partition(" ")
        one = int(number) if number.isdigit() else None
        do: dict[str, Callable[[], object]] = {
            "kill": lambda: self._part(what, one, signal.SIGKILL),
            "kill of all engines": lambda: [
                self._part("engine", engine, signal.SIGKILL) for engine in range(4)
            ],
            "freeze": lambda: self._freeze(what, one),
            "ib0 cut": lambda: self._cut("15 s", fault.target),
            "crash of a host": lambda: self._crash_engines(fault.target),
            "warning": self._warn,
            "preemption": lambda: self._preempt(fault.target),
            "scontrol requeue": lambda: self.cluster.ask("scontrol", "requeue", self.job),
        }
        do[fault.kind]()

    def _part(self, role: str, engine: int | None, number: int) -> list[int]:
        """Waits until it is there: it may be on its way back."""
        for _ in range(400):
            if found := self.parts.processes(role, engine)[:1]:
                with contextlib.suppress(ProcessLookupError):  # it ends at this moment
                    os.kill(found[0], number)
                    return found
            self.tend()
        say(f"     no {role} {engine} is there")
        return []

    def _freeze(self, role: str, engine: int | None) -> None:
        found = self._part(role, engine, signal.SIGSTOP)
        self._tend_for("10 s")
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _crash_engines(self, node: str) -> None:
        """The job goes on; the host is back a minute later, for its next start."""
        self.cluster.testbed("crash", node)
        self._tend_for("60 s")
        self.cluster.testbed("revive", node)


def wrongs(soak: RlSoak) -> list[str]:
    """What is not as it should be."""
    found, state = [], status(soak.dir)
    if state["state"] != "done":
        found.append(f"the run is {state['state']}: {state['reason']}")
    steps = {line["step"]: line for line in load_history(soak.dir).losses}
    last = max(steps, default=0)
    if list(steps) != list(range(1, last + 1)):
        found.append(f"steps that do not count: {sorted(set(range(1, last + 1)) - set(steps))}")
    if bad := [step for step, line in steps.items() if not math.isfinite(line["loss"] or 0.0)]:
        found.append(f"losses that are not finite: {bad}")
    told = [line["step"] for line in read_jsonl(soak.dir / "rl-samples.jsonl")]
    if told != sorted(told) or set(told) != set(steps):
        found.append("rl-samples.jsonl does not have the samples of each step, in order")
    found += revived(soak.dir)
    try:
        soak.parts.assert_nothing_left()
    except AssertionError as error:
        found.append(f"left behind: {error}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.faults < 1:
        parser.error(f"--faults {args.faults}: at least 1")
    plan = draw(args.faults, args.seed, KINDS, GAP)
    say("\n".join(map(str, plan)))
    folder = Path(tempfile.mkdtemp(prefix="soak-rl-"))
    with cluster_of(3, folder, gpus=2) as cluster:
        soak = RlSoak(cluster, folder, "kit", plan, 0.0)
        wrong = live(soak) or wrongs(soak)
        say(f"{soak.submissions} submission, {len(soak.struck)} faults, {soak.decisions()}")
    if not wrong:
        shutil.rmtree(folder)
    say("\n".join([*wrong, f"the run is in {folder}"]) if wrong else "every step counts, once")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Broken as error:
        sys.exit(f"error: {error}")
