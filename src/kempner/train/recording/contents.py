"""Contents of a checkpoint besides tensors: the configuration, and the facts by which a later start
decides whether it may continue."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import Any

from kempner.config.loading import config_hash, to_toml
from kempner.jobs.code import current_code
from kempner.jobs.ranks.placement import World
from kempner.jobs.system.files import write_atomic
from kempner.train.parts import fixed_facts
from kempner.train.sections import RunConfig


def checkpoint_contents(
    cfg: RunConfig, world: World, run_dir: Path
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return files by name, and facts for the manifest. Those under "fixed" define the meaning of
    the weights and the position: a run with different ones refuses the checkpoint."""
    first = world.rank == 0
    return (
        {"config.toml": to_toml(cfg)},
        {
            "code": current_code()._asdict() if first else {},
            "run": run_id(run_dir) if first else "",
            "config_hash": config_hash(cfg),
            "replicas": world.replicas,
            "fixed": fixed_facts(cfg, first),
        },
    )


def run_id(run_dir: Path) -> str:
    """Return the run's identity, made at its first start. Its checkpoints carry it, so that no
    other run continues them."""
    path = run_dir / "id"
    # Not path.exists(), which hides every error in Python 3.14: the run would become another one.
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    write_atomic(path, f"{uuid.uuid4().hex}\n")
    return path.read_text().strip()
