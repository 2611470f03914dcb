"""Options of scripts/slurm/run.sh: all words before `--`. No torch."""

from __future__ import annotations

import difflib
import glob
import itertools
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kempner.config.option import ConfigError
from kempner.jobs.program.launchers import TORCHRUN_NAMES
from kempner.jobs.system.directories import Kind, refuse_others

# Options by name, with the form of their values.
OPTION_NAMES = {
    "run-dir": "DIR",
    "code": "DIR",
    "checkpoints": "GLOB",
    "steps": "REGEX",
    "heartbeat": "SECONDS",
    "signal": "NAME",
}
SIGNALS = ("TERM", "USR1", "USR2", "INT", "HUP")
PROGRAM_USAGE = (
    f"run.sh {' '.join(f'[--{n}={v}]' for n, v in OPTION_NAMES.items())} -- COMMAND [ARGUMENTS]"
)


@dataclass(frozen=True)
class Options:
    """Options of a program's run. If the user has not set them, `checkpoints` is empty and `code`,
    `steps`, `heartbeat` and `signal` are None; the supervisor then chooses the signal."""

    command: tuple[str, ...]
    run_dir: Path
    checkpoints: str = ""
    code: Path | None = None
    steps: re.Pattern[bytes] | None = None
    heartbeat: float | None = None
    signal: signal.Signals | None = None

    @property
    def checkpoint_dir(self) -> Path | None:
        """The directory of all checkpoints, which a container must mount from the host."""
        if not self.checkpoints:
            return None
        parts = Path(self.checkpoints).absolute().parts
        fixed = [*itertools.takewhile(lambda part: not glob.has_magic(part), parts)]
        return Path(*fixed[: len(parts) - 1])


def parse_options(words: Sequence[str]) -> Options:
    """Parse the options. Raises ConfigError with all problems."""
    own = list(words[: words.index("--")]) if "--" in words else list(words)
    command = tuple(words[len(own) + 1 :])
    if first := next((word for word in own if not word.startswith("-")), None):
        raise ConfigError(f"'{first}': the command comes after '--': {PROGRAM_USAGE}")
    problems = [] if command else [f"no command given: {PROGRAM_USAGE}"]
    values: dict[str, str] = {}
    for word in own:
        name, _, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in OPTION_NAMES:
            problems.append(f"'{word}': {_advice(word, name)}")
        elif not value:
            problems.append(f"--{name}: write --{name}={OPTION_NAMES[name]}")
        elif name in values:
            problems.append(f"--{name}={value}: given twice; leave one out")
        else:
            values[name] = value
    fields = {
        "code": Path(values["code"]) if "code" in values else None,
        "steps": _steps(values.get("steps"), problems),
        "heartbeat": _heartbeat(values.get("heartbeat"), problems),
        "signal": _signal(values.get("signal"), problems),
    }
    if problems:
        raise ConfigError(problems)
    run_dir = Path(values.get("run-dir") or f"runs/{program_name(command)}").absolute()
    return Options(command, run_dir, values.get("checkpoints", ""), **fields)  # type: ignore[arg-type]


def _advice(word: str, name: str) -> str:
    near = difflib.get_close_matches(name, OPTION_NAMES, 1)
    hint = f"did you mean --{near[0]}={OPTION_NAMES[near[0]]}? " if near else ""
    return f"not an option of run.sh; {hint}{PROGRAM_USAGE}; options of sbatch come before run.sh"


def _steps(text: str | None, problems: list[str]) -> re.Pattern[bytes] | None:
    if text is None:
        return None
    try:
        pattern = re.compile(text.encode())
    except re.error as error:
        problems.append(f"--steps={text}: not a valid regular expression: {error}")
        return None
    if pattern.groups != 1:
        problems.append(
            f"--steps={text}: must have one group, around the number: --steps='step (\\d+)'"
        )
    return pattern


def _heartbeat(text: str | None, problems: list[str]) -> float | None:
    if text is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", text) and float(text) >= 1:
        return float(text)
    problems.append(f"--heartbeat={text}: must be a number of seconds >= 1")
    return None


def _signal(text: str | None, problems: list[str]) -> signal.Signals | None:
    if text is None:
        return None
    name = text.upper().removeprefix("SIG")
    if name in SIGNALS:
        return signal.Signals[f"SIG{name}"]
    problems.append(f"--signal={text}: must be one of {', '.join(SIGNALS)}")
    return None


def program_name(command: Sequence[str]) -> str:
    """Name a program by its command: my_train for `python -u my_train.py` and `python -m
    pkg.my_train`."""
    name = Path(command[0]).name
    for before, word in zip(("", *command), command, strict=False):
        if before == "-m":
            name = word.rpartition(".")[2]
        elif word.endswith((".py", ".sh")) and not word.startswith("-"):
            name = Path(word).stem
        else:
            continue
        break
    return re.sub(r"[^\w.-]", "_", name).lstrip(".") or "program"


def check_command(command: Sequence[str]) -> None:
    """Raise ConfigError if the command or its script does not exist. A script in a container may
    not be visible from here."""
    if shutil.which(command[0]) is None:
        fix = "give its path, or load its module in site.env"
        if Path(command[0]).is_file():
            fix = f"for a script, write: -- python {command[0]}"
        elif command[0] == "torchrun":
            fix += ", or write: -- python -m torch.distributed.run"
        raise ConfigError(f"no command '{command[0]}' here: {fix}")
    script = _script_of(command)
    if script and not Path(script).exists():
        raise ConfigError(f"no file '{script}' in {Path.cwd()}: correct its name, or give its path")


def _script_of(command: Sequence[str]) -> str:
    """Return the file NAME.py that Python or torchrun is told to run; "" for a module or none."""
    name, words = Path(command[0]).name, list(command[1:])
    launcher = next((i for i, word in enumerate([name, *words]) if word in TORCHRUN_NAMES), None)
    if launcher is not None:
        words = words[launcher:]
        # Its options have values, so the script is the first word that looks like one.
        at = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
        others = {"-m", "--module", "--no-python", "--no_python"}
    elif re.fullmatch(r"python[\d.]*", name):
        at = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
        others = {"-c", "-m"}
    else:
        return ""
    script = "".join(words[at : at + 1])
    return script if script.endswith(".py") and not others.intersection(words[:at]) else ""


def check_run_dir(run_dir: Path) -> None:
    """Raise ConfigError if the directory has another kind of content, even a run of the trainer,
    whose records have a different meaning."""
    fix = "give the program a directory of its own: --run-dir=runs/NAME"
    refuse_others(run_dir, "--run-dir", (Kind.PROGRAM, Kind.STARTED, Kind.NOTES), fix)
