"""Curves as SVG that stretches to any width, so that the page needs no script. No torch.

Lines keep their width (non-scaling-stroke), and labels are HTML beside the drawing, positioned in
percent: they are as large on a phone as on a wide screen. A curve with more points than BUCKETS is
drawn as the mean of each bucket of steps within its range of values: no spike is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from kempner.jobs.records.attempts import Record

CurvePoints = Sequence[
    tuple[float, float | None]
]  # x in order; a y that is None: not finite, a gap
BUCKETS = 300
GRID = 1000  # units of the drawing, each way
LARGEST_DRAWN, SMALLEST_DRAWN = 1e30, 1e-30  # beyond them a value is drawn as not finite, or as 0
# Largest over smallest: above this a logarithmic axis shows more than the start.
LOG_AXIS_FROM = 3.0
NARROW = 4  # labels of the axis below; a phone shows every second one


class Bucket(NamedTuple):
    x: float
    low: float
    mean: float
    high: float


@dataclass(frozen=True)
class Curve:
    points: CurvePoints
    name: str = ""
    style: str = "a"  # the class that colors it
    dots: bool = False


def curve_points(lines: Sequence[Record], key: str) -> list[tuple[float, float | None]]:
    """Return the points of the lines with this key, by step."""
    points: list[tuple[float, float | None]] = []
    for line in lines:
        if key in line:
            value = line[key]
            is_drawable = type(value) in (int, float) and abs(value) < LARGEST_DRAWN
            small = is_drawable and abs(value) < SMALLEST_DRAWN
            points.append((line["step"], (0.0 if small else value) if is_drawable else None))
    return points


def curve_envelope(points: CurvePoints, buckets: int = BUCKETS) -> list[list[Bucket]]:
    """Return the pieces of a curve between its gaps, each as buckets of equal width."""
    if not points:
        return []
    low, high = points[0][0], points[-1][0]
    width = (high - low) / buckets or 1.0
    # Few points are a bucket each.
    few = len(points) <= 2 * buckets
    pieces: list[list[Bucket]] = [[]]
    group: list[tuple[float, float]] = []
    place = 0

    def close() -> None:
        if group:
            ys = [y for _, y in group]
            x = group[0][0] if few else sum(x for x, _ in group) / len(group)
            pieces[-1].append(Bucket(x, min(ys), math.fsum(ys) / len(ys), max(ys)))
            group.clear()

    for i, (x, y) in enumerate(points):
        now = i if few else int((x - low) / width)
        if y is None or now != place:
            close()
            place = now
        if y is not None:
            group.append((x, y))
        # Among many, the other points of the bucket represent a missing one.
        elif pieces[-1] and few:
            pieces.append([])
    close()
    return [piece for piece in pieces if piece]


class Axis:
    """A map from values to positions on the drawing, 0 to GRID; `ticks` are round values within."""

    def __init__(self, low: float, high: float, log: bool = False, count: int = 5) -> None:
        self.log = log
        # A constant would have an axis without height.
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            low, high = (low / 1.05, high * 1.05) if log else (low - 0.5, high + 0.5)
        self._low, self._high = self._at(low), self._at(high)
        self.ticks = log_ticks(low, high) if log else axis_ticks(low, high, count)

    def _at(self, value: float) -> float:
        return math.log(value) if self.log else value

    def share(self, value: float) -> float:
        return min(1.0, max(0.0, (self._at(value) - self._low) / (self._high - self._low)))


def axis_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    unit *= next(factor for factor in (1, 2, 5, 10) if factor * unit >= rough * 0.999)
    # A tick at the very end must not be lost to rounding.
    first = math.ceil(low / unit - 1e-9)
    return [unit * k for k in range(first, math.floor(high / unit + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    # The densest labels with at most six in the range.
    for factors in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [f * 10.0**k for k in decades for f in factors if low <= f * 10.0**k <= high]
        if len(ticks) <= 6:
            return ticks
    return ticks[:: math.ceil(len(ticks) / 6)]


def short_label(value: float) -> str:
    """Format a number for labels: 1234 -> "1.23k"."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # With three digits 999.5 is "1e+03": from there on it is 1k.
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def spans_decades(low: float, high: float) -> bool:
    """Return whether the values span so much that a linear axis would only show the first steps."""
    return low > 0 and high / low >= LOG_AXIS_FROM


def render_chart(
    curves: Sequence[Curve],
    marks: Sequence[float] = (),
    *,
    zero: bool = False,
    log: bool = False,
    most: float | None = None,
    buckets: int = BUCKETS,
    label: Callable[[float], str] = short_label,
    what: str = "",
) -> str:
    """Draw a chart with its axes. `marks`: dotted vertical lines; `zero`: the axis of values begins
    there; `log`: logarithmic, if the values span enough; `most`: the largest x; `what`: for screen
    readers."""
    pieces = [(curve, curve_envelope(curve.points, buckets)) for curve in curves]
    all_buckets = [
        bucket for _, curve_pieces in pieces for piece in curve_pieces for bucket in piece
    ]
    if not all_buckets:
        return '<p class="none">nothing to draw yet</p>'
    low, high = min(b.low for b in all_buckets), max(b.high for b in all_buckets)
    log = log and spans_decades(low, high)
    low = min(0.0, low) if zero else low
    if not log and not zero:
        low, high = low - 0.03 * (high - low), high + 0.03 * (high - low)
    y = Axis(low, high * (1.06 if zero and high > 0 else 1), log, 4)
    x = Axis(0.0, most or max(b.x for b in all_buckets) or 1.0, count=NARROW + 1)
    body = [
        f'<path class="grid" d="{"".join(f"M0 {height_position(y, t)}h{GRID}" for t in y.ticks)}"/>'
    ]
    if marks:
        body.append(
            f'<path class="mark" d="{"".join(f"M{axis_position(x, m)} 0v{GRID}" for m in marks)}"/>'
        )
    for curve, curve_pieces in pieces:
        body += [render_curve(curve, piece, x, y) for piece in curve_pieces]
    labels = [
        f'<i class="y" style="top:{100 - 100 * y.share(t):.4g}%">{escape(label(t))}</i>'
        for t in y.ticks
    ]
    labels += [
        f'<i class="x{" odd" * (k % 2)}" style="left:{100 * x.share(t):.4g}%">{short_label(t)}</i>'
        for k, t in enumerate(x.ticks)
    ]
    return (
        f'<div class="plot"><svg viewBox="0 0 {GRID} {GRID}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(what)}">{"".join(body)}</svg>{"".join(labels)}</div>'
    )


def axis_position(axis: Axis, value: float) -> int:
    return round(GRID * axis.share(value))


def height_position(axis: Axis, value: float) -> int:
    return GRID - axis_position(axis, value)


def render_curve(curve: Curve, piece: Sequence[Bucket], x: Axis, y: Axis) -> str:
    means = [(axis_position(x, b.x), height_position(y, b.mean)) for b in piece]
    out = ""
    if any(b.low < b.high for b in piece):
        tops = [(axis_position(x, b.x), height_position(y, b.high)) for b in piece]
        bottoms = [(axis_position(x, b.x), height_position(y, b.low)) for b in reversed(piece)]
        out += f'<path class="band {curve.style}" d="{svg_path(tops + bottoms)}z"/>'
    line = svg_path(means) if len(means) > 1 else svg_path(means) + "h0"  # a round cap: a dot
    dots = "" if not curve.dots and len(means) > 1 else " dot"
    out += f'<path class="line {curve.style}{dots * (len(means) == 1)}" d="{line}"/>'
    if curve.dots and len(means) > 1 and len(means) <= 60:
        each = "".join(f"M{a} {b}h0" for a, b in means)
        out += f'<path class="line {curve.style} dot" d="{each}"/>'
    return out


def svg_path(points: Sequence[tuple[int, int]]) -> str:
    """Write a path in relative moves, which are short: a page of 200 runs has 200,000 of them."""
    first, *rest = points
    out, (px, py) = [f"M{first[0]} {first[1]}"], first
    if rest:
        out.append("l")
    for qx, qy in rest:
        dy = qy - py
        # A minus sign also separates two numbers.
        out.append(f"{qx - px}{dy}" if dy < 0 else f"{qx - px} {dy}")
        out.append(" ")
        px, py = qx, qy
    return "".join(out).rstrip()


def render_sparkline(points: CurvePoints, buckets: int = 60) -> str:
    """Draw a small curve without axes."""
    pieces = curve_envelope(points, buckets)
    all_buckets = [bucket for piece in pieces for bucket in piece]
    if not all_buckets:
        return ""
    low, high = min(b.low for b in all_buckets), max(b.high for b in all_buckets)
    log = spans_decades(low, high)
    x, y = Axis(all_buckets[0].x, all_buckets[-1].x), Axis(low, high, log)
    body = "".join(render_curve(Curve((), style="a"), piece, x, y) for piece in pieces)
    return (
        f'<svg class="spark" viewBox="0 0 {GRID} {GRID}" preserveAspectRatio="none" '
        f'aria-hidden="true">{body}</svg>'
    )
