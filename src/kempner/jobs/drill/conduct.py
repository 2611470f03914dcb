"""The drill itself: submits the jobs, injects faults, waits with limits, and cancels the rest."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kempner.jobs.drill.cases import LAST_CALL, OWN, PACE_S, STRIKE_CALL, Case, CaseOutcome
from kempner.jobs.drill.plan import MOST_GPU_HOURS, ROOT, SCRIPTS_FOLDER, Plan, trainer_words
from kempner.jobs.drill.site import (
    QueuedJob,
    SlurmAnswer,
    jobs_of,
    nodes_of_job,
    preempting_option,
    tell,
    without_sizes,
)
from kempner.jobs.records.run_history import load_history
from kempner.jobs.slurm import job_fields
from kempner.jobs.system.reading import read_jsonl

DRILL_POLL_S = 5.0  # seconds between queries to the controller, one for all jobs
GONE = 2  # a job is over if so many queries in a row do not show it
OWN_RUNS_S = 20.0  # the user's program is killed so many seconds after its start
MENDED_S = 180.0  # to recover from a fault: Slurm holds a requeued job for up to two minutes
PREEMPT_S = 60.0  # for the urgent job to preempt
REFUSAL = "[Dd]enied|disabled|[Oo]nly batch|Invalid"  # of scontrol requeue
MOST_TRIES = 4  # jobs per case, each without the hosts that lost one
CANCEL_S = 60.0  # for cancelled jobs to leave the queue
TRAINER = ROOT / "scripts/slurm/lib/drill_train.py"


@dataclass
class DrillTrial:
    """A case in progress. `missing`: queries in a row that did not show its job; `tries`: its jobs
    so far; `urgent`: the name of the job that preempts it; `urgent_since`: when that started."""

    seen: CaseOutcome
    name: str
    submitted: bool = False
    over: bool = False
    missing: int = 0
    tries: int = 1
    state: str = ""
    why: str = ""
    number: str = ""
    urgent: str = ""
    urgent_since: float = 0.0

    @property
    def case(self) -> Case:
        return self.seen.case


@dataclass
class Drill:
    """A drill. `folder`: its directory; `say`: prints and logs a line."""

    plan: Plan
    folder: Path
    say: Callable[[str], None]
    trials: list[DrillTrial] = field(default_factory=list)
    gpu_seconds: float = 0.0
    node_seconds: float = 0.0
    broken_hosts: dict[str, str] = field(default_factory=dict)  # host -> how its job ended

    def __post_init__(self) -> None:
        prefix = self.folder.name
        for case in self.plan.cases:
            seen = CaseOutcome(case, self.folder / case.name)
            if case.fault == "freeze" and self.plan.ranks < 2:
                seen.not_tried = "only one rank: no other rank could notice; request two tasks"
            self.trials.append(DrillTrial(seen, f"{prefix}-{case.name}", over=bool(seen.not_tried)))

    def run(self) -> None:
        """Run all cases to their ends or until a limit. Always cancels the remaining jobs."""
        began = last = time.monotonic()
        try:
            while self._open():
                self._submit()
                jobs = jobs_of(self.folder.name)
                now = time.monotonic()
                # Without an answer, no job counts as gone and no time as used.
                if jobs is not None:
                    self._look(jobs, now - last)
                last = now
                self._end_at(now - began)
                if self._open():
                    time.sleep(DRILL_POLL_S)
        finally:
            self.cancel()

    def _open(self) -> list[DrillTrial]:
        return [trial for trial in self.trials if not trial.over]

    # --- submitting ---

    def _submit(self) -> None:
        """Submit waiting cases. A site may limit a user's jobs: the rest follow as others end."""
        for trial in self._open():
            if trial.submitted:
                continue
            said = self._sbatch(trial)
            if said.ok:
                # --parsable prints JOBID;CLUSTER if the cluster has a name.
                trial.submitted, trial.number = True, said.text.strip().split(";")[0]
                self.say(f"{trial.case.name}: job {trial.number}")
                continue
            # The answer may be lost although the job was accepted.
            jobs = jobs_of(trial.name)
            if jobs:
                trial.submitted, trial.number = True, jobs[0].number
            elif not any(other.submitted and not other.over for other in self.trials):
                trial.seen.broken, trial.over = f"sbatch: {said.text.splitlines()[-1]}", True
                self.say(f"{trial.case.name}: {trial.seen.broken}")
            else:
                return

    def _sbatch(self, trial: DrillTrial) -> SlurmAnswer:
        case, out = trial.case, self.folder / f"{trial.case.name}.out"
        mark = self.folder / f"{case.name}.struck"
        options = [
            # --export: KEMPNER_DRILL must reach the job even if SBATCH_EXPORT is NONE.
            *self.plan.request, *case.options, f"--job-name={trial.name}", f"--output={out}",
            f"--time={case.minutes}", "--parsable", "--export=ALL",
        ]  # fmt: skip
        if self.broken_hosts:
            options.append(f"--exclude={','.join([*self.plan.excluded, *self.broken_hosts])}")
        if case is OWN:
            words = [f"--run-dir={trial.seen.run}", "--", *self.plan.command]
            script = ["sbatch", *options, str(SCRIPTS_FOLDER / "run.sh"), *words]
            return tell(*script)
        drill = {"fault": case.fault, "call": STRIKE_CALL, "last": LAST_CALL, "pace": PACE_S,
                 "slow": case.slow, "mark": str(mark)}  # fmt: skip
        env = {"KEMPNER_TRAIN": str(TRAINER), "KEMPNER_DRILL": json.dumps(drill)}
        words = trainer_words(trial.seen.run, self.plan.batch)
        return tell("sbatch", *options, str(SCRIPTS_FOLDER / "multinode.sh"), *words, env=env)

    # --- while they run ---

    def _look(self, jobs: list[QueuedJob], seconds: float) -> None:
        """Process the answer of squeue, and inject faults that are due."""
        shown = {job.name: job for job in jobs}
        for job in jobs:
            if job.state == "RUNNING":
                self.gpu_seconds += seconds * self.plan.nodes * self.plan.gpus
                self.node_seconds += seconds * self.plan.nodes
        for trial in self._open():
            if not trial.submitted:
                continue
            own = shown.get(trial.name)
            trial.missing = 0 if own else trial.missing + 1
            if own is not None:
                trial.state, trial.why, trial.number = own.state, own.why, own.number
                trial.seen.started = trial.seen.started or own.state == "RUNNING"
            # A job may begin and end between two looks.
            trial.seen.started = trial.seen.started or trial.seen.run.exists()
            self._note_strike(trial)
            if trial.missing >= GONE:
                self._close(trial)
            elif trial.state == "RUNNING":
                self._strike(trial, shown)

    def _note_strike(self, trial: DrillTrial) -> None:
        mark = self.folder / f"{trial.case.name}.struck"
        with contextlib.suppress(OSError):
            if trial.seen.struck is None:
                # The time of the fault, not of this look.
                trial.seen.struck = mark.stat().st_mtime
                self.say(f"{trial.case.name}: the fault has struck")

    def _close(self, trial: DrillTrial) -> None:
        if self._has_no_log(trial):
            return
        trial.over = True
        state = load_history(trial.seen.run).state
        self.say(f"{trial.case.name}: over: {state.word}")

    def _has_no_log(self, trial: DrillTrial) -> bool:
        """Return whether a job ended without a batch log, and if so retry the case without its
        host: Slurm ends a job whose host cannot open the log."""
        fields = job_fields(trial.number)
        host, state = fields.get("BatchHost", ""), fields.get("JobState", "")
        if not host or state == "COMPLETED" or (self.folder / f"{trial.case.name}.out").exists():
            return False
        why = f"{state}, exit code {fields.get('ExitCode')}, and no batch log"
        self.broken_hosts.setdefault(host, why)
        self.say(f"{trial.case.name}: job {trial.number} on {host}: {why}")
        if trial.tries == MOST_TRIES:
            trial.seen.broken = f"{trial.tries} jobs were lost on {', '.join(self.broken_hosts)}"
            return False
        trial.tries, trial.submitted, trial.missing = trial.tries + 1, False, 0
        trial.seen.started, trial.state = False, ""
        return True

    def _strike(self, trial: DrillTrial, shown: dict[str, QueuedJob]) -> None:
        """Inject a fault from outside, once, when the run has reached its step."""
        name = trial.case.name
        if trial.urgent:
            self._watch_urgent(trial, shown)
        if trial.seen.struck is not None or name not in ("requeue", "limit", "preempt", "own"):
            return
        if trial.case is OWN:
            self._kill_own(trial)
            return
        lines = read_jsonl(trial.seen.run / "metrics.jsonl")
        if name == "limit" or not lines or lines[-1].get("step", 0) < STRIKE_CALL:
            # The time limit needs no help.
            if name == "limit" and lines:
                trial.seen.struck = time.time()
            return
        if name == "requeue":
            said = tell("scontrol", "requeue", trial.number)
            if said.ok:
                self._struck(trial, f"scontrol requeue {trial.number}")
            elif re.search(REFUSAL, said.text):  # other errors: retried
                trial.seen.broken = f"scontrol requeue: {said.text}"
                self._cancel_name(trial.name)
        else:
            self._preempt(trial)

    def _struck(self, trial: DrillTrial, what: str) -> None:
        trial.seen.struck = time.time()
        self.say(f"{trial.case.name}: {what}")

    def _kill_own(self, trial: DrillTrial) -> None:
        """Kill the step of the user's program with SIGKILL to each rank."""
        attempts = load_history(trial.seen.run).attempts
        began = attempts[-1].began if attempts else None
        if began is None or time.time() - began < OWN_RUNS_S:
            return
        said = tell("squeue", "--noheader", "--steps", f"--jobs={trial.number}", "--format=%i")
        # Not the steps "batch" and "extern".
        steps = [word for word in said.text.split() if word.rpartition(".")[2].isdecimal()]
        if said.ok and steps and tell("scancel", "--signal=KILL", steps[-1]).ok:
            self._struck(trial, f"scancel --signal=KILL {steps[-1]}")

    def _preempt(self, trial: DrillTrial) -> None:
        """Submit another job of this user to preempt it. Only if it has its nodes for itself, so
        that no other user's job is preempted."""
        nodes = nodes_of_job(trial.number)
        option, why = preempting_option(trial.number)
        if not nodes:
            why = "it shares its nodes: another user's job might be preempted instead"
        if nodes and option:
            words = [
                *without_sizes(self.plan.request), option, "--nodes=1", "--exclusive", "--time=1",
                f"--nodelist={nodes[-1]}", f"--job-name={trial.name}-by", "--output=/dev/null",
                "--wrap=sleep 1",
            ]  # fmt: skip
            said = tell("sbatch", *words)
            if said.ok:
                trial.urgent, trial.urgent_since = f"{trial.name}-by", time.monotonic()
                self._struck(trial, f"a job with {option} on {nodes[-1]}")
                return
            why = f"sbatch {option}: {said.text.splitlines()[-1]}"
        self._leave_out(trial, why)

    def _watch_urgent(self, trial: DrillTrial, shown: dict[str, QueuedJob]) -> None:
        """Leave the case out if the urgent job still waits after PREEMPT_S."""
        starts = load_history(trial.seen.run).attempts
        late = time.monotonic() - trial.urgent_since > PREEMPT_S
        job = shown.get(trial.urgent)
        if job is not None and job.state == "PENDING" and late and len(starts) < 2:
            self._leave_out(trial, f"nothing was preempted in {PREEMPT_S:.0f} s: {job.why}")

    def leave_out_rest(self, why: str) -> None:
        """Note why the unfinished cases were not tried; run() cancels their jobs."""
        for trial in self._open():
            trial.seen.not_tried, trial.over = why, True

    def _leave_out(self, trial: DrillTrial, why: str) -> None:
        trial.seen.not_tried, trial.over = why, True
        self.say(f"{trial.case.name}: not tried: {why}")
        self._cancel_name(trial.name)

    # --- the end ---

    def _end_at(self, seconds: float) -> None:
        """Close all open cases when the time or the budget is used up."""
        why = ""
        if self.gpu_seconds / 3600 >= MOST_GPU_HOURS:
            why = f"{MOST_GPU_HOURS:.0f} GPU hours are used up"
        elif seconds >= 60 * self.plan.minutes:
            why = f"{self.plan.minutes} minutes are over (--minutes)"
        for trial in self._open() if why else []:
            trial.over = True
            # Broken only if a fault struck and there was time to recover, not by a slow queue.
            self._note_strike(trial)
            since = time.time() - (trial.seen.struck or math.inf)
            if trial.seen.started and since > MENDED_S:
                trial.seen.broken = f"{why}, and the job is {trial.state or 'gone'}"
            elif trial.seen.started:
                trial.seen.not_tried = f"{why}, and its job was not over"
            else:
                trial.seen.not_tried = f"{why}; its job waited in the queue: {trial.why or '-'}"
        if not why:
            self._end_own()

    def _end_own(self) -> None:
        """Cancel the user's program once it has started again: it may run for days."""
        for trial in self._open():
            if trial.case is OWN and trial.seen.struck is not None:
                attempts = load_history(trial.seen.run).attempts
                if any((attempt.began or 0) > trial.seen.struck for attempt in attempts):
                    trial.over = True
                    self._cancel_name(trial.name)

    def _cancel_name(self, name: str) -> None:
        for job in jobs_of(name) or []:
            tell("scancel", job.number)

    def cancel(self) -> None:
        """Cancel the drill's jobs that are still in the queue, and wait until they have left it."""
        end = time.monotonic() + CANCEL_S
        # None means no answer, not an empty queue.
        while (jobs := jobs_of(self.folder.name)) != [] and time.monotonic() < end:
            # Repeated in each round: a busy controller may drop a request.
            for job in jobs or []:
                if job.state != "COMPLETING":
                    tell("scancel", job.number)
            time.sleep(1)
        if jobs:
            numbers = " ".join(job.number for job in jobs)
            self.say(f"these jobs do not leave the queue; cancel them: scancel {numbers}")
