"""A run that is broken again and again, and what that costs it: one sbatch, N faults, no hand.

    python -m benchmarks.soak --faults 30 --seed 1 --out soak.md              ours, 10 to 15 minutes
    python -m benchmarks.soak --faults 30 --seed 1 --pattern kit spares       and with a spare node
    python -m benchmarks.soak --faults 30 --seed 1 --pattern kit naive        and naive.sh, the same
    python -m benchmarks.soak --site hostile --faults 40 --seed 1             ours: soak_site.py

Needs root: it boots a Slurm of two hosts (scripts/slurm/testbed.sh), or three for the spare one,
and trains a small model on two, one task on each. The faults are drawn from the seed before the
start, each for a step, and printed.
Exit code 0 when the run has ended as done, from one submission, with the losses of an unbroken run,
bit by bit; else 1, and what differs. The unbroken run has two processes as well: with one, another
order of the sums changes the losses by 1e-7, and after 500 steps by 1e-2.

What it may do for the job, as nobody on a real cluster would have to: `StartTime=now` for a
requeued job, which would otherwise wait until its old credential has expired.

naive.sh ends for good after most faults. Then a user submits it again: a hand on the keyboard, and
an absence (--absence, added to the wall time, not waited for). Its watchdog is off: in a hang the
process group's timeout comes first (--hang-limit) and, where that does not end the job, a user who
cancels it 30 s later. A model as small as this one is saved within KillWait: what a cut-off save
costs naive.sh with a large one is not in these figures.

Columns per fault: the step it struck at; steps done again because of it; seconds from it until the
save that followed was durable; seconds from the start of rank 0's next process to its first step;
seconds from it until the run was past the step that it had reached. Parts of the wall time are
`kempner.jobs.report.wall_time`'s; the effective training time ratio is the share that the steps
would have taken at their median time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kempner.jobs.records.event_reader import read_records
from kempner.jobs.records.run_history import load_history
from kempner.jobs.system.reading import read_jsonl
from tests.cluster import ENDED, ROOT, TESTBED, Cluster, make_data
from tests.conftest import clean_env, losses, status
from tests.trainer.fault.broken_run import BrokenRun, words

INTERVAL = 10  # steps between saves
GAP = (25, 75)  # steps between faults: at least one save, so that every attempt gets on
STEP_S = 0.1  # no step is shorter
HANG_S = 8  # of the watchdog
STUCK_S = 240  # no new step for so long: the run does not come back
SAVER, COMMIT = "kempner.checkpoint.checkpointer", "kempner.checkpoint.commit"
POINTS = {  # inside a save: the function, and the rank that dies there
    "before it": f"{SAVER}:Checkpointer._stage:before rank=0",
    "staged": f"{SAVER}:Checkpointer._stage:after rank=1",
    "in the file": "kempner.checkpoint.format.writer:_trailer:before rank=0",
    "written": f"{SAVER}:write_file:after rank=1",
    "before the manifest": f"{SAVER}:Checkpointer._commit:before rank=0",
    "renamed": f"{COMMIT}:point_latest:before rank=0",
    "latest moved": f"{COMMIT}:point_latest:after rank=0",
}
Kinds = dict[str, tuple[int, tuple[str, ...]]]
RANKS, NODES = ("rank 0", "rank 1"), ("node1", "node2")
# How often in a bag of 20, and where it may strike.
KINDS: Kinds = {
    "warning": (3, ("batch shell",)),
    "TERM": (2, RANKS),
    "preemption": (2, NODES),
    "scontrol requeue": (1, ("job",)),
    "kill": (2, RANKS),
    "kill of all": (1, ("both ranks",)),
    "freeze": (2, RANKS),
    "ib0 cut": (1, ("3 s", "20 s")),
    "crash in a save": (3, tuple(POINTS)),
    "damaged checkpoint": (2, ("truncated", "one byte")),
    "crash of a host": (1, NODES),
}


class Fault(NamedTuple):
    """`step`: 12.3 is three tenths of a step after the twelfth."""

    number: int
    kind: str
    target: str
    step: float

    def __str__(self) -> str:
        return f"{self.number:3d}  step {self.step:6.1f}  {self.kind}: {self.target}"


def draw(
    count: int, seed: int, kinds: Kinds = KINDS, gap: tuple[float, float] = GAP
) -> list[Fault]:
    """The same for a seed, always. Every kind comes up: they are drawn from a bag until it is
    empty."""
    chance = random.Random(seed)
    plan: list[Fault] = []
    bag: list[str] = []
    step = 0.0
    for number in range(1, count + 1):
        if not bag:
            bag = [kind for kind, (times, _) in kinds.items() for _ in range(times)]
            chance.shuffle(bag)
        step += chance.uniform(*gap)
        kind = bag.pop()
        plan.append(Fault(number, kind, chance.choice(kinds[kind][1]), round(step, 1)))
    return plan


class Struck(NamedTuple):
    """What was seen when a fault struck. Unix seconds."""

    fault: Fault
    time: float
    reached: int  # steps recorded by then


class Broken(Exception):
    """The run has not come through: why."""


class Soak(BrokenRun):
    """One run under one pattern, its faults, and the hands that it needed."""

    stuck_s = STUCK_S

    def __init__(
        self, cluster: Cluster, folder: Path, pattern: str, plan: list[Fault], hang_limit: float
    ) -> None:
        super().__init__(cluster, {}, folder)
        self.naive, self.plan, self.hang_limit = pattern == "naive", plan, hang_limit
        self.spares = pattern == "spares"
        self.struck: list[Struck] = []
        self.commits: dict[int, float] = {}  # unix time at which `latest` came to name this step
        self.hands = 0
        self.submissions = 0
        self._in_a_pause: Callable[[], None] | None = None  # to do while the job does not run
        self._pending_since = self._changed = time.monotonic()
        self._seen: Any = None
        self._next_look = 0.0

    # --- the job ---

    def start(self) -> None:
        self.submissions += 1
        self._changed = time.monotonic()
        ours = ("multinode.sh", [f"--resilience.hang_timeout={HANG_S}"], ["--time=2:00:00"])
        env = {}
        if self.spares:
            ours[2].append("--nodes=3")
            env = {"KEMPNER_SPARES": "1", "SBATCH_NO_KILL": "set"}
        theirs = (
            str(ROOT / "benchmarks/naive.sh"),
            [f"--resilience.hang_timeout={self.hang_limit}"],
            ["--time=2:00:00"],
        )
        script, overrides, options = theirs if self.naive else ours
        self.submit(
            *overrides,
            *run_words(self.plan),
            options=options,
            script=script,
            # Rank 0 has its own such line: steps as slow on both, and no straggler.
            faults=f"slow ms={1000 * STEP_S:.0f} rank=1\n{self._armed_kills()}",
            **env,
        )

    def _armed_kills(self) -> str:
        """One kill per crash in a save, whichever it will be. It strikes once: when its file can be
        made, and that is when the file has been removed."""
        lines = []
        for fault in self.plan:
            if fault.kind == "crash in a save":
                where, rank = POINTS[fault.target].split()
                file = self._fuse(fault)
                if self.submissions == 1:
                    file.touch()
                lines.append(f"kill at={where} {rank} nth=0 once={file}")
        return "\n".join(lines)

    def _fuse(self, fault: Fault) -> Path:
        return self.folder / f"fuse-{fault.number}"

    def last(self) -> dict[str, Any]:
        """The newest line of a step, whatever attempt it is of."""
        try:
            with open(self.dir / "metrics.jsonl", "rb") as file:
                # The end alone: this is read 20 times a second.
                file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
                text = file.read().decode()
        except OSError:
            return {"step": 0}
        # The last line may still be on its way to the file.
        whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return dict(json.loads(whole[-1])) if whole else {"step": 0}

    def tend(self) -> bool:
        """Look at the run, and do what belongs to the plan or to a user; True when it is done."""
        link = self.dir / "checkpoints/latest"
        with contextlib.suppress(OSError):
            self.commits[int(link.readlink().name[5:])] = link.lstat().st_mtime
        time.sleep(0.05)
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + 0.3
        state = self.state()
        seen = (self.last(), state)
        if seen != self._seen:
            self._seen, self._changed = seen, now
        if state != "PENDING":
            self._pending_since = now
        if self._in_a_pause and (state == "PENDING" or state in ENDED):
            self._in_a_pause()
            self._in_a_pause = None
        if state == "PENDING":
            # Sooner, Slurm takes the end of the old attempt for that of the new one.
            if now - self._pending_since > 2 and self.cluster.field(self.job, "Restarts") != "0":
                self.cluster.run("scontrol", "update", f"JobId={self.job}", "StartTime=now")
        elif state in ENDED:
            if self._run_state() == "done":
                return True
            self._ended(state)
        self._see_hang(now)
        return False

    def state(self) -> str:
        return self.cluster.state(self.job)

    def _run_state(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return str(status(self.dir)["state"])
        return "not begun"

    def _ended(self, state: str) -> None:
        if not self.naive:
            raise Broken(f"the job has ended as {state}, the run is {self._run_state()}")
        self.hands += 1
        say(f"     a hand: the job has ended as {state}; submitted again")
        self.start()

    def _see_hang(self, now: float) -> None:
        """A user looks at a run that stands still when its timeouts had their chance."""
        still = now - self._changed
        if self.naive and still > self.hang_limit + 30:
            say(f"     no step for {still:.0f} s: scancel")
            self.cluster.run("scancel", self.job)
            self._changed = now
        elif still > self.stuck_s:
            raise Broken(f"no step for {still:.0f} s, the job is {self.state()}")

    # --- the faults ---

    def live(self) -> None:
        """From the submission through all faults to the end."""
        self.start()
        for fault in self.plan:
            while self.last()["step"] < int(fault.step):
                if self.tend():
                    raise Broken(f"done before fault {fault.number}")
            time.sleep(fault.step % 1 * STEP_S)
            say(f"{fault}  (+{time.time() - self._born():.0f} s)")
            self.struck.append(Struck(fault, time.time(), self.last()["step"]))
            self._strike(fault)
        while not self.tend():
            pass

    def _born(self) -> float:
        return load_history(self.dir).attempts[0].opened

    def _strike(self, fault: Fault) -> None:
        do = {
            "warning": lambda _: self._warn(),
            "TERM": lambda rank: self._send(signal.SIGTERM, int(rank[-1])),
            "preemption": self._preempt,
            "scontrol requeue": lambda _: self.cluster.ask("scontrol", "requeue", self.job),
            "kill": lambda rank: self._send(signal.SIGKILL, int(rank[-1])),
            "kill of all": lambda _: self._send(signal.SIGKILL, 0, 1),
            "freeze": lambda rank: self._send(signal.SIGSTOP, int(rank[-1])),
            "ib0 cut": self._cut,
            "crash in a save": lambda _: self._fuse(fault).unlink(),
            "damaged checkpoint": self._damage_in_a_pause,
            "crash of a host": self._crash,
        }
        do[fault.kind](fault.target)

    def _warn(self) -> None:
        """What Slurm does at the time of --signal=B:SIGTERM@N."""
        self.cluster.ask("scancel", "--batch", "--signal=TERM", self.job)

    def _send(self, number: signal.Signals, *ranks: int) -> None:
        pids = [pid for rank in ranks for pid in self.pids(rank)]
        if not pids:
            raise Broken(f"no process of ranks {ranks} to send {number.name} to")
        for pid in pids:
            os.kill(pid, number)

    def _preempt(self, node: str) -> None:
        urgent = ["--partition=urgent", "--exclusive", f"--nodelist={node}", "--output=/dev/null"]
        self.cluster.ask("sbatch", *urgent, "--wrap=sleep 1")

    def _cut(self, duration: str, node: str = "") -> None:
        node = node or self._second()
        self.cluster.testbed("cut", node)
        self._tend_for(duration)
        self.cluster.testbed("join", node)

    def _tend_for(self, duration: str) -> None:
        end = time.monotonic() + float(duration.split()[0])
        while time.monotonic() < end:
            self.tend()

    def _damage_in_a_pause(self, how: str) -> None:
        """The run is interrupted, and while the job waits its newest checkpoint goes bad."""

        def damage() -> None:
            newest = (self.dir / "checkpoints/latest").resolve()
            path = max(newest.glob("*/*.distcp"), key=lambda file: file.stat().st_size)
            data = bytearray(path.read_bytes())
            if how == "truncated":
                del data[-100:]
            else:
                data[len(data) // 2] ^= 1
            path.write_bytes(data)
            say(f"     {newest.name}/{path.name}: {how}")

        self._in_a_pause = damage
        self._warn()

    def _second(self) -> str:
        """The host of the second rank: node2, unless a spare has taken its place."""
        return str(self.events("start")[-1]["nodes"][-1])

    def _crash(self, node: str) -> None:
        node = self._second() if node == "node2" else node
        decided = len(self.decisions())
        self.cluster.testbed("crash", node)
        end = time.monotonic() + 120
        while self.state() == "RUNNING" and time.monotonic() < end:
            time.sleep(0.1)
            if self.spares and len(self.decisions()) > decided:
                break
        self.cluster.testbed("revive", node)
        self._pending_since = self._changed = time.monotonic()  # nobody has looked in between


def run_words(plan: list[Fault]) -> list[str]:
    """What this run has in place of the fault tests' words, the unbroken one as well."""
    return [f"--train.max_steps={int(plan[-1].step) + GAP[1]}", f"--checkpoint.interval={INTERVAL}"]


# --- What it cost -------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Of one fault. Seconds; None where there was none."""

    recomputed: int
    durable: float | None
    start_up: float | None
    past: float | None


def costs(soak: Soak) -> list[Cost]:
    """Fault by fault. What an attempt lost goes to the last fault that struck it."""
    run = load_history(soak.dir)
    attempts = [
        (a, lost) for a, lost in zip(run.attempts, run.wall_time.lost, strict=True) if a.began
    ]
    events = read_records(soak.dir / "attempts.jsonl")
    started = {e["attempt"]: e["process_began"] for e in events if e["event"] == "start"}
    # Which attempt each fault struck: the last one that had begun.
    hit = [max(i for i, (a, _) in enumerate(attempts) if a.began <= s.time) for s in soak.struck]
    found = []
    for n, (struck, i) in enumerate(zip(soak.struck, hit, strict=True)):
        attempt, lost = attempts[i]
        lines = (line for line in run.lines if line["step"] > struck.reached)
        past = next((line["time"] for line in lines if line["time"] > struck.time), None)
        if i in hit[n + 1 :] or i + 1 == len(attempts):  # the attempt has outlived it
            found.append(Cost(0, None, None, past and past - struck.time))
            continue
        after = [t for t in soak.commits.values() if struck.time < t <= attempt.ended + 1]
        durable = max(after) - struck.time if after and attempt.state == "interrupted" else None
        nxt = attempts[i + 1][0]
        start_up = nxt.stepped - started[nxt.number] if nxt.stepped else None
        # Steps that were still done on the way out are no sign of life.
        lines = (line for line in run.lines if line["attempt"] >= nxt.number)
        past = next((x["time"] for x in lines if x["step"] > attempt.last_step), None)
        found.append(Cost(lost, durable, start_up, past and past - struck.time))
    return found


def table(rows: list[list[str]]) -> str:
    """Markdown; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def fault_table(soak: Soak) -> str:
    rows = [["", "step", "fault", "recomputed", "durable (s)", "start-up (s)", "past it (s)"]]
    for struck, cost in zip(soak.struck, costs(soak), strict=True):
        fault, times = struck.fault, (cost.durable, cost.start_up, cost.past)
        rows.append([
            str(fault.number), f"{fault.step}", f"{fault.kind}: {fault.target}",
            str(cost.recomputed), *("-" if t is None else f"{t:.1f}" for t in times),
        ])  # fmt: skip
    return table(rows)


def summary(soaks: dict[str, Soak], absence: float) -> str:
    """The patterns side by side."""
    columns = []
    for soak in soaks.values():
        run = load_history(soak.dir)
        spent, faults = run.wall_time, max(1, len(soak.struck))
        pace = statistics.median(line["step_time"] for line in run.losses)
        training = pace * len(run.losses)  # a step that a fault held up has not trained for longer
        away = spent.total + soak.hands * absence
        columns.append({
            "faults": f"{len(soak.struck)}",
            "submitted by hand": f"{soak.submissions}",
            "hands on the keyboard after that": f"{soak.hands}",
            "restarts in place": f"{sum(a.decision == 'restart' for a in run.attempts)}",
            "starts that came to a step": f"{sum(s is not None for s in spent.startups)}",
            "wall time": f"{spent.total:.0f} s",
            **{f"  {part}": f"{seconds:.0f} s" for part, seconds in spent.parts.items()},
            "useful training time, steps x median": f"{training:.0f} s",
            "effective training time ratio": f"{training / spent.total:.1%}",
            f"wall time with {absence:.0f} s of absence a hand": f"{away:.0f} s",
            "effective training time ratio then": f"{training / away:.1%}",
            "wall time that trained nothing, per fault": f"{(away - training) / faults:.1f} s",
            "steps recomputed": f"{sum(spent.lost)}",
            "steps recomputed, per fault": f"{sum(spent.lost) / faults:.1f}",
        })  # fmt: skip
    return table([["", *soaks], *([name, *(c[name] for c in columns)] for name in columns[0])])


def differences(soak: Soak, unbroken: dict[int, float]) -> list[str]:
    """What is not as in a run that was never broken."""
    found, state = losses(soak.dir), status(soak.dir)
    checkpoints = soak.dir / "checkpoints"
    wrong = []
    if state["state"] != "done":
        wrong.append(f"the run is {state['state']}: {state['reason']}")
    if missing := sorted(set(unbroken) ^ set(found)):
        wrong.append(f"steps {missing[:10]} are in one run alone")
    if other := [step for step in unbroken if found.get(step, unbroken[step]) != unbroken[step]]:
        first = other[0]
        wrong.append(
            f"{len(other)} losses differ, the first that of step {first}: {found[first]!r} "
            f"for {unbroken[first]!r}"
        )
    wrong += revived(soak.dir)
    left = [*checkpoints.glob("*partial*"), *soak.dir.glob(".rendezvous*"), *soak.dir.glob("lock")]
    if left:
        wrong.append(f"left behind: {', '.join(path.name for path in left)}")
    return wrong


def revived(run_dir: Path) -> list[str]:
    """Starts after the batch script has decided that the run has ended: Slurm requeued the job."""
    ended, wrong = "", []
    for event in read_jsonl(run_dir / "attempts.jsonl"):
        if event.get("event") == "start" and ended:
            wrong.append(f"attempt {event.get('attempt')} started after the decision {ended!r}")
        if event.get("event") == "decision":
            ended = str(event.get("why")) if event.get("decision") == "end" else ""
    return wrong


# --- The program --------------------------------------------------------------------------------


@contextlib.contextmanager
def cluster_of(nodes: int, folder: Path, gpus: int = 1, **more: str) -> Iterator[Cluster]:
    """`more`: variables of testbed.sh."""
    env = {**os.environ, "KEMPNER_TESTBED_OWNER": str(os.getpid()), **more}
    for attempt in range(5):  # a number may be taken by another cluster
        env["KEMPNER_TESTBED"] = str((os.getpid() + attempt) % 249 + 1)
        command = ["bash", str(TESTBED), "up", str(nodes), str(gpus)]
        up = subprocess.run(command, env=env, capture_output=True, text=True)
        if up.returncode == 0:
            break
    else:
        raise Broken(up.stderr)
    try:
        conf = up.stdout.split("SLURM_CONF=")[1].strip()
        yield Cluster(int(env["KEMPNER_TESTBED"]), conf, make_data(folder), folder)
    finally:
        subprocess.run(["bash", TESTBED, "down"], env=env, check=True)


def run_unbroken(cluster: Cluster, folder: Path, plan: list[Fault]) -> dict[int, float]:
    """Loss by step of two processes that nothing befalls."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [*words(cluster, folder / "unbroken"), *run_words(plan)]
    command += [str(ROOT / "scripts/train.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=clean_env(), capture_output=True, text=True)
    if done.returncode:
        raise Broken(done.stderr)
    found = losses(folder / "unbroken")
    if list(found) != list(range(1, max(found) + 1)):
        raise Broken(f"the unbroken run has not made every step: {done.stdout[-2000:]}")
    return found


def say(text: str) -> None:
    print(text, flush=True)


def live(soak: Soak) -> list[str]:
    """Returns what went wrong."""
    try:
        soak.live()
    except Broken as error:
        job = soak.cluster.run("scontrol", "show", "job", soak.job).stdout
        return [f"{error}\n{job}\n{soak.log[-6000:]}"]
    finally:
        soak.end()
    return []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pattern", nargs="+", choices=("kit", "spares", "naive"), default=["kit"])
    parser.add_argument("--absence", type=float, default=60.0, help="seconds until a user is back")
    parser.add_argument("--hang-limit", type=float, default=60.0, help="process group's timeout")
    parser.add_argument("--out", type=Path, help="Markdown of the figures")
    parser.add_argument("--keep", type=Path, help="keep the run directories here")
    parser.add_argument(
        "--site", help="hostile, or parts of it: docs/start/testbed.md; the kit, as a user"
    )
    parser.add_argument(
        "--kit", type=Path, help="with --site: the kit of another checkout, as a contrast"
    )
    args = parser.parse_args()
    if args.kit and not (args.site and (args.kit / "scripts/slurm/multinode.sh").is_file()):
        parser.error(f"--kit {args.kit}: must be a checkout of this repository, with --site")
    if args.faults < 1:
        parser.error(f"--faults {args.faults}: at least 1")
    if args.keep and args.keep.exists():
        parser.error(f"--keep {args.keep}: already exists; name another")
    if args.site:
        from benchmarks.soak_site import soak_site

        return soak_site(args.site, args.faults, args.seed, args.keep, args.out, args.kit)
    plan = draw(args.faults, args.seed)
    say("\n".join(map(str, plan)))
    folder = args.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    soaks: dict[str, Soak] = {}
    wrong: list[str] = []
    unbroken: dict[int, float] = {}
    for pattern in args.pattern:
        say(f"\n{pattern}")
        (folder / pattern).mkdir()
        with cluster_of(3 if pattern == "spares" else 2, folder / pattern) as cluster:
            unbroken = unbroken or run_unbroken(cluster, folder, plan)
            soak = Soak(cluster, folder / pattern, pattern, plan, args.hang_limit)
            problems = live(soak) or differences(soak, unbroken)
            wrong += [f"{pattern}: {problem}" for problem in problems]
            soaks[pattern] = soak
    text = "\n\n".join([
        f"python -m benchmarks.soak {' '.join(sys.argv[1:])}",
        *(f"{pattern}:\n\n{fault_table(soak)}" for pattern, soak in soaks.items()),
        summary(soaks, args.absence),
    ])  # fmt: skip
    say(f"\n{text}\n")
    if args.out:
        args.out.write_text(text + "\n")
    if not wrong and not args.keep:
        shutil.rmtree(folder)
    say("\n".join(wrong) if wrong else "every loss is that of the unbroken run, bit by bit")
    if wrong:
        say(f"the run directories are in {folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Broken as error:
        sys.exit(f"error: {error}")
