"""Figures of nodes over time: preflight writes node-speeds/NODE.jsonl beside the runs. No torch."""

from __future__ import annotations

import json
import os
import stat
import statistics
from pathlib import Path
from typing import NamedTuple

from kempner.jobs.records.attempts import Record
from kempner.jobs.records.event_reader import is_time
from kempner.jobs.records.run_history import is_number
from kempner.jobs.system.files import end_torn_line, write_atomic
from kempner.jobs.system.reading import read_jsonl

SPEED_FOLDER = "node-speeds"
MOST_BYTES = 1 << 18  # of a node's file: over a thousand lines; then the older half is dropped
LEAST_BEFORE = 3  # earlier figures for a meaningful median
ALIKE = ("kind", "device", "tasks", "torch")  # only figures with equal values are compared


class NodeFigure(NamedTuple):
    """A figure of a node. `worse`: share below its own median at which it is reported, on GPUs and
    on CPUs; 0 if the figure does not depend on the node alone."""

    label: str
    unit: str
    worse: tuple[float, float] = (0.0, 0.0)


# Devices: the node's slowest. All-reduces vary with the partner, files with the load of the file
# system; virtual hosts share CPUs.
NODE_FIGURES = {
    "product": NodeFigure("matrix product", "FLOP/s", (0.05, 0.8)),
    "copy": NodeFigure("copy in memory", "B/s", (0.05, 0.8)),
    "inside": NodeFigure("all-reduce inside", "B/s", (0.5, 0.8)),
    "pair": NodeFigure("all-reduce, best pair", "B/s", (0.5, 0.8)),
    "write": NodeFigure("run directory, write", "B/s"),
    "read": NodeFigure("run directory, read", "B/s"),
}


def load_speeds(folder: Path) -> dict[str, list[Record]]:
    """Read the lines of each node, in order; {} if there are none or they cannot be read."""
    lines = {path.stem: load_speed(folder, path.stem) for path in sorted(folder.glob("*.jsonl"))}
    return {node: found for node, found in lines.items() if found}


def load_speed(folder: Path, node: str) -> list[Record]:
    """Read the lines of a node, in order."""
    path = folder / f"{node}.jsonl"
    return [line for line in read_jsonl(path, MOST_BYTES) if is_time(line.get("time"))]


def append_speed(folder: Path, node: str, line: Record) -> None:
    """Append a line to a node's file. Raises OSError, also if the directory or the file is a link
    or belongs to another user."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{node}.jsonl"
    # Several users may share the directory: another user's link could redirect this write.
    for each in (folder, path):
        if each.is_symlink() or (each.exists() and each.stat().st_uid != os.getuid()):
            raise PermissionError(f"{each} is a link, or belongs to another user")
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise PermissionError(f"{path} is not a file")
    if path.exists() and path.stat().st_size > MOST_BYTES:
        lines = path.read_bytes().splitlines(keepends=True)
        write_atomic(path, b"".join(lines[len(lines) // 2 :]))
    end_torn_line(path)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o666)
    # Unbuffered: one write() per line, which O_APPEND keeps apart from other jobs' lines.
    with open(fd, "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def values_of(lines: list[Record], key: str) -> list[float]:
    """List the values of a figure that are comparable with the last line's, which comes last; [] if
    the last line has none."""
    if not lines or not is_number(lines[-1].get(key)):
        return []
    alike = [line for line in lines if all(line.get(k) == lines[-1].get(k) for k in ALIKE)]
    return [float(line[key]) for line in alike if is_number(line.get(key))]


def share_under(values: list[float]) -> float | None:
    """Return the share by which the last value is below the median of the earlier ones; None if
    there are too few."""
    *before, last = values or [0.0]
    usual = statistics.median(before) if len(before) >= LEAST_BEFORE else 0.0
    return 1 - last / usual if usual > 0 else None


def is_worse(lines: list[Record], key: str) -> bool:
    """Return whether the last line's figure is worse than the node's earlier ones."""
    under = share_under(values_of(lines, key))
    limit = NODE_FIGURES[key].worse[lines[-1].get("kind") != "cuda"] if lines else 0.0
    return under is not None and 0 < limit <= under
