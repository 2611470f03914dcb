"""The command line of drill.sh, and the shape of its jobs, checked by the launch script itself."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kempner.config.option import ConfigError
from kempner.jobs.drill.cases import CASES, DRILL_STEPS, HANG_S, OWN, SAVE_INTERVAL, Case

ROOT = Path(__file__).resolve().parents[4]
SCRIPTS_FOLDER = ROOT / "scripts/slurm"
MOST_GPU_HOURS = 10.0
OWN_OPTIONS = (  # sbatch options that the drill sets for each job
    "job-name", "J", "output", "o", "error", "e", "time", "t", "array", "a", "export", "wrap",
    "dependency", "d", "parsable", "test-only", "wait", "W", "hold", "H", "signal", "open-mode",
    "input", "i", "dry-run", "begin", "b",
)  # fmt: skip
ANY_BATCH = 2**12 * 3**2 * 5 * 7 * 11  # a multiple of any usual number of ranks
LEAST_MINUTES, MOST_MINUTES = 1, 24 * 60


@dataclass(frozen=True)
class Plan:
    """The cases to try. `request`: the user's sbatch options; `command`: the user's program;
    `nodes`, `tasks` and `gpus`: of each job, the last two per node."""

    minutes: int
    cases: tuple[Case, ...]
    request: tuple[str, ...]
    command: tuple[str, ...]
    nodes: int = field(default=1)
    tasks: int = field(default=1)
    gpus: int = field(default=0)

    @property
    def ranks(self) -> int:
        return self.nodes * self.tasks

    @property
    def batch(self) -> int:
        """Samples per step, the same number on each rank."""
        return self.ranks * -(-8 // self.ranks)

    @property
    def excluded(self) -> list[str]:
        """Host lists that the user excludes."""
        found = (re.fullmatch(r"(?:--exclude=|-x)(.+)", word) for word in self.request)
        return [match[1] for match in found if match]

    @property
    def gpu_hours(self) -> float:
        """Estimated cost if nothing goes wrong."""
        return sum(case.usual for case in self.cases) / 60 * self.nodes * self.gpus


def parse_plan(argv: Sequence[str]) -> Plan:
    """Parse the arguments of drill.sh. Raises ConfigError with all problems."""
    words, command = [*argv], tuple[str, ...]()
    if "--" in words:
        at = words.index("--")
        words, command = words[:at], tuple(words[at + 1 :])
        if not command:
            raise ConfigError('no command after "--": drill.sh [SBATCH OPTIONS] -- COMMAND')
    values: dict[str, str] = {}
    request: list[str] = []
    problems: list[str] = []
    while words:
        word = words.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("--") and name in ("minutes", "only"):
            if not equals:
                value = words.pop(0) if words else ""
            if name in values:
                problems.append(f"--{name}: is given twice; give it once")
            values[name] = value
        elif not re.match(r"-\w|--\w", word):
            problems.append(
                f"{word!r} is not an option: write --NAME=VALUE as one word, and your program"
                " after --"
            )
        elif re.match(r"--[a-z]+\.[a-z]", word):
            problems.append(f"{word}: is an option of the trainer, not of sbatch; leave it out")
        elif name in OWN_OPTIONS or (word[1:2] in OWN_OPTIONS and not word.startswith("--")):
            problems.append(f"{word}: the drill sets this for each of its jobs; leave it out")
        else:
            request.append(word)
    empty = [word[:-1] for word in request if word.endswith("=")]
    empty += [f"--{name}" for name, value in values.items() if not value]
    problems += [f"{word}: a value is missing" for word in empty]
    values = {"minutes": "20", "only": "", **values}
    minutes = values["minutes"]
    number = int(minutes) if re.fullmatch("[0-9]{1,9}", minutes) else 0
    if minutes and not LEAST_MINUTES <= number <= MOST_MINUTES:
        problems.append(f"--minutes={minutes}: must be from {LEAST_MINUTES} to {MOST_MINUTES}")
    cases = _chosen(values["only"], command, problems)
    if problems:
        raise ConfigError(problems)
    return Plan(number, cases, tuple(request), command)


def _chosen(only: str, command: Sequence[str], problems: list[str]) -> tuple[Case, ...]:
    """Return the cases, with the unbroken run if another case is compared with it."""
    known = (*CASES, OWN) if command else CASES
    if not only:
        return known
    names = only.split(",")
    if "own" in names and not command:
        problems.append("--only=own: give your program after --")
    elif wrong := [name for name in names if name not in {case.name for case in known}]:
        problems.append(
            f"--only={only}: no case {wrong[0]!r}; choose from"
            f" {', '.join(case.name for case in known)}"
        )
    compared = set(names) - {"own"}
    return tuple(
        case for case in known if case.name in names or (compared and case.name == "unbroken")
    )


def trainer_words(run: Path, batch: int) -> list[str]:
    """Return the arguments of the tiny run; `batch`: samples per step."""
    return [
        str(ROOT / "configs/train/debug.toml"),
        "--data.dataset_path=fake:",
        f"--run.dir={run}",
        "--train.seq_len=32",
        f"--train.global_batch={batch}",
        f"--train.max_steps={DRILL_STEPS}",
        "--train.deterministic",
        f"--checkpoint.interval={SAVE_INTERVAL}",
        "--eval.interval=0",
        "--metrics.log_interval=1",
        f"--resilience.hang_timeout={HANG_S}",
    ]


def _dry_run(plan: Plan, batch: int) -> subprocess.CompletedProcess[str]:
    words = [*trainer_words(Path("runs/drill"), batch), "--train.micro_batch=1"]
    command = ["bash", str(SCRIPTS_FOLDER / "multinode.sh"), *words]
    # KEMPNER_TRAIN would replace the trainer in the check.
    env = {k: v for k, v in os.environ.items() if not k.startswith("KEMPNER_TRAIN")}
    return subprocess.run(
        [*command, "--dry-run", *plan.request], capture_output=True, text=True, env=env
    )


def with_shape(plan: Plan) -> Plan:
    """Ask the launch script for the shape of jobs of this request. Raises ConfigError with its
    message, or Slurm's, if the request is refused."""
    if plan.command and "/" in plan.command[0] and not Path(plan.command[0]).exists():
        raise ConfigError(f"no file {plan.command[0]!r} here; correct its path")
    place = Path("runs" if Path("runs").exists() else ".").absolute()
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{place} is not writable; change to a directory that you can write to")
    # The number of ranks is unknown so far; if it does not divide the batch, the error names it.
    done = _dry_run(plan, ANY_BATCH)
    if ranks := re.search(r"sequences do not divide by (\d+) ranks", done.stderr):
        done = _dry_run(plan, int(ranks[1]))
    found = re.search(
        r"configuration fits: (\d+) node\(s\) x (\d+) task\(s\) .*?, (\d+) GPU", done.stdout, re.S
    )
    if done.returncode != 0 or found is None:
        said = done.stderr.strip().split("\n")
        problems = [line[4:] for line in said if line.startswith("  - ")]
        errors = [line.partition("error: ")[2] for line in said if "error: " in line]
        slurms = done.stdout.partition("sbatch --test-only says:\n")[2].split("\n")
        if slurms := [line.strip() for line in slurms if line.strip()]:
            errors = [f"Slurm refuses this request: {'; '.join(slurms)}"]
        raise ConfigError(problems or errors[:1] or said[-1:])
    # A dry run needs no controller.
    if "no Slurm controller answers here" in done.stdout:
        raise ConfigError("no Slurm controller answers here: `scontrol ping` says more; try later")
    nodes, tasks, gpus = map(int, found.groups())
    return Plan(plan.minutes, plan.cases, plan.request, plan.command, nodes, tasks, gpus)
