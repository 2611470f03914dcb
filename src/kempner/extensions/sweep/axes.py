"""Values of an axis: a list, a range, or random draws; and the options of [propose]. No torch."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kempner.config.option import option
from kempner.config.values import format_value, to_text

LARGEST_SWEEP = 10_000  # points, or values of an axis


@dataclass(frozen=True)
class Propose:
    points: int = option(1, "points in all", minimum=1, maximum=LARGEST_SWEEP)
    startup: int = option(10, "results after which random draws end", minimum=1)
    seed: int = option(0, "seed", minimum=0)


def grid_values(spec: Any) -> list[Any]:
    """Return the values of `[1, 2]` or `{log = [1e-4, 1e-2], count = 5}`. Raises ValueError."""
    if isinstance(spec, list):
        if not spec:
            raise ValueError("has no values; give one, or leave it out")
        # Compared as text: a value may be a list, which is unhashable, and 1 == true in Python.
        if len({*map(to_text, spec)}) < len(spec):
            raise ValueError("has a value twice; leave one of them out")
        return spec
    ends = _range(spec, {"count"})
    count = spec["count"]
    # type(), here and below: to isinstance(), true and false are integers, too.
    if type(count) is not int or not 2 <= count <= LARGEST_SWEEP:
        raise ValueError(f"count = {format_value(count)}: must be 2 to {LARGEST_SWEEP:,}")
    return [_between(spec, ends, i / (count - 1)) for i in range(count)]


def draw_axes(axes: Mapping[str, Any], samples: Any, seed: Any) -> list[dict[str, Any]]:
    """Draw `samples` values of each axis. Each draw and axis has its own generator, so that adding
    samples, or an axis, leaves the other values unchanged. Raises ValueError."""
    for key, value, least in (("samples", samples, 1), ("seed", seed, 0)):
        if type(value) is not int or not least <= value <= 2**31:
            raise ValueError(
                f"{key} = {format_value(value)}: must be a whole number, at least {least}"
            )
    if samples > LARGEST_SWEEP:
        raise ValueError(f"samples = {samples}: at most {LARGEST_SWEEP:,}")
    ranges = {}
    for name, spec in axes.items():
        try:
            ranges[name] = None if isinstance(spec, list) else _range(spec, set())
        except ValueError as error:
            raise ValueError(f"{name} = {format_value(spec)}: {error}") from None
        if spec == []:
            raise ValueError(f"{name}: has no values; give one, or leave it out")

    def draw(name: str, number: int) -> Any:
        # A string is seeded by its SHA-512, the same in every process, unlike its hash().
        part, ends = random.Random(f"{seed} {number} {name}").random(), ranges[name]
        spec = axes[name]
        return spec[int(part * len(spec))] if ends is None else _between(spec, ends, part)

    return [{name: draw(name, number) for name in axes} for number in range(samples)]


def _range(spec: Any, more: set[str]) -> tuple[float, float]:
    form = "a list, or {log = [LOW, HIGH]" + "".join(f", {key} = N" for key in more) + "}"
    kinds = {"log", "linear"} & spec.keys() if isinstance(spec, dict) else set()
    if len(kinds) != 1 or spec.keys() - {"log", "linear"} != more:
        raise ValueError(f"must be {form} (or linear for log)")
    kind = kinds.pop()
    ends = spec[kind]
    sound = isinstance(ends, list) and len(ends) == 2
    sound = sound and all(type(end) in (int, float) and math.isfinite(end) for end in ends)
    if not sound or not ends[0] < ends[1] or (kind == "log" and ends[0] <= 0):
        over = " over 0" if kind == "log" else ""
        raise ValueError(f"{kind} = {format_value(ends)}: must be [LOW, HIGH]{over}")
    return ends[0], ends[1]


def _between(spec: Mapping[str, Any], ends: tuple[float, float], part: float) -> int | float:
    """Return the value a fraction `part` of the way; an integer if both ends are, with linear."""
    low, high = ends
    if "linear" in spec:
        value = low + (high - low) * part
        return round(value) if isinstance(low, int) and isinstance(high, int) else value
    # The ends stay exactly as written, because a power of floats may miss them.
    if part in (0.0, 1.0):
        return high if part else low
    return float(f"{low * (high / low) ** part:.6g}")
