"""A run's position in its data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from kempner.config.option import ConfigError
from kempner.data.stages import samples_between, step_of_sample
from kempner.train.sections import RunConfig


@dataclass(frozen=True)
class Progress:
    """Position of a run: its totals so far; the ranges of sample numbers it leaves out, because
    their steps were not finite; the sample numbers at which the data's phases begin; the
    checkpoints of other runs that it descends from, nearest first (see fork.fork_generation); and,
    on rank 0, the state of the extension that brings its batches, if any."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skip: list[list[int]] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)
    lineage: list[dict[str, Any]] = field(default_factory=list)
    orchestrator: dict[str, Any] | None = None

    @classmethod
    def of(cls, manifest: dict[str, Any] | None) -> Progress:
        """Read the progress from a checkpoint's manifest; None: the beginning."""
        if manifest is None:
            return cls()
        # Older checkpoints lack these.
        none: dict[str, Any] = {"phases": [], "lineage": [], "orchestrator": None}
        values = none | manifest
        return cls(**{each.name: values[each.name] for each in fields(cls)})

    def plan(self, cfg: RunConfig) -> Progress:
        """Plan the starts of the phases. Those that have begun stay, whatever the global batch was
        then; the others follow from the remaining steps and tokens before them."""
        stages = cfg.train.stages
        starts = [start for start in self.phases if start < self.samples]
        for phase in cfg.data.phases[len(starts) :]:
            if (first := phase.start_step) is None:
                assert phase.start_token is not None
                # Round up: a phase begins with a whole sample.
                samples = -((self.tokens - phase.start_token) // cfg.train.seq_len)
                first = step_of_sample(stages, self.step, samples)
            start = self.samples + samples_between(stages, self.step, first)
            if start < self.samples:
                raise ConfigError(
                    f"data.phases[{len(starts)}]: would have begun before step {self.step}, where "
                    "the run is; a phase that is added begins in the future, at "
                    f"start_step = {self.step} or later"
                )
            # Samples that are left out also have numbers.
            for begin, end in self.skip:
                start += end - begin if self.samples <= begin < start else 0
            starts.append(start)
        return replace(self, phases=starts)

    def after_step(
        self, samples: int, tokens: int, orchestrator: dict[str, Any] | None = None
    ) -> Progress:
        """Return the progress one step later. `samples`: the loader's position; `tokens`:
        of that step."""
        now = replace(self, step=self.step + 1, samples=samples, tokens=self.tokens + tokens)
        return replace(now, orchestrator=orchestrator)

    def record(self) -> dict[str, Any]:
        """Return the record for the manifest."""
        return asdict(self)
