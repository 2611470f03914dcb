"""The results of a tune: its table, the overlay, the command that uses it, and the record from
which a later tune begins. No torch."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kempner.config.command_line import Command
from kempner.config.values import to_text
from kempner.extensions.planner.memory import GIB
from kempner.extensions.tune.search import Search
from kempner.extensions.tune.space import Overrides, describe_candidate
from kempner.extensions.tune.trials import Trial
from kempner.jobs.ranks.placement import World
from kempner.jobs.report.tables import align_table
from kempner.jobs.system.files import write_atomic
from kempner.jobs.system.front_door import how_to_run

OVERLAY_SIGN = "# Made by scripts/tune.py"
REMEMBERED = 5  # candidates from which a later tune begins
RIGHT_COLUMNS = range(8)


def tune_table(search: Search) -> str:
    """Format the measurements, the best first, then the failures. "of plan": a step's time relative
    to the planner's estimate; "planned" and "error" refer to memory."""
    tokens, gpu = search.space.tokens, search.space.machine.is_gpu
    rows = [
        ["tokens/s", "+-", "steps", "of plan", "MFU", "GiB", "planned", "error", "settings"],
        *(_row(one, tokens, gpu) for one in _with_best_first(search)),
    ]
    for trial in search.trials.values():
        if trial.failed:
            planned = f"{trial.planned_bytes / GIB:.2f}"
            name = f"{describe_candidate(trial.overrides)}: {trial.failed}"
            rows.append(["-", "-", "-", "-", "-", "-", planned, "-", name])
    return align_table(rows, 2, RIGHT_COLUMNS)


def _with_best_first(search: Search) -> list[Trial]:
    # It is chosen among the longest runs; a shorter run may be faster by noise.
    best = search.best
    return [*([best] if best else []), *(one for one in search.ranked if one is not best)]


def _row(trial: Trial, tokens: int, gpu: bool) -> list[str]:
    speed, planned = tokens / trial.step, trial.planned_bytes / GIB
    # On a CPU the measurement includes the process and its libraries.
    error = f"{planned / trial.gib - 1:+.0%}" if gpu else "-"
    return [
        f"{speed:,.0f}",
        f"{min(trial.error / trial.step, 1.0):.1%}",
        f"{len(trial.seconds)}",
        f"{trial.step / trial.planned_seconds:.2f}" if trial.planned_seconds else "-",
        f"{trial.mfu:.1%}" if trial.mfu else "-",
        f"{trial.gib:.2f}",
        f"{planned:.2f}",
        error,
        describe_candidate(trial.overrides),
    ]


def figures_of(trial: Trial, tokens: int, ranks: int) -> dict[str, Any]:
    """Return a trial as JSON."""
    return {
        "overrides": trial.overrides,
        "failed": trial.failed or None,
        "tokens_per_s": tokens / trial.step if trial.seconds else None,
        "tokens_per_s_per_gpu": tokens / trial.step / ranks if trial.seconds else None,
        "error": trial.error / trial.step if trial.seconds else None,
        "steps": len(trial.seconds),
        "mfu": trial.mfu if trial.seconds else None,
        "memory_gib": trial.gib if trial.seconds else None,
        "planned_gib": trial.planned_bytes / GIB,
        "planned_step_s": trial.planned_seconds,
    }


def overlay_text(overrides: Mapping[str, Any], about: Sequence[str]) -> str:
    """Format a candidate as a configuration file, with comment lines."""
    sections: dict[str, list[str]] = {}
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"{name} = {to_text(value)}\n")
    blocks = [f"\n[{section}]\n" + "".join(lines) for section, lines in sections.items()]
    return "".join(f"{line}\n" for line in (OVERLAY_SIGN, *(f"# {text}" for text in about))) + (
        "".join(blocks)
    )


def values_in(overlay: str) -> list[str]:
    """Return the lines of overlay_text() without its comments."""
    return [line for line in overlay.splitlines() if not line.startswith("#")]


def command_with(command: Command, overrides: Overrides, out: Path, world: World) -> str:
    """Return the command that trains with the overlay. Omits words of the tune that set the same
    option and would win, the tune's own directory, and options that only --bench reads."""
    theirs = {*overrides, "run.dir"}
    words = [
        word
        for word in command.overrides
        if option_of(word) not in theirs and not option_of(word).startswith("bench.")
    ]
    files = [*command.files, *([str(out)] if overrides else [])]
    start = how_to_run("train.py")
    if world.source == "slurm" and "KEMPNER_ATTEMPT_ID" in os.environ:
        nodes = world.size * world.replicas // world.per_node
        start = f"sbatch --nodes={nodes} scripts/slurm/multinode.sh"
    elif world.size > 1:
        start = "bash scripts/slurm/singlenode.sh"
    return f"{start} {shlex.join([*files, *words])}"


def option_of(word: str) -> str:
    """Return the section.key that a word of the command line sets."""
    name = word.removeprefix("--").partition("=")[0].replace("-", "_")
    return name.removeprefix("no_")


def write_record(path: Path, search: Search, about: Mapping[str, Any], ranks: int) -> None:
    """Write the measurements, the best first."""
    best, tokens = search.best, search.space.tokens
    trials = [*_with_best_first(search), *(t for t in search.trials.values() if t.failed)]
    record = {
        **about,
        "best": best and best.overrides,
        "tokens_per_step": tokens,
        "ranks": ranks,
        "trials": [figures_of(trial, tokens, ranks) for trial in trials],
        "left_out_gib": {name: need / GIB for name, need in search.skipped.items()},
    }
    write_atomic(path, json.dumps(record, indent=1) + "\n")


def remembered(path: Path) -> list[Overrides]:
    """Return the best candidates in an earlier tune's record; [] if there is none."""
    try:
        trials = json.loads(path.read_text())["trials"]
        return [dict(one["overrides"]) for one in trials if not one["failed"]][:REMEMBERED]
    except (OSError, ValueError, KeyError, TypeError):
        return []
