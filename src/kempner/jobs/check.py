"""Answer all questions of the batch script about a configuration in one process: starting Python
in a container may take minutes. No torch.

    python -m kempner.jobs.check PROGRAM ARGUMENTS

runs PROGRAM with the arguments and --check, and prints, each followed by a NUL: ANSWER, the checked
configuration, run.dir, checkpoint.dir, distributed.device, the directories of token shards, an
empty text, and the configuration files among the arguments with all their base files. The exit code
is that of PROGRAM.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

from kempner.config import toml
from kempner.jobs.code import input_files
from kempner.jobs.system.front_door import ANSWER, run_module


def launch_values(text: str) -> Iterator[str]:
    """Yield the parts of a checked configuration that the batch script needs."""
    cfg = toml.loads(text)
    yield cfg["run"]["dir"]
    yield cfg.get("checkpoint", {}).get("dir", "")
    yield cfg.get("distributed", {}).get("device", "auto")
    data = cfg.get("data", {})
    paths = [data.get("dataset_path", ""), *(s["path"] for s in data.get("sources", []))]
    for path in map(os.path.expanduser, paths):
        if os.path.isfile(os.path.join(path, "dataset.json")):
            yield path


def parse_checked_config(output: str) -> str:
    """Return the configuration in the output of --check, skipping anything that a sitecustomize or
    a plugin printed before it. Raises ValueError, KeyError or TypeError if there is none."""
    lines = output.splitlines(keepends=True)
    for first in range(len(lines)):
        text = "".join(lines[first:])
        with contextlib.suppress(ValueError, KeyError, TypeError):
            list(launch_values(text))
            return text
    raise ValueError("no configuration")


def main(program: str, arguments: Sequence[str]) -> int:
    command = [sys.executable, program, *arguments, "--check"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        return done.returncode
    try:
        text = parse_checked_config(done.stdout)
        # The empty text ends the list of directories, which are never empty.
        fields = [text, *launch_values(text), "", *map(str, input_files(arguments))]
    except (ValueError, KeyError, TypeError):  # --help among the arguments
        fields = []
    print(*(f"{part}\0" for part in (ANSWER, *fields)), sep="", end="")
    return 0


if __name__ == "__main__":
    run_module(lambda program, *arguments: main(program, arguments), __doc__, 1, sys.maxsize)
