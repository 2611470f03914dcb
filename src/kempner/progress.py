"""Where a run is: its position in the data, and the way back to an earlier one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from kempner.resilience.requests import GO_ON, Verdict
from kempner.run import RunConfig, TrainConfig, micro_batch

if TYPE_CHECKING:
    import torch
    from torch import nn

    from kempner.checkpoint.checkpointer import Checkpointer
    from kempner.data.batch import MicroBatch
    from kempner.data.loader import TrainLoader
    from kempner.data.source import Source
    from kempner.parallel.layout import Layout
    from kempner.run_directory import Run


@dataclass(frozen=True)
class Progress:
    """Where a run is: totals so far, and the ranges of sample numbers that it leaves out, because
    their steps were not finite."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skip: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, manifest: dict[str, Any] | None) -> Progress:
        """As the manifest of a checkpoint has it; None: at the start."""
        if manifest is None:
            return cls()
        return cls(**{each.name: manifest[each.name] for each in fields(cls)})

    def after_step(self, samples: int, tokens: int) -> Progress:
        """One step later. `samples`: the loader's position; `tokens`: of that step."""
        return replace(self, step=self.step + 1, samples=samples, tokens=self.tokens + tokens)

    def record(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)


def seed_everything(cfg: TrainConfig) -> None:
    import torch

    torch.manual_seed(cfg.seed)
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


@functools.cache  # for the check of the input, and then for the loaders
def open_checkpointer(
    cfg: RunConfig, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Checkpointer:
    """Saves and loads the weights, the optimizer's state, and each rank's random state."""
    from kempner.checkpoint.checkpointer import Checkpointer
    from kempner.checkpoint.state import run_state

    state = run_state(model, optimizer)
    return Checkpointer(cfg.checkpoint, cfg.checkpoint_dir, state, run.contents(), run.announce)


def open_data(cfg: RunConfig, rank: int) -> tuple[Source, Source | None]:
    """The training split and, when the run validates, the held-out one. Rank 0 checks all shards;
    the others open none before they read from it. Raises ConfigError."""
    from kempner.data.chat_dataset import ChatDataset
    from kempner.data.dataset import TokenDataset
    from kempner.data.sidecar import open_sidecar

    def split(name: str) -> Source:
        path, seq_len, vocab_size = cfg.data.dataset_path, cfg.train.seq_len, cfg.model.vocab_size
        if open_sidecar(path).kind == "text":
            return TokenDataset.open(path, name, seq_len, vocab_size, rank == 0)
        return ChatDataset.open(
            path, name, seq_len, vocab_size, rank == 0, too_long=cfg.data.too_long
        )

    return split("train"), split("val") if cfg.eval.interval else None


def open_loaders(
    cfg: RunConfig, layout: Layout, pin: bool, progress: Progress
) -> tuple[TrainLoader, Callable[[], Iterator[MicroBatch]]]:
    """This rank's share of the data: the training's loader at its position, and what makes an
    iterator over the held-out batches."""
    from kempner.data.loader import TrainLoader, val_batches

    train, held_out = open_data(cfg, layout.data_rank)
    micro = micro_batch(cfg.train, layout.data_ranks)
    loader = TrainLoader(
        train,
        seed=cfg.data.seed,
        batch=cfg.train.sequences,
        rank=layout.data_rank,
        world=layout.data_ranks,
        micro=micro,
        position=progress.samples,
        prefetch=cfg.data.prefetch,
        pin=pin,
        skip=progress.skip,
    )

    def held_out_batches() -> Iterator[MicroBatch]:
        assert held_out is not None
        return val_batches(
            held_out,
            samples=cfg.eval.samples or None,
            micro=micro,
            rank=layout.data_rank,
            world=layout.data_ranks,
        )

    return loader, held_out_batches


def go_back(
    progress: Progress,
    bad: list[int],
    verdict: Verdict,
    checkpointer: Checkpointer,
    loader: TrainLoader,
    run: Run,
) -> tuple[Progress, Verdict]:
    """To the last checkpoint, from where the samples numbered bad[0] to bad[1] - 1 are left out;
    returns where the run is then, and what is next."""
    manifest = checkpointer.load()
    if manifest is None:
        reason = f"{verdict.reason}; no checkpoint to go back to"
        return progress, Verdict(state="failed", reason=reason)
    progress = replace(Progress.of(manifest), skip=[bad])
    checkpointer.remember_skip(progress.skip)  # a restart leaves them out, too
    loader.seek(progress.samples, progress.skip)
    run.went_back(progress.step, bad, verdict.reason)
    return progress, GO_ON
