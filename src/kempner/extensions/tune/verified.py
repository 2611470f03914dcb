"""The table of verified figures, configs/verified/SHAPE-GPU.toml: for each shape and GPU a command
and its measured figures, if anybody has run it. No torch.

    python -m kempner.extensions.tune.verified configs/train/7b.toml H100

adds an entry without figures: the planner's fastest candidate on one node of 8.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kempner.config import toml
from kempner.config.command_line import Command, parse_command
from kempner.config.option import ConfigError
from kempner.config.values import to_text
from kempner.extensions.planner.cost import step_seconds
from kempner.extensions.planner.gpus import GPUS
from kempner.extensions.planner.memory import GIB, estimate_memory
from kempner.extensions.planner.search import best_candidates
from kempner.extensions.tune.report import option_of
from kempner.extensions.tune.space import Space, describe_candidate
from kempner.extensions.tune.trials import Trial
from kempner.jobs.ranks.placement import World
from kempner.jobs.system.files import write_atomic
from kempner.jobs.system.front_door import run_module
from kempner.train.configure import check_world, load_config
from kempner.train.sections import RunConfig

KIT = Path(__file__).resolve().parents[4]
VERIFIED = KIT / "configs" / "verified"
HEAD = """\
# Written by scripts/tune.py --record and make gpu-check; docs/extensions/tuning.md explains it.
# Without [measured] nobody has run the command, which the planner proposes.
"""
ENTRY_FIELDS = {"shape": str, "gpu": str, "nodes": int, "gpus_per_node": int, "command": str}
ENTRY_FIGURES = {  # of [measured]
    "date": str,
    "commit": str,
    "device": str,
    "driver": str,
    "torch": str,
    "cuda": str,
    "kempner": str,
    "tokens_per_s_per_gpu": float,
    "mfu": float,
    "memory_gib": float,
}
SCRIPT = "scripts/slurm/singlenode.sh"
SCRIPTS = ("scripts/slurm/multinode.sh", SCRIPT)
# A figure that differs more from the planner's estimate means that one of the two is wrong.
PLAUSIBLE = {"tokens_per_s_per_gpu": (0.1, 1.5), "memory_gib": (0.5, 1.5)}
THEIR_OWN = ("run.dir", "data.dataset_path")  # options that no entry keeps


class Entry(NamedTuple):
    """One shape on one GPU."""

    shape: str
    gpu: str
    nodes: int
    gpus_per_node: int
    command: str
    measured: Mapping[str, Any] = MappingProxyType({})

    @property
    def words(self) -> list[str]:
        """The trainer's words in the command: a file, overrides, --bench."""
        words = shlex.split(self.command)
        start = 2 if words[0] == "bash" else next(map(words.index, {*SCRIPTS} & {*words})) + 1
        return words[start:]

    @property
    def changes(self) -> list[str]:
        return parse_command(self.words, {"bench": bool}).overrides

    @property
    def path(self) -> Path:
        return VERIFIED / f"{self.shape}-{self.gpu.lower()}.toml"

    def text(self) -> str:
        lines = [f"{name} = {to_text(getattr(self, name))}\n" for name in ENTRY_FIELDS]
        if self.measured:
            lines.append("\n[measured]\n")
            lines += [f"{name} = {to_text(self.measured[name])}\n" for name in ENTRY_FIGURES]
        return HEAD + "".join(lines)


def shape_of(command: Command) -> str:
    """Name the shape of a command line after its first file."""
    return Path(command.files[0]).stem if command.files else ""


def read_entry(shape: str, gpu: str) -> Entry | None:
    """Return the table's entry; None: none. Raises ConfigError for a file that is not an entry."""
    path = VERIFIED / f"{shape}-{gpu.lower()}.toml"
    return load_entry(path) if path.is_file() else None


def load_entry(path: Path) -> Entry:
    """Read a file of the table. Raises ConfigError."""
    try:
        table = toml.loads(path.read_text())
    except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}; correct or remove it") from None
    figures = table.pop("measured", {})
    wrong = [name for name, kind in ENTRY_FIELDS.items() if not isinstance(table.get(name), kind)]
    wrong += [name for name in table if name not in ENTRY_FIELDS]
    for name, kind in ENTRY_FIGURES.items() if figures else ():
        wrong += [name] * (not isinstance(figures.get(name), kind))
    wrong += [name for name in figures if name not in ENTRY_FIGURES]
    if wrong:
        raise ConfigError(f"{path}: {', '.join(wrong)}: not as in other entries; correct or remove")
    return Entry(**{name: table[name] for name in ENTRY_FIELDS}, measured=figures)


def add_entry(entry: Entry) -> Path | None:
    """Write an entry, unless the existing one has a figure that is not slower; returns
    the file written."""
    old = read_entry(entry.shape, entry.gpu)
    name = "tokens_per_s_per_gpu"
    if old and old.measured.get(name, -math.inf) >= entry.measured.get(name, -math.inf):
        return None
    VERIFIED.mkdir(exist_ok=True)
    write_atomic(entry.path, entry.text())
    return entry.path


def new_entry(
    files: Sequence[str], overrides: Sequence[str], gpu: str, nodes: int, per_node: int
) -> Entry:
    """Return an entry without figures. Raises ConfigError if it is not one of the kit's shapes."""
    file = Path(files[0]).resolve() if len(files) == 1 else Path()
    if not file.is_relative_to(KIT / "configs"):
        raise ConfigError(
            f"--record: {shlex.join(files) or 'no file'}: the table covers the shapes of configs/, "
            "one file each; give one of these, or leave --record out"
        )
    words = [str(file.relative_to(KIT)), *overrides, "--bench"]
    start = ["bash", SCRIPT] if nodes == 1 else ["sbatch", f"--nodes={nodes}", SCRIPTS[0]]
    return Entry(file.stem, gpu, nodes, per_node, shlex.join([*start, *words]))


def measured_by(
    facts: Mapping[str, Any], tokens_per_s_per_gpu: float, mfu: float, gib: float
) -> dict[str, Any]:
    """Return the figures of an entry. `facts`: of the machine, as in bench.json."""
    names = ("commit", "device", "driver", "torch", "cuda", "kempner")
    return {
        "date": time.strftime("%Y-%m-%d"),
        **{name: str(facts[name]) for name in names},
        "tokens_per_s_per_gpu": round(tokens_per_s_per_gpu, 1),
        "mfu": round(mfu, 4),
        "memory_gib": round(gib, 2),
    }


def record(
    command: Command, best: Trial, space: Space, facts: Mapping[str, Any], world: World
) -> Path | None:
    """Add the best candidate of a tune to the table; returns the file written."""
    ranks, spec = space.world_size, space.machine.spec
    assert spec is not None  # the front door has ensured it
    own = [
        word for word in command.overrides if option_of(word) not in (*best.overrides, *THEIR_OWN)
    ]
    changes = [f"--{key}={to_text(value)}" for key, value in best.overrides.items()]
    nodes = ranks // world.per_node
    entry = new_entry(command.files, [*own, *changes], spec.name, nodes, world.per_node)
    speed = space.tokens / best.step / ranks
    figures = measured_by(facts, speed, best.mfu or 0.0, best.gib)
    return add_entry(entry._replace(measured=figures))


def config_of(entry: Entry) -> RunConfig:
    command = parse_command(entry.words, {"bench": bool})
    files = [str(KIT / file) for file in command.files]  # independent of the current directory
    return load_config(files, command.overrides, command.problems)


def planned_figures(entry: Entry) -> dict[str, float]:
    """Return the planner's estimates of an entry's figures, by name."""
    cfg, each = config_of(entry), entry.gpus_per_node
    ranks = entry.nodes * each
    seconds = step_seconds(cfg, ranks, each, GPUS[entry.gpu]).step
    return {
        "tokens_per_s_per_gpu": cfg.train.sequences * cfg.train.seq_len / ranks / seconds,
        "memory_gib": estimate_memory(cfg, ranks, each).peak / GIB,
    }


def entry_problems(entry: Entry) -> list[str]:
    """List what is wrong with an entry: its command, and any figure that the
    planner finds implausible."""
    ranks = entry.nodes * entry.gpus_per_node
    problems = check_world(config_of(entry), ranks, entry.gpus_per_node)
    if entry.gpu not in GPUS:
        problems.append(f"gpu = {entry.gpu}: is not known; one of {', '.join(GPUS)}")
    if not entry.measured or problems:
        return problems
    for name, planned in planned_figures(entry).items():
        found, (low, high) = entry.measured[name], PLAUSIBLE[name]
        if not low * planned <= found <= high * planned:
            problems.append(f"{name} = {found:,.1f}: the planner says {planned:,.1f}")
    if not 0 < entry.measured["mfu"] < 1:
        problems.append(f"mfu = {entry.measured['mfu']}: must be between 0 and 1")
    return problems


def main(file: str, gpu: str) -> int:
    if gpu not in GPUS:
        raise ConfigError(f"{gpu}: is not known; give one of {', '.join(GPUS)}")
    cfg = load_config([file], [])
    found = best_candidates(cfg, 8, 8, GPUS[gpu], check_world, 1)
    if not found:
        raise ConfigError(f"{file}: does not fit 8 {gpu}; give another GPU")
    changes = describe_candidate(found[0].overrides) if found[0].overrides else ""
    path = add_entry(new_entry([file], shlex.split(changes), gpu, 1, 8))
    print(path or "this entry already exists")
    return 0


if __name__ == "__main__":
    run_module(main, __doc__, 2)
