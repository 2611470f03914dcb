"""Exchange between the processes of one attempt, as files in RUN/rl/ATTEMPT. No torch.

    start.json                the trainer, once it has resumed: ExchangeStart
    weights/v00000007/        a model in Hugging Face's form; manifest.json in it comes last
    rollouts/step_00000008/   rank_0.safetensors ...; batch.json in it comes last
    scores/step_00000008      the trainer: its log-probabilities of the first row, see Batch.scored
    engines/                  engine-K: the URL of each engine
    token                     what requests to engines must have, mode 600
    orchestrator, trainer     PART's sign of life; PART.full while it waits for room on a full disk

What readers look for is written, then renamed. Version k is what step k has made; step n trains
version n - 1. An attempt is one start of a job: nothing of an earlier one is ever read. The
orchestrator removes rollouts when the version that they made is published, and a version when a
newer one is published and no engine reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from kempner.jobs.system.files import name_of_step, write_atomic

EXCHANGE_HEARTBEAT_S = 2.0  # between two signs of life
LISTEN_S = 10.0  # between two looks for one, at most
EXCHANGE_SILENCE_S = 120.0  # a part that gives none for so long does nothing
DISK_S = 600.0  # that a full disk may stay full
AGAIN_S = 5.0  # between two looks whether there is room

ExchangeState = dict[str, Any]
"""Of the orchestrator, after the batch of some step: JSON, a part of that step's checkpoint."""


class ExchangeStart(NamedTuple):
    step: int  # that was loaded; 0: a new run
    data_ranks: int  # rank files of a batch
    state: ExchangeState | None


class Batch(NamedTuple):
    """A batch on disk. The rank files hold arrays of R rows of T = train.seq_len, R the same for
    all ranks: inputs int32; targets int32, -100 where nothing counts; documents int32, the number
    of the document in its row; logprobs fp32, of the targets, by the sampler; advantages fp32;
    versions int32, of the oldest weights that have drawn tokens of the sample."""

    step: int
    tokens: int  # targets that count, of all ranks
    metrics: dict[str, float]  # a part of the step's line in metrics.jsonl
    state: ExchangeState
    scored: bool = False
    """The trainer hands back what its weights, before the step, say of the first row of rank 0:
    fp32 [T]."""


class RolloutExchange:
    def __init__(self, run_dir: str | Path) -> None:
        # rl.sh sets it for all of its processes; started by hand there is one attempt, "0".
        self.root = Path(run_dir, "rl", os.environ.get("KEMPNER_ATTEMPT_ID", "0"))
        self.weights, self.engines = self.root / "weights", self.root / "engines"
        self.scores = self.root / "scores"
        self.token = self.root / "token"

    @property
    def run(self) -> str:
        """Name of this attempt for engines, RUN#ATTEMPT: each has versions of its own."""
        # Quoted: a # in the path would end the part that names the run.
        return f"{quote(str(self.root.parent.parent.absolute()))}#{self.root.name}"

    # --- the trainer ---

    def version(self, number: int) -> Path:
        """Return the directory of a version. It is published once it has a manifest."""
        return self.weights / f"v{number:08d}"

    def publish(self, number: int, facts: dict[str, Any]) -> None:
        """Publish a version, all of whose other files are there."""
        write_atomic(self.version(number) / "manifest.json", json.dumps(facts))

    def begin(self, start: ExchangeStart) -> None:
        """Write the start, after the version of `start.step` was published."""
        self.root.mkdir(parents=True, exist_ok=True)
        write_atomic(self.root / "start.json", json.dumps(start._asdict()))

    def batch(self, step: int) -> Batch | None:
        """Return the batch of a step; None until it is there."""
        fields = _read(self.rollouts(step) / "batch.json")
        return None if fields is None else Batch(**fields)

    def hand_back(self, step: int, logprobs: NDArray[np.float32]) -> None:
        """Hand back log-probabilities. No step depends on them: without room on the disk they are
        left out."""
        with contextlib.suppress(OSError):
            self.scores.mkdir(exist_ok=True)
            write_atomic(self.scores / name_of_step(step), logprobs.tobytes())

    # --- the orchestrator ---

    def handed_back(self, step: int) -> NDArray[np.float32] | None:
        """Take what was handed back, once; None until it is there."""
        path = self.scores / name_of_step(step)
        try:
            logprobs = np.frombuffer(path.read_bytes(), np.float32)
            path.unlink()
        except OSError:
            return None
        return logprobs

    def started(self) -> ExchangeStart | None:
        """Return the start; None until the trainer has resumed."""
        fields = _read(self.root / "start.json")
        return None if fields is None else ExchangeStart(**fields)

    def newest(self) -> int | None:
        """Return the newest version that is published."""
        if not self.weights.is_dir():
            return None
        # Numbers have leading zeros: sorted as texts they are in order.
        manifests = sorted(self.weights.glob("v*/manifest.json"))
        return int(manifests[-1].parent.name[1:]) if manifests else None

    def update(self, number: int) -> dict[str, Any]:
        """Return the request by which an engine takes a published version."""
        path = self.version(number).absolute()
        facts = json.loads((path / "manifest.json").read_text())
        if facts["transport"] == "direct":
            return {"manifest": str(path / "manifest.json")}
        return {"path": str(path), "version": number}

    def rollouts(self, step: int) -> Path:
        return self.root / "rollouts" / name_of_step(step)

    def hand_over(self, batch: Batch) -> None:
        """Publish a batch, all of whose rank files are there."""
        write_atomic(self.rollouts(batch.step) / "batch.json", json.dumps(batch._asdict()))


class Beat:
    """A heartbeat file whose time says that a part of the run lives, and whose name says whether it
    waits for room: both can still be changed on a full disk. The batch script and status.py look at
    it."""

    def __init__(self, exchange: RolloutExchange, part: str) -> None:
        self._name = exchange.root / part
        self._full, self._next = exchange.root / f"{part}.full", 0.0
        with contextlib.suppress(OSError):
            # An earlier process of this part may have ended while it waited for room.
            self._full.unlink(missing_ok=True)
            self._name.touch()

    def alive(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EXCHANGE_HEARTBEAT_S
        for name in (self._name, self._full):  # one of them is there
            with contextlib.suppress(OSError):
                os.utime(name)

    def full(self) -> None:
        """Mark that it waits for room."""
        with contextlib.suppress(OSError):
            self._name.rename(self._full)

    def room(self) -> None:
        """Mark that it goes on."""
        with contextlib.suppress(OSError):
            self._full.rename(self._name)


class Listener:
    """A listener to the heartbeat of another part, as kp_hear_orchestrator in rl_watch.sh."""

    def __init__(self, exchange: RolloutExchange, part: str) -> None:
        self._names = exchange.root / part, exchange.root / f"{part}.full"
        self._heard: list[tuple[str, int]] = []
        self._silent, self._looked = 0.0, time.monotonic()

    def silent(self) -> float:
        """Return the seconds since the last heartbeat; 0 for a part that has not begun. Looks that
        are far apart count little: this process stood still, and so may the part have, in a job
        that was suspended."""
        beats, now = [], time.monotonic()
        for name in self._names:
            with contextlib.suppress(OSError):
                beats.append((name.name, name.stat().st_mtime_ns))
        self._silent += min(now - self._looked, LISTEN_S)
        if beats != self._heard or not beats:
            self._silent = 0.0
        self._heard, self._looked = beats, now
        return self._silent


def _read(path: Path) -> dict[str, Any] | None:
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return fields
