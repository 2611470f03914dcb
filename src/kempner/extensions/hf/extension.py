"""External weights as an extension of the trainer: model.init_from and run.fork."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kempner.config.loading import as_dict
from kempner.config.option import ConfigError
from kempner.extensions.hf.checks import changed_config, check_tokenizer, complete_model
from kempner.extensions.hf.families import family_of
from kempner.extensions.hf.source import (
    HF_FOLDER,
    WeightsSource,
    copy_model_files,
    find_weights,
    run_of,
)
from kempner.extensions.hf.stored import check_source
from kempner.extensions.preference.config import PreferenceConfig
from kempner.train.extensions import Extension
from kempner.train.lookup import Values

if TYPE_CHECKING:
    from kempner.model.decoder import Decoder
    from kempner.train.recording.run_directory import Run
    from kempner.train.sections import RunConfig


class HfExtension(Extension):
    def complete_values(self, values: Values, run_dir: str) -> list[str]:
        return complete_model(values, run_dir)

    def check_files(self, cfg: RunConfig, rank: int, begun: bool, servers: bool) -> list[str]:
        """List problems with the weights of model.init_from, if this start reads them."""
        source = cfg.model.init_from
        # Every start reads a reference model or the base of adapters.
        again = cfg.of(PreferenceConfig).loss == "dpo" or cfg.lora.rank > 0
        # Rank 0 alone: it reads the headers of all files; a thousand ranks need not repeat that.
        if source is None or rank or not (again or not (cfg.run.fork or begun)):
            return []
        try:
            weights = find_weights(source, pinned=again)
            check_source(weights, cfg.model)
            problems = check_tokenizer(weights, cfg)
            return problems + (changed_config(weights, cfg) if begun else [])
        except ConfigError as error:
            return [f"model.init_from: {problem}" for problem in error.problems]

    def check_fork(self, cfg: RunConfig, checkpoint: Path) -> list[str]:
        problems = check_tokenizer(WeightsSource(cfg.run.fork, checkpoint, True), cfg)
        return [f"run.fork = {cfg.run.fork}: {problem}" for problem in problems]

    def warnings(self, cfg: RunConfig) -> list[str]:
        warnings = []
        if cfg.model.router_is_blind:
            warnings.append(
                f"model.init_from = {cfg.model.init_from} has experts_per_token = 1 with "
                "router_normalize: the loss has no gradient for its routers, which stay as they "
                "are except for rounding and model.aux_loss"
            )
        try:
            family_of(cfg.model)
        except ConfigError as error:
            warnings.append(f"no export to Hugging Face format: {'; '.join(error.problems)}")
        return warnings

    def fixed_facts(self, cfg: RunConfig) -> dict[str, Any]:
        """Return the base of adapters, which every start reads again."""
        from kempner.extensions.hf.adapter import weights_identity

        if not cfg.lora.rank:
            return {}
        base = weights_identity(cfg.model.init_from or "")
        return {"lora": {**as_dict(cfg)["lora"], "base": base}}

    def start(self, cfg: RunConfig, run: Run, model: Decoder, begun: bool) -> None:
        """Load the source weights. Resuming adapters needs the weights of their base, too."""
        if cfg.model.init_from is not None and (cfg.lora.rank or not begun):
            from kempner.extensions.hf.load import start_from

            # A restart keeps the run's config.json: changed_config() compares the source with it.
            run.announce(start_from(model, cfg.model, None if begun else run.dir))

    def forked(self, checkpoint: Path, run: Run) -> None:
        """Copy the files that the other run has beside its weights."""
        if (beside := run_of(checkpoint) / HF_FOLDER).is_dir():
            copy_model_files(beside, run.dir / HF_FOLDER)
