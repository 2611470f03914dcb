"""What the tests of several axes read of a run, and how they cut one short."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from kempner.checkpoint.format.reader import read_tensors


def state(run: Path, step: int) -> dict[str, Tensor]:
    return read_tensors(run / f"checkpoints/step_{step:08d}")


def begun(place: Path, name: str, run: Path, step: int) -> Path:
    """A copy of a run that has only got so far."""
    shutil.copytree(place / name, run, symlinks=True)
    for path in (run / "checkpoints").glob("step_*"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    latest = run / "checkpoints/latest"
    latest.unlink()
    latest.symlink_to(f"step_{step:08d}")
    kept = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(x for x in kept if json.loads(x)["step"] <= step))
    return run


def numbers(run: Path, name: str) -> dict[int, Any]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[name] for line in lines if name in line}
