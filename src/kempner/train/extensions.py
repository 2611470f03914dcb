"""The interface between the trainer and its extensions.

An extension names its sections and overrides the methods it needs. The trainer knows none by name:
an index, kept with the extensions, maps a section, option or flag to the one to import. Extensions
that a configuration does not use are not imported.
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
    """A run started by a flag's program."""

    name: str  # its additions to the command line
    words: list[str]  # its whole command line
    cfg: RunConfig


class Loader(Protocol):
    """The batches of a run: data.loader.TrainLoader, or an extension's."""

    @property
    def names(self) -> Sequence[str]:
        """The sources of data; with several, a step's loss is recorded by source."""
        ...

    @property
    def sources(self) -> Sequence[Source]:
        """The sources of [data]; none if an extension brings the batches."""
        ...

    waits_for_all: bool  # all ranks wait for a batch together: it is not a rank's own work
    at_once: bool  # read and record a step's numbers before the next batch
    position: int  # samples so far
    phase: int  # of the data, at the newest batch
    tokens: int  # of the newest batch, over all ranks: its targets, if all count
    state: dict[str, Any] | None  # for the checkpoint after the newest batch's step; on rank 0

    def begin(self, progress: Progress, clock: Clock, waiting: Waiting) -> None:
        """Called after loading, before the first batch. `waiting`: the watchdog's patient()."""

    def __next__(self) -> Sequence[MicroBatch] | Verdict:
        """Return this rank's micro-batches of the next step or, if any rank was asked to leave
        meanwhile, the common verdict."""

    def after_update(self) -> None:
        """Called when the weights are updated with the newest batch."""

    def seek(
        self, position: int, step: int, skip: Sequence[Sequence[int]], mixture: Mixture | None
    ) -> None:
        """Continue from an earlier position. Raises RuntimeError if only a new attempt can."""

    def keys_per_query(self, window: int | None) -> float | None:
        """Return the mean number of keys that a query sees; None: all before it."""

    def sample_numbers(self, position: int, count: int) -> Sequence[Any]:
        """Return the names of `count` samples from `position` on."""

    def places(self, tokens: int) -> int:
        """Return the number of row positions that the model has computed for `tokens` tokens."""

    def record(self, result: StepResult, lap: Mapping[str, float], counted: str) -> dict[str, Any]:
        """Return a part of the step's line in metrics.jsonl. `lap`: seconds since the previous
        line; `counted`: the field for the number of targets that count."""

    def close(self) -> None:
        """Stop reading ahead."""


class Extension:
    """An extension that does nothing. Each method is called for every configuration that uses the
    extension; "problems" are one message each, with a remedy."""

    sections: ClassVar[Mapping[str, type]] = {}
    script: ClassVar[str] = "train.py"  # in scripts/: its own program, if any

    # --- the command line -> a configuration ---

    def complete_values(self, values: Values, run_dir: str) -> list[str]:
        """Add derived values; returns problems. `run_dir`: the default of run.dir."""
        return []

    def complete(self, cfg: RunConfig) -> RunConfig:
        """Return the configuration with what follows from the extension's sections."""
        return cfg

    def problems(self, cfg: RunConfig) -> list[str]:
        """List problems across sections, before any file is opened."""
        return []

    def program_problem(self, cfg: RunConfig, own: bool) -> str | None:
        """Return the problem of this configuration with the program that reads it, if any. `own`:
        it is the extension's own program, not train.py."""
        return None

    def check_files(self, cfg: RunConfig, rank: int, begun: bool, servers: bool) -> list[str]:
        """List problems with the files that the sections name and, with `servers`, with programs
        that already run. `begun`: the run has a checkpoint."""
        return []

    def check_fork(self, cfg: RunConfig, checkpoint: Path) -> list[str]:
        """List problems of this run with the checkpoint that it begins from."""
        return []

    def fills_memory(self, cfg: RunConfig) -> bool:
        """Return whether a step needs more memory than one of next tokens, as train.recompute
        = auto tries."""
        return False

    def warnings(self, cfg: RunConfig) -> list[str]:
        """List settings that are allowed but rarely intended."""
        return []

    # --- a flag's program ---

    def variants(self, command: Command, cfg: RunConfig) -> list[Variant]:
        """Return the runs that --bench measures. Raises ConfigError."""
        raise NotImplementedError

    def measure(
        self, cfg: RunConfig, variants: Sequence[Variant], leaves: Callable[[], float]
    ) -> int:
        """Start the runs of --bench; returns the exit code. `leaves()`: positive once this process
        is asked to end."""
        raise NotImplementedError

    def build(self, cfg: RunConfig, world_size: int, per_node: int) -> str:
        """Describe what one rank holds, for --build. Raises ConfigError."""
        raise NotImplementedError

    # --- the parts of a training ---

    def brings_batches(self, cfg: RunConfig) -> bool:
        """Return whether loader() makes the batches instead of [data]."""
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
        """Return, by section, the facts that must not change during the run; called on rank 0."""
        return {}

    def start(self, cfg: RunConfig, run: Run, model: Decoder, begun: bool) -> None:
        """Fill the model with other weights, on all ranks. `begun`: a checkpoint is loaded."""

    def forked(self, checkpoint: Path, run: Run) -> None:
        """Take over the files that belong to the checkpoint that the run begins from; on rank 0."""

    def objective(
        self, cfg: RunConfig, layout: Layout, model: Decoder, run: Run, device: torch.device
    ) -> Objective | None:
        """Return the objective of the run; None: next tokens."""
        return None

    def count_replicas(self, cfg: RunConfig, world_size: int, per_node: int) -> int:
        """Return the number of replicas in a whole world. Raises ConfigError."""
        return 1

    def replicas_in_step(self, cfg: RunConfig, world_size: int, per_node: int) -> int:
        """Return the number of replicas in this srun step. Raises ConfigError."""
        return 1

    def of_replica(self, cfg: RunConfig, number: int) -> RunConfig:
        """Return the configuration of replica `number`."""
        return cfg

    def replicas(
        self,
        cfg: RunConfig,
        world: World,
        model: Decoder,
        optimizer: Optimizer,
        waiting: Waiting,
    ) -> Replicas | None:
        """Return this replica's link to the others; None if it is the only one."""
        return None

    # --- memory ---

    def recompute_choices(
        self, cfg: RunConfig, world: World, gpu: bool
    ) -> list[tuple[dict[str, Any], float]]:
        """Return the choices of train.recompute = auto, fastest first: values of [train] and the
        bytes that a rank needs with them. `gpu`: on a GPU."""
        raise NotImplementedError

    def advise(self, cfg: RunConfig, world: World) -> str:
        """Return advice for a run that has run out of memory."""
        return ""
