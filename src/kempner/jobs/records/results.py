"""Results of evaluations, from the evaluating job to metrics.jsonl. No torch.

metrics.jsonl has one writer, the trainer while it runs: two processes that append to one file over
NFS may overwrite each other's lines. So each result is a separate file, RUN/eval/step_X.TASKS.json.
The writer of metrics.jsonl adds its content and moves the file to RUN/eval/added. TASKS is a
digest: several jobs may evaluate a run, each with its own tasks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kempner.jobs.system.files import LineFile, name_of_step, step_of_name, write_atomic

PREFIX = "eval/"  # of the figures in a line of metrics.jsonl


def record_result(run_dir: Path, step: int, tasks: str, figures: Mapping[str, float]) -> None:
    """Record the figures of a checkpoint. `tasks`: any text that identifies the tasks. Without a
    trainer, this process is the writer."""
    line = {"step": step, "time": round(time.time(), 3)}
    line |= {f"{PREFIX}{name}": value for name, value in figures.items()}
    folder = run_dir / "eval"
    folder.mkdir(exist_ok=True)
    write_atomic(folder / f"{name_of_step(step)}.{_digest(tasks)}.json", json.dumps(line))
    add_without_trainer(run_dir)


def add_without_trainer(run_dir: Path) -> None:
    # Not needed by the trainer, which calls only add_results().
    from kempner.jobs.records.state import read_lock

    if read_lock(run_dir, time.time()).holder is False:  # None: unknown
        add_results(run_dir, LineFile(run_dir / "metrics.jsonl").write)


def add_results(run_dir: Path, write: Callable[[str], object]) -> None:
    """Pass each new result to `write`. A crash in between may duplicate a line, which is harmless:
    the later line counts."""
    for path in sorted((run_dir / "eval").glob("step_*.json")):
        try:
            text = path.read_text()
        except FileNotFoundError:  # another evaluating job has added it
            continue
        write(text)
        (path.parent / "added").mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.parent / "added" / path.name)


def evaluated_steps(run_dir: Path, tasks: str) -> set[int]:
    """Return the steps with a result of these tasks."""
    folder = run_dir / "eval"
    paths = [*folder.glob("step_*.json"), *folder.glob("added/step_*.json")]
    names = [path.stem.partition(".") for path in paths]
    # A file of an earlier version does not name its tasks: it counts for any.
    found = {step_of_name(name) for name, _, of in names if of in ("", _digest(tasks))}
    return {step for step in found if step is not None}


def _digest(tasks: str) -> str:
    return hashlib.sha256(tasks.encode()).hexdigest()[:8]
