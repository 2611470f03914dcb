"""Stands for W&B in the tests: $FAKE_WANDB is a directory that plays the server. While it has a
file `silent` the server does not answer; with a file `broken` it is an error. Rows are sent in
pairs, as the real one sends them in groups."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

SERVER = Path(os.environ["FAKE_WANDB"])


class Settings:
    def __init__(self, **options: Any) -> None:
        pass


class Run:
    def __init__(self, name: str, folder: Path) -> None:
        self._rows, self.dir, self._waiting = SERVER / f"{name}.jsonl", str(folder / "files"), ""
        self._rows.touch()
        self.starting_step = len(self._rows.read_text().splitlines())
        self._next = self.starting_step

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, row: dict[str, Any], step: int, commit: bool) -> None:
        assert commit and step == self._next, "W&B drops a row of an earlier step"
        self._next += 1
        self._waiting += json.dumps({**row, "_step": step}) + "\n"
        if step % 2:
            self._send()

    def _send(self) -> None:
        while (SERVER / "silent").exists():
            time.sleep(0.05)
        with open(self._rows, "a") as file:
            file.write(self._waiting)
        self._waiting = ""

    def finish(self, exit_code: int) -> None:
        self._send()
        (SERVER / "exit_code").write_text(str(exit_code))


def init(*, id: str, name: str, config: Any, mode: str, resume: str, **options: Any) -> Run:
    assert (mode, resume) == ("online", "allow")
    if (SERVER / "broken").exists():
        raise RuntimeError("no way to the server")
    while (SERVER / "silent").exists():
        time.sleep(0.05)
    (SERVER / f"{id}.json").write_text(json.dumps({"name": name, "config": config}))
    return Run(id, Path(options["dir"]))


def teardown() -> None:
    pass
