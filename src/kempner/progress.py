"""Where a run is: its position in the data, and the way back to an earlier one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kempner.checkpoint.fork import generation
from kempner.config.option import ConfigError
from kempner.data.sidecar import open_sidecar
from kempner.data.stages import samples_between, step_of
from kempner.resilience.requests import GO_ON, Verdict
from kempner.run import RunConfig, check_batch, micro_batch

if TYPE_CHECKING:
    import torch
    from torch import nn

    from kempner.checkpoint.checkpointer import Checkpointer
    from kempner.data.batch import MicroBatch
    from kempner.data.loader import TrainLoader
    from kempner.data.mixture import Mixture
    from kempner.data.source import Source
    from kempner.lowcomm.replicas import Replicas
    from kempner.model.decoder import Decoder
    from kempner.objective import Objective
    from kempner.parallel.layout import Layout
    from kempner.run_directory import Run


@dataclass(frozen=True)
class Progress:
    """Where a run is: totals so far, the ranges of sample numbers that it leaves out, because their
    steps were not finite, the sample numbers at which the data's phases begin, and the checkpoints
    of other runs that it comes from, nearest first (see fork.generation)."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skip: list[list[int]] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)
    lineage: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, manifest: dict[str, Any] | None) -> Progress:
        """As the manifest of a checkpoint has it; None: at the start."""
        if manifest is None:
            return cls()
        known = {"phases": [], "lineage": [], **manifest}  # older checkpoints have none
        return cls(**{each.name: known[each.name] for each in fields(cls)})

    def plan(self, cfg: RunConfig) -> Progress:
        """With the starts of the phases: those that have begun stay, whatever the global batch was
        then; the others follow from the steps and tokens that are left until they begin."""
        stages = cfg.train.stages
        starts = [start for start in self.phases if start < self.samples]
        for phase in cfg.data.phases[len(starts) :]:
            if (first := phase.start_step) is None:
                assert phase.start_token is not None
                samples = -((self.tokens - phase.start_token) // cfg.train.seq_len)
                first = step_of(stages, self.step, samples)
            start = self.samples + samples_between(stages, self.step, first)
            if start < self.samples:
                raise ConfigError(
                    f"data.phases[{len(starts)}]: would have begun before step {self.step}, where "
                    "the run is; a phase that is added begins in the future, at "
                    f"start_step = {self.step} or later"
                )
            for begin, end in self.skip:
                start += end - begin if self.samples <= begin < start else 0
            starts.append(start)
        return replace(self, phases=starts)

    def after_step(self, samples: int, tokens: int) -> Progress:
        """One step later. `samples`: the loader's position; `tokens`: of that step."""
        return replace(self, step=self.step + 1, samples=samples, tokens=self.tokens + tokens)

    def record(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)


def prepare_torch(cfg: RunConfig, run: Run, device: torch.device) -> None:
    """What holds for the whole process: the seed, deterministic kernels, and the kernel of the
    attention, which is announced. Raises ConfigError when this device does not have it."""
    import torch

    from kempner.model.attention import choose
    from kempner.parallel.build import compute_dtype
    from kempner.parallel.compiled import leave_compiler_out

    if not cfg.train.compile:
        leave_compiler_out()
    torch.manual_seed(cfg.train.seed)
    if cfg.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if cfg.train.compile or device.type == "cuda":
            torch.use_deterministic_algorithms(True)  # imports the compiler, to tell it, too
        else:
            torch.set_deterministic_debug_mode("error")
    sources, _ = open_data(cfg, run.world.rank == 0)
    packed = cfg.data.document_mask or any(source.packing is not None for source in sources)
    tokens = torch.zeros(1, cfg.train.seq_len, dtype=torch.int64, device=device)
    dtype = compute_dtype(cfg.train.dtype, device.type)
    ring = cfg.distributed.cp > 1 and cfg.distributed.cp_method == "ring"
    kernel = (
        "flash, in a ring"
        if ring
        else choose(cfg.train.attention, cfg.model, tokens, packed, dtype)
    )
    run.announce(f"attention: {kernel}, of {cfg.train.attention}")


def open_checkpointer(
    cfg: RunConfig,
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    replicas: Replicas,
) -> Checkpointer:
    """Saves and loads the weights, the optimizer's state, and each rank's random state."""
    from kempner.checkpoint.checkpointer import Checkpointer
    from kempner.checkpoint.state import run_state
    from kempner.checkpoint.unsaved import Unsaved

    if not cfg.checkpoint.save:
        return Unsaved()
    state = replicas.with_outer(run_state(model, optimizer))
    parts = (cfg.checkpoint, cfg.checkpoint_dir, state, run.contents(), run.announce)
    if run.world.store is None:
        return Checkpointer(*parts)
    from kempner.lowcomm.checkpoints import ReplicaCheckpointer

    return ReplicaCheckpointer(*parts, world=run.world, replicas=replicas)


def resume(
    cfg: RunConfig, run: Run, model: nn.Module, checkpointer: Checkpointer, replicas: Replicas
) -> Progress:
    """Load the newest checkpoint; without one, that of the run to be forked, or the weights that
    model.init_from names. Checkpoints of adapters need these, too."""
    manifest = checkpointer.load()
    forks = manifest is None and bool(cfg.run.fork)
    if cfg.model.init_from is not None and (cfg.lora.rank or (manifest is None and not forks)):
        from kempner.hf.load import start_from

        run.announce(start_from(model, cfg.model, run.dir))
    progress = begin_fork(cfg, run, checkpointer) if forks else Progress.of(manifest).plan(cfg)
    return replicas.begin(progress)


def begin_fork(cfg: RunConfig, run: Run, checkpointer: Checkpointer) -> Progress:
    """Load the checkpoint that run.fork names, and save it as the first one of this run."""
    from kempner.checkpoint.choose import differences
    from kempner.hf.source import FOLDER, carry, run_of

    names = tuple(name for name in checkpointer.providers if name != "rng")
    names = names if cfg.run.fork_optimizer == "keep" else ("model",)
    path, manifest, table = checkpointer.load_from(cfg.run.fork, names)
    if run.world.rank == 0 and (beside := run_of(path) / FOLDER).is_dir():
        carry(beside, run.dir / FOLDER)
    kept = "optim" in names and any(name.startswith("optim.") for name in table)
    lineage = generation(cfg.run.fork, manifest, "keep" if kept else "fresh")
    # With the same samples in the same order the fork goes on where the other run was.
    changed = list(differences(manifest, checkpointer.about, ("model.*",)))
    if not manifest["fixed"].get("data", {}).get("mixture"):  # imported, or of an older version
        changed.append("data.sources")
    progress = replace(Progress() if changed else Progress.of(manifest), step=0, tokens=0)
    progress = replace(progress, lineage=lineage).plan(cfg)
    run.announce(
        f"a fork of {lineage[0]['from']}: the weights, "
        + ("the optimizer's state, " if kept else "a fresh optimizer, ")
        + (f"{', '.join(changed)} of its own: " if changed else "the same data: ")
        + f"from sample {progress.samples} on"
    )
    checkpointer.save(0, progress.record())  # from then on the fork does not need the other run
    return progress


def open_objective(
    cfg: RunConfig, layout: Layout, model: Decoder, run: Run, device: torch.device
) -> Objective:
    """What the run minimises, and what it counts beside that."""
    from kempner.objective import WithExperts

    objective = _objective(cfg, layout, model, run, device)
    return WithExperts(objective, model, layout) if cfg.model.n_experts else objective


def _objective(
    cfg: RunConfig, layout: Layout, model: Decoder, run: Run, device: torch.device
) -> Objective:
    """The reference of DPO is sharded as the model is, and has the weights
    of model.init_from after every restart, too."""
    if cfg.preference.loss == "none":
        from kempner.objective import NextToken

        if layout.cp is None:
            return NextToken()
        from kempner.parallel.context import own_tokens

        return NextToken(own_tokens(layout.cp, cfg.distributed.cp_method))
    from kempner.hf.load import start_from
    from kempner.parallel.build import build_model
    from kempner.preference.losses import DPO, Reward, token_losses, token_scores

    if cfg.preference.loss == "reward":
        model.loss = token_scores
        return Reward(open_sidecar(cfg.data.mixed[0].path).eod, device)
    reference = build_model(cfg.model, layout, cfg.train, cfg.distributed, frozen=True)
    run.announce(f"the reference {start_from(reference, cfg.model, run.dir)}")
    model.loss = reference.loss = token_losses
    return DPO(reference, cfg.preference.beta, device)


@functools.cache  # for the check of the input, the manifest, and the loaders
def open_data(cfg: RunConfig, check: bool) -> tuple[list[Source], list[Source]]:
    """The sources of the training and, when the run validates, the held-out data. `check` all
    shards, which rank 0 does; otherwise none is opened before it is read. Raises ConfigError."""
    from kempner.data.opening import Opening, open_held_out, open_sources
    from kempner.data.stream import Shape

    data, cut = cfg.data, cfg.data.too_long == "cut"
    preferences = cfg.preference.loss != "none"
    shape = Shape(cfg.train.seq_len, cfg.model.vocab_size, data.document_mask, cut, preferences)
    how = Opening(shape, check, Path(cfg.run.dir, "bookmarks"))
    sources = open_sources(data, how)
    if cfg.train.seq_len_ramp and any(source.packing for source in sources):
        raise ConfigError(
            f"train.seq_len_ramp = {list(cfg.train.seq_len_ramp)}: would cut conversations in two; "
            "it is for text: leave it out"
        )
    return sources, open_held_out(data, cfg.eval.sources, how) if cfg.eval.interval else []


def open_mixture(cfg: RunConfig, sources: Sequence[Source], progress: Progress) -> Mixture:
    """The order of all samples. Raises ConfigError when they do not last for all steps."""
    from kempner.data.opening import facts_of, mixture_of

    mixture = mixture_of(facts_of(cfg.data, sources), progress.phases, cfg.data.seed)
    left = samples_between(cfg.train.stages, progress.step, cfg.train.max_steps)
    if mixture.end is not None and mixture.end < progress.samples + left:
        raise ConfigError(mixture.too_short(progress.samples + left))
    return mixture


def open_loaders(
    cfg: RunConfig, layout: Layout, pin: bool, progress: Progress
) -> tuple[TrainLoader, Callable[[], dict[str, Iterator[MicroBatch]]]]:
    """This rank's share of the data: the training's loader at its position, and what makes
    iterators over the held-out batches, by name of the set."""
    from kempner.data.loader import TrainLoader, val_batches

    sources, held_out = open_data(cfg, layout.data_rank == 0)
    check_batch(cfg.train, layout.shares)
    micro = micro_batch(cfg.train, layout.shares, cfg.train.sequences)
    loader = TrainLoader(
        sources,
        open_mixture(cfg, sources, progress),
        stages=cfg.train.stages,
        rank=layout.share,
        world=layout.shares,
        micro=micro,
        position=progress.samples,
        step=progress.step,
        prefetch=cfg.data.prefetch,
        pin=pin,
        reset_positions=cfg.data.reset_positions,
        skip=progress.skip,
    )

    def held_out_batches() -> dict[str, Iterator[MicroBatch]]:
        return {
            source.name: val_batches(
                source,
                samples=cfg.eval.samples or None,
                micro=micro,
                rank=layout.data_rank,
                world=layout.data_ranks,
                reset_positions=cfg.data.reset_positions,
            )
            for source in held_out
        }

    return loader, held_out_batches


def go_back(
    progress: Progress,
    since: Progress,
    verdict: Verdict,
    checkpointer: Checkpointer,
    loader: TrainLoader,
    run: Run,
) -> tuple[Progress, Verdict]:
    """To the last checkpoint, from where the samples of the bad steps are left out; returns where
    the run is then, and what is next. `since`: after the first of these steps."""
    bad = [since.samples - run.cfg.train.stage(since.step - 1).batch, loader.position]
    manifest = checkpointer.load()
    if manifest is None:
        reason = f"{verdict.reason}; no checkpoint to go back to"
        return progress, Verdict(state="failed", reason=reason)
    progress = replace(Progress.of(manifest), skip=[bad]).plan(run.cfg)
    checkpointer.remember_skip(progress.skip)  # a restart leaves them out, too
    mixture = open_mixture(run.cfg, loader.sources, progress)
    loader.seek(progress.samples, progress.step, progress.skip, mixture)
    run.went_back(progress.step, bad, verdict.reason)
    return progress, GO_ON
