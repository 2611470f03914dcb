"""Verdict on the nodes from their answers, and the table that shows it."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kempner.jobs.ranks.nccl_transport import expected_transports
from kempner.jobs.report.tables import format_amount

Figure = dict[str, Any]

SLOW_BANDWIDTH = 0.5  # of the median node's bandwidth
CLOCK_S = 5.0  # saves before the end of a job assume that clocks agree within this
# Fastest first: of two nodes with different networks, the one with the slower kind is at fault.
NETWORKS = ("InfiniBand", "RoCE", "EFA", "Slingshot", "Ethernet", "")
LITTLE_MEMORY = 0.5  # of the median node's
FEW_NODES, FEW_SHARE = 2, 0.03  # nodes that may be broken at the same time
NAMED_NODES = 8  # names in a message


@dataclass
class NodeResult:
    """Facts about a node. `ranks`: its tasks that answered. `transport`: NCCL's between nodes."""

    name: str
    ranks: list[int]
    facts: dict[str, Any] = field(default_factory=dict)
    clock_s: float | None = None
    inside: Figure | None = None
    transport: str = ""
    late: str = ""  # how many of its tasks did not answer
    pairs: dict[str, Figure] = field(default_factory=dict)
    devices: dict[int, Figure] = field(default_factory=dict)  # by task
    storage: Figure | None = None  # of the run directory while all nodes use it
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def answered(self) -> bool:
        """True if its first task has answered and can be asked more."""
        return bool(self.facts)

    @property
    def first(self) -> int:
        return self.ranks[0]

    @property
    def best(self) -> float:
        """Bytes per second of its best pair."""
        return max((f.get("bus_bytes_per_s", 0.0) for f in self.pairs.values()), default=0.0)

    def slowest(self, key: str) -> float | None:
        """Return the lowest value of a figure among its devices."""
        return min((f[key] for f in self.devices.values() if key in f), default=None)

    @property
    def ports_bytes_per_s(self) -> float:
        """Nominal rate of the RDMA ports that its tasks can use: the fastest ones, one per task."""
        rates = [float(port.split()[1]) for port in self.facts["ports"] if " Gb/sec" in port]
        return sum(sorted(rates, reverse=True)[: len(self.ranks)]) * 1e9 / 8


@dataclass
class Report:
    """The whole job. `least`: bytes per second that any all-reduce between nodes must reach."""

    nodes: list[NodeResult]
    kind: str = "cpu"
    least: float = 0.0
    gpus: int = 0  # expected on each node; 0: not checked
    whole: Figure | None = None
    storage_alone: Figure | None = None  # rates of the run directory while one node uses it
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)  # not those of a single node
    notes: list[str] = field(default_factory=list)

    @property
    def faulty(self) -> bool:
        return bool(self.faults) or any(node.faults for node in self.nodes)

    def expected_of(self, node: NodeResult) -> int:
        """Return the number of GPUs that its first task should see; with --gpu-bind, those of other
        tasks do not count."""
        gpu_count = node.facts.get("gpus_given")
        return self.gpus if gpu_count is None else min(self.gpus, gpu_count)

    def add_pair(self, a: NodeResult, b: NodeResult, figure: Figure) -> None:
        a.pairs[b.name] = b.pairs[a.name] = figure

    def record(self) -> dict[str, Any]:
        """Return the content of the JSON file. "bad": the faulty nodes, as for sbatch --exclude."""
        return {
            "bad": ",".join(node.name for node in self.nodes if node.faults),
            "faults": self.faults,
            "notes": self.notes,
            "seconds": round(self.seconds, 1),
            "device": self.kind,
            "whole": self.whole,
            "storage_alone": self.storage_alone,
            "nodes": {
                node.name: {
                    "faults": node.faults,
                    "notes": node.notes,
                    "clock_s": node.clock_s,
                    "inside": node.inside,
                    "transport": node.transport,
                    "pairs": node.pairs,
                    "devices": node.devices,
                    "storage": node.storage,
                    **node.facts,
                }
                for node in self.nodes
            },
        }

    def table(self) -> str:
        """Format a row for each node and a line for each fault."""
        names = ("node", "GPUs", "memory", "clock", "product", "copy", "network", "inside")
        rows = [(*names, "best pair", "")]
        for node in self.nodes:
            facts = node.facts
            gpus = facts.get("gpus")
            used = f"(NCCL: {node.transport})" if node.transport else ""
            clock = "-" if node.clock_s is None else f"{node.clock_s:+.3f} s"
            rows.append((
                node.name,
                "-" if not self.gpus else f"{gpus or 0}/{self.expected_of(node)}",
                f"{facts['memory_free'] / 2**30:.0f} GiB" if "memory_free" in facts else "-",
                clock,
                format_amount(node.slowest("flops_per_s"), "FLOP/s"),
                format_amount(node.slowest("copy_bytes_per_s"), "B/s"),
                " ".join(filter(None, (facts.get("interface"), facts.get("network"), used))) or "-",
                format_figure(node.inside),
                format_figure(max(node.pairs.values(), key=format_bandwidth, default=None))
                + self.share_of_ports(node),
                "FAULTY" if node.faults else "late" if node.late else "ok",
            ))  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines += self.drivers()
        ranks = sum(len(node.ranks) for node in self.nodes)
        if self.whole is not None:
            lines.append(
                f"all-reduce of all {ranks} tasks ({self.kind}): {format_figure(self.whole)}"
            )
        lines += self.storage_lines()
        for node in self.nodes:
            lines += [f"{node.name}: {fault}" for fault in node.faults]
            lines += [f"note: {node.name}: {note}" for note in node.notes]
        lines += [*self.faults, *(f"note: {note}" for note in self.notes)]
        bad = self.record()["bad"]
        if bad:
            lines.append(f"exclude: {bad} (sbatch --exclude={bad})")
        lines.append(f"preflight took {self.seconds:.1f} s")
        return "\n".join(lines)

    def share_of_ports(self, node: NodeResult) -> str:
        """Format the share of its ports' nominal rate that its best pair reached; "" over gloo,
        which does not measure the ports."""
        if self.kind != "cuda" or not node.best or not node.ports_bytes_per_s:
            return ""
        return f", {node.best / node.ports_bytes_per_s:.0%} of its ports"

    def storage_lines(self) -> list[str]:
        """Format the rates of the run directory: of one node alone, and of all at once in sum."""
        used = [node.storage for node in self.nodes if node.storage]
        together = {
            key: sum(figure.get(key, 0.0) for figure in used)
            for key in ("write_bytes_per_s", "read_bytes_per_s")
        }
        rows = [("one node alone", self.storage_alone)]
        rows += [(f"{len(used)} nodes at once", together)] if len(used) > 1 else []
        return [
            f"run directory, {who}: writes {format_amount(figure.get('write_bytes_per_s'), 'B/s')}"
            f", reads {format_amount(figure.get('read_bytes_per_s'), 'B/s')}"
            for who, figure in rows
            if figure
        ]

    def drivers(self) -> list[str]:
        """Format the versions of GPU driver and torch's CUDA, one line per pair."""
        names_by_driver: dict[tuple[str, str], list[str]] = {}
        for node in self.nodes:
            if version := node.facts.get("driver"):
                names_by_driver.setdefault((version, node.facts.get("cuda") or "none"), []).append(
                    node.name
                )
        return [
            f"driver {version}, torch built with CUDA {cuda}: "
            + ("all nodes" if len(names) == len(self.nodes) else ", ".join(names))
            for (version, cuda), names in names_by_driver.items()
        ]


def format_bandwidth(figure: Figure) -> float:
    return float(figure.get("bus_bytes_per_s", 0.0))


def format_figure(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    if "error" in figure:
        return str(figure["error"])[:40]
    rate = format_bandwidth(figure)
    text = f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.2f} MB/s"
    return f"{text}, {figure['latency_s'] * 1e6:,.0f} us"


def slow_nodes(report: Report) -> list[NodeResult]:
    """List nodes that are slow with every partner: under half the median node, or `least`."""
    paired = [node for node in report.nodes if node.pairs]
    if not paired:
        return []
    # The high median: with half of the nodes slow it must not be a slow node's.
    median = statistics.median_high([node.best for node in paired])
    return [node for node in paired if node.best < max(SLOW_BANDWIDTH * median, report.least)]


def blame_late(report: Report, ended: bool) -> None:
    """Mark nodes whose tasks did not answer as faulty, unless there are many: these wait for
    something shared, such as a file system that reads Python's packages for the first time.
    `ended`: srun has ended, so they are not late but failed."""
    late = [node for node in report.nodes if node.late]
    if len(late) <= max(FEW_NODES, FEW_SHARE * len(report.nodes)):
        for node in late:
            node.faults.append(node.late)
        return
    names = ", ".join(node.name for node in late[:NAMED_NODES])
    more = f" and {len(late) - NAMED_NODES} more" if len(late) > NAMED_NODES else ""
    text = (
        f"{len(late)} of {len(report.nodes)} nodes did not answer {{}}, too many to blame each of "
        f"them: look at what they share, the file system and Python: {names}{more}"
    )
    if ended:
        report.faults.append(text.format("before srun ended"))
    else:
        report.notes.append(text.format("in time"))


def compare_nodes(report: Report) -> None:
    """Add faults and notes for nodes that differ from the others or fall short."""
    answered = [node for node in report.nodes if node.answered]
    for node in answered:
        check_transport(node, alone=len(answered) == 1)
        gpus, expected = node.facts["gpus"] or 0, report.expected_of(node)
        if gpus < expected:
            node.faults.append(f"{gpus} GPU(s) seen, {expected} expected")
        node.faults += node.facts["gpu_faults"]
        if node.clock_s is not None and abs(node.clock_s) > CLOCK_S:
            node.faults.append(f"its clock differs by {node.clock_s:+.1f} s from this host's")
    blame_unlike(report, "network", lambda node: node.facts["network"], NETWORKS)
    blame_unlike(
        report,
        "active RDMA ports",
        lambda node: ", ".join(sorted(port.partition(" ")[2] for port in node.facts["ports"])),
    )
    blame_unlike(report, "Python", lambda node: node.facts["python"])
    names = sorted({name for node in answered for name in node.facts["packages"]})
    for name in names:
        blame_unlike(report, name, lambda node, name=name: node.facts["packages"].get(name, ""))  # type: ignore[misc]
    if answered:
        median = statistics.median([node.facts["memory_free"] for node in answered])
        for node in answered:
            if node.facts["memory_free"] < LITTLE_MEMORY * median:
                node.notes.append(f"{node.facts['memory_free'] / 2**30:.1f} GiB of memory free")
    for node in slow_nodes(report):
        pairs = "; ".join(
            f"with {name} {format_figure(figure)}" for name, figure in node.pairs.items()
        )
        node.faults.append(f"all-reduce between nodes: {pairs}")
    for node in answered:
        if report.share_of_ports(node) and node.best < SLOW_BANDWIDTH * node.ports_bytes_per_s:
            ports = format_amount(node.ports_bytes_per_s, "B/s")
            node.notes.append(
                f"its best all-reduce with another node reached "
                f"{node.best / node.ports_bytes_per_s:.0%} of its ports' {ports}"
            )
    check_whole(report)


def check_transport(node: NodeResult, alone: bool) -> None:
    """Check that NCCL uses the node's fast network: it falls back to TCP without an error."""
    network, used = node.facts["network"], node.transport
    # NCCL also names a network on a single node, which never uses it.
    if alone or not used or used in (expected_transports(network) or (used,)):
        return
    what = f"NCCL uses {used}, not the node's {network}"
    if setting := node.facts["nccl_setting"]:
        node.notes.append(f"{what}: {setting} is set")
    else:
        node.faults.append(f"{what}; see its log with NCCL_DEBUG=INFO (docs/start/debugging.md)")


def check_whole(report: Report) -> None:
    """Check the all-reduce of all tasks. With two nodes, neither can be blamed if it is slow."""
    # A faulty node explains a slow or failed all-reduce.
    if report.whole is None or any(node.faults for node in report.nodes):
        return
    if "error" in report.whole:
        report.faults.append(f"all-reduce of all tasks: {report.whole['error']}")
    elif format_bandwidth(report.whole) < report.least:
        report.faults.append(
            f"all-reduce of all tasks: {format_figure(report.whole)}, under "
            f"{report.least / 1e6:g} MB/s; with three or more nodes preflight finds the slow one"
        )


def blame_unlike(
    report: Report, what: str, value: Callable[[NodeResult], str], best: Sequence[str] = ()
) -> None:
    """Blame the nodes whose value is not the most frequent one. In a tie, blame the value that
    comes later in `best`; if `best` does not list both, no single node is at fault."""
    answered = [node for node in report.nodes if node.answered]
    values = {node.name: value(node) for node in answered}
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
    for node in answered:
        if values[node.name] != usual:
            have, others = values[node.name] or "none", usual or "none"
            node.faults.append(f"{what}: {have}; the other nodes have {others}")
