"""What the processes of one attempt hand each other, as files in RUN/rl/ATTEMPT. No torch.

    start.json                the trainer, once it has resumed: Start
    weights/v00000007/        a model in Hugging Face's form; manifest.json in it comes last
    weights/wanted            the orchestrator: some engine needs the newest version once more
    rollouts/step_00000008/   rank_0.safetensors ...; batch.json in it comes last
    engines/                  engine-K: the URL of each engine
    token                     what requests to engines must have, mode 600

Each is written, then renamed. Version k is what step k has made; step n trains version n - 1. An
attempt is one start of a job: nothing of an earlier one is ever read. Who has read something
removes it: the orchestrator removes rollouts when the version that they made is published, and a
version when a newer one is in use on all engines.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from kempner.files import write_atomic

State = dict[str, Any]
"""Of the orchestrator, after the batch of some step: JSON, a part of that step's checkpoint."""


class Start(NamedTuple):
    step: int  # that was loaded; 0: a new run
    data_ranks: int  # rank files of a batch
    state: State | None


class Batch(NamedTuple):
    """The rank files hold arrays of R rows of T = train.seq_len, R the same for all ranks: inputs
    int32; targets int32, -100 where nothing counts; documents int32, the number of the document in
    its row; logprobs fp32, of the targets, by the sampler; advantages fp32; versions int32, of the
    oldest weights that have drawn tokens of the sample."""

    step: int
    tokens: int  # targets that count, of all ranks
    metrics: dict[str, float]  # a part of the step's line in metrics.jsonl
    state: State


class Exchange:
    def __init__(self, run_dir: str | Path) -> None:
        # Set by rl.sh, for all of its processes; by hand there is one attempt, "0".
        self.root = Path(run_dir, "rl", os.environ.get("KEMPNER_ATTEMPT_ID", "0"))
        self.weights, self.engines = self.root / "weights", self.root / "engines"
        self.token, self.wanted = self.root / "token", self.weights / "wanted"

    # --- the trainer ---

    def version(self, number: int) -> Path:
        """Where a version goes. It is published when it has a manifest."""
        return self.weights / f"v{number:08d}"

    def publish(self, number: int, facts: dict[str, Any]) -> None:
        """All else of the version is there."""
        write_atomic(self.version(number) / "manifest.json", json.dumps(facts))

    def begin(self, start: Start) -> None:
        """After the version of `start.step` was published."""
        self.root.mkdir(parents=True, exist_ok=True)
        write_atomic(self.root / "start.json", json.dumps(start._asdict()))

    def batch(self, step: int) -> Batch | None:
        """None until it is there."""
        found = _read(self.rollouts(step) / "batch.json")
        return None if found is None else Batch(**found)

    # --- the orchestrator ---

    def started(self) -> Start | None:
        """None until the trainer has resumed."""
        found = _read(self.root / "start.json")
        return None if found is None else Start(**found)

    def newest(self) -> int | None:
        """The newest version that is published."""
        if not self.weights.is_dir():
            return None
        found = sorted(self.weights.glob("v*/manifest.json"))
        return int(found[-1].parent.name[1:]) if found else None

    def update(self, number: int) -> dict[str, Any]:
        """What an engine is sent to take a version that is published."""
        path = self.version(number).absolute()
        facts = json.loads((path / "manifest.json").read_text())
        if facts["transport"] == "direct":
            return {"manifest": str(path / "manifest.json")}
        return {"path": str(path), "version": number}

    def rollouts(self, step: int) -> Path:
        return self.root / "rollouts" / f"step_{step:08d}"

    def hand_over(self, batch: Batch) -> None:
        """All rank files are there."""
        write_atomic(self.rollouts(batch.step) / "batch.json", json.dumps(batch._asdict()))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return found
