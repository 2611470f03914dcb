"""Arrays of points: one per Slurm request, split at Slurm's limit. No torch."""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kempner.config.loading import to_toml
from kempner.config.option import ConfigError
from kempner.extensions.sweep.file import Sweep
from kempner.extensions.sweep.journal import Journal, Submission
from kempner.extensions.sweep.look import HOLDS, PointStatus
from kempner.extensions.sweep.points import SweepPoint, check_points
from kempner.extensions.sweep.resources import profile_environment
from kempner.jobs import slurm
from kempner.jobs.records import event_reader
from kempner.jobs.system.files import write_atomic

DELAYS_S = (1, 2, 4, 8, 16, 32)  # before each retry of sbatch
# Messages of an sbatch that has sent nothing; after any other, Slurm may have the job.
NO_CLUSTER = "Could not establish a configuration source"
POLICY_REFUSAL = "violates accounting/QOS policy"  # of limits: the same request is refused again
INVALID = "Batch job submission failed: Invalid"  # partition, account, QOS, feature, ...
FINAL = (NO_CLUSTER, POLICY_REFUSAL, INVALID)
NOT_SENT = (*FINAL, "(connect failure)", "Connection refused")
REGISTER_S = 15  # in which a busy controller registers a job whose answer was lost
MAX_SUBMIT = "MaxSubmitJob"  # in the name of sbatch's limit, of a user, account or QOS
MAX_ARRAY_SIZE = 1001  # Slurm's default


@dataclass(frozen=True)
class Array:
    """Points with the same request, `pack` per task. `running`: most tasks at a time; 0: all.
    `job`: of an array that Slurm has accepted earlier, with the points that it still holds."""

    words: list[str]
    script: Path
    points: list[SweepPoint]
    pack: int
    job: str = ""
    running: int = 0

    @property
    def tasks(self) -> int:
        return math.ceil(len(self.points) / self.pack)

    @property
    def program(self) -> list[str]:
        """Return the program for sbatch, without the points."""
        return [str(self.script), *([str(self.pack)] if self.pack > 1 else [])]

    @property
    def indices(self) -> str:
        limit = f"%{self.running}" if self.running else ""
        return f"0-{self.tasks - 1}{limit}"


def plan_arrays(
    sweep: Sweep, points: Sequence[SweepPoint], slurm_arrays: Sequence[Array] = ()
) -> list[Array]:
    """Return checked arrays of these points, given the arrays that Slurm already has. Raises
    ConfigError with all problems."""
    problems: list[str] = []
    arrays: list[Array] = []
    try:
        profile_environment(sweep.profile)
    except ConfigError as error:
        problems += error.problems
    try:
        arrays = arrays_of(sweep, points, slurm.max_array_size(), slurm_arrays)
    except ConfigError as error:
        problems += error.problems
    try:
        check_points(points)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return arrays


def arrays_of(
    sweep: Sweep,
    points: Sequence[SweepPoint],
    largest: int | None,
    slurm_arrays: Sequence[Array] = (),
) -> list[Array]:
    """Group the points into arrays. `largest`: MaxArraySize, one more than the largest index; None:
    unknown. Raises ConfigError."""
    most = MAX_ARRAY_SIZE if largest is None else largest
    if most < 1:
        raise ConfigError("this cluster allows no job arrays (MaxArraySize = 0): ask its operators")
    # All tasks of an array share the request and the script of one sbatch.
    requests: dict[tuple[int, Path, tuple[str, ...]], list[SweepPoint]] = {}
    for point in points:
        wants = point.resources
        requests.setdefault((wants.pack, wants.script, (*wants.words(),)), []).append(point)
    parts = [
        Array([*words], script, group[i : i + most * pack], pack)
        for (pack, script, words), group in requests.items()
        for i in range(0, len(group), most * pack)
    ]
    arrays = [*slurm_arrays, *parts]
    least = sum(array.pack for array in arrays)
    if sweep.max_running and sweep.max_running < least:
        still = f", beside {len(slurm_arrays)} that Slurm has already" if slurm_arrays else ""
        raise ConfigError(
            f"{sweep.file}: max_running = {sweep.max_running}: the points make {len(parts)} arrays "
            f"(requests that differ, or parts of MaxArraySize = {most}){still}, and each runs one "
            f"point, or resources.pack of them, at least; give at least {least}"
        )
    return _limited(arrays, sweep.max_running) if sweep.max_running else arrays


def _limited(arrays: Sequence[Array], limit: int) -> list[Array]:
    """Divide the limit of running tasks by size: at least 1 task per array, and none that
    it cannot use."""
    # Each array gets one task; the rest is divided by size.
    spare = limit - sum(array.pack for array in arrays)
    total = sum(len(array.points) for array in arrays)
    tasks = [
        min(array.tasks, 1 + spare * len(array.points) // total // array.pack) for array in arrays
    ]
    # Tasks left by rounding go to the largest arrays first.
    room = limit - sum(n * array.pack for n, array in zip(tasks, arrays, strict=True))
    for i in sorted(range(len(arrays)), key=lambda i: -len(arrays[i].points)):
        more = min(arrays[i].tasks - tasks[i], room // arrays[i].pack)
        tasks[i], room = tasks[i] + more, room - more * arrays[i].pack
    return [
        # For ArrayTaskThrottle, too, 0 means no limit.
        replace(array, running=0 if n == array.tasks else n)
        for array, n in zip(arrays, tasks, strict=True)
    ]


def held_arrays(looks: Sequence[PointStatus]) -> list[Array]:
    """List the arrays that Slurm still holds for points of the sweep."""
    statuses: dict[str, list[PointStatus]] = {}
    for status in looks:
        if status.task and status.state.word in HOLDS:
            # 12 of 12_3, because a limit applies to the whole array.
            statuses.setdefault(status.task.partition("_")[0], []).append(status)
    return [
        Array([], Path(), [status.point for status in group], group[0].pack, job)
        for job, group in statuses.items()
    ]


def throttle_array(array: Array) -> str:
    """Set how many tasks of an array in Slurm may run; returns what went wrong, or ""."""
    limit = f"ArrayTaskThrottle={array.running}"
    command = ["scontrol", "update", f"JobId={array.job}", limit]
    env = slurm.plain_environment()
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    return done.stderr.strip() if done.returncode else ""


def write_points(folder: Path, points: Sequence[SweepPoint]) -> dict[str, Path]:
    """Write the whole configuration of each point, so that later edits of its source files do
    not change it."""
    (folder / "points").mkdir(parents=True, exist_ok=True)
    files = {point.name: folder / "points" / f"{point.name}.toml" for point in points}
    for point in points:
        text = to_toml(point.cfg)
        if not files[point.name].exists() or files[point.name].read_text() != text:
            write_atomic(files[point.name], text)
    return files


def submit_array(
    sweep: Sweep, array: Array, journal: Journal, env: Mapping[str, str],
    say: Callable[[str], None],
) -> list[Array]:  # fmt: skip
    """Submit one array by sbatch, retrying temporary failures. Returns what Slurm has accepted: the
    array, or the parts that fit the limit of queued jobs; the rest stays planned."""
    submitted_arrays: list[Array] = []
    points, tasks, full = array.points, array.tasks, False
    while points and tasks:
        part = replace(array, points=points[: tasks * array.pack])
        job, full = _send(sweep, part, journal, env, say)
        if job:
            submitted_arrays.append(replace(part, job=job))
            points = points[len(part.points) :]
            # The limit applies per array: each of several would run that many at once.
            if array.running and points:
                break
        elif full:
            # How much room there is is unknown: halve the array.
            tasks = part.tasks // 2
        else:
            break
    if full or (submitted_arrays and points):
        say(
            f"{len(points)} of {len(array.points)} point(s) stay planned: Slurm accepts no more "
            "of your jobs at a time (MaxSubmitJobs); submit again when some have ended"
        )
    return submitted_arrays


def _send(
    sweep: Sweep, array: Array, journal: Journal, env: Mapping[str, str],
    say: Callable[[str], None],
) -> tuple[str, bool]:  # fmt: skip
    """Run sbatch for one array; returns its job, "" if Slurm has not accepted it, and whether the
    user's limit of queued jobs was the reason."""
    configs = write_points(journal.folder, array.points)
    for name in ("arrays", "logs"):
        (journal.folder / name).mkdir(exist_ok=True)
    # Before sbatch: if this process dies before it learns the job, the array is found by name.
    submission = journal.intend(sweep.name, [*configs], array.pack)
    lines = journal.folder / "arrays" / f"{submission.name}.txt"
    write_atomic(lines, "".join(f"{config}\n" for config in configs.values()))
    command = [
        "sbatch", "--parsable", f"--job-name={submission.name}", f"--array={array.indices}",
        f"--output={journal.folder}/logs/%x-%A_%a.out",
        "--export=ALL",  # KEMPNER_* must reach the job even if SBATCH_EXPORT is NONE
        *array.words, *array.program, f"@{lines}",
    ]  # fmt: skip
    job: str | None = ""
    maybe = full = False  # maybe: only the answer may be lost, not the job, so Slurm is asked first
    wait_s = 0
    for delay in (0, *DELAYS_S):
        time.sleep(delay)
        wait_s += delay
        job = find_job(journal, submission) if maybe else ""
        if job:
            break
        if job is None:
            say("Slurm does not answer")
            continue
        # Slurm may register it late: sending it again would duplicate it.
        if maybe and wait_s < REGISTER_S:
            continue
        done = subprocess.run(command, env=dict(env), capture_output=True, text=True)
        if job := job_in(done.stdout) if done.returncode == 0 else "":
            break
        full = done.returncode != 0 and MAX_SUBMIT in done.stderr
        if full:
            break
        say(f"sbatch failed: {done.stderr.strip() or done.returncode}")
        maybe, wait_s = not any(word in done.stderr for word in NOT_SENT), 0
        if any(word in done.stderr for word in FINAL):
            break
    else:
        job = find_job(journal, submission) if maybe else ""
    record_job(journal, submission, job)
    return job or "", full


def job_in(text: str) -> str:
    """Parse the job in the output of `sbatch --parsable`, JOB or JOB;CLUSTER, "" if there is none:
    a site's sbatch may print more."""
    jobs = re.findall(r"^(\d+)(?:;.*)?$", text, re.M)
    return jobs[-1] if jobs else ""


def find_job(journal: Journal, submission: Submission) -> str | None:
    """Find the job of an array of which only the intent is known; "" if sbatch has not taken it,
    None if that is unknown. Slurm forgets a job some minutes after its end, its runs do not."""
    jobs = slurm.jobs_named(submission.name)
    if jobs is None:
        return None
    runs = [journal.folder.parent / point for point in submission.points]
    run_events = [
        event for run in runs for event in event_reader.read_events(run / "attempts.jsonl")
    ]
    # Only runs that began after the intent count: earlier ones belong to another array.
    since = [e.job.partition("_")[0] for e in run_events if e.job and e.time > submission.time]
    return next(iter([*jobs, *since]), "")


def record_job(journal: Journal, submission: Submission, job: str | None) -> None:
    """Record the result of find_job()."""
    if job:
        journal.append(event="submitted", name=submission.name, job=job)
    elif job == "":
        journal.append(event="refused", name=submission.name)


def withdraw_late(journal: Journal) -> list[str]:
    """Cancel waiting arrays that Slurm has registered late, after sbatch was retried or abandoned.
    Their running tasks continue; their points are no longer planned. Returns the arrays."""
    known_jobs = {submission.job for submission in journal.submissions.values()}
    waiting = slurm.waiting_arrays().items()
    late = [job for job, name in waiting if name in journal.names and job not in known_jobs]
    for job in late:
        command = ["scancel", "--state=PENDING", job]
        subprocess.run(command, capture_output=True, env=slurm.plain_environment())
    return late


def settle_journal(journal: Journal, here: bool = False) -> list[str]:
    """Resolve submissions that an earlier sweep.py could not record: it was killed, or Slurm was
    away. `here`: run points for which Slurm still gives no answer on this machine; if Slurm has the
    job after all, the run's lock lets only one of the two train. Returns the withdrawn arrays."""
    for submission in journal.open:
        job = find_job(journal, submission)
        record_job(journal, submission, "" if here and job is None else job)
    # The job of an open submission would count as late, too.
    return [] if journal.open else withdraw_late(journal)
