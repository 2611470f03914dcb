"""Resolve RUN[@STEP] to a checkpoint. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from kempner.checkpoint import history
from kempner.config import toml
from kempner.config.option import ConfigError
from kempner.jobs.system.files import name_of_step, step_of_name

# Anything with checkpoints contains one of these.
CHECKPOINT_SIGNS = ("config.toml", "checkpoints", "latest", history.MANIFEST)
STEPPED = re.compile(r"(.+)@(\d+)")


def split_name(name: str) -> tuple[Path, int | None]:
    """Split RUN[@STEP] into a directory and the step; None: its newest checkpoint."""
    whole, stepped = Path(name).expanduser(), STEPPED.fullmatch(name)
    # The name of a directory may itself end in @ and a number.
    if stepped is None or whole.is_dir():
        return whole, None
    return Path(stepped[1]).expanduser(), int(stepped[2])


def find_checkpoint(name: str) -> Path:
    """Find the checkpoint of that step, or the best one, in a run or a directory of checkpoints. A
    path to a checkpoint is returned unchanged. Raises ConfigError if there is none."""
    directory, step = split_name(name)
    if not directory.is_dir():
        raise ConfigError(f"{name}: no such directory {directory}; name the run.dir of a run")
    if (directory / history.MANIFEST).is_file():
        return directory.resolve()
    root = checkpoints_of(directory)
    there = [
        path for path in history.complete_checkpoints(root) if (path / history.MANIFEST).is_file()
    ]
    if not there:
        raise ConfigError(
            f"{name}: {root} has no complete checkpoint yet; a run saves one every "
            "checkpoint.interval steps and at its end"
        )
    if step is None:
        return there[0].resolve()
    path = root / name_of_step(step)
    if path not in there:
        steps = ", ".join(str(step_of_name(path.name)) for path in sorted(there))
        raise ConfigError(
            f"{name}: {root} has no complete checkpoint of step {step}, only of steps "
            f"{steps}: name one of them, or leave out @{step} for the newest"
        )
    return path.resolve()


def checkpoints_of(run: Path) -> Path:
    """Return the directory of a run's checkpoints: inside it, unless checkpoint.dir was set; a
    directory that is not a run may hold checkpoints itself."""
    if (inside := run / "checkpoints").is_dir():
        return inside
    try:
        elsewhere = toml.loads((run / "config.toml").read_text())["checkpoint"]["dir"]
    except FileNotFoundError:
        return run
    except (OSError, ValueError, KeyError, TypeError):
        elsewhere = ""
    return Path(elsewhere or inside)
