"""Journal of a tune, RUN/tune/journal.jsonl: a line before each run of a candidate and one after
it. A restarted tune has the journal's results; it repeats a run without a result, and, once, a run
that the host has killed. No torch."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kempner.config.option import ConfigError
from kempner.extensions.tune.space import Overrides
from kempner.extensions.tune.trials import Measurement
from kempner.jobs.system.files import LineFile
from kempner.jobs.system.reading import read_jsonl


class TuneJournal:
    """The results of one subject: a configuration on a machine. The file may also hold others."""

    def __init__(self, folder: Path, subject: str) -> None:
        """Open it for this process alone. Raises ConfigError if another one has it."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(folder / "lock", "a")  # noqa: SIM115
        # Opening it to append preserves the time of the last beat.
        lived = (folder / "lock").stat().st_mtime  # see beat()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another tune.py works here; wait for it, or give another --run.dir"
            ) from None
        self._path = path = folder / "journal.jsonl"
        lines = [*filter(_is_sound, read_jsonl(path))]
        self._file, self._subject = LineFile(path), subject
        # Numbers the runs: a run replaces the directory of its number, so runs of other
        # subjects keep theirs.
        self.runs: int = sum(line.get("event") == "start" for line in lines)  # of all subjects
        if lines and lines[-1].get("event") == "start":  # killed during a run
            # Time counts up to the last beat: how long the run lived afterwards is unknown.
            cut = {**lines[-1], "event": "cut", "wall": max(lived - lines[-1]["time"], 0.0)}
            self._append(cut)
            lines.append(cut)
        mine = [line for line in lines if line.get("of") == subject]
        self.results: list[tuple[Overrides, int, Measurement]] = []
        self.spent: float = 0.0  # seconds of all runs, including those that were cut off
        # Killed runs are results in the file, too, so that every start can count them.
        killed = Counter[str]()
        for line in mine:
            self.spent += line.get("wall", 0.0)
            if line.get("event") == "result":
                result = _measurement(line["measurement"])
                self.spent += result.wall
                name = f"{line['overrides']}{line['rung']}"
                killed[name] += result.killed
                # A candidate killed twice has failed; the configuration itself is tried again.
                if not result.killed or (line["overrides"] and killed[name] > 1):
                    self.results.append((line["overrides"], line["rung"], result))

    def start(self, overrides: Overrides, rung: int) -> int:
        """Record a run before it begins; returns its number."""
        self.runs += 1
        self._write("start", overrides, rung)
        return self.runs

    def end(self, overrides: Overrides, rung: int, result: Measurement) -> None:
        self._write("result", overrides, rung, measurement=dataclasses.asdict(result))
        self.spent += result.wall
        self.results.append((overrides, rung, result))

    def cut(self, overrides: Overrides, rung: int, wall: float) -> None:
        """Record that a run was cut off after so many seconds."""
        self.spent += wall
        self._write("cut", overrides, rung, wall=wall)

    def beat(self) -> None:
        """Record that the run goes on: its time up to now counts if this process is killed."""
        os.utime(self._lock.fileno())

    def close(self) -> None:
        self._lock.close()

    def _write(self, event: str, overrides: Overrides, rung: int, **more: Any) -> None:
        line = {"event": event, "of": self._subject, "run": self.runs, "overrides": overrides}
        line |= {"rung": rung, **more, "pid": os.getpid(), "time": time.time()}
        self._append(line)

    def _append(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line))
        except OSError as error:
            # A write error, for example on a full disk, does not name the file.
            error.filename = str(self._path)
            raise


def _is_sound(line: dict[str, Any]) -> bool:
    """Return whether a line is as it was written; a damaged one is ignored."""
    try:
        walls = [line.get("wall", 0.0), line["time"], line["rung"], len(line["overrides"])]
        if line["event"] == "result":
            walls.append(_measurement(line["measurement"]).wall)
        return all(0 <= wall < math.inf for wall in walls)
    except (KeyError, TypeError):
        return False


def _measurement(values: dict[str, Any]) -> Measurement:
    return Measurement(**{**values, "seconds": tuple(values["seconds"])})
