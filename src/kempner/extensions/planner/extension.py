"""The planner as an extension of the trainer: --build, --bench with [bench], and advice for a run
that is out of memory."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kempner.config.command_line import Command, parse_command
from kempner.config.option import ConfigError
from kempner.extensions.bench.config import BenchConfig
from kempner.train.extensions import Extension, Variant

if TYPE_CHECKING:
    from kempner.jobs.ranks.placement import World
    from kempner.train.sections import RunConfig


class PlannerExtension(Extension):
    sections: ClassVar = {"bench": BenchConfig}

    def variants(self, command: Command, cfg: RunConfig) -> list[Variant]:
        from kempner.extensions.bench import measure as bench
        from kempner.jobs.system.directories import Kind, refuse_others
        from kempner.jobs.system.seal import refuse_other_file
        from kempner.train.configure import OWN_DIRECTORY, load_config

        refuse_others(cfg.run.dir, "run.dir", (Kind.STARTED,), OWN_DIRECTORY)
        if file := cfg.of(BenchConfig).output_json:
            refuse_other_file(file, "bench.output_json", (bench.BENCH_SIGN,))
        variants, problems = [], []
        for number, name in enumerate(cfg.of(BenchConfig).compare or ("",), 1):
            try:
                more = parse_command(shlex.split(name), {})
                files = [*command.files, *more.files]
                overrides = [*command.overrides, *more.overrides]
                own = load_config(files, overrides, more.problems)  # its [bench] chooses the data
                overrides += bench.bench_overrides(own, f"{cfg.run.dir}/{number}")
                own = load_config(files, overrides)
                variants.append(Variant(name, [*files, *overrides], own))
            except ConfigError as error:
                problems += [f"bench.compare, {name}: {text}" for text in error.problems]
            except ValueError as error:
                problems.append(f"bench.compare, {name}: {error}; quote it as in a shell")
        if problems:
            raise ConfigError(problems)
        return variants

    def measure(
        self, cfg: RunConfig, variants: Sequence[Variant], leaves: Callable[[], float]
    ) -> int:
        from kempner.extensions.bench import measure as bench
        from kempner.jobs.ranks.placement import discover_world

        return bench.run_bench(Path(cfg.run.dir), variants, discover_world(), leaves)

    def build(self, cfg: RunConfig, world_size: int, per_node: int) -> str:
        from kempner.extensions.planner.build import build_without_memory

        return build_without_memory(cfg, world_size, per_node)

    def recompute_choices(
        self, cfg: RunConfig, world: World, gpu: bool
    ) -> list[tuple[dict[str, Any], float]]:
        from kempner.extensions.planner import recompute

        return recompute.planned_choices(cfg, world.size, world.per_node, gpu)

    def advise(self, cfg: RunConfig, world: World) -> str:
        from kempner.extensions.planner.out_of_memory import explain_memory
        from kempner.train.configure import check_world

        return explain_memory(cfg, world, check_world)
