"""Where a run is: its position in the data, and the way back to an earlier one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kempner.process_group import World
from kempner.resilience.requests import GO_ON, Verdict
from kempner.run import RunConfig, TrainConfig, micro_batch

if TYPE_CHECKING:
    from kempner.checkpoint.dcp import Checkpointer
    from kempner.data.dataset import TokenDataset
    from kempner.data.loader import MicroBatch, TrainLoader

Position = dict[str, Any]  # what position() returns


def seed_everything(cfg: TrainConfig) -> None:
    import torch

    torch.manual_seed(cfg.seed)
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


@functools.cache  # for the check of the input, and then for the loaders
def open_data(cfg: RunConfig, rank: int) -> tuple[TokenDataset, TokenDataset | None]:
    """The training split and, when the run validates, the held-out one. Rank 0 checks all shards;
    the others open none before they read from it. Raises ConfigError."""
    from kempner.data.dataset import TokenDataset

    def split(name: str) -> TokenDataset:
        return TokenDataset.open(
            cfg.data.dataset_path, name, cfg.train.seq_len, cfg.model.vocab_size, rank == 0
        )

    return split("train"), split("val") if cfg.eval.interval else None


def open_loaders(
    cfg: RunConfig, world: World, pin: bool, at: Position
) -> tuple[TrainLoader, Callable[[], Iterator[MicroBatch]]]:
    """This rank's share of the data: the training's loader at its position, and what makes an
    iterator over the held-out batches."""
    from kempner.data.loader import TrainLoader, val_batches

    train, held_out = open_data(cfg, world.rank)
    micro = micro_batch(cfg.train, world.size)
    loader = TrainLoader(
        train,
        seed=cfg.data.seed,
        batch=cfg.train.sequences,
        rank=world.rank,
        world=world.size,
        micro=micro,
        position=at["samples"],
        prefetch=cfg.data.prefetch,
        pin=pin,
        skip=at["skip"],
    )

    def held_out_batches() -> Iterator[MicroBatch]:
        assert held_out is not None
        return val_batches(
            held_out,
            samples=cfg.eval.samples or None,
            micro=micro,
            rank=world.rank,
            world=world.size,
        )

    return loader, held_out_batches


def position(manifest: dict[str, Any] | None) -> Position:
    """Where a run is, from the manifest of its checkpoint: steps, samples and tokens so far, and
    the ranges of sample numbers that are left out, because they were not finite."""
    start: Position = {"step": 0, "samples": 0, "tokens": 0, "skip": []}
    return start if manifest is None else {key: manifest[key] for key in start}


def go_back(
    at: Position, bad: list[int], verdict: Verdict, checkpointer: Checkpointer, loader: TrainLoader
) -> tuple[Position, Verdict]:
    """To the last checkpoint, from where the samples numbered bad[0] to bad[1] - 1 are left out;
    returns where the run is then, and what is next."""
    manifest = checkpointer.load()
    if manifest is None:
        reason = f"{verdict.reason}; no checkpoint to go back to"
        return at, Verdict(state="failed", reason=reason)
    at = {**position(manifest), "skip": [bad]}
    loader.seek(at["samples"], at["skip"])
    checkpointer.log(
        f"{verdict.reason}: back to step {at['step']}, without the samples {bad[0]} to {bad[1] - 1}"
    )
    return at, GO_ON
