"""What the tests read back from a tracker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FAKE = Path(__file__).parent / "fake_wandb"  # a package that stands for W&B


def shown(run: Path, tag: str = "train/loss") -> dict[int, float]:
    """What TensorBoard shows, by step; a step that it has twice is an error."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not (run / "tensorboard").is_dir():
        return {}
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    scalars = events.Scalars(tag) if tag in events.Tags()["scalars"] else []
    assert len({event.step for event in scalars}) == len(scalars)
    return {event.step: event.value for event in scalars}


def rows(server: Path) -> list[dict[str, Any]]:
    """What the fake W&B has of its one run."""
    return [
        json.loads(line)
        for path in server.glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
