"""The [bench] section."""

from __future__ import annotations

from dataclasses import dataclass

from kempner.config.option import option


@dataclass(frozen=True)
class BenchConfig:
    """The [bench] section, for `train.py --bench` and `rl.py --bench`; no other run reads it."""

    warmup: int = option(5, "warm-up steps, not measured", minimum=1)
    steps: int = option(20, "measured steps", minimum=1)
    data: str = option("fake", "random tokens, or those of [data]", choices=("fake", "real"))
    length: str = option(
        "fixed",
        "fake documents as long as a row, or of variable length, kept apart in each row",
        choices=("fixed", "variable"),
    )
    output_json: str = option("", "file for the figures; unset: bench.json in the run directory")
    compare: tuple[str, ...] = option(
        (),
        "variants to measure one after another, instead of the one configuration; each is given "
        "by what it adds to the command line, such as '--train.micro_batch=4'",
    )

    def problems(self) -> list[str]:
        if self.data == "real" and self.length == "variable":
            return [
                "bench.length = variable: needs bench.data = fake; real documents have "
                "their own lengths"
            ]
        return []
