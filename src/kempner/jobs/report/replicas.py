"""History of the replicas of a run with lowcomm.mode = steps, from replicas.jsonl, written by their
judge (extensions/lowcomm/judge.py). No torch."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path

from kempner.jobs.records.attempts import Record
from kempner.jobs.records.event_reader import is_time
from kempner.jobs.system.reading import read_jsonl


@dataclass
class Replica:
    """All starts of the replica with one number. `lost`: when, and why."""

    starts: int = 0
    rounds: int = 0  # that it has contributed to
    here: bool = False
    lost: list[tuple[float, str]] = field(default_factory=list)

    @property
    def losses(self) -> str:
        """List when and why the replica was lost, for a table."""
        texts = [f"{time.strftime('%H:%M:%S', time.localtime(at))} {why}" for at, why in self.lost]
        return "; ".join(texts) or "-"


@dataclass(frozen=True)
class ReplicaHistory:
    """`rounds`: the newest record of each, by number; `sent`: bytes of all replicas, in all
    rounds."""

    by_number: dict[int, Replica]
    rounds: dict[int, Record]
    sent: int

    @property
    def here(self) -> int:
        """Return the number of replicas that currently take part."""
        return sum(replica.here for replica in self.by_number.values())


def replicas_of(run_dir: Path) -> ReplicaHistory | None:
    """Read the replicas; None if the run has none that can be lost individually."""
    lines = [line for line in read_jsonl(run_dir / "replicas.jsonl") if is_time(line.get("time"))]
    if not lines:
        return None
    replicas: dict[int, Replica] = {}
    rounds: dict[int, Record] = {}
    counts, total = dict[str, int](), 0  # bytes so far, by replica name, and in all
    for line in lines:
        # A damaged line lacks a field, or has a wrong type there.
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            event, name = line["event"], line["name"]
            replica = replicas.setdefault(int(name.partition(".")[0]), Replica())
            if event == "here":
                replica.starts, replica.here = replica.starts + 1, True
                counts[name] = 0  # an earlier start of the job had a replica with this name
            elif event == "gone":
                replica.here = False
                if line["reason"] != "left":
                    replica.lost.append((line["time"], line["reason"]))
            elif event == "round":
                # `bytes` counts from the start of the replica: only the increase is new.
                new = line["bytes"] - counts.get(name, 0)
                # An entry only hands the state to joining replicas: it is not a separate round.
                counts_here = name in line["members"] and not line["entry"]
                rounds[int(line["round"])] = line
                replica.rounds += counts_here
                total, counts[name] = total + new, line["bytes"]
    return ReplicaHistory(dict(sorted(replicas.items())), rounds, total)
