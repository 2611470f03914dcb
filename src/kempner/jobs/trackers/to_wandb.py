"""Points -> one W&B run over all attempts, with the run's own id from RUN/id.

A point is one row of W&B's history, under its number. Online, W&B itself knows how many rows it
has. Offline, each start of the tracker makes its own directory, which counts only if
RUN/wandb/closed.json records that it was closed properly. A directory left incomplete by a killed
tracker is removed, and its rows are written again.

W&B cannot remove rows: if the run has repeated a step, the first row stays.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import wandb

from kempner.config import toml
from kempner.jobs.records.results import PREFIX
from kempner.jobs.system.files import write_atomic
from kempner.jobs.trackers.points import MetricsPoint

INIT_TIMEOUT_S = 60.0


class WeightsAndBiases:
    def __init__(self, run_dir: Path) -> None:
        config: dict[str, Any] = toml.loads((run_dir / "config.toml").read_text())
        options = config.get("trackers", {})
        mode = options.get("wandb", "off")
        name = (run_dir / "id").read_text().strip()
        self._offline = mode == "offline"
        self._closed = run_dir / "wandb" / "closed.json"
        rows = self._clean(name) if self._offline else 0
        try:
            self._run = wandb.init(
                project=options.get("wandb_project") or "kempner",
                id=name,
                name=run_dir.resolve().name,
                dir=run_dir,
                config=config,
                mode="offline" if self._offline else "online",
                # The run may already exist: its id is the same in each start.
                resume=None if self._offline else "allow",
                settings=wandb.Settings(
                    console="off",
                    init_timeout=INIT_TIMEOUT_S,
                    silent=True,
                    x_disable_stats=True,
                ),
            )
        except Exception:
            wandb.teardown()  # otherwise its helper process stays
            raise
        # W&B's own step is the row number, but the x axis must be the training step.
        self._run.define_metric("*", step_metric="step")
        self.position = 0
        self._row = 0  # number of the next one
        self._sent = rows if self._offline else self._run.starting_step
        self._newest: dict[str, int] = {}
        self._evaluated: set[tuple[str, int]] = set()  # in any order, unlike the steps of a run

    def _clean(self, name: str) -> int:
        """Remove directories that were not closed; returns the number of rows in the others."""
        closed: dict[str, int] = {}
        if self._closed.exists():
            closed = json.loads(self._closed.read_text())
        for path in self._closed.parent.glob(f"offline-run-*-{name}"):
            if path.name not in closed:
                shutil.rmtree(path)
        return max(closed.values(), default=0)

    def write(self, points: list[MetricsPoint]) -> None:
        """Hand the points to W&B's own process, which then writes or sends them."""
        for point in points:
            new = {k: v for k, v in point.values.items() if self._is_new(k, point.step)}
            self._newest.update(dict.fromkeys(new, point.step))
            self._evaluated.update((k, point.step) for k in new if k.startswith(PREFIX))
            if not new:
                continue
            # Rows that W&B already has are also counted: row numbers are the same in each start.
            if self._row >= self._sent:
                # A row with a step stays open until the next one, unless commit is true.
                row = {**new, "step": point.step, "_timestamp": point.time}
                self._run.log(row, step=self._row, commit=True)
            self._row += 1

    def _is_new(self, name: str, step: int) -> bool:
        if name.startswith(PREFIX):
            return (name, step) not in self._evaluated
        return self._newest.get(name, -1) < step

    def close(self, failed: bool) -> None:
        folder = Path(self._run.dir).parent
        self._run.finish(exit_code=int(failed))
        if self._offline:
            closed = json.loads(self._closed.read_text()) if self._closed.exists() else {}
            closed[folder.name] = self._row
            write_atomic(self._closed, json.dumps(closed))
