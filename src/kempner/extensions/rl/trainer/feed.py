"""The batches of an RL trainer, in place of a data loader: all ranks wait for the orchestrator."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from kempner.checkpoint.ranks import PeerFailed, Ranks
from kempner.data.config import FAKE
from kempner.data.formats.fake import FakeDataset
from kempner.data.source import Shape
from kempner.extensions.bench.config import BenchConfig
from kempner.extensions.rl.config import RlConfig
from kempner.extensions.rl.exchange import (
    AGAIN_S,
    DISK_S,
    Batch,
    Beat,
    ExchangeStart,
    RolloutExchange,
)
from kempner.extensions.rl.trainer.batch import Rollouts, micro_batches, read_batch
from kempner.extensions.rl.trainer.publish import Publisher, open_publisher
from kempner.jobs.system.files import FULL
from kempner.model.decoder import Decoder
from kempner.parallel.layout import Layout
from kempner.train.progress import Progress
from kempner.train.recording.metrics import Clock
from kempner.train.replicas import Waiting
from kempner.train.resilience.requests import (
    INTERRUPT_REQUEST,
    REQUEST_FLAGS,
    StopRequests,
    Verdict,
    requested_verdict,
)
from kempner.train.step import StepResult

if TYPE_CHECKING:
    from kempner.train.recording.run_directory import Run
    from kempner.train.sections import RunConfig

IDLE_LIMIT = "KEMPNER_IDLE_LIMIT"  # minutes of waiting after which the job is given back
BATCH_POLL_S = 0.01, 0.1  # between two checks for a batch, and for requests to leave: from, to
WAIT_SHARE = 0.02  # check interval as a share of the wait so far: prolongs a wait by no more


class Feed:
    """A loader (kempner.train.extensions.Loader) that waits for the batch of each step, and
    publishes the weights after it."""

    names: tuple[str, ...] = ()  # of data sources
    sources: tuple[Any, ...] = ()
    phase = 0
    waits_for_all = at_once = True
    waiting: Waiting = nullcontext
    """The watchdog's patient(), entered at each look: the wait for the orchestrator is unlimited as
    long as all ranks look."""
    _clock: Clock

    def __init__(
        self,
        cfg: RunConfig,
        exchange: RolloutExchange,
        layout: Layout,
        stop: StopRequests,
        publisher: Publisher,
        samples: int,
        say: Callable[[str], None],
    ) -> None:
        """`samples`: number trained on so far."""
        self._exchange, self._layout = exchange, layout
        self._stop, self._publisher, self._say = stop, publisher, say
        self._seq_len, self._micro = cfg.train.seq_len, cfg.train.micro_batch
        self._pin = layout.mesh.device_type == "cuda"
        # gloo: the sums of _look() are on the host, and a wait of hours must not occupy the GPU.
        self._ranks = Ranks(dist.new_group(backend="gloo"))
        self._beat = Beat(exchange, "trainer") if self._ranks.rank == 0 else None
        self._tries = 0  # to publish the newest version, for which the disk had no room
        self._again = 0.0  # when the next try is due; on rank 0
        self.position = samples
        self.tokens = 0  # of the newest batch: targets that count, on all ranks
        self._places = 0  # all places in its rows
        self.state: dict[str, Any] | None = None  # of the orchestrator after that batch; on rank 0
        self._metrics: dict[str, float] = {}
        self._step = 0  # of the newest batch
        self._idle_limit = 60 * float(os.environ.get(IDLE_LIMIT) or "inf")  # seconds
        self._own: list[torch.Tensor] | None = None  # see Rollouts; requested on rank 0

    def begin(self, progress: Progress, clock: Clock, waiting: Waiting) -> None:
        """Publish the run's initial weights; then the orchestrator may begin."""
        self._clock, self.waiting, self._step = clock, waiting, progress.step
        with waiting():
            self.publish(progress.step)
        if self._ranks.rank == 0:
            start = ExchangeStart(progress.step, self._layout.data_ranks, progress.orchestrator)
            self._exchange.begin(start)

    def __next__(self) -> list[Rollouts] | Verdict:
        return self.next(self._step + 1)

    def next(self, step: int) -> list[Rollouts] | Verdict:
        """Return this rank's micro-batches of a step; or, if any rank was asked to leave meanwhile,
        the common verdict."""
        answer: Batch | Verdict | None = None
        began, pause, idle = time.monotonic(), 0.0, ""
        while answer is None:
            with self.waiting(0.0):
                answer = self._look(step, pause)
            waited = time.monotonic() - began
            pause = pause_after(waited)
            if self._ranks.rank == 0 and not idle and waited > self._idle_limit:
                idle = f"idle for {waited / 60:.0f} min, without a batch ({IDLE_LIMIT})"
                self._stop.request(INTERRUPT_REQUEST, idle)
        if isinstance(answer, Verdict):
            # The verdict itself says "asked to make room"; the batch script repeats this reason.
            return answer._replace(reason=idle) if idle else answer
        self.tokens, self._metrics = answer.tokens, answer.metrics
        # A row holds several samples, which the orchestrator has counted.
        self.position += int(answer.metrics.get("samples", 0))
        self.state = answer.state
        self._step = step
        self._own = [] if answer.scored and self._ranks.rank == 0 else None
        path = self._exchange.rollouts(step) / f"rank_{self._layout.data_rank}.safetensors"
        arrays = self._ranks.on_all(lambda: read_batch(path, self._seq_len, step - 1))
        self._places = arrays["inputs"].numel() * self._layout.data_ranks
        return list(micro_batches(arrays, self._micro, self._pin, self._own))

    def _look(self, step: int, pause: float) -> Batch | Verdict | None:
        """Look for the batch once, on all ranks, after `pause` seconds. Only rank 0
        reads the directory."""
        batch, is_due = None, False
        if self._ranks.rank == 0:
            # The other ranks wait for this one in the sum below.
            time.sleep(pause)
            batch = self._exchange.batch(step)
            is_due = self._tries > 0 and time.monotonic() > self._again
        # All ranks act on the same sums: one that left or published alone would hang the others.
        flags = torch.tensor([batch is not None, is_due, *self._stop.flags[INTERRUPT_REQUEST:]])
        dist.all_reduce(flags, dist.ReduceOp.MAX, self._ranks.group)
        ready, due, *leaving = flags.tolist()
        # A request only to save can wait for the next step's all-reduce.
        verdict = requested_verdict(dict(zip(REQUEST_FLAGS, (0.0, *leaving), strict=True)))
        if verdict.state:
            return verdict
        if due:
            self.publish(step - 1)
        if not ready:
            return None
        # Without the orchestrator's state, which may be long and stays on rank 0.
        message = [batch._replace(state={}) if batch else None]
        dist.broadcast_object_list(message, 0, self._ranks.group)
        return batch or message[0]

    def after_update(self) -> None:
        """Publish the weights: the engines wait for them, and they go through the host anyway."""
        with self._clock.part("publish"), self.waiting():
            self.publish(self._step)

    def publish(self, version: int) -> None:
        """Publish the weights to the engines, on all ranks. If the disk is full, next() retries
        until there is room: nobody needs the step's weights earlier. Raises all other errors."""
        try:
            self._publisher.publish(version)
        except (OSError, PeerFailed) as error:
            # All ranks get here: publish() raises on each if it has failed on one.
            full = torch.tensor(isinstance(error, OSError) and error.errno in FULL)
            dist.all_reduce(full, dist.ReduceOp.MAX, self._ranks.group)
            self._tries += 1
            # Tries, not seconds, because all ranks must count alike and give up together.
            if not full or self._tries > DISK_S / AGAIN_S:
                raise
            self._again = time.monotonic() + AGAIN_S
            if self._tries == 1:
                self._say(f"{error}; waiting for room")
                if self._beat:
                    self._beat.full()
            return
        if self._tries and self._beat:
            self._beat.room()
            self._say(f"version {version} of the weights is published")
        self._tries = 0

    # --- For the recorder ---

    def seek(self, *_: object) -> None:
        """Refuse: the orchestrator is ahead, so only a new attempt can go back."""
        raise RuntimeError("the orchestrator is ahead: only a new attempt can go back")

    def keys_per_query(self, window: int | None) -> None:
        """Return None, because the length of samples is not known beforehand."""

    def sample_numbers(self, position: int, count: int) -> list[int]:
        return []

    def places(self, tokens: int) -> int:
        """Return the places of the newest batch, because its rows have places without a target."""
        return self._places

    def record(self, result: StepResult, lap: Mapping[str, float], counted: str) -> dict[str, Any]:
        """Return the metrics of the newest batch's step: the orchestrator's, and the trainer's."""
        # The step's numbers have been read, so the GPU is done and the copy waits for nothing.
        if self._own:
            self._exchange.hand_back(self._step, self._own[0].cpu().numpy())
        metrics = {name: value for name, value in self._metrics.items() if name != "samples"}
        return {
            **metrics,
            "wait": lap.get("data", 0.0) / max(lap["total"], 1e-9),
            "publish_seconds": lap.get("publish", 0.0),
        }

    def close(self) -> None:
        pass


def pause_after(waited: float) -> float:
    """Return the seconds until the next check."""
    least, most = BATCH_POLL_S
    return min(most, max(least, WAIT_SHARE * waited))


class FakeFeed(Feed):
    """Random samples, for measurements: each of rl.batch_samples is as long as a row, or rows hold
    several of variable length (see [bench]). Removes what engines would remove."""

    def __init__(
        self,
        cfg: RunConfig,
        exchange: RolloutExchange,
        layout: Layout,
        stop: StopRequests,
        publisher: Publisher,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(cfg, exchange, layout, stop, publisher, 0, say)
        separate = cfg.of(BenchConfig).length == "variable"
        shape = Shape(cfg.train.seq_len, cfg.model.vocab_size, separate, False, False)
        # The mean log-probability under random weights, so that the loss's ratios are near 1.
        self._source, self._guess = FakeDataset("fake", shape), -math.log(cfg.model.vocab_size)
        self._rows = (cfg.of(RlConfig).batch_samples or 64) // layout.data_ranks

    def next(self, step: int) -> list[Rollouts] | Verdict:
        if self._ranks.rank == 0 and step > 1:
            shutil.rmtree(self._exchange.version(step - 2), ignore_errors=True)
        self._step = step
        first = self.position + self._layout.data_rank * self._rows
        rows = self._source.read(np.arange(first, first + self._rows))
        shape = rows.inputs.shape
        documents = np.zeros(shape, np.int32) if rows.documents is None else rows.documents
        sign = np.where(np.arange(len(rows.inputs)) % 2 == 0, 1.0, -1.0).astype(np.float32)
        arrays = {
            "inputs": rows.inputs,
            "targets": rows.targets,
            "documents": documents,
            "logprobs": np.full(shape, self._guess, np.float32),
            "advantages": np.broadcast_to(sign[:, None], shape).copy(),
            "fresh": np.ones(shape, bool),
        }
        self.position += self._rows * self._layout.data_ranks
        self._places = self._rows * self._layout.data_ranks * self._seq_len
        self.tokens = self._places
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return list(micro_batches(tensors, self._micro, self._pin))


def open_feed(
    cfg: RunConfig,
    run: Run,
    layout: Layout,
    model: Decoder,
    progress: Progress,
    stop: StopRequests,
) -> Feed:
    """Open the batches of a run, and the publication of its weights."""
    exchange, device = RolloutExchange(run.dir), torch.device(layout.mesh.device_type)
    publisher = open_publisher(cfg, model, exchange, device)
    if cfg.data.dataset_path == FAKE:
        return FakeFeed(cfg, exchange, layout, stop, publisher, run.announce)
    return Feed(cfg, exchange, layout, stop, publisher, progress.samples, run.announce)
