"""The seam between the trainer and what is built on it.

An extension names its sections and overrides what it gives. The trainer knows none by name: the
index, data that lives with the extensions, says which one to import for a section, an option or a
flag. What a configuration does not use is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from kempner.config.command_line import Command
    from kempner.data.batch import MicroBatch
    from kempner.data.mixture import Mixture
    from kempner.data.source import Shape, Source
    from kempner.jobs.ranks.placement import World
    from kempner.model.decoder import Decoder
    from kempner.optim.optimizer import Optimizer
    from kempner.parallel.layout import Layout
    from kempner.train.lookup import Values
    from kempner.train.objective import Objective
    from kempner.train.progress import Progress
    from kempner.train.recording.metrics import Clock
    from kempner.train.recording.run_directory import Run
    from kempner.train.replicas import Replicas, Waiting
    from kempner.train.resilience.requests import StopRequests, Verdict
    from kempner.train.sections import RunConfig
    from kempner.train.step import StepResult


@dataclass(frozen=True)
class Variant:
    """A run that a flag's program starts."""

    name: str  # what it adds to the command line
    words: list[str]  # the command line of its run
    cfg: RunConfig


class Loader(Protocol):
    """The batches of a run: data.loader.TrainLoader, or an extension's."""

    @property
    def names(self) -> Sequence[str]:
        """The sources of data; a step's loss is recorded by source where there are several."""
        ...

    @property
    def sources(self) -> Sequence[Source]:
        """The sources of [data]; none if the batches are an extension's."""
        ...

    waits_for_all: bool  # the wait for a batch is one of all ranks, and no rank's own work
    at_once: bool  # the numbers of a step are read, and recorded, before the next batch
    position: int  # samples so far
    phase: int  # of the data, of the newest batch
    tokens: int  # of the newest batch, over all ranks: targets, if all count
    state: dict[str, Any] | None  # for the checkpoint of the newest batch's step; on rank 0

    def begin(self, progress: Progress, clock: Clock, waiting: Waiting) -> None:
        """The run is loaded, and its first batch is asked for next. `waiting`: the watchdog's
        patient()."""

    def __next__(self) -> Sequence[MicroBatch] | Verdict:
        """This rank's micro-batches of the next step; or, when any rank was asked to leave
        meanwhile, the verdict of all."""

    def after_update(self) -> None:
        """The weights of the newest batch's step are there."""

    def seek(
        self, position: int, step: int, skip: Sequence[Sequence[int]], mixture: Mixture | None
    ) -> None:
        """Go on at an earlier place. Raises RuntimeError where only a new attempt can."""

    def keys_per_query(self, window: int | None) -> float | None:
        """Keys that a query sees on average; None: all before it."""

    def sample_numbers(self, position: int, count: int) -> Sequence[Any]:
        """The names of so many samples from `position` on."""

    def places(self, tokens: int) -> int:
        """Places in rows that the model has computed, for so many `tokens`."""

    def record(self, result: StepResult, lap: Mapping[str, float], counted: str) -> dict[str, Any]:
        """A part of the step's line in metrics.jsonl. `lap`: seconds since the line before;
        `counted`: the name there of the targets that count."""

    def close(self) -> None:
        """Stop reading ahead."""


class Extension:
    """An extension that gives nothing. Each method is called for every configuration that uses the
    extension; "problems" are one message each, with the way out."""

    sections: ClassVar[Mapping[str, type]] = {}
    script: ClassVar[str] = "train.py"  # of scripts/: its own program, if it has one

    # --- the command line -> a configuration ---

    def complete_values(self, values: Values, run_dir: str) -> list[str]:
        """Add values that follow from those given; returns problems. `run_dir`: where run.dir is
        not given."""
        return []

    def complete(self, cfg: RunConfig) -> RunConfig:
        """The configuration with what follows from the extension's sections."""
        return cfg

    def problems(self, cfg: RunConfig) -> list[str]:
        """Problems across sections, before any file is opened."""
        return []

    def program_problem(self, cfg: RunConfig, own: bool) -> str | None:
        """The problem of this configuration with the program that reads it. `own`: it is the
        extension's own one, not train.py."""
        return None

    def check_files(self, cfg: RunConfig, rank: int, begun: bool, servers: bool) -> list[str]:
        """Problems with what the sections name: files and, with `servers`, programs that run
        already. `begun`: the run has a checkpoint."""
        return []

    def check_fork(self, cfg: RunConfig, checkpoint: Path) -> list[str]:
        """Problems of this run with the checkpoint that it begins from."""
        return []

    def fills_memory(self, cfg: RunConfig) -> bool:
        """Return whether a step holds more in memory than one of next tokens, which is what
        train.recompute = auto tries."""
        return False

    def warnings(self, cfg: RunConfig) -> list[str]:
        """List what is allowed, but seldom meant."""
        return []

    # --- a flag's program ---

    def variants(self, command: Command, cfg: RunConfig) -> list[Variant]:
        """--bench: the runs to measure. Raises ConfigError."""
        raise NotImplementedError

    def measure(
        self, cfg: RunConfig, variants: Sequence[Variant], leaves: Callable[[], float]
    ) -> int:
        """--bench: start them; returns the exit code. `leaves()`: over 0 once this process is asked
        to end."""
        raise NotImplementedError

    def build(self, cfg: RunConfig, world_size: int, per_node: int) -> str:
        """--build: what one rank holds, in words. Raises ConfigError."""
        raise NotImplementedError

    # --- the parts of a training ---

    def brings_batches(self, cfg: RunConfig) -> bool:
        """Return whether loader() makes the batches, in place of [data]."""
        return False

    def loader(
        self,
        cfg: RunConfig,
        run: Run,
        layout: Layout,
        model: Decoder,
        progress: Progress,
        stop: StopRequests,
    ) -> Loader:
        """Open the extension's batches, if brings_batches()."""
        raise NotImplementedError

    def sample_shape(self, cfg: RunConfig, shape: Shape) -> Shape:
        """Return the shape of a sample of [data]."""
        return shape

    def fixed_facts(self, cfg: RunConfig) -> dict[str, Any]:
        """Return the facts that must not change during the run, by section; called on rank 0."""
        return {}

    def start(self, cfg: RunConfig, run: Run, model: Decoder, begun: bool) -> None:
        """Fill the model with weights from elsewhere, on all ranks. `begun`: it has those of a
        checkpoint."""

    def forked(self, checkpoint: Path, run: Run) -> None:
        """Take over what belongs to the checkpoint that the run has begun from; on rank 0."""

    def objective(
        self, cfg: RunConfig, layout: Layout, model: Decoder, run: Run, device: torch.device
    ) -> Objective | None:
        """Return the objective of the run; None: next tokens."""
        return None

    def count_replicas(self, cfg: RunConfig, world_size: int, per_node: int) -> int:
        """Replicas that a whole world is shared out to. Raises ConfigError."""
        return 1

    def replicas_in_step(self, cfg: RunConfig, world_size: int, per_node: int) -> int:
        """Replicas that the ranks of this srun step are shared out to. Raises ConfigError."""
        return 1

    def of_replica(self, cfg: RunConfig, number: int) -> RunConfig:
        """The configuration that replica `number` works with."""
        return cfg

    def replicas(
        self,
        cfg: RunConfig,
        world: World,
        model: Decoder,
        optimizer: Optimizer,
        waiting: Waiting,
    ) -> Replicas | None:
        """Return this replica's link to the others; None: there are no others."""
        return None

    # --- memory ---

    def recompute_choices(
        self, cfg: RunConfig, world: World, gpu: bool
    ) -> list[tuple[dict[str, Any], float]]:
        """Return values of [train] for train.recompute = auto, the fastest first, and the bytes
        that a rank needs with them. `gpu`: on a GPU."""
        raise NotImplementedError

    def advise(self, cfg: RunConfig, world: World) -> str:
        """Return advice for a run that is out of memory."""
        return ""
