"""Faults of hosts over any number of runs, for the admin. No torch.

An event counts against the hosts that it names: a fault, unless it only says that a peer is gone;
the batch script's blame, if no rank of that host recorded an error (it was killed, or the host was
lost); and every other kind of event that names a host, under its own name, unless it is only noted:
Xid 13, 31 and the like are mostly the program's fault (jobs/gpu/findings.py). A GPU for which the
sampler ended the attempt counts once; the resulting crash does not count.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kempner.jobs.records.attempts import Record
from kempner.jobs.records.run_history import History

PEACEFUL = frozenset(("start", "first_step", "go_back", "end"))
DIED_KIND = "died"  # blamed by the batch script, without a record of its own


class Sin(NamedTuple):
    """A fault of a host. `run`: the path of the affected run; `time`: Unix seconds."""

    kind: str
    time: float
    run: str
    reason: str


@dataclass
class NodeHistory:
    """A host over all runs. `seconds`: of attempts that trained on it."""

    host: str
    runs: set[str] = field(default_factory=set)
    attempts: int = 0
    seconds: float = 0.0
    excluded: int = 0
    sins: list[Sin] = field(default_factory=list)

    @property
    def last(self) -> Sin | None:
        return max(self.sins, key=lambda sin: sin.time, default=None)

    @property
    def kinds(self) -> dict[str, int]:
        return dict(Counter(sin.kind for sin in self.sins).most_common())

    def as_json(self) -> dict[str, Any]:
        last = self.last
        return {
            "host": self.host,
            "runs": len(self.runs),
            "attempts": self.attempts,
            "hours": round(self.seconds / 3600, 2),
            "faults": self.kinds,
            "excluded": self.excluded,
            "last_fault": last._asdict() if last else None,
        }


def nodes_of(runs: Iterable[History]) -> list[NodeHistory]:
    """Return the hosts of these runs, most faults first."""
    nodes: dict[str, NodeHistory] = {}

    def at(host: str) -> NodeHistory:
        return nodes.setdefault(host, NodeHistory(host))

    for run in runs:
        for attempt in run.attempts:
            for host in set(attempt.hosts):
                node = at(host)
                node.runs.add(str(run.path))
                node.attempts += attempt.began is not None
                node.seconds += max(0.0, attempt.ended - attempt.began) if attempt.began else 0.0
        accused: dict[tuple[object, str], object] = {}
        for record in run.records:
            # In order: the sampler's event precedes the resulting crash.
            for host, kind in node_faults(record, accused):
                reason = record.get("reason") or record.get("why") or ""
                at(host).sins.append(Sin(kind, record["time"], str(run.path), str(reason)))
                accused[record.get("attempt_id"), host] = record.get("answer")
            for host in host_names(record.get("excluded")):
                at(host).excluded += record.get("event") == "decision"
    return rank_nodes(nodes.values())


def merge_nodes(several: Iterable[list[NodeHistory]]) -> list[NodeHistory]:
    """Merge the hosts found in several lists."""
    found: dict[str, NodeHistory] = {}
    for node in itertools.chain(*several):
        one = found.setdefault(node.host, NodeHistory(node.host))
        one.runs |= node.runs
        one.attempts += node.attempts
        one.seconds += node.seconds
        one.excluded += node.excluded
        one.sins += node.sins
    return rank_nodes(found.values())


def rank_nodes(nodes: Iterable[NodeHistory]) -> list[NodeHistory]:
    return sorted(nodes, key=lambda node: (-len(node.sins), -node.excluded, node.host))


def node_faults(
    record: Record, accused: dict[tuple[object, str], object]
) -> Iterator[tuple[str, str]]:
    """Yield (host, kind) for each host that an event counts against. `accused`: maps each (attempt
    id, host) so far to the sampler's answer, if it was the sampler's."""
    event, attempt = record.get("event"), record.get("attempt_id")
    if event == "fault":
        if not record.get("lost_peer"):
            kind = str(record.get("kind", "crash"))
            hosts = hosts_of(record)
            yield from ((host, kind) for host in hosts if accused.get((attempt, host)) != "end")
    elif event == "decision":
        for host in host_names(record.get("blamed")):
            if (attempt, host) not in accused:
                yield host, DIED_KIND
    elif event not in PEACEFUL and record.get("answer") != "note":
        yield from ((host, fault_kind(record)) for host in hosts_of(record))


def fault_kind(record: Record) -> str:
    """Name an event's kind: `gpu_fault` of the kind `xid` -> "gpu_fault xid"."""
    kind = record.get("kind")
    return f"{record.get('event')} {kind}" if isinstance(kind, str) else str(record.get("event"))


def hosts_of(record: Record) -> list[str]:
    return [name for key in ("hosts", "host", "node") for name in host_names(record.get(key))]


def host_names(value: object) -> list[str]:
    """List hosts from a list or from "node1,node2"."""
    if isinstance(value, str):
        return [name for name in value.split(",") if name]
    return [x for x in value if isinstance(x, str)] if isinstance(value, list) else []
