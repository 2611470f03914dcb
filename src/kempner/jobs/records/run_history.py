"""Reads a run directory: its steps, attempts, state and use of wall time. No torch.

A run that still trains, was killed in the middle of a line, or never reached its first step has a
history, too: missing values are None and raise nothing here.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from kempner.jobs.records import event_reader
from kempner.jobs.records.attempts import Attempt, Record, Refusal, attempts_of
from kempner.jobs.records.results import PREFIX
from kempner.jobs.records.state import RunState, judge_state, read_lock, slurm_job_of_run
from kempner.jobs.report.wall_time import WallTime, wall_time_of
from kempner.jobs.slurm import SlurmJob
from kempner.jobs.system.directories import NOBODYS
from kempner.jobs.system.files import step_of_name
from kempner.jobs.system.reading import open_regular, read_jsonl

# Types of a record's fields, if present: files may be damaged or foreign.
STATUS = {"step": int, "max_steps": int, "attempt": int, "state": str, "reason": str}
# Numbers of a step that reports draw or average; in a damaged line, None replaces a non-number.
NONE = (
    "loss",
    "val_loss",
    "lr",
    "grad_norm",
    "tokens",
    "tokens_per_s",
    "step_time",
    "reward",
    "mfu",
)
COUNTED_FIGURES = dict.fromkeys(NONE) | {"checkpoint_time": 0.0, "eval_time": 0.0}
ROUND = ("round", "replicas", "bytes_sent", "bytes_data_parallel", "outer_time")
SAVE = ("saved_step", "save_stall", "save_drain")
LARGEST_NUMBER = 1e300  # a larger number is damage; sums of many smaller ones stay finite
# Sample of a long file: blocks, bytes per block, and bytes at the end.
SAMPLE_BLOCKS, SAMPLE_BLOCK_BYTES, SAMPLE_TAIL_BYTES = 64, 1 << 12, 1 << 15
RECORDS = ("status.json", "attempts.jsonl", "metrics.jsonl", "lock")


@dataclass(frozen=True)
class History:
    """History of a run. `losses` and `validations` are the valid lines of metrics.jsonl, by step;
    `lines` also has those of steps that a later attempt has repeated."""

    path: Path
    status: Record
    lines: list[Record] = field(repr=False)
    results: list[Record] = field(repr=False)  # of eval.py, one per step, in order
    attempts: list[Attempt]
    state: RunState
    job: SlurmJob | None  # as Slurm shows it; None if unknown
    successor: SlurmJob | None = None  # the job waiting to continue the run
    records: list[Record] = field(default_factory=list, repr=False)  # the lines of attempts.jsonl
    share: float = 1.0  # of metrics.jsonl that was read
    refusals: list[Refusal] = field(default_factory=list)  # starts that never became attempts
    refusal: Refusal | None = None  # the last one, if no attempt followed

    @cached_property
    def losses(self) -> list[Record]:
        return counting_lines([line for line in self.lines if "loss" in line], self.attempts)

    @cached_property
    def validations(self) -> list[Record]:
        return counting_lines([line for line in self.lines if "val_loss" in line], self.attempts)

    @cached_property
    def saves(self) -> list[Record]:
        """Lines of saves; they have no figures of steps if no step ran meanwhile."""
        return [line for line in self.lines if all(is_number(line.get(key)) for key in SAVE)]

    @cached_property
    def rounds(self) -> list[Record]:
        """Lines of the rounds of a run whose replicas meet once per round (lowcomm/)."""
        found = [line for line in self.lines if "round_loss" in line]
        whole = [line for line in found if all(is_number(line.get(key)) for key in ROUND)]
        return counting_lines(whole, self.attempts)

    @cached_property
    def wall_time(self) -> WallTime:
        newest = newest_checkpoint_step(self.path / "checkpoints")
        return wall_time_of(self.attempts, self.lines, newest)

    @property
    def lineage(self) -> tuple[str, ...]:
        """RUN@STEP that the run is a fork of, then the origin of that run, and so on."""
        return next((a.lineage for a in reversed(self.attempts) if a.began), ())

    @property
    def step(self) -> int | None:
        """Steps done, as far as known; status.json of a running attempt lags behind. None for a
        program with unknown steps. A program that has not printed a step has not gone back."""
        starts = [attempt for attempt in self.attempts if attempt.began is not None]
        with_steps = [attempt for attempt in starts if attempt.counted]
        newest = max((a.last_step for a in (*starts[-1:], *with_steps[-1:])), default=0)
        last = self.losses[-1]["step"] if self.losses else 0
        return max(newest, last) or (None if starts and not with_steps else 0)

    @property
    def warning(self) -> str:
        """Warning about the last attempt in one line; "" if none."""
        last = self.attempts[-1:]
        warnings = [
            text for a in last for text in (a.device_warning, a.smaller(self.attempts)) if text
        ]
        return "; ".join(warnings)

    @property
    def step_text(self) -> str:
        return "-" if self.step is None else f"{self.step:,}"


def is_run(path: Path) -> bool:
    """Return whether it is a run; False also for a directory that this user may not read."""
    return any(os.path.isfile(path / name) for name in RECORDS)


def runs_in(path: Path) -> list[Path]:
    """Return the run itself, or the runs in a directory."""
    if is_run(path):
        return [path]
    with contextlib.suppress(OSError):
        return sorted(run for run in path.iterdir() if is_run(run))
    return []


def unreadable_in(path: Path) -> list[Path]:
    """List directories, records and dangling links that runs_in() or load_history() cannot read."""
    found = []
    with contextlib.suppress(OSError):
        entries = [path] if is_run(path) else sorted(path.iterdir())
        for entry in entries:
            if NOBODYS.fullmatch(entry.name):  # such as lost+found
                continue
            if entry.is_symlink() and not os.path.exists(entry):
                found.append(entry)
            elif os.path.isdir(entry):
                records = [entry / name for name in RECORDS if os.path.exists(entry / name)]
                if not os.access(entry, os.R_OK | os.X_OK):
                    found.append(entry)
                found += [
                    record
                    for record in records
                    if not (os.path.isfile(record) and os.access(record, os.R_OK))
                ]
    return found


def load_history(
    path: Path,
    jobs: dict[str, SlurmJob] | None = None,
    tail: int | None = None,
    *,
    sample: bool = False,
) -> History:
    """Read a run directory; missing files count as empty. `jobs`: slurm.my_jobs(); `tail`: read
    only so many bytes at the end of metrics.jsonl; `sample`: read only sample lines and the last
    lines if it is long."""
    status: Record = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        with open(path / "status.json", opener=open_regular) as file:
            status = {"time": os.fstat(file.fileno()).st_mtime, **json.load(file)}
        status = {
            k: v for k, v in status.items() if event_reader.fits_type(STATUS.get(k, object), v)
        }
    metrics = path / "metrics.jsonl"
    share = (
        min(1.0, SAMPLE_BLOCKS * SAMPLE_BLOCK_BYTES / max(1, file_size(metrics))) if sample else 1.0
    )
    all_lines = sample_lines(metrics) if share < 1 else read_jsonl(metrics, tail)
    sound_lines = [*filter(is_sound, all_lines)]
    lines = [line for line in sound_lines if not is_result(line)]
    records = [*filter(event_reader.is_event, event_reader.read_records(path / "attempts.jsonl"))]
    attempts, refusals = attempts_of(event_reader.known_events(records), lines, status)
    later = next((r for r in refusals[-1:] if not attempts or r.time > attempts[-1].ended), None)
    of_starts = [start.job for start in attempts] or [start.job for start in refusals]
    name = next(filter(None, reversed(of_starts)), None) or status.get("job")
    after = successor_of(path, jobs or {})
    if after and after.why != "Dependency":  # its turn; it may have written nothing yet
        name, after = after.number, None
    lock = read_lock(path, time.time())
    job = slurm_job_of_run(path, name, jobs, lock)
    state = judge_state(attempts, lines, lock, job, later)
    if state.word in ("running", "silent") and attempts:
        # Judged by its events alone, which have no end yet, it was killed.
        attempts[-1] = replace(attempts[-1], state="running")
    run = History(
        path, status, lines, results_of(sound_lines), attempts, state, job, after, records, share,
        refusals, later,
    )  # fmt: skip
    if "max_steps" in status:  # a later start may ask for fewer than are done
        status["max_steps"] = max(status["max_steps"], run.step or 0)
    return run


def successor_of(path: Path, jobs: dict[str, SlurmJob]) -> SlurmJob | None:
    """Return the queued job that continues the last one (KEMPNER_CHAIN), by the chain's journal."""
    last: Record = next(reversed(read_jsonl(path / "chain.jsonl")), {})
    return jobs.get(str(last.get("job"))) if last.get("event") == "submitted" else None


def file_size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def sample_lines(path: Path) -> list[Record]:
    """Read sample lines of a long file: those in SAMPLE_BLOCKS evenly spaced blocks, and the last
    ones. The time does not grow with the file."""
    text = b""
    with contextlib.suppress(OSError), open(path, "rb", opener=open_regular) as file:
        size = file.seek(0, os.SEEK_END)
        for k in range(SAMPLE_BLOCKS):
            file.seek(k * size // SAMPLE_BLOCKS)
            # A line cut by the block is not JSON and is skipped below.
            text += file.read(SAMPLE_BLOCK_BYTES) + b"\n"
        file.seek(max(0, size - SAMPLE_TAIL_BYTES))
        text += file.read()
    found: dict[bytes, Record] = {}
    for line in text.split(b"\n"):
        with contextlib.suppress(ValueError):
            if isinstance(record := json.loads(line), dict):
                # Keyed by text: the blocks may overlap.
                found[line] = record
    return list(found.values())


def is_sound(line: Record) -> bool:
    """Return whether a line has a step and a time. Replaces fields that should be numbers and are
    not by their defaults."""
    step, attempt = line.get("step"), line.get("attempt", 0)
    if (
        type(step) is not int
        or type(attempt) is not int
        or not 0 <= step < event_reader.LATEST_TIME
    ):
        return False
    if not event_reader.is_time(line.get("time")):
        return False
    for name in COUNTED_FIGURES:
        value = line.get(name, 0)  # is_number in one line: there may be 100,000 of them
        if type(value) not in (int, float) or not -LARGEST_NUMBER < value < LARGEST_NUMBER:
            line[name] = COUNTED_FIGURES[name]
    return True


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether it is a finite number: null stands for a non-finite one, and a damaged file
    may have anything."""
    return type(value) in (int, float) and -LARGEST_NUMBER < value < LARGEST_NUMBER


def is_result(line: Record) -> bool:
    """Return whether a line is a result. Results come from another process at any time, so they are
    not signs of life of an attempt."""
    return "loss" not in line and any(key.startswith(PREFIX) for key in line)


def results_of(lines: Sequence[Record]) -> list[Record]:
    """Return the newest figures of each step."""
    by_step: dict[int, Record] = {}
    for line in filter(is_result, lines):
        by_step[line["step"]] = by_step.get(line["step"], {}) | line
    return [by_step[step] for step in sorted(by_step)]


def main_figures(line: Record) -> dict[str, float]:
    """Return a result's figures from 0 to 1, such as accuracies, by task, without their errors."""
    return {
        name.removeprefix(PREFIX): value
        for name, value in line.items()
        if name.startswith(PREFIX) and "stderr" not in name and is_number(value) and 0 <= value <= 1
    }


def newest_checkpoint_step(checkpoints: Path) -> int | None:
    with contextlib.suppress(OSError):
        return step_of_name((checkpoints / "latest").readlink().name)
    return None


def counting_lines(lines: Sequence[Record], attempts: Sequence[Attempt]) -> list[Record]:
    """Return the valid lines, by step. A line cancels earlier lines of its step and later steps,
    because the run has gone back. So does the start of an attempt, before its first line."""
    limits: dict[int, float] = {}
    limit = float("inf")
    # Backwards: the start of an attempt limits the lines of all earlier ones.
    for attempt in sorted(attempts, key=lambda attempt: -attempt.number):
        limits[attempt.number] = limit
        if attempt.began and attempt.counted:
            limit = min(limit, attempt.first_step)
    count: list[Record] = []
    for line in lines:
        if line["step"] > limits.get(line.get("attempt", -1), float("inf")):
            continue
        while count and count[-1]["step"] >= line["step"]:
            count.pop()
        count.append(line)
    return count
