"""What the nodes have answered, which of them are faulty, and the table that says so."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Figure = dict[str, Any]

SLOW = 0.5  # of the median node's bandwidth
CLOCK_S = 5.0  # a save that has to be done before the end of the job reckons with less than that
NETWORKS = ("InfiniBand", "RoCE", "EFA", "Slingshot", "Ethernet", "")
LITTLE_MEMORY = 0.5  # of the median node's


@dataclass
class Node:
    """One node, and what is known of it. `ranks`: its tasks that have answered."""

    name: str
    ranks: list[int]
    facts: dict[str, Any] = field(default_factory=dict)
    clock_s: float | None = None
    inside: Figure | None = None
    pairs: dict[str, Figure] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def here(self) -> bool:
        """It can be asked: its first task has answered."""
        return bool(self.facts)

    @property
    def first(self) -> int:
        return self.ranks[0]

    @property
    def best(self) -> float:
        """Bytes per second of the best pair that it is in."""
        return max((f.get("bus_bytes_per_s", 0.0) for f in self.pairs.values()), default=0.0)


@dataclass
class Report:
    """The whole job. `least`: bytes per second that any all-reduce between nodes must reach."""

    nodes: list[Node]
    kind: str = "cpu"
    least: float = 0.0
    gpus: int = 0  # that each node should have; 0: not looked at
    whole: Figure | None = None
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)  # of no single node

    @property
    def faulty(self) -> bool:
        return bool(self.faults) or any(node.faults for node in self.nodes)

    def add_pair(self, a: Node, b: Node, figure: Figure) -> None:
        a.pairs[b.name] = b.pairs[a.name] = figure

    def record(self) -> dict[str, Any]:
        """What the JSON file holds. "bad": the faulty nodes, as sbatch --exclude takes them."""
        return {
            "bad": ",".join(node.name for node in self.nodes if node.faults),
            "faults": self.faults,
            "seconds": round(self.seconds, 1),
            "device": self.kind,
            "whole": self.whole,
            "nodes": {
                node.name: {
                    "faults": node.faults,
                    "notes": node.notes,
                    "clock_s": node.clock_s,
                    "inside": node.inside,
                    "pairs": node.pairs,
                    **node.facts,
                }
                for node in self.nodes
            },
        }

    def table(self) -> str:
        """For people: a row for each node, and a line for each fault."""
        rows = [("node", "GPUs", "memory", "clock", "network", "inside", "best pair", "")]
        for node in self.nodes:
            facts = node.facts
            gpus = facts.get("gpus")
            clock = "-" if node.clock_s is None else f"{node.clock_s:+.3f} s"
            rows.append((
                node.name,
                "-" if not self.gpus else f"{gpus or 0}/{self.gpus}",
                f"{facts['memory_free'] / 2**30:.0f} GiB" if "memory_free" in facts else "-",
                clock,
                " ".join(filter(None, (facts.get("interface"), facts.get("network")))) or "-",
                show(node.inside),
                show(max(node.pairs.values(), key=bandwidth, default=None)),
                "FAULTY" if node.faults else "well",
            ))  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        ranks = sum(len(node.ranks) for node in self.nodes)
        if self.whole is not None:
            lines.append(f"all-reduce of all {ranks} tasks ({self.kind}): {show(self.whole)}")
        for node in self.nodes:
            lines += [f"{node.name}: {fault}" for fault in node.faults]
            lines += [f"note: {node.name}: {note}" for note in node.notes]
        lines += self.faults
        bad = self.record()["bad"]
        if bad:
            lines.append(f"not to be used: {bad} (sbatch --exclude={bad})")
        lines.append(f"preflight took {self.seconds:.1f} s")
        return "\n".join(lines)


def bandwidth(figure: Figure) -> float:
    return float(figure.get("bus_bytes_per_s", 0.0))


def show(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    if "error" in figure:
        return str(figure["error"])[:40]
    rate = bandwidth(figure)
    text = f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.2f} MB/s"
    return f"{text}, {figure['latency_s'] * 1e6:,.0f} us"


def slow_nodes(report: Report) -> list[Node]:
    """Those that are slow with every partner: under half of the median node, or under the least."""
    paired = [node for node in report.nodes if node.pairs]
    if not paired:
        return []
    median = statistics.median_high([node.best for node in paired])
    return [node for node in paired if node.best < max(SLOW * median, report.least)]


def compare(report: Report) -> None:
    """Find what is unlike the others, or not enough; adds to the faults and notes."""
    here = [node for node in report.nodes if node.here]
    for node in here:
        gpus = node.facts["gpus"] or 0
        if report.gpus and gpus != report.gpus:
            node.faults.append(f"{gpus} GPU(s) seen, {report.gpus} expected")
        node.faults += node.facts["gpu_faults"]
        if node.clock_s is not None and abs(node.clock_s) > CLOCK_S:
            node.faults.append(f"its clock differs by {node.clock_s:+.1f} s from this host's")
    unlike(report, "network", lambda node: node.facts["network"], NETWORKS)
    unlike(
        report,
        "active RDMA ports",
        lambda node: ", ".join(sorted(port.partition(" ")[2] for port in node.facts["ports"])),
    )
    unlike(report, "Python", lambda node: node.facts["python"])
    names = sorted({name for node in here for name in node.facts["packages"]})
    for name in names:
        unlike(report, name, lambda node, name=name: node.facts["packages"].get(name, ""))  # type: ignore[misc]
    if here:
        median = statistics.median([node.facts["memory_free"] for node in here])
        for node in here:
            if node.facts["memory_free"] < LITTLE_MEMORY * median:
                node.notes.append(f"{node.facts['memory_free'] / 2**30:.1f} GiB of memory free")
    for node in slow_nodes(report):
        told = "; ".join(f"with {name} {show(figure)}" for name, figure in node.pairs.items())
        node.faults.append(f"all-reduce between nodes: {told}")
    check_whole(report)


def check_whole(report: Report) -> None:
    """All together; of two nodes nobody can say which one is slow."""
    if report.whole is None or any(node.faults for node in report.nodes):
        return
    if "error" in report.whole:
        report.faults.append(f"all-reduce of all tasks: {report.whole['error']}")
    elif bandwidth(report.whole) < report.least:
        report.faults.append(
            f"all-reduce of all tasks: {show(report.whole)}, under {report.least / 1e6:g} MB/s; "
            "with three nodes or more the slow one is found"
        )


def unlike(
    report: Report, what: str, value: Callable[[Node], str], best: Sequence[str] = ()
) -> None:
    """Those whose value is not that of most nodes. Where there is no majority, it is the one that
    comes later in `best`, or nobody can say."""
    here = [node for node in report.nodes if node.here]
    values = {node.name: value(node) for node in here}
    if len(set(values.values())) < 2:
        return
    (usual, count), (second, next_count), *_ = collections.Counter(values.values()).most_common()
    if count == next_count:
        if usual not in best or second not in best:
            report.faults.append(
                f"{what}: " + ", ".join(f"{name} has {v or 'none'}" for name, v in values.items())
            )
            return
        usual = min(usual, second, key=best.index)
    for node in here:
        if values[node.name] != usual:
            have, others = values[node.name] or "none", usual or "none"
            node.faults.append(f"{what}: {have}; the other nodes have {others}")
