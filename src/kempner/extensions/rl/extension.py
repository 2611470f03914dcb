"""Reinforcement learning as an extension of the trainer: its sections, batches and objective."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kempner.config.option import ConfigError
from kempner.extensions.rl import config
from kempner.extensions.rl.config import (
    DeploymentConfig,
    InferenceConfig,
    LossConfig,
    RlConfig,
    SamplingConfig,
)
from kempner.train.extensions import Extension, Loader

if TYPE_CHECKING:
    import torch

    from kempner.model.decoder import Decoder
    from kempner.parallel.layout import Layout
    from kempner.train.objective import Objective
    from kempner.train.progress import Progress
    from kempner.train.recording.run_directory import Run
    from kempner.train.resilience.requests import StopRequests
    from kempner.train.sections import RunConfig

OTHER_PROGRAM = {
    False: "rl.env: this configuration learns from rewards; submit scripts/slurm/rl.sh with it",
    True: "rl.env = []: no environment to learn from; give [[rl.env]], or train on data, with "
    "scripts/train.py",
}


class RlExtension(Extension):
    script = "rl.py"
    sections: ClassVar = {
        "rl": RlConfig,
        "rl.deployment": DeploymentConfig,
        "rl.sampling": SamplingConfig,
        "rl.loss": LossConfig,
        "rl.inference": InferenceConfig,
    }

    def complete(self, cfg: RunConfig) -> RunConfig:
        """Set the batch from [rl]."""
        rl = cfg.of(RlConfig)
        if not rl.on or rl.batch_samples is None:
            return cfg
        return replace(cfg, train=replace(cfg.train, global_batch=rl.batch_samples))

    def fills_memory(self, cfg: RunConfig) -> bool:
        return cfg.of(RlConfig).on

    def problems(self, cfg: RunConfig) -> list[str]:
        return config.rl_problems(cfg)

    def warnings(self, cfg: RunConfig) -> list[str]:
        off = "[rl] has no effect: rl.env names no environment"
        return [] if cfg.of(RlConfig).on else [off]

    def program_problem(self, cfg: RunConfig, own: bool) -> str | None:
        return None if cfg.of(RlConfig).on == own else OTHER_PROGRAM[own]

    def brings_batches(self, cfg: RunConfig) -> bool:
        return cfg.of(RlConfig).on

    def check_files(self, cfg: RunConfig, rank: int, begun: bool, servers: bool) -> list[str]:
        """List problems with the environments, the tokenizer and, with `servers`, the engines
        that already run."""
        if not cfg.of(RlConfig).on:
            return []
        # imports NumPy, which --help avoids
        from kempner.extensions.rl.opening import check_isolation, open_parts

        problems = []
        # With adapters every start reads the base weights; otherwise only the first start.
        if not rank and (cfg.lora.rank or not begun):
            problems = _other_tokens(cfg)
        try:
            envs, _ = open_parts(cfg, servers)
            # A run skips this: its orchestrator checks the host that computes the rewards.
            if servers:
                check_isolation(envs.values())
        except ConfigError as error:
            problems += error.problems
        return problems

    def loader(
        self,
        cfg: RunConfig,
        run: Run,
        layout: Layout,
        model: Decoder,
        progress: Progress,
        stop: StopRequests,
    ) -> Loader:
        from kempner.extensions.rl.trainer.feed import open_feed

        return open_feed(cfg, run, layout, model, progress, stop)

    def objective(
        self, cfg: RunConfig, layout: Layout, model: Decoder, run: Run, device: torch.device
    ) -> Objective | None:
        if not cfg.of(RlConfig).on:
            return None
        from kempner.extensions.rl.trainer.loss import open_policy

        return open_policy(cfg, layout, model, device)


def _other_tokens(cfg: RunConfig) -> list[str]:
    """List the problem if the tokenizer's ids differ from those that model.init_from knows."""
    from kempner.extensions.hf.checks import other_ids, same_ids
    from kempner.extensions.hf.source import find_weights, source_tokenizer

    name, own = cfg.of(RlConfig).tokenizer, None
    with contextlib.suppress(ConfigError):  # reported by the check of the weights
        own = source_tokenizer(find_weights(cfg.model.init_from)) if cfg.model.init_from else None
    theirs = named_tokenizer(name)
    # open_parts() reports a missing tokenizer.
    if own is None or theirs is None or same_ids(theirs, own):
        return []
    return [other_ids(f"rl.tokenizer = {name}", theirs, own, "leave rl.tokenizer out")]


def named_tokenizer(name: str) -> dict[str, str] | None:
    """Describe the tokenizer that rl.tokenizer names, like source_tokenizer(); None if
    it is missing."""
    from kempner.data.sidecar import BYTES_TOKENIZER, SIDECAR, Sidecar
    from kempner.extensions.hf.source import TOKENIZER_FILE, tokenizer_of_file

    folder = Path(name).expanduser()
    if name == BYTES_TOKENIZER["kind"]:
        return dict(BYTES_TOKENIZER)
    if name and (folder / TOKENIZER_FILE).is_file():
        return tokenizer_of_file(folder / TOKENIZER_FILE)
    if name and (folder / SIDECAR).is_file():  # data of bytes
        return Sidecar.load(folder / SIDECAR).tokenizer
    return None
