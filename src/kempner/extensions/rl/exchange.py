"""Exchange between the processes of one attempt, as files in RUN/rl/ATTEMPT. No torch.

    start.json                from the trainer, once it has resumed: ExchangeStart
    weights/v00000007/        a model in Hugging Face format; its manifest.json comes last
    rollouts/step_00000008/   rank_0.safetensors ...; batch.json comes last
    scores/step_00000008      the trainer's log-probabilities of the first row, see Batch.scored
    engines/                  engine-K: the URL of each engine
    token                     required in requests to engines, mode 600
    orchestrator, trainer     PART's heartbeat; PART.full while it waits for room on a full disk

Files that readers look for are written, then renamed. Step k makes version k; step n trains version
n - 1. An attempt is one start of a job: files of an earlier one are never read. The orchestrator
removes rollouts when the version that they made is published, and a version when a newer one is
published and no engine reads it.
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

EXCHANGE_HEARTBEAT_S = 2.0  # between two heartbeats
LISTEN_S = 10.0  # between two looks for one, at most
EXCHANGE_SILENCE_S = 120.0  # a part without a heartbeat for so long is not working
DISK_S = 600.0  # for which a disk may stay full
AGAIN_S = 5.0  # between two checks for room

ExchangeState = dict[str, Any]
"""State of the orchestrator after the batch of a step: JSON, part of that step's checkpoint."""


class ExchangeStart(NamedTuple):
    step: int  # that was loaded; 0: a new run
    data_ranks: int  # number of rank files in a batch
    state: ExchangeState | None


class Batch(NamedTuple):
    """A batch on disk. The rank files hold arrays of R rows of T = train.seq_len, with the same R
    for all ranks: inputs int32; targets int32, -100 if not counted; documents int32, the number of
    the document in its row; logprobs fp32, of the targets, by the sampler; advantages fp32;
    versions int32, of the oldest weights that drew tokens of the sample."""

    step: int
    tokens: int  # targets that count, on all ranks
    metrics: dict[str, float]  # a part of the step's line in metrics.jsonl
    state: ExchangeState
    scored: bool = False
    """The trainer returns the log-probabilities of the first row of rank 0 under its weights before
    the step: fp32 [T]."""


class RolloutExchange:
    def __init__(self, run_dir: str | Path) -> None:
        # rl.sh sets it for all of its processes; without rl.sh there is one attempt, "0".
        self.root = Path(run_dir, "rl", os.environ.get("KEMPNER_ATTEMPT_ID", "0"))
        self.weights, self.engines = self.root / "weights", self.root / "engines"
        self.scores = self.root / "scores"
        self.token = self.root / "token"

    @property
    def run(self) -> str:
        """Name of this attempt for engines, RUN#ATTEMPT: each attempt has its own versions."""
        # Quoted, because a # in the path would end the part that names the run.
        return f"{quote(str(self.root.parent.parent.absolute()))}#{self.root.name}"

    # --- the trainer ---

    def version(self, number: int) -> Path:
        """Return the directory of a version, which is published once it has a manifest."""
        return self.weights / f"v{number:08d}"

    def publish(self, number: int, facts: dict[str, Any]) -> None:
        """Publish a version whose other files are all present."""
        write_atomic(self.version(number) / "manifest.json", json.dumps(facts))

    def begin(self, start: ExchangeStart) -> None:
        """Write the start, after version `start.step` was published."""
        self.root.mkdir(parents=True, exist_ok=True)
        write_atomic(self.root / "start.json", json.dumps(start._asdict()))

    def batch(self, step: int) -> Batch | None:
        """Return the batch of a step; None until it exists."""
        fields = _read(self.rollouts(step) / "batch.json")
        return None if fields is None else Batch(**fields)

    def hand_back(self, step: int, logprobs: NDArray[np.float32]) -> None:
        """Hand back log-probabilities. No step depends on them, so they are dropped if the
        disk is full."""
        with contextlib.suppress(OSError):
            self.scores.mkdir(exist_ok=True)
            write_atomic(self.scores / name_of_step(step), logprobs.tobytes())

    # --- the orchestrator ---

    def handed_back(self, step: int) -> NDArray[np.float32] | None:
        """Take log-probabilities handed back, once; None until they exist."""
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
        """Return the newest published version."""
        if not self.weights.is_dir():
            return None
        # Numbers are zero-padded, so they sort as strings.
        manifests = sorted(self.weights.glob("v*/manifest.json"))
        return int(manifests[-1].parent.name[1:]) if manifests else None

    def update(self, number: int) -> dict[str, Any]:
        """Return the request that makes an engine load a published version."""
        path = self.version(number).absolute()
        facts = json.loads((path / "manifest.json").read_text())
        if facts["transport"] == "direct":
            return {"manifest": str(path / "manifest.json")}
        return {"path": str(path), "version": number}

    def rollouts(self, step: int) -> Path:
        return self.root / "rollouts" / name_of_step(step)

    def hand_over(self, batch: Batch) -> None:
        """Publish a batch whose rank files are all present."""
        write_atomic(self.rollouts(batch.step) / "batch.json", json.dumps(batch._asdict()))


class Beat:
    """A heartbeat file whose time shows that a part of the run is alive, and whose name shows
    whether it waits for room: both can change even on a full disk. The batch script and
    status.py read it."""

    def __init__(self, exchange: RolloutExchange, part: str) -> None:
        self._name = exchange.root / part
        self._full, self._next = exchange.root / f"{part}.full", 0.0
        with contextlib.suppress(OSError):
            # An earlier process of this part may have ended while waiting for room.
            self._full.unlink(missing_ok=True)
            self._name.touch()

    def alive(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EXCHANGE_HEARTBEAT_S
        for name in (self._name, self._full):  # one of them exists
            with contextlib.suppress(OSError):
                os.utime(name)

    def full(self) -> None:
        """Mark that the part waits for room."""
        with contextlib.suppress(OSError):
            self._name.rename(self._full)

    def room(self) -> None:
        """Mark that the part goes on."""
        with contextlib.suppress(OSError):
            self._full.rename(self._name)


class Listener:
    """Listens to the heartbeat of another part, like kp_hear_orchestrator in rl_watch.sh."""

    def __init__(self, exchange: RolloutExchange, part: str) -> None:
        self._names = exchange.root / part, exchange.root / f"{part}.full"
        self._heard: list[tuple[str, int]] = []
        self._silent, self._looked = 0.0, time.monotonic()

    def silent(self) -> float:
        """Return the seconds since the last heartbeat; 0 before the part has begun. Long gaps
        between looks count little: this process was paused, and the part may have been, too, if the
        job was suspended."""
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
