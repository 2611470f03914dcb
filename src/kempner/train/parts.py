"""Factories for the parts of a training run."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kempner.config.option import ConfigError
from kempner.data.stages import samples_between, stage_at
from kempner.jobs.ranks import process_group, startup
from kempner.train import lookup
from kempner.train.sections import RunConfig, check_batch, micro_batch

if TYPE_CHECKING:
    import torch

    from kempner.data.batch import MicroBatch
    from kempner.data.loader import TrainLoader
    from kempner.data.mixture import Mixture
    from kempner.data.source import Source
    from kempner.jobs.ranks.placement import World
    from kempner.model.decoder import Decoder
    from kempner.optim.optimizer import Optimizer
    from kempner.parallel.layout import Layout
    from kempner.train.objective import Objective
    from kempner.train.progress import Progress
    from kempner.train.recording.run_directory import Run
    from kempner.train.replicas import Replicas, Waiting


def prepare_torch(cfg: RunConfig, run: Run, device: torch.device) -> None:
    """Configure the whole process: the seed, deterministic kernels, and the attention kernel, which
    is announced. Raises ConfigError if this device lacks that kernel."""
    import torch

    startup.mark_start("process group")
    from kempner.model.attention import choose_kernel
    from kempner.parallel.build import compute_dtype

    if cfg.train.compile:
        from kempner.parallel.compiled import keep_compiled

        keep_compiled(run.dir, run.world)
    else:
        from kempner.jobs.system.uncompiled import leave_compiler_out

        leave_compiler_out()
    torch.manual_seed(cfg.train.seed)
    if cfg.train.deterministic:
        # cuBLAS is deterministic only with a fixed workspace; without it torch refuses products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if cfg.train.compile or device.type == "cuda":
            torch.use_deterministic_algorithms(True)  # also imports and configures the compiler
        else:
            torch.set_deterministic_debug_mode("error")
    packed = _packs(cfg, run.world.rank == 0)
    tokens = torch.zeros(1, cfg.train.seq_len, dtype=torch.int64, device=device)
    dtype = compute_dtype(cfg.train.dtype, device.type)
    ring = cfg.distributed.cp > 1 and cfg.distributed.cp_method == "ring"
    kernel = (
        "flash, in a ring"
        if ring
        else choose_kernel(cfg.train.attention, cfg.model, tokens, packed, dtype)
    )
    asked = cfg.train.attention
    if kernel.startswith("flash") and (device.type == "cuda" or asked in ("fa3", "fa4")):
        from kempner.model.flash import use_newer_flash

        by_length = kernel == "flash, by length"
        fixed = cfg.train.deterministic
        kernel += use_newer_flash(asked, cfg.model, dtype, device, fixed, by_length)
    run.announce(f"attention: {kernel} (train.attention = {asked})")
    if cfg.model.n_experts:
        from kempner.model.moe import choose_products

        run.announce(f"experts: {choose_products(dtype, device)}")
    if text := slow_products(device.type, str(dtype)):
        run.announce(text)


def slow_products(device: str, dtype: str) -> str | None:
    """Return a log line if products run far below the GPU's speed: torch leaves TF32 off."""
    if device != "cuda" or dtype != "torch.float32":
        return None
    return "products: fp32, without TF32: several times slower than train.dtype=bf16 on this GPU"


def open_layout(cfg: RunConfig, world: World, device: torch.device) -> Layout:
    """Build the meshes over the ranks of this replica, and its place among the others."""
    from kempner.parallel.layout import build_layout
    from kempner.train.resilience.watchdog import HANG_PATIENCE_S

    replica = world.replica, world.replicas
    layout = build_layout(cfg.distributed, world.size, world.per_node, device.type, replica)
    # Until the watchdog knows these groups, NCCL's default timeout of ten minutes would end a
    # stalled start without a record.
    process_group.set_timeout(max(cfg.distributed.start_timeout, HANG_PATIENCE_S), layout.groups)
    return layout


def open_replicas(
    cfg: RunConfig, world: World, model: Decoder, waiting: Waiting = nullcontext
) -> tuple[Optimizer, Replicas]:
    """Open this replica's optimizer and its link to others. `waiting`: the watchdog's patient()."""
    from kempner.optim.build import build_optimizer
    from kempner.train.replicas import Replicas

    optimizer = build_optimizer(model, cfg.optimizer)
    if cfg.resilience.spike_sigma is not None:
        from kempner.optim.spikes import Spikes

        optimizer.spikes = Spikes(cfg.resilience.spike_sigma, cfg.resilience.spike_window)
    for each in lookup.used(cfg):
        if (replicas := each.replicas(cfg, world, model, optimizer, waiting)) is not None:
            return optimizer, replicas
    return optimizer, Replicas()


def open_objective(
    cfg: RunConfig, layout: Layout, model: Decoder, run: Run, device: torch.device
) -> Objective:
    """Return the objective of the run, which also counts whatever else is recorded."""
    objective = _objective(cfg, layout, model, run, device)
    if cfg.model.n_experts or cfg.train.z_loss:
        from kempner.train.recording.objectives import WithExperts, WithZLoss

        if cfg.model.n_experts:
            objective = WithExperts(objective, model, layout, device)
        if cfg.train.z_loss:
            objective = WithZLoss(objective, model, device)
    if interval := cfg.profile.layers_interval:
        from kempner.train.recording.layers import WithLayers

        objective = WithLayers(objective, model, layout, interval, lambda: run.step)
    return objective


def _objective(
    cfg: RunConfig, layout: Layout, model: Decoder, run: Run, device: torch.device
) -> Objective:
    from kempner.train.objective import NextToken

    for each in lookup.used(cfg):
        if (found := each.objective(cfg, layout, model, run, device)) is not None:
            return found
    if layout.cp is None:
        return NextToken()
    from kempner.parallel.context import own_tokens

    return NextToken(own_tokens(layout.cp, cfg.distributed.cp_method))


@functools.cache  # for the check of the input, the manifest, and the loaders
def open_data(cfg: RunConfig, check: bool) -> tuple[list[Source], list[Source]]:
    """Open the training sources and, if the run validates, the held-out data; none if an extension
    brings the batches. With `check`, as on rank 0, check all shards; otherwise open each when it is
    first read. Raises ConfigError."""
    if lookup.bringer(cfg):
        return [], []
    from kempner.data.opening import Opening, open_held_out, open_sources
    from kempner.data.source import Shape

    data, cut = cfg.data, cfg.data.too_long == "cut"
    shape = Shape(cfg.train.seq_len, cfg.model.vocab_size, data.document_mask, cut)
    for each in lookup.used(cfg):
        shape = each.sample_shape(cfg, shape)
    how = Opening(shape, check, Path(cfg.run.dir, "bookmarks"))
    sources = open_sources(data, how)
    if cfg.train.seq_len_ramp and any(source.packing for source in sources):
        raise ConfigError(
            f"train.seq_len_ramp = {list(cfg.train.seq_len_ramp)}: would cut conversations in two; "
            "it is for text: leave it out"
        )
    return sources, open_held_out(data, cfg.eval.sources, how) if cfg.eval.interval else []


def fixed_facts(cfg: RunConfig, first: bool) -> dict[str, Any]:
    """Return, by section, the facts that define the meaning of a run's weights and position,
    which must be the same at later starts (checkpoint/fits.py). `first`: on rank 0, whose facts
    count. Raises ConfigError."""
    from kempner.data.opening import facts_of

    sources, _ = open_data(cfg, first)
    data: dict[str, Any] = {}  # none if an extension brings the batches
    if sources:  # a mixture's past: see fits.fact_differences
        data = {"seed": cfg.data.seed, "mixture": facts_of(cfg.data, sources)}
    others: dict[str, Any] = {}
    for each in lookup.used(cfg) if first else ():
        others |= each.fixed_facts(cfg)
    return {
        "model": asdict(cfg.model),
        "train": {"seq_len": cfg.train.seq_len},
        "data": data,
        **others,
    }


def _packs(cfg: RunConfig, check: bool) -> bool:
    """Return whether rows hold several documents each. `check`: see open_data()."""
    sources, _ = open_data(cfg, check)
    apart = cfg.data.document_mask or any(source.packing is not None for source in sources)
    return apart or lookup.bringer(cfg) is not None


def expect_batches(cfg: RunConfig, layout: Layout, model: Decoder, step: int) -> None:
    """Tell the compiler which batch sizes change after `step`."""
    if not cfg.train.compile:
        return
    from kempner.parallel.compiled import expect_changes

    if lookup.bringer(cfg):
        expect_changes(model, cfg.train.micro_batch is None, False, documents=True)
        return
    now = stage_at(cfg.train.stages, step)
    stages = [now, *(stage for stage in cfg.train.stages if stage.start > step)]
    micro = micro_batch(cfg.train, layout.shares, cfg.train.sequences)
    rows = {min(micro, stage.batch // layout.shares) * stage.pieces for stage in stages}
    lengths = {stage.pieces for stage in stages}
    packed = _packs(cfg, layout.data_rank == 0)
    expect_changes(model, len(rows) > 1, len(lengths) > 1, documents=packed)


def open_mixture(cfg: RunConfig, sources: Sequence[Source], progress: Progress) -> Mixture:
    """Return the order of all samples. Raises ConfigError if there are too few for all steps. Those
    that the run leaves out since it went back do not count: see resuming.find_last_step()."""
    from kempner.data.opening import facts_of, mixture_of

    mixture = mixture_of(facts_of(cfg.data, sources), progress.phases, cfg.data.seed)
    samples_left = samples_between(cfg.train.stages, progress.step, cfg.train.max_steps)
    here = progress.samples
    passed = sum(max(0, min(end, here) - begin) for begin, end in progress.skip)
    if mixture.end is not None and mixture.end < (needed := here - passed + samples_left):
        raise ConfigError(mixture.too_short(needed))
    return mixture


def open_loader(cfg: RunConfig, layout: Layout, pin: bool, progress: Progress) -> TrainLoader:
    """Open this rank's share of the training data, at its position."""
    from kempner.data.loader import TrainLoader

    sources, _ = open_data(cfg, layout.data_rank == 0)
    check_batch(cfg.train, layout.shares)
    return TrainLoader(
        sources,
        open_mixture(cfg, sources, progress),
        stages=cfg.train.stages,
        rank=layout.share,
        world=layout.shares,
        micro=micro_batch(cfg.train, layout.shares, cfg.train.sequences),
        position=progress.samples,
        step=progress.step,
        prefetch=cfg.data.prefetch,
        pin=pin,
        reset_positions=cfg.data.reset_positions,
        skip=progress.skip,
    )


def open_held_out_batches(
    cfg: RunConfig, layout: Layout
) -> Callable[[], dict[str, Iterator[MicroBatch]]]:
    """Return a function that makes iterators over this rank's share of the held-out batches, by
    name of the set."""
    from kempner.data.loader import val_batches

    _, held_out = open_data(cfg, layout.data_rank == 0)

    def batches() -> dict[str, Iterator[MicroBatch]]:
        return {
            source.name: val_batches(
                source,
                samples=cfg.eval.samples or None,
                micro=micro_batch(cfg.train, layout.shares, cfg.train.sequences),
                rank=layout.data_rank,
                world=layout.data_ranks,
                reset_positions=cfg.data.reset_positions,
            )
            for source in held_out
        }

    return batches
