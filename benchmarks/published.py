"""Published throughput beside the planner's estimate: the rows of published.toml."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from kempner.config.toml import loads
from kempner.extensions.planner import compute, cost
from kempner.extensions.planner.cost import step_seconds
from kempner.extensions.planner.gpus import GPUS, GpuSpec
from kempner.extensions.planner.search import changed_by
from kempner.extensions.planner.spread import Spread, kind_of_run
from kempner.extensions.tune.verified import entry_problems, load_entry, planned_figures
from kempner.jobs.report.tables import align_table
from kempner.parallel.layout import axis_sizes
from kempner.train.configure import load_config
from kempner.train.sections import RunConfig

FILE = Path(__file__).with_name("published.toml")
NEAR = 0.15  # error of a row that is near
AXES = ("tp", "pp", "cp", "ep")
OWN = ("model", "gpus", "passes", "overlap", "tokens")  # keys of a row that are no options


@dataclass(frozen=True)
class Row:
    source: str
    model: str
    fitted: bool  # the planner's constants were fitted to it
    cfg: RunConfig
    gpus: int
    per_node: int
    gpu: GpuSpec
    published: float  # tokens per second and GPU
    differs: str

    @property
    def kind(self) -> str:
        return kind_of_run(self.cfg, self.gpus, self.per_node)

    @cached_property
    def estimate(self) -> float:
        """Tokens per second and GPU."""
        train = self.cfg.train
        step = step_seconds(self.cfg, self.gpus, self.per_node, self.gpu).step
        return train.sequences * train.seq_len / self.gpus / step

    @property
    def near(self) -> bool:
        return abs(self.error) <= NEAR

    @property
    def how(self) -> str:
        """What the row has besides its model and GPUs: batch, axes, precision, recomputation."""
        train, axes = self.cfg.train, self.cfg.distributed
        words = [f"{train.micro_batch} x {train.seq_len}"]
        words += [f"{name} {n}" for name in AXES if (n := getattr(axes, name)) > 1]
        words += [train.fp8] * (train.fp8 != "none") + ["LoRA"] * (self.cfg.lora.rank > 0)
        words += [f"recompute/{train.recompute_every}"] * (train.recompute != "none")
        words += ["eager"] * (not train.compile) + ["overlap"] * bool(axes.overlap)
        return ", ".join(words)

    @property
    def error(self) -> float:
        return self.estimate / self.published - 1


def published_rows() -> list[Row]:
    text = loads(FILE.read_text())
    return [row for source in text["source"] for row in rows_of(source, text)]


def rows_of(source: dict[str, Any], text: dict[str, Any]) -> Iterator[Row]:
    platform = dict(text["platforms"][source["platform"]])
    gpu, per_node = GPUS[platform.pop("gpu")], platform.pop("per_node", 8)
    common = dict(flat(source["common"]))
    for number, values in enumerate(source["rows"]):
        keys = common | dict(zip(source["columns"], values, strict=True))
        own = {name: keys.pop(name) for name in OWN if name in keys}
        shape = {f"model.{key}": value for key, value in text["models"][own["model"]].items()}
        cfg = changed_by(BASE, {**shape, "model.max_seq_len": keys["train.seq_len"], **keys})
        data_ranks = axis_sizes(cfg.distributed, own["gpus"], per_node).data_ranks
        batch = keys["train.micro_batch"] * own["passes"] * data_ranks
        cfg = replace(cfg, train=replace(cfg.train, global_batch=batch))
        if own.get("overlap"):
            cfg = changed_by(cfg, {"distributed.overlap": ("tp",)})
        # Constants are fitted to every second row; the others check them.
        yield Row(
            source["name"], own["model"], number % 2 == 0, cfg, own["gpus"], per_node,
            gpu._replace(**platform), own["tokens"], source["differs"],
        )  # fmt: skip


def flat(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}.")
        else:
            yield before + key, tuple(value) if isinstance(value, list) else value


def spread_of(rows: Iterable[Row]) -> dict[str, Spread]:
    """Return by kind how the published time of a step lies to the estimate, without a tenth of the
    rows at each end."""
    by_kind: dict[str, list[float]] = {}
    for row in rows:
        by_kind.setdefault(row.kind, []).append(1 + row.error)
    found = {}
    for kind, ratios in by_kind.items():
        cut, ratios = len(ratios) // 10, sorted(ratios)
        found[kind] = Spread(ratios[cut], ratios[-1 - cut])
    return found


def print_published(rows: Sequence[Row]) -> None:
    """Print a table of all rows, how many are near, and the spread by kind; and how the sources of
    those that are not near differ from what is estimated."""
    lines = [["published", "estimate", "error", "model", "GPUs", "", "how", "source"]]
    for row in rows:
        numbers = [f"{row.published:,.0f}", f"{row.estimate:,.0f}", f"{row.error:+.0%}"]
        mark = ("" if row.near else "outside") + (" " if row.fitted else " checked")
        where = f"{row.gpus} {row.gpu.name}"
        lines.append([*numbers, row.model, where, mark.strip(), row.how, row.source])
    print("tokens per second and GPU", align_table(lines, 2, range(3)), sep="\n")
    print(f"\nwithin {NEAR:.0%}:")
    for name, some in (
        ("rows that constants were fitted to", [row for row in rows if row.fitted]),
        ("rows that were not", [row for row in rows if not row.fitted]),
    ):
        middle = statistics.median(abs(row.error) for row in some)
        near = sum(row.near for row in some)
        print(f"  {near} of {len(some)} {name}; the median error is {middle:.1%}")
    print("\npublished time of a step over the estimate, without a tenth of the rows at each end:")
    for kind, spread in spread_of(rows).items():
        count = sum(row.kind == kind for row in rows)
        print(f"  {kind}: {spread.least:.2f} to {spread.most:.2f} ({count} rows)")
    print("\nsources with rows outside, and how they differ from what is estimated:")
    for source in dict.fromkeys(row.source for row in rows if not row.near):
        outside = [row for row in rows if row.source == source]
        count = sum(not row.near for row in outside)
        print(f"  {source}, {count} of {len(outside)}: {outside[0].differs}")


def print_verified(folder: Path) -> None:
    """Print the entries of a folder like configs/verified beside the planner's estimates, and what
    is wrong with them."""
    lines = [["entry", "tokens/s per GPU", "estimate", "error", "GiB", "estimate", "error"]]
    problems = []
    for path in sorted(folder.glob("*.toml")):
        entry = load_entry(path)
        cells = [path.stem]
        for name, estimate in planned_figures(entry).items():
            found = entry.measured.get(name)
            error = "-" if found is None else f"{estimate / found - 1:+.0%}"
            cells += ["-" if found is None else f"{found:,.0f}", f"{estimate:,.0f}", error]
        lines.append(cells)
        problems += [f"{path.stem}: {text}" for text in entry_problems(entry)]
    if len(lines) == 1:
        print(f"{folder} has no entries yet: nobody has measured a shipped configuration on a GPU")
    else:
        print("\n".join([align_table(lines, 2, range(1, 7)), *problems]))


def misfit(rows: Iterable[Row]) -> float:
    """Return the mean error of the rows that constants are fitted to, each at most 0.5. A source
    weighs as the root of its number of rows."""
    by_source: dict[str, list[float]] = {}
    for row in rows:
        if row.fitted:
            # Bounded: a row that no constant can explain must not bend all of them.
            by_source.setdefault(row.source, []).append(min(abs(math.log1p(row.error)), 0.5))
    weights = {source: len(errors) ** 0.5 for source, errors in by_source.items()}
    found = sum(weights[source] * statistics.mean(errors) for source, errors in by_source.items())
    return found / sum(weights.values())


def misfit_beside(name: str, factor: float) -> float:
    """Return the misfit with one of FITTED times `factor`."""
    if name in FITTED:
        module = FITTED[name]
        # Rows are read anew: each keeps the estimate that it has once made.
        with patch.object(module, name, factor * getattr(module, name)):
            return misfit(published_rows())
    card, _, share = name.partition(" ")
    changed = [
        replace(row, gpu=row.gpu._replace(**{share: factor * getattr(row.gpu, share)}))
        if row.gpu.name == card else row
        for row in published_rows()
    ]  # fmt: skip
    return misfit(changed)


def print_fit() -> None:
    """Print each fitted constant with the misfit at 0.9, 1 and 1.1 times its value."""
    lines = [["constant", "value", *(f"x {factor}" for factor in FACTORS)]]
    for name in CONSTANTS:
        card, _, share = name.partition(" ")
        value = getattr(GPUS[card], share) if share else getattr(FITTED[name], name)
        errors = [f"{misfit_beside(name, factor):.4f}" for factor in FACTORS]
        lines.append([name, f"{value:g}", *errors])
    table = align_table(lines, 2, range(1, 5))
    print("mean error of the rows that constants were fitted to", table, sep="\n")


FITTED: dict[str, ModuleType] = {
    "PRODUCT_HALF": compute, "RING": compute, "ROWWISE": compute, "EAGER": compute,
    "INTERFERENCE": cost, "TP_HIDDEN": cost,
}  # fmt: skip
CONSTANTS = (
    *FITTED, "A100 products", "H100 products", "H200 products", "GB200 products", "A100 flash",
    "H100 flash", "H100 attention",
)  # fmt: skip
FACTORS = (0.9, 1.0, 1.1)
BASE = load_config([], ["--data.dataset_path=fake:"])
