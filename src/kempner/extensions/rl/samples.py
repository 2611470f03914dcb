"""The log of samples, RUN/rl-samples.jsonl, with a few from each step; and figures of all
samples. No torch."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kempner.extensions.rl.orchestrate.groups import SampleGroup
from kempner.jobs.system.files import LineFile
from kempner.jobs.system.reading import open_regular

SAMPLES_FILE = "rl-samples.jsonl"
RECORDED_GROUPS = 2  # per step; their best and worst samples are recorded
LONGEST_TEXT = 4000  # characters per text
STEP_OF_LINE = re.compile(rb'\{"step": (\d+),')


class SampleLog:
    def __init__(self, run_dir: Path, step: int, say: Callable[[str], None]) -> None:
        """Open the log. Removes lines of steps after `step`, whose training was lost."""
        self._path, self._say, self._failed = run_dir / SAMPLES_FILE, say, False
        with contextlib.suppress(OSError):
            remove_after(self._path, step)

    def add(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """Add samples of a step. Training does not depend on them: a full disk is reported once."""
        try:
            # Reopened for each step, which ends a line cut off by a full disk.
            file = LineFile(self._path)
            for group in groups[:RECORDED_GROUPS]:
                scored = sorted(group.scored, key=lambda each: each.reward or 0.0)
                for each in (scored[-1], scored[0]):
                    line = {
                        "step": step,
                        "env": group.at.env,
                        "task": group.at.number,
                        "reward": each.reward,
                        "prompt": group.prompt[:LONGEST_TEXT],
                        "completion": each.text[:LONGEST_TEXT],
                    }
                    file.write(json.dumps(line))
        except OSError as error:
            if not self._failed:
                self._say(f"{self._path}: {error.strerror}; samples are not recorded")
            self._failed = True


def remove_after(path: Path, step: int) -> None:
    """Remove the lines of later steps, which come last. Reads only these, because the log of a long
    run has gigabytes. Raises OSError."""
    with open(path, "rb", opener=open_regular) as file:
        size = end = os.fstat(file.fileno()).st_size
        if not size:  # an empty file cannot be mapped
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
            while end:
                begin = lines.rfind(b"\n", 0, end - 1) + 1
                found = STEP_OF_LINE.match(lines, begin)
                if not found or int(found[1]) <= step:
                    break
                end = begin
    if end < size:
        os.truncate(path, end)


def reward_figures(
    groups: Sequence[SampleGroup],
    batch: Sequence[SampleGroup],
    step: int,
    stale: int,
    cancelled: int,
) -> dict[str, float]:
    """Compute the metrics. `groups`: all that have arrived since the last batch, because the
    trained groups would not reveal prompts that are always or never solved. `batch`: trained by
    step `step`; `cancelled`: groups that became too old before they arrived."""
    scored = [each for group in groups for each in group.scored]
    rewards = [reward for group in groups for reward in group.rewards]
    trained = [each for group in batch for each in group.scored]
    figures = {
        "reward": mean_or_zero(rewards),
        "reward_std": float(np.std(rewards)) if rewards else 0.0,
        "length": mean_or_zero([each.length for each in scored]),
        # Less than `length` if rl.max_async selects short answers.
        "length_trained": mean_or_zero([each.length for each in trained]),
        "truncated": mean_or_zero([each.truncated for each in scored]),
        "zero_variance": float(sum(not group.failed and group.flat for group in groups)),
        "dropped_stale": float(stale),
        "cancelled": float(cancelled),
        "given_up": float(sum(group.given_up for group in groups)),
        "broken_tasks": float(sum(group.broken for group in groups)),
        "failed_rewards": float(sum(len(group.rollouts) - len(group.rewards) for group in groups)),
        # Step n trains version n - 1, whose samples have staleness 0.
        "staleness": mean_or_zero([step - 1 - each.oldest for each in trained]),
        "samples": float(len(trained)),
    }
    for label in sorted({group.at.env for group in groups}):
        of = [r for group in groups if group.at.env == label for r in group.rewards]
        if of:
            figures[f"reward/{label}"] = mean_or_zero(of)
    return figures


def mean_or_zero(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
