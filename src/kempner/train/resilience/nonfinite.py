"""Reaction to skipped steps, with a non-finite loss or gradient or a spike (spikes.py): too many in
a row send the run back, or end it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kempner.train.resilience.config import ResilienceConfig
from kempner.train.resilience.requests import Verdict

if TYPE_CHECKING:
    from kempner.train.progress import Progress
    from kempner.train.step import StepResult


class NonFinite:
    """Counts consecutive skipped steps; the same on all ranks."""

    def __init__(self, cfg: ResilienceConfig) -> None:
        self.max_skipped = cfg.max_skipped
        self.in_a_row = 0
        self.spikes = 0  # among them
        self.since: Progress  # after the first of them

    def judge(self, result: StepResult, may_go_back: bool) -> Verdict | None:
        """Return the consequence of a step, if any. After `max_skipped` consecutive bad steps the
        run goes back to its last checkpoint or, if it may not (it has done so before), fails."""
        if result.bad and not self.in_a_row:
            self.since = result.after
        self.in_a_row = self.in_a_row + 1 if result.bad else 0
        self.spikes = self.spikes + result.spike if result.bad else 0
        if self.in_a_row < self.max_skipped:
            return None
        what = "spikes or " if 0 < self.spikes < self.in_a_row else ""
        what = "spikes" if self.spikes == self.in_a_row else f"{what}not finite"
        self.in_a_row = 0
        reason = f"{self.max_skipped} steps in a row were {what} (resilience.max_skipped)"
        if may_go_back:
            return Verdict(go_back=True, reason=reason)
        return Verdict(state="failed", reason=f"{reason}, again after going back once")
