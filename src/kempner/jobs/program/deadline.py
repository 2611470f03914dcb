"""Deadline of a program that is asked to leave. No torch."""

from __future__ import annotations

import os
import threading
import time

from kempner.jobs import slurm, this_job

RECORD_MARGIN_S = 5.0  # for writing the records
NO_WARNING_S = 60.0  # most seconds before the end of the job for a warning without a signal


def last_warning() -> float:
    """Return the seconds before the end of the job at which to warn if no signal has come: half the
    lead of the signal."""
    try:
        return min(float(os.environ["KEMPNER_SIGNAL_LEAD"]) / 2, NO_WARNING_S)
    except (KeyError, ValueError):
        return NO_WARNING_S / 2


class Deadline:
    """A deadline in time.monotonic(), set by a thread once Slurm has answered. A program that
    handles the request has until Slurm's SIGKILL. Any other is ended before the time limit, so that
    the batch script learns in time how it ended."""

    def __init__(self) -> None:
        self.of_listening = self.of_deaf = float("inf")
        threading.Thread(target=self._ask, daemon=True, name="deadline").start()

    def _ask(self) -> None:
        now, job = time.monotonic(), this_job.job_name()
        fields = slurm.job_fields(job) if job else {}
        if not fields:
            return
        wait, end = slurm.kill_wait(), slurm.end_of(fields)
        seconds_left = 0.0  # Slurm is ending the job
        if fields.get("JobState") == "RUNNING":  # without a limit: preempted
            seconds_left = end - time.time() if end is not None else 2 * last_warning()
        # SIGKILL comes KillWait after the end; at most half of that is kept for the records.
        self.of_listening = now + seconds_left + wait - min(RECORD_MARGIN_S, wait / 2)
        self.of_deaf = now + max(seconds_left - RECORD_MARGIN_S, wait / 2)
