"""Preparation on many nodes: tasks encode each unit of the input into a separate file in OUT/units,
and one process makes shards of them, as if it had encoded them itself.

There is no queue and no lock. A task encodes every n-th unit, then helps with the missing ones, in
its own order. Two tasks that meet write the same bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import numpy as np

from kempner.data.prepare.sources import BadLine, SourcePiece
from kempner.data.sidecar import DATA_SPLITS, UNITS_FOLDER
from kempner.data.text.encode import FOR_THE_PARENT, Encoded, Encoding, encode_pieces, in_workers
from kempner.data.text.tokenizer import Tokenizer
from kempner.jobs.system.directories import Kind, read_mark
from kempner.jobs.system.files import write_atomic

Item = tuple[Path, list[SourcePiece]]

IN_UNITS = re.compile(r"\d{8}\.npz|(attempts|chain)\.jsonl|status\.json|logs|notified|\..*")


def unit_file(out: Path, number: int) -> Path:
    return out / UNITS_FOLDER / f"{number:08d}.npz"


def remove_units(out: Path) -> None:
    """Delete the units and records of a job's tasks; versions without marks are recognised
    by their names."""
    folder = out / UNITS_FOLDER
    names = os.listdir(folder) if folder.is_dir() else []
    if read_mark(folder)[0] is Kind.DATA or all(map(IN_UNITS.fullmatch, names)):
        shutil.rmtree(folder, ignore_errors=True)


def number_units(out: Path, units: list[list[SourcePiece]]) -> list[Item]:
    return [(unit_file(out, number), unit) for number, unit in enumerate(units)]


def save_unit(path: Path, unit: Encoded) -> None:
    """Write a unit. An error leaves no file, and a kill only an unused temporary one."""
    about = {**dataclasses.asdict(unit), "tokens": None}
    parts = {
        **unit.tokens,
        "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
    }
    write_atomic(path, lambda file: np.savez(file, **parts))  # type: ignore[arg-type]


def load_unit(path: Path) -> Encoded | None:
    """Read a unit; None if it is missing or damaged: npz has a CRC-32 of each array. For a damaged
    header zipfile may report encryption or a later version (RuntimeError)."""
    try:
        with np.load(path) as parts:
            about = json.loads(parts["about"].tobytes())
            about["tokens"] = {split: parts[split] for split in DATA_SPLITS}
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile):
        return None
    about["bad"] = [BadLine(**bad) for bad in about["bad"]]
    return Encoded(**about)


def read_or_encode(item: Item, how: Encoding, tokenizer: Tokenizer) -> Encoded:
    path, unit = item
    return load_unit(path) or encode_pieces(unit, how, tokenizer)


def _write(item: Item, how: Encoding, tokenizer: Tokenizer) -> Encoded:
    """Write a unit; return it without its tokens, which are in the file."""
    path, unit = item
    encoded = encode_pieces(unit, how, tokenizer)
    save_unit(path, encoded)
    return dataclasses.replace(encoded, tokens={})


class Leave:
    """The signal that asks this process to leave, once received."""

    def __init__(self) -> None:
        self.state = ""
        signal.signal(signal.SIGTERM, partial(self._ask, "interrupted"))
        signal.signal(signal.SIGUSR1, partial(self._ask, "interrupted"))
        signal.signal(signal.SIGINT, partial(self._ask, "stopped"))
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # every unit is saved anyway
        # task.sh starts us with these signals blocked, so that none is lost before this handler
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FOR_THE_PARENT, signal.SIGTERM})

    def _ask(self, state: str, *_: object) -> None:
        self.state = state


def encode_units(
    items: Sequence[Item], how: Encoding, workers: int, rank: int, tasks: int
) -> Iterator[Encoded]:
    """Encode this task's share, then the units that others have left; yields the results, without
    tokens. Ends early on a request to leave, recorded in status.json for the batch script."""
    leave = Leave()
    others = [item for number, item in enumerate(items) if number % tasks != rank]
    # Each task in its own order, so that helpers rarely meet at one unit.
    random.Random(rank).shuffle(others)

    def missing() -> Iterator[Item]:
        for item in itertools.chain(items[rank::tasks], others):
            # Checked when a worker is free: by then another task may have done it.
            if not leave.state and not item[0].exists():
                yield item

    try:
        yield from in_workers(_write, missing(), how, workers)
    except BrokenProcessPool:
        # The signal that ends a job also reaches the workers.
        time.sleep(1.0)
        if not leave.state:
            raise
    if leave.state:
        record = {"state": leave.state, "attempt_id": os.environ.get("KEMPNER_ATTEMPT_ID")}
        write_atomic(items[0][0].with_name("status.json"), json.dumps(record))
