"""The table of docs/start/any-program.md: kinds of programs under run.sh, each struck by one fault
after the other in one job. Too slow for every day:

    .venv/bin/python -m pytest -m soak -s tests/jobs/slurm/test_any_program.py

prints the rows.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kempner.jobs.records.event_reader import of_kind, read_events, read_kind
from kempner.jobs.records.events import DecisionEvent, FaultEvent, StartEvent
from tests.cluster import ROOT, Cluster, boot
from tests.jobs.slurm.test_run import wait_until

PROGRAMS = ROOT / "tests/jobs/slurm/programs"
PYTHON = sys.executable
BEGINS = r"^\[0\] (?:resumed at|resuming at iter|from step) (\d+)"


@dataclass(frozen=True)
class Program:
    """`command` has the program's file as {}; `words`: options of run.sh; `ranks`: of the whole
    job; `steps`: what it prints, "" for one that the report cannot count; `pieces`: the files that
    it has made at its end; `per_host`: one process a host."""

    name: str
    command: tuple[str, ...]
    words: tuple[str, ...]
    ranks: int = 4
    per_host: bool = False
    steps: str = r"step (\d+)"
    pieces: tuple[str, int] = ("", 0)

    def __str__(self) -> str:
        return self.name


def steps(pattern: str) -> str:
    return f"--steps={pattern}"


ALL = (
    Program(
        "nano.py",
        (PYTHON, "{}", "400"),
        ("--checkpoints=out/ckpt.pt", steps(r"iter (\d+)")),
        steps=r"iter (\d+):",
    ),
    Program(
        "torchrun_style.py",
        ("torchrun", "--nproc-per-node=2", "{}", "400"),
        ("--checkpoints=out/step_*.pt", steps(r"step (\d+):")),
        per_host=True,
        steps=r"step (\d+):",
    ),
    Program(
        "composer_names.py",
        (PYTHON, "{}", "600"),
        ("--checkpoints=out/ep*.pt",),
        steps="",
        pieces=("out/ep*.pt", 30),
    ),
    Program(
        "fast_save.py",
        (PYTHON, "{}", "200"),
        ("--checkpoints=out/state.json", steps(r"step (\d+)")),
    ),
    Program(
        "leaves_later.py", (PYTHON, "{}", "300"), ("--checkpoints=out/ckpt-*", steps(r"step (\d+)"))
    ),
    Program("loop.c", ("{}", "600"), ("--checkpoints=out/state-0.txt", steps(r"step (\d+)"))),
    Program(
        "shards.sh",
        ("bash", "{}", "400"),
        ("--checkpoints=out/piece-*",),
        steps="",
        pieces=("out/piece-*", 400),
    ),
    Program(
        "grid_search.py",
        (PYTHON, "{}", "300"),
        ("--checkpoints=out/point-*",),
        ranks=2,
        per_host=True,
        steps="",
        pieces=("out/point-*", 300),
    ),
    Program(
        "all_gpus.py",
        (PYTHON, "{}", "400"),
        ("--checkpoints=out/answers-0-*", steps(r"step (\d+)")),
        ranks=2,
        per_host=True,
    ),
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts of two GPUs."""
    with boot(2, 2, tmp_path_factory) as cluster:
        yield cluster


def kill_last_rank(program: Program, folder: Path) -> None:
    """Of the processes that have this rank the outermost one, below its supervisor."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "environ").read_bytes().split(b"\0")
            if (
                f"RANK={program.ranks - 1}".encode() in words
                and any(word.startswith(b"KEMPNER_HEARTBEAT=") for word in words)
                and Path(os.readlink(place / "cwd")) == folder
            ):
                parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
                found[place.name] = parent
    top = [pid for pid, parent in found.items() if parent not in found]
    assert top, f"no rank {program.ranks - 1} of {program}"
    os.kill(int(top[0]), signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.parametrize("program", ALL, ids=str)
def test_a_program_and_its_faults(small: Cluster, tmp_path: Path, program: Program) -> None:
    """A rank is killed, the job is warned, a host dies, and then the program ends by itself."""
    file = PROGRAMS / program.name
    if file.suffix == ".c":
        binary = tmp_path / file.stem
        subprocess.run(["cc", "-O1", "-o", binary, file], check=True)
        file = binary
    command = [word.format(file) for word in program.command]
    options = ["--nodes=2", "--gpus-per-node=2", "--time=10"]
    if program.per_host and command[0] != "torchrun":
        options.append("--ntasks-per-node=1")
    env = {"PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}", "KEMPNER_EXCLUDE": "0"}
    job = small.sbatch(
        "run.sh", *program.words, "--", *command, options=options, cwd=tmp_path, env=env
    )
    log, run_dir = tmp_path / f"kempner-{job}.out", tmp_path / f"runs/{file.stem}"

    def count() -> int:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int((run_dir / "progress").read_text().split()[0])
        return -1

    def attempts() -> int:
        return len(read_kind(run_dir / "attempts.jsonl", StartEvent))

    def saved_again(number: int) -> None:
        wait_until(small, job, lambda: attempts() >= number)
        before = count()
        wait_until(small, job, lambda: count() > before)

    saved_again(1)
    kill_last_rank(program, tmp_path)
    saved_again(2)
    small.ask("scancel", "--batch", "--signal=TERM", job)
    saved_again(3)
    small.testbed("crash", "node2")
    small.testbed("revive", "node2")
    code = small.wait(job)
    text = log.read_text()
    assert code == 0, text

    events = read_events(run_dir / "attempts.jsonl")
    first = next(fault for fault in of_kind(events, FaultEvent))
    assert first.hosts == ("node2",) and (program.per_host or first.ranks == (3,)), text
    assert {
        host for fault in of_kind(events, FaultEvent) if not fault.lost_peer for host in fault.hosts
    } == {"node2"}
    assert {d.blamed for d in of_kind(events, DecisionEvent)} <= {"", "node2"}
    pattern, count_at_end = program.pieces
    assert not pattern or len([*tmp_path.glob(pattern)]) == count_at_end
    began, last = history(text, program.steps or "saved batch (\\d+)")
    report = small.run(PYTHON, ROOT / "scripts/report.py", run_dir).stdout
    told = re.search(r"steps recomputed +(\S+)", report)
    assert told
    truth = sum(max(0, a - b) for a, b in zip(last, began[1:], strict=False))
    cells = [d.decision for d in of_kind(events, DecisionEvent)][:3]
    if program.steps:
        pairs = zip(cells, last, began[1:], strict=False)
        cells = [f"{decision}, {b} of {a}" for decision, a, b in pairs]
    print(f"\n| `{program}` | {program.ranks} | {' | '.join(cells)} | {told[1]} ({truth}) |")
    if program.steps:  # rank 0 is killed with the step, and its last lines are not recorded
        assert int(told[1]) <= truth and (int(told[1]) == truth or "or more" in report), report
    else:
        assert told[1] == "-", report


def history(text: str, pattern: str) -> tuple[list[int], list[int]]:
    """The steps that the attempts began with, and the last ones that rank 0 printed."""
    attempts = re.split(r"kempner: attempt \d+ in ", text)[1:]
    begun = (re.search(BEGINS, each, re.M) for each in attempts)
    printed = (re.findall(rf"^\[0\] {pattern}", each, re.M) for each in attempts)
    return [int(b[1]) if b else 0 for b in begun], [int(p[-1]) if p else 0 for p in printed]


@pytest.mark.soak
def test_a_program_with_mpi(small: Cluster, tmp_path: Path) -> None:
    """Where Open MPI and Slurm's PMIx are: its ranks are those of srun, on one host; it is killed,
    and goes on."""
    if not shutil.which("mpicc"):
        pytest.skip("no mpicc: apt-get install openmpi-bin libopenmpi-dev")
    listed = small.run("srun", "--mpi=list")
    if "pmix" not in listed.stdout + listed.stderr:
        pytest.skip("this Slurm has no PMIx: srun --mpi=list")
    binary = tmp_path / "mpi_sum"
    subprocess.run(["mpicc", "-o", binary, PROGRAMS / "mpi_sum.c"], check=True)
    words = ["--checkpoints=out/state.txt", steps(r"step (\d+)"), "--", binary, "100"]
    options = ["--nodes=1", "--gpus-per-node=2"]
    env = {"KEMPNER_MPI": "pmix", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    job = small.sbatch("run.sh", *words, options=options, cwd=tmp_path, env=env)
    log, run_dir = tmp_path / f"kempner-{job}.out", tmp_path / "runs/mpi_sum"
    wait_until(small, job, lambda: (run_dir / "progress").exists())
    kill_last_rank(Program("mpi_sum", (), (), ranks=2), tmp_path)
    assert small.wait(job) == 0, log.read_text()
    text = log.read_text()
    # At the last checkpoint before the kill, which may come late.
    assert "[0] step 100: 2 ranks" in text and re.search(r"\[0\] resumed at [2468]0", text), text
    (fault,) = read_kind(run_dir / "attempts.jsonl", FaultEvent)
    assert fault.ranks == (1,), text
