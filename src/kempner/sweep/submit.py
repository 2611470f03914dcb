"""Arrays of points: one for each request to Slurm, cut where Slurm's limit is. No torch."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kempner import slurm
from kempner.config.loading import to_toml
from kempner.config.option import ConfigError
from kempner.files import write_atomic
from kempner.history import events
from kempner.history.run_history import is_run
from kempner.sweep.file import Sweep
from kempner.sweep.journal import Journal, Submission
from kempner.sweep.points import Point, check_points
from kempner.sweep.resources import profile_environment

DELAYS_S = (1, 2, 4, 8, 16, 32)  # before sbatch is tried again
MAX_ARRAY_SIZE = 1001  # Slurm's default


@dataclass(frozen=True)
class Array:
    """Points with the same request. `running`: at most so many at once; 0: all."""

    words: list[str]
    script: Path
    points: list[Point]
    running: int

    @property
    def indices(self) -> str:
        limit = f"%{self.running}" if self.running else ""
        return f"0-{len(self.points) - 1}{limit}"


def check(sweep: Sweep, points: Sequence[Point]) -> list[Array]:
    """The arrays of these points, all of it sound. Raises ConfigError with all problems."""
    problems: list[str] = []
    arrays: list[Array] = []
    if is_run(sweep.dir):
        problems.append(f"{sweep.dir}: is the directory of a run; give the sweep another name")
    try:
        profile_environment(sweep.profile)
    except ConfigError as error:
        problems += error.problems
    try:
        arrays = arrays_of(sweep, points, slurm.max_array_size())
    except ConfigError as error:
        problems += error.problems
    try:
        check_points(points)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return arrays


def arrays_of(sweep: Sweep, points: Sequence[Point], largest: int | None) -> list[Array]:
    """`largest`: MaxArraySize, over the largest index by one; None: not known. Raises
    ConfigError."""
    most = MAX_ARRAY_SIZE if largest is None else largest
    if most < 1:
        raise ConfigError("this cluster takes no job arrays (MaxArraySize = 0): ask its operators")
    requests: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        script = str(point.resources.script)
        requests.setdefault((script, *point.resources.words()), []).append(point)
    parts = [
        (script, words, group[i : i + most])
        for (script, *words), group in requests.items()
        for i in range(0, len(group), most)
    ]
    if sweep.max_running and sweep.max_running < len(parts):
        raise ConfigError(
            f"{sweep.file}: max_running = {sweep.max_running}: the points make {len(parts)} arrays "
            f"(requests that differ, or parts of MaxArraySize = {most}), and each runs one point "
            f"at least; give at least {len(parts)}"
        )
    shares = _shares([len(group) for _, _, group in parts], sweep.max_running)
    return [
        Array(words, Path(script), group, share)
        for (script, words, group), share in zip(parts, shares, strict=True)
    ]


def _shares(sizes: Sequence[int], limit: int) -> list[int]:
    """The limit in parts by size, each at least 1 and at most its array; 0: no limit is needed."""
    spare = limit - len(sizes)
    shares = [1 + spare * size // sum(sizes) for size in sizes] if limit else [0] * len(sizes)
    return [0 if share >= size else share for share, size in zip(shares, sizes, strict=True)]


def write_points(folder: Path, points: Sequence[Point]) -> dict[str, Path]:
    """The whole configuration of each point: what the files that it came from say later does not
    matter to it."""
    (folder / "points").mkdir(parents=True, exist_ok=True)
    found = {point.name: folder / "points" / f"{point.name}.toml" for point in points}
    for point in points:
        text = to_toml(point.cfg)
        if not found[point.name].exists() or found[point.name].read_text() != text:
            write_atomic(found[point.name], text)
    return found


def submit(
    sweep: Sweep, array: Array, journal: Journal, env: Mapping[str, str],
    say: Callable[[str], None],
) -> bool:  # fmt: skip
    """One array: sbatch, again where it fails for a while; whether it was submitted."""
    configs = write_points(journal.folder, array.points)
    for name in ("arrays", "logs"):
        (journal.folder / name).mkdir(exist_ok=True)
    submission = journal.intend(sweep.name, [*configs])
    lines = journal.folder / "arrays" / f"{submission.name}.txt"
    write_atomic(lines, "".join(f"{config}\n" for config in configs.values()))
    command = [
        "sbatch", "--parsable", f"--job-name={submission.name}", f"--array={array.indices}",
        f"--output={journal.folder}/logs/%x-%A_%a.out",
        *array.words, str(array.script), f"@{lines}",
    ]  # fmt: skip
    job: str | None = ""
    for delay in (0, *DELAYS_S):
        time.sleep(delay)
        if delay:  # the answer may be lost, and not the job: no second try without Slurm's word
            job = find(journal, submission)
        if job:
            break
        if job is None:
            say("Slurm does not answer")
            continue
        done = subprocess.run(command, env=dict(env), capture_output=True, text=True)
        job = done.stdout.strip().partition(";")[0]  # JOB, or JOB;CLUSTER
        if done.returncode == 0:
            break
        say(f"sbatch failed: {done.stderr.strip() or done.returncode}")
    else:
        job = find(journal, submission)
    record(journal, submission, job)
    return bool(job)


def find(journal: Journal, submission: Submission) -> str | None:
    """The job of an array of which only the intent is known; "" where sbatch has not taken it, None
    where that is not known. Slurm forgets a job some minutes after its end, its runs do not."""
    jobs = slurm.jobs_named(submission.name)
    if jobs is None:
        return None
    runs = [journal.folder.parent / point for point in submission.points]
    told = [event for run in runs for event in events.read(run / "attempts.jsonl")]
    since = [e.job.partition("_")[0] for e in told if e.job and e.time > submission.time]
    return next(iter([*jobs, *since]), "")


def record(journal: Journal, submission: Submission, job: str | None) -> None:
    """What find() has found out."""
    if job:
        journal.append(event="submitted", name=submission.name, job=job)
    elif job == "":
        journal.append(event="refused", name=submission.name)


def settle(journal: Journal) -> None:
    """What an earlier sweep.py could not record, because it was killed or Slurm was away."""
    for submission in journal.open:
        record(journal, submission, find(journal, submission))
