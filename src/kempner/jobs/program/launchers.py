"""Commands that start processes themselves. torchrun runs once per host, and run.sh tells it of the
others; the rest would do run.sh's work and are refused, with the line to write. No torch."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from kempner.config.option import ConfigError

TORCHRUN_NAMES = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
MPI = "srun starts the ranks of MPI, with KEMPNER_MPI=pmix: docs/start/any-program.md"
REFUSED = {  # name -> why it is not needed
    "accelerate": "Accelerate reads the variables of run.sh: docs/start/any-program.md has more",
    "accelerate-launch": "Accelerate reads the variables of run.sh",
    "accelerate.commands.launch": "Accelerate reads the variables of run.sh",
    "accelerate.commands.accelerate_cli": "Accelerate reads the variables of run.sh",
    "deepspeed": "DeepSpeed reads the variables of run.sh",
    "deepspeed.pt": "DeepSpeed reads the variables of run.sh",
    "ds": "DeepSpeed reads the variables of run.sh",
    "deepspeed.launcher.runner": "DeepSpeed reads the variables of run.sh",
    "composer": "Composer reads the variables of run.sh",
    "horovodrun": MPI,
    "mpirun": MPI,
    "mpirun.openmpi": MPI,
    "mpirun.mpich": MPI,
    "mpiexec": MPI,
    "mpiexec.openmpi": MPI,
    "mpiexec.hydra": MPI,
    "orterun": MPI,
    "srun": "run.sh starts srun itself; KEMPNER_SRUN has more options for it",
}
# These launch only with the word "launch": `accelerate config` does not.
LAUNCH = ("accelerate", "accelerate.commands.accelerate_cli")
SHELLS = ("sh", "bash", "dash", "zsh")
SHELL_PREFIXES = (
    "env",
    "exec",
    "command",
    "nohup",
    "time",
    "if",
    "then",
    "else",
    "do",
    "while",
    "{",
    "!",
)
WRAPPERS = ("timeout", "nice", "ionice", "stdbuf", "numactl", "taskset")  # with options and numbers


def shell_string(command: Sequence[str]) -> int | None:
    """Return the index of the string in `bash -lc STRING`, also after env or a container."""
    shell, value = False, False
    for place, word in enumerate(command):
        if shell and not value and re.fullmatch(r"-[a-z]*c", word):
            return place + 1 if place + 1 < len(command) else None
        # Options may come between the shell and -c, and `-o pipefail` has a value.
        shell = Path(word).name in SHELLS or (shell and (value or word[:1] in "-+"))
        value = shell and word in ("-o", "+o", "-O", "+O")
        # Words after a script are its arguments: `train.py bash -c x` starts no shell.
        if word.endswith((".py", ".sh")):
            break
    return None


def simple_commands(command: Sequence[str]) -> list[list[str]]:
    """Split a string for a shell into its commands; any other command is returned alone."""
    place = shell_string(command)
    if place is None:
        return [[*command]]
    # punctuation_chars splits words at ; & | < > and parentheses, as the shell does.
    # A newline separates commands, too; shlex would treat it as a blank.
    lexer = shlex.shlex(command[place].replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = [*lexer]
    except ValueError:  # an open quote: the shell will say so
        words = command[place].split()
    commands: list[list[str]] = [[]]
    for word in words:
        if word.strip("();&|<>"):
            commands[-1].append(word)
        else:
            commands.append([])
    # Each may again be a shell with a string.
    return [each for words in commands if words for each in simple_commands(words)]


def bare_command(command: Sequence[str]) -> list[str]:
    """Strip the words of the shell, env or a wrapper such as timeout before a simple command."""
    words = [*command]
    while words and (words[0] in (*SHELL_PREFIXES, *WRAPPERS) or re.match(r"\w+=", words[0])):
        wrapper = words.pop(0) in WRAPPERS
        while wrapper and words and re.match(r"-|\d", words[0]):
            del words[0]
    return words


def starter_words(command: Sequence[str]) -> list[str]:
    """Return the words of a simple command that may start its program: all words if one is a
    script, which may follow env, uv run, a container or a profiler; else only the first words, as
    the rest may be anything."""
    words = bare_command(command)
    if any(k and word.endswith((".py", ".sh")) for k, word in enumerate(words)):
        return words
    options = [*itertools.takewhile(lambda word: word[0:1] == "-" and word != "-m", words[1:])]
    module = len(options) + 1
    return words[: module + 2 if words[module : module + 1] == ["-m"] else 1]


def find_launcher(names: Collection[str], words: Sequence[str]) -> int | None:
    """Return the index of the first of these commands or modules before the script."""
    for place, word in enumerate(words):
        if word.endswith((".py", ".sh")):
            break
        if Path(word).name in names:
            return place
    return None


def launcher_in(command: Sequence[str]) -> int | None:
    """Return the index of a refused launcher in a simple command."""
    words = bare_command(command)
    names, after, before = {*REFUSED}, len(starter_words(command)), len(command) - len(words)
    start = 0
    while (place := find_launcher(names, words[start:after])) is not None:
        start += place + 1
        launches = words[start : start + 1] == ["launch"]
        if launches or Path(words[start - 1]).name not in LAUNCH:
            return before + start - 1
    return None


def uses_torchrun(command: Sequence[str]) -> bool:
    commands = simple_commands(command) if command else []
    return any(
        find_launcher(TORCHRUN_NAMES, starter_words(words)) is not None for words in commands
    )


def check_launcher(command: Sequence[str], nodes: int) -> None:
    """Raise ConfigError for a launcher that would start the program once more for each GPU, and for
    torchrun options with which each node would train alone."""
    for words in simple_commands(command):
        place = launcher_in(words)
        if place is not None:
            name = Path(words[place]).name
            line = shlex.join(without_launcher(command, words[:place], words[place:]))
            raise ConfigError(
                f"'{name}' starts processes itself, and run.sh would start it once for each GPU:"
                f" write -- {line}; {REFUSED[name]}"
            )
    if nodes == 1 or not uses_torchrun(command):
        return
    text = " ".join(itertools.chain(*map(_without_program, simple_commands(command))))
    alone = re.search(r"--standalone|--node[-_]rank[= ]\d+", text)
    count = re.search(r"--nnodes[= ](?:\d+:)?(\d+)", text)
    if count and int(count[1]) != nodes:
        alone = count
    if alone:
        raise ConfigError(
            f"torchrun {alone[0]} on {nodes} nodes: run.sh starts one torchrun on each node and"
            " tells it of the others: leave out --nnodes, --node-rank, --standalone, --master-addr,"
            " --master-port and --rdzv-endpoint"
        )


def _without_program(words: Sequence[str]) -> Sequence[str]:
    """Strip torchrun's program and its arguments, whose options are not torchrun's."""
    place = find_launcher(TORCHRUN_NAMES, starter_words(words))
    if place is None:
        return words
    return words[: len(words) - len(program_in(words[place + 1 :])[1])]


def without_launcher(
    command: Sequence[str], before: Sequence[str], launched: Sequence[str]
) -> list[str]:
    """Remove the launcher, the first word of `launched`, and keep the words before it (env, uv
    run). The rest of a string for a shell is unchanged."""
    python, program = program_in(launched[1:])
    place = shell_string(command)
    if place is None:
        if before[-1:] == ["-m"]:  # python -m accelerate.commands.launch
            options = [*itertools.takewhile(lambda word: word[0:1] == "-", before[::-1])]
            before = before[: -len(options) - 1]
        return [*before, *python, *program]
    text, name = command[place], re.escape(Path(program[0]).name)
    # Not within a path, an option or quotes.
    launcher = re.compile(rf"(?<![\w/.'\"-]){re.escape(launched[0])}(?![\w/.'\"-])")
    began = next((found.start() for found in launcher.finditer(text)), None)
    if began is None:  # it is quoted
        return ["COMMAND"]
    there = re.compile(rf"(?<!\S)(?!-)\S*{name}(?![\w./-])").search(text, began + 1)
    rest = text[there.start() :] if there else shlex.join(program)
    # The last occurrence before the program: an earlier word may be equal, as in `conda activate
    # deepspeed; deepspeed t.py`.
    began = [found.start() for found in launcher.finditer(text[: there and there.start()])][-1]
    # For example `python -m accelerate.commands.launch`.
    before = re.sub(r"\S*python\S* +(-\S+ +)*$", "", text[:began])
    return [*command[:place], before + " ".join([*python, rest])]


def program_in(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Find the program (a script, a module or a command) after a launcher's options and their
    values. Returns the words that must precede it, such as python -m, and the program's words."""
    for place, word in enumerate(words):
        if word.endswith(".py"):
            return ["python"], [*words[place:]]
    for place, word in enumerate(words[:-1]):
        if word in ("-m", "--module") and "." in words[place + 1]:
            return ["python", "-m"], [*words[place + 1 :]]
    plain = [
        k for k, word in enumerate(words) if word[:1] not in "-0123456789" and word != "launch"
    ]
    on_path = (k for k in plain if shutil.which(words[k]))
    free = (k for k in plain if k == 0 or not words[k - 1].startswith("-"))
    place = next(itertools.chain(on_path, free, plain), len(words))
    return [], [*words[place:]] or ["COMMAND"]
