"""Figures of each node, kept by preflight beside the runs: kempner.jobs.records.node_speed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from kempner.jobs.preflight.verdict import NodeResult, Report
from kempner.jobs.records.node_speed import (
    NODE_FIGURES,
    append_speed,
    is_worse,
    load_speed,
    share_under,
    values_of,
)


def keep_speeds(report: Report, folder: Path) -> None:
    """Add a line for each measured node, and a note if the node is worse than before. An unwritable
    directory is only noted."""
    problem = ""
    for node in report.nodes:
        if not (node.devices or node.pairs):
            continue
        line = speed_line(report, node)
        lines = [*load_speed(folder, node.name), line]
        for key, figure in NODE_FIGURES.items():
            if is_worse(lines, key):
                under = share_under(values_of(lines, key)) or 0.0
                node.notes.append(f"{figure.label}: {under:.0%} under its own earlier median")
        try:
            append_speed(folder, node.name, line)
        except OSError as error:  # the next nodes are still compared
            problem = problem or f"the figures cannot be recorded: {error}"
    if problem:
        report.notes.append(problem)


def speed_line(report: Report, node: NodeResult) -> dict[str, Any]:
    """Return a node's figures for its file: of its slowest device and its best pair, in bytes and
    operations per second."""
    storage = node.storage or {}
    names = {figure.get("device") for figure in node.devices.values()} - {None}
    line = {
        "time": round(time.time()),
        "job": os.environ.get("SLURM_JOB_ID"),
        "kind": report.kind,
        "device": ", ".join(sorted(map(str, names))),
        "tasks": len(node.ranks),
        "torch": node.facts.get("packages", {}).get("torch"),
        "ok": not node.faults,
        "product": node.slowest("flops_per_s"),
        "copy": node.slowest("copy_bytes_per_s"),
        "inside": (node.inside or {}).get("bus_bytes_per_s"),
        "pair": node.best or None,
        "write": storage.get("write_bytes_per_s"),
        "read": storage.get("read_bytes_per_s"),
    }
    return {key: value for key, value in line.items() if value is not None}
