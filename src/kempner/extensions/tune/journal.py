"""Journal of a tune, RUN/tune/journal.jsonl: a line before each run of a candidate and one after
it. Started again, a tune has the results that the journal has; a run without a result is repeated.
No torch."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from kempner.config.option import ConfigError
from kempner.extensions.tune.space import Overrides
from kempner.extensions.tune.trials import Measurement
from kempner.jobs.system.files import LineFile, read_jsonl


class TuneJournal:
    """The results of one subject: a configuration on a machine. Others may be in the same file."""

    def __init__(self, folder: Path, subject: str) -> None:
        """Open it for this process alone. Raises ConfigError if another one has it."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(folder / "lock", "a")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another tune.py works here; wait for it, or give another --run.dir"
            ) from None
        path = folder / "journal.jsonl"
        lines = read_jsonl(path)
        self._file, self._subject = LineFile(path), subject
        self.runs: int = sum(line.get("event") == "start" for line in lines)  # of all subjects
        mine = [line for line in lines if line.get("of") == subject]
        self.results: list[tuple[Overrides, int, Measurement]] = [
            (line["overrides"], line["rung"], _measurement(line["measurement"]))
            for line in mine
            if line.get("event") == "result"
        ]

    @property
    def spent(self) -> float:
        """Seconds of all runs that came to their end."""
        return sum(result.wall for *_, result in self.results)

    def start(self, overrides: Overrides, rung: int) -> int:
        """Note a run before it begins; returns its number."""
        self.runs += 1
        self._write("start", overrides, rung)
        return self.runs

    def end(self, overrides: Overrides, rung: int, result: Measurement) -> None:
        self._write("result", overrides, rung, measurement=dataclasses.asdict(result))
        self.results.append((overrides, rung, result))

    def close(self) -> None:
        self._lock.close()

    def _write(self, event: str, overrides: Overrides, rung: int, **more: Any) -> None:
        line = {"event": event, "of": self._subject, "run": self.runs, "overrides": overrides}
        line |= {"rung": rung, **more, "pid": os.getpid(), "time": time.time()}
        self._file.write(json.dumps(line))


def _measurement(values: dict[str, Any]) -> Measurement:
    return Measurement(**{**values, "seconds": tuple(values["seconds"])})
