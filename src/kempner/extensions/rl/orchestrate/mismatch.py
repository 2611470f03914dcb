"""Mismatch of trainer and sampler for batches without a sample of the newest weights: an engine
with the trainer's weights scores one of the trainer's samples. No torch.

The trainer has the weights of version n - 1 only during step n, and an engine has them between two
updates. So each computes log-probabilities of one text of batch n when it can, and their distance
becomes part of a later batch's metrics.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kempner.data.source import IGNORE
from kempner.extensions.rl.engines.client import Busy, Lost, Rejected, RouterEngine, Scores
from kempner.extensions.rl.engines.router import Router
from kempner.extensions.rl.exchange import RolloutExchange

LONGEST_PROBE = 2048  # tokens of the text: an engine holds the logits of all of them at once
KEPT_BATCHES = 32  # batches whose texts wait for an engine with the preceding version


class Probe(NamedTuple):
    """One sample of the first row of rank 0: P positions of the row."""

    tokens: list[int]  # [P + 1]
    places: slice
    counts: NDArray[np.bool_]  # [P], whether the model sampled the target


def choose_probe(arrays: Mapping[str, NDArray[np.generic]]) -> Probe:
    """Choose the longest sample of a row that is short enough to score, else the shortest.
    `arrays`: of the rank file (exchange.Batch)."""
    # Row 0 is the most expensive of the batch (deal_rows), so it contains a sample.
    inputs, targets, documents = (arrays[name][0] for name in ("inputs", "targets", "documents"))
    mask = targets != IGNORE
    lengths = {
        int(number): int((documents == number).sum()) for number in np.unique(documents[mask])
    }
    short = [number for number, length in lengths.items() if length < LONGEST_PROBE]
    number = max(short, key=lengths.__getitem__) if short else min(lengths, key=lengths.__getitem__)
    first = int(np.argmax(documents == number))
    places = slice(first, first + lengths[number])
    last = targets[places][-1]  # its prediction is ignored if it was not sampled
    tokens = [*inputs[places].tolist(), int(last) if last != IGNORE else 0]
    return Probe(tokens, places, mask[places])


class Mismatch:
    """Measurement of the mismatch. Its methods must run on the orchestrator's thread."""

    def __init__(self, exchange: RolloutExchange, router: Router, temperature: float) -> None:
        self._exchange, self._router, self._temperature = exchange, router, temperature
        self._steps: deque[int] = deque()  # all steps that may still have a file of the trainer
        self._probes: dict[int, Probe] = {}  # by step; not yet sent to an engine
        self._scored: dict[int, tuple[Probe, Scores]] = {}  # waiting for the trainer's
        self._answers: SimpleQueue[tuple[int, Probe, Scores | None]] = SimpleQueue()
        self._asks = False
        self._found: list[float] = []

    def add(self, step: int, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Add rank 0's file of a batch; the trainer hands back its log-probabilities of
        the first row."""
        self._steps.append(step)
        self._probes[step] = choose_probe(arrays)
        if len(self._steps) > KEPT_BATCHES:
            old = self._steps.popleft()
            self._probes.pop(old, None)
            self._scored.pop(old, None)
            # This deletes the trainer's file, which is no longer needed.
            self._exchange.handed_back(old)

    def look(self) -> None:
        """Ask an engine, if one has the weights that train a batch; compare finished answers."""
        with contextlib.suppress(Empty):
            step, probe, scores = self._answers.get_nowait()
            self._asks = False
            # The engine may have taken newer weights between the question and the answer.
            if scores and scores.version == step - 1 and len(scores.logprobs) == len(probe.counts):
                self._scored[step] = probe, scores
        # One question at a time, the newest batch first: engines do not keep its version for long.
        for step in [] if self._asks else sorted(self._probes, reverse=True):
            if engine := self._router.with_version(step - 1):
                self._asks, question = True, (step, self._probes.pop(step), engine)
                threading.Thread(target=self._ask, args=question, daemon=True).start()
                break
        for step, (probe, scores) in list(self._scored.items()):
            if (ours := self._exchange.handed_back(step)) is not None:
                apart = np.abs(ours[probe.places] - np.array(scores.logprobs, np.float32))
                self._found.append(float(apart[probe.counts].mean()))
                del self._scored[step]

    def _ask(self, step: int, probe: Probe, engine: RouterEngine) -> None:
        scores = None
        with contextlib.suppress(Busy, Lost, Rejected):  # its beats find out its state
            scores = engine.score(probe.tokens, self._temperature)
        self._answers.put((step, probe, scores))

    def take(self) -> dict[str, float]:
        """Return the mean distance since the last call; nothing if none was measured."""
        distances, self._found = self._found, []
        return {"mismatch": sum(distances) / len(distances)} if distances else {}
