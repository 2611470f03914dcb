"""The section [data]: which tokens, in which order."""

from __future__ import annotations

from dataclasses import dataclass

from kempner.config.option import option


@dataclass(frozen=True)
class DataConfig:
    dataset_path: str = option("", "directory of token shards made by scripts/prepare_data.py")
    seed: int = option(0, "shuffling seed", minimum=0)
    prefetch: int = option(
        2,
        "global batches to read ahead in the background; 0: read inside the step",
        minimum=0,
        maximum=1024,
    )

    def problems(self) -> list[str]:
        if not self.dataset_path:
            return [
                'data.dataset_path = "": must name a directory of token shards; make one with '
                "`python scripts/prepare_data.py TEXT... --out data/NAME` and give "
                "--data.dataset_path=data/NAME"
            ]
        return []
