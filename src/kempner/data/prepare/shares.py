"""Preparation of all units of the input as shards, or of one task's share as files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kempner.config.option import ConfigError
from kempner.data.formats.shards import SHOWN_SKIPPED, ShardWriter, one_line
from kempner.data.prepare import units
from kempner.data.prepare.sources import BadLine
from kempner.data.sidecar import BAD_LINES, SIDECAR, Sidecar
from kempner.data.text import encode
from kempner.jobs.ranks.placement import World
from kempner.jobs.system.files import write_atomic

ALL_BAD = 1000  # JSON lines without a single document: enough to give up


@dataclass(frozen=True)
class Work:
    out: Path
    sidecar: Sidecar  # finished so far
    items: list[units.Item]
    how: encode.Encoding
    workers: int
    skip_bad_lines: bool

    def done(self) -> int:
        """Number of units that are in shards."""
        return int(self.sidecar.prepared["progress"]["units"])


def encode_task_share(work: Work, world: World) -> None:
    """Encode the part of one task of a job."""
    remaining = work.items[work.done() :]
    if not remaining or (work.out / SIDECAR).is_file():
        return
    bad = documents = 0
    workers = min(work.workers, len(remaining))
    share = units.encode_units(remaining, work.how, workers, world.rank, world.size)
    if world.rank == 0:
        there = sum(path.exists() for path, _ in remaining)
        print(f"{there} of {len(remaining)} units of input are encoded already", flush=True)
    total = _bytes(remaining) // world.size
    with encode.progress_bar(total, start=0, quiet=world.rank > 0) as advance:
        for done in share:
            bad, documents = bad + len(done.bad), documents + done.documents
            if bad >= ALL_BAD and not documents and not work.skip_bad_lines:
                break  # the process that makes the shards reports it
            advance(done.size)


def write_shards(work: Work) -> Sidecar:
    """Write all units as shards. Raises ConfigError with the bad lines, unless they are skipped."""
    writer = ShardWriter(work.out, work.sidecar)
    # In the order of the input: the finished units come first.
    done, remaining = work.items[: work.done()], work.items[work.done() :]
    if done:
        shards = sum(map(len, work.sidecar.splits.values()))
        of = f"{len(done)} of {len(work.items)} units of input"
        print(f"{work.out}: resuming after {shards} shards ({of})")
    bad, documents = list[BadLine](), 0
    workers = min(work.workers, max(1, len(remaining)))
    with encode.progress_bar(_bytes(work.items), start=_bytes(done)) as advance:
        for encoded in encode.in_workers(units.read_or_encode, remaining, work.how, workers):
            documents += encoded.documents
            # After a bad line nothing more is written, but all are found: one correction suffices.
            if work.skip_bad_lines or not (bad or encoded.bad):
                writer.add(encoded)
            else:
                bad += writer.bad_lines(encoded)
                if len(bad) >= ALL_BAD and not documents:  # a wrong --text-key, say
                    break
            advance(encoded.size)
    if bad:
        raise ConfigError(*_refuse(work.out, bad, stopped=len(bad) >= ALL_BAD and not documents))
    return writer.finish()


def _refuse(out: Path, bad: list[BadLine], stopped: bool) -> tuple[list[str], str]:
    """Return the first bad lines and the fix; all go into a file."""
    lines = [one_line(line.path, line) for line in bad]
    write_atomic(out / BAD_LINES, "\n".join([*lines, ""]))
    more = f"{len(bad) - SHOWN_SKIPPED} more such lines, " if len(bad) > SHOWN_SKIPPED else ""
    where = f"{more}all named in {out / BAD_LINES}; "
    end = "stopped looking there; " if stopped else ""
    return lines[
        :SHOWN_SKIPPED
    ], f"{where}{end}correct them, or give --skip-bad-lines to leave them out"


def _bytes(items: list[units.Item]) -> int:
    return sum(piece.size for _, unit in items for piece in unit)
