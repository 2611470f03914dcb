"""Preferences as an extension of the trainer: its section, its objective, and pairs as samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kempner.extensions.preference.config import PreferenceConfig, preference_problems
from kempner.train.extensions import Extension

if TYPE_CHECKING:
    import torch

    from kempner.data.source import Shape
    from kempner.model.decoder import Decoder
    from kempner.parallel.layout import Layout
    from kempner.train.objective import Objective
    from kempner.train.recording.run_directory import Run
    from kempner.train.sections import RunConfig


class PreferenceExtension(Extension):
    sections: ClassVar = {"preference": PreferenceConfig}

    def fills_memory(self, cfg: RunConfig) -> bool:
        return cfg.of(PreferenceConfig).loss != "none"

    def problems(self, cfg: RunConfig) -> list[str]:
        return preference_problems(cfg)

    def warnings(self, cfg: RunConfig) -> list[str]:
        off = '[preference] has no effect: preference.loss = "none"; give dpo or reward'
        return [] if cfg.of(PreferenceConfig).loss != "none" else [off]

    def sample_shape(self, cfg: RunConfig, shape: Shape) -> Shape:
        return shape._replace(preferences=cfg.of(PreferenceConfig).loss != "none")

    def fixed_facts(self, cfg: RunConfig) -> dict[str, Any]:
        """Return the weights of the reference, which every start reads again."""
        from kempner.extensions.hf.adapter import weights_identity

        if cfg.of(PreferenceConfig).loss != "dpo":
            return {}
        return {"preference": {"reference": weights_identity(cfg.model.init_from or "")}}

    def objective(
        self, cfg: RunConfig, layout: Layout, model: Decoder, run: Run, device: torch.device
    ) -> Objective | None:
        """Return the objective. DPO's reference is sharded like the model, and has the weights of
        model.init_from even after a restart."""
        if cfg.of(PreferenceConfig).loss == "none":
            return None
        # Not at the top: this module declares a section, which --help needs without torch.
        from kempner.data.sidecar import open_sidecar
        from kempner.extensions.hf.load import start_from
        from kempner.extensions.preference.losses import DPO, Reward, token_losses, token_scores
        from kempner.parallel.build import build_model

        if cfg.of(PreferenceConfig).loss == "reward":
            model.loss = token_scores
            return Reward(open_sidecar(cfg.data.mixed[0].path).eod, device)
        reference = build_model(cfg.model, layout, cfg.train, cfg.distributed, frozen=True)
        run.announce(f"the reference {start_from(reference, cfg.model, None)}")
        model.loss = reference.loss = token_losses
        return DPO(reference, cfg.of(PreferenceConfig).beta, device)
