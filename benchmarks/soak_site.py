"""The soak on the hostile site of the test bed: python -m benchmarks.soak --site hostile

One submission by a user without rights, with his batch log in a home of 1 MB. Beside the faults of
soak.py, which keep their shares: the controller away when a rank has just died, a full home, a host
that breaks under the run, a second job on its directory. Slurm's clients on the hosts fail one call
in ten all the time.

An operator takes drained nodes back within half a minute. When the job ends before the run is done,
it is submitted again: a hand. Exit code 0 when there was none, and the losses are those of an
unbroken run, bit by bit.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.soak import (
    KINDS,
    STEP_S,
    Broken,
    Fault,
    Kinds,
    Soak,
    cluster_of,
    differences,
    draw,
    fault_table,
    live,
    run_unbroken,
    run_words,
    say,
    summary,
)
from tests.cluster import ENDED
from tests.site import Site
from tests.trainer.fault.broken_run import words

NODES = 8  # of them the last three are broken, where the site has such
MOST_HANDS = 60
ROUND_S = 30  # between two looks of the operator at the nodes
SITE_KINDS: Kinds = {
    **KINDS,
    "controller away": (1, ("60 s", "180 s")),
    "full home": (1, ("30 s",)),
    "host breaks": (1, ("unmounted", "eio", "python")),
    "second job": (1, ("alice", "mallory")),
}


class SiteSoak(Soak):
    """A run of alice's. `folder`: hers, on all hosts."""

    stuck_s = 600  # a controller that is away for minutes, and pauses that grow

    def __init__(self, site: Site, folder: Path, plan: list[Fault]) -> None:
        super().__init__(site.cluster, folder, "kit", plan, hang_limit=60)
        self.site = site
        self.home = site.state / "home/alice"
        self._next_round = 0.0

    @property
    def log(self) -> str:
        path = self.home / f"job-{self.job}.out"
        return path.read_text() if path.exists() else ""

    def submit(
        self,
        *overrides: str,
        options: Sequence[str] = (),
        faults: str = "",
        script: str = "multinode.sh",
        tasks: int = 1,
        **env: str,
    ) -> str:
        self.job = self._sbatch("alice", *overrides, options=options, faults=faults, **env)
        return self.job

    def _sbatch(
        self, user: str, *overrides: str, options: Sequence[str], faults: str, **env: str
    ) -> str:
        site = self.site
        first, _, *more = words(self.cluster, self.dir)
        arguments = [site.kit / first, f"--data.dataset_path={site.project / 'data'}", *more]
        log = self.home if user == "alice" else Path("/tmp")
        return site.sbatch(
            "multinode.sh",
            *arguments,
            *overrides,
            options=["--gpus-per-node=1", f"--output={log}/job-%j.out", *options],
            cwd=site.project,
            env={
                "KEMPNER_TRAIN": str(site.faulty_trainer),
                "FAULTS": f"slow ms={1000 * STEP_S:.0f} rank=0\n{faults}",
                **env,
            },
            user=user,
        )

    def tend(self) -> bool:
        """Also as the site's operator, who takes the nodes back that Slurm has drained: where the
        controller is away, a step may not end in time, and that is "Kill task failed"."""
        if time.monotonic() >= self._next_round:
            self._next_round = time.monotonic() + ROUND_S
            drained = self.cluster.run("sinfo", "-h", "-N", "-t", "drained", "-o", "%N").stdout
            for node in sorted({*drained.split()}):
                self.cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        return super().tend()

    def _ended(self, state: str) -> None:
        if self.hands == MOST_HANDS:
            raise Broken(f"gave up after {self.hands} hands")
        self.hands += 1
        why = [x for x in self.log.splitlines() if "kempner: " in x]
        say(f"     a hand: the job has ended as {state}: {why[-1] if why else 'without a word'}")
        self.start()

    def _strike(self, fault: Fault) -> None:
        do = {
            "controller away": self._take_controller,
            "full home": self._fill_home,
            "host breaks": self._break_host,
            "second job": self._submit_second,
        }
        if fault.kind in do:
            do[fault.kind](fault.target)
            self._changed = time.monotonic()
        else:
            with contextlib.suppress(AssertionError):  # the job has just ended: a hand follows
                super()._strike(fault)

    def _send(self, number: signal.Signals, *ranks: int) -> None:
        with contextlib.suppress(Broken):  # it is between two attempts
            super()._send(number, *ranks)

    def _preempt(self, node: str) -> None:
        if "accounting" not in self.site.parts:
            return super()._preempt(node)
        urgent = ["--qos=urgent", "--exclusive", f"--nodelist={node}", "--output=/dev/null"]
        self.cluster.ask("sbatch", *urgent, "--wrap=sleep 1")

    def _take_controller(self, duration: str) -> None:
        """At the worst moment: a rank has just died."""
        self._send(signal.SIGKILL, 1)
        self.cluster.testbed("away", duration.split()[0])

    def _fill_home(self, duration: str) -> None:
        self.site.run("alice", "sh", "-c", "cat /dev/zero >~/full")
        self._tend_for(duration)
        (self.home / "full").unlink(missing_ok=True)

    def _break_host(self, how: str) -> None:
        """That of the second rank, which then dies: the next attempt finds it."""
        node = self._second()
        self.cluster.testbed("break", node, how)
        self._send(signal.SIGKILL, 1)
        end = time.monotonic() + 120
        while self._second() == node and time.monotonic() < end:
            self.tend()
        self.cluster.testbed("revive", node)

    def _submit_second(self, user: str) -> None:
        words = run_words(self.plan)
        job = self._sbatch(user, *words, options=["--time=10"], faults="", KEMPNER_CODE="0")
        end = time.monotonic() + 60
        while self.cluster.state(job) not in ENDED and time.monotonic() < end:
            self._tend_for("1 s")
        state, reason = (self.cluster.field(job, name) for name in ("JobState", "Reason"))
        say(f"     the second job is {state}, {reason}")
        if state not in ENDED:
            self.cluster.ask("scancel", job)


def soak_site(
    parts: str, faults: int, seed: int, keep: Path | None, out: Path | None, kit: Path | None
) -> int:
    """What main() of soak.py does, on a site. Returns the exit code."""
    plan = draw(faults, seed, SITE_KINDS)
    say("\n".join(map(str, plan)))
    folder = keep or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    more = {"KEMPNER_TESTBED_SITE": parts, "KEMPNER_TESTBED_SEED": str(seed)}
    if kit:
        more["KEMPNER_TESTBED_KIT"] = str(kit.resolve())
    with cluster_of(NODES, folder, **more) as cluster:
        site = Site(cluster)
        say(f"the site has {', '.join(site.parts[1:])}")
        unbroken = run_unbroken(cluster, folder, plan)
        work = site.folder("soak")
        # The run is alice's, and the second job that of another user.
        work.chmod(0o777)
        soak = SiteSoak(site, work, plan)
        wrong = live(soak) or differences(soak, unbroken)
        if soak.hands:
            wrong.append(f"{soak.hands} hands on the keyboard after the submission")
        text = "no fault has struck"
        if soak.struck:
            text = f"{fault_table(soak)}\n\n{summary({'kit': soak}, 60)}"
        if keep:
            shutil.copytree(soak.dir, keep / "run")
    text = f"python -m benchmarks.soak {' '.join(sys.argv[1:])}\n\n{text}"
    say(f"\n{text}\n")
    say(f"submissions: {soak.submissions}, hands: {soak.hands}")
    if out:
        out.write_text(text + "\n")
    say("\n".join(wrong) if wrong else "every loss is that of the unbroken run, bit by bit")
    return 1 if wrong else 0
