"""What the checks of benchmarks/gpu_checks.py share: the trainer as a user starts it, and its
losses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SMALL = (
    "configs/train/debug.toml",
    "--schedule.name=constant",  # the runs have different lengths
    "--eval.interval=0",
    "--metrics.log_interval=1",
)
TINY = ("--model.dim=64", "--model.n_layers=2", "--train.seq_len=32", "--train.global_batch=8")
SAME = 2e-2  # relative difference of losses that bf16 and other kernels may cause


class Failed(Exception):
    """The check failed; the text says why."""


class Skipped(Exception):
    """The check does not apply to this machine."""


Figures = dict[str, Any]
Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Job:
    """What a check is given. `work`: a directory that all checks share; `ranks`: the GPUs, or the
    processes of a distributed check on CPUs."""

    work: Path
    device: str
    quick: bool
    ranks: int

    @property
    def data(self) -> str:
        return f"--data.dataset_path={self.work / 'data'}"

    def words(self, name: str, *more: str) -> list[str]:
        """Arguments of scripts/train.py for a small run."""
        size = TINY if self.quick else ()
        where = (f"--run.dir={self.work / name}", f"--distributed.device={self.device}", self.data)
        return [*SMALL, *size, *where, *more]


# --- the trainer as a user starts it ----------------------------------------------------------


@contextlib.contextmanager
def trainer(
    words: list[str], log: Path, ranks: int = 1, program: str = "train.py", **env: str
) -> Iterator[Process]:
    """A program of scripts/, by torchrun for several ranks; it is killed when the body ends. `log`:
    what it prints."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*launcher, f"scripts/{program}", *words],
            cwd=ROOT, env=os.environ | env, start_new_session=True,
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # torchrun's ranks too
        process.wait()


def train(job: Job, words: list[str], ranks: int = 1, **env: str) -> str:
    """Run the trainer to its end; returns what it printed."""
    log = log_of(job, words)
    with trainer(words, log, ranks, **env) as process:
        process.wait()
    if process.returncode:
        raise failure(log)
    return log.read_text()


def log_of(job: Job, words: list[str]) -> Path:
    """The file with what train() of the same words has printed."""
    run_dir = next(word for word in words if word.startswith("--run.dir="))
    return job.work / f"{Path(run_dir).name}.out"


def failure(log: Path) -> Failed:
    """Prints a log; returns the line of it that says what went wrong."""
    print(text := log.read_text(), flush=True)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return Failed((errors or lines or ["no output"])[-1])


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of the steps so far; the last one may be half written."""
    found = []
    with contextlib.suppress(OSError):
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [line for line in found if "loss" in line]


def losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(run_dir)}


def compare(name: str, found: dict[int, float], reference: dict[int, float]) -> float:
    """The largest relative difference between two runs' losses. Raises Failed over SAME."""
    steps = found.keys() & reference.keys()
    if not steps:
        raise Failed(f"{name}: no steps to compare")
    worst = max(abs(found[n] - reference[n]) / reference[n] for n in steps)
    if worst > SAME:
        raise Failed(f"{name}: losses differ by {worst:.1%} from those of the eager run")
    return worst
