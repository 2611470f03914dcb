"""The facts of a run as one JSON object, for `status.py --json`, notifications and the head of the
page. docs/start/monitoring.md describes the fields. No torch."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kempner.jobs.records.attempts import Attempt, Record
from kempner.jobs.records.run_history import History
from kempner.jobs.report.idle import idle_share, spare_share
from kempner.jobs.slurm import SlurmJob

PACE_LINES = 100  # lines of metrics.jsonl used for the speed and the expected end


def run_facts(run: History, now: float) -> dict[str, Any]:
    """Return the facts. Unknown and non-finite values are None: JSON has no NaN or infinity."""
    started = [attempt for attempt in run.attempts if attempt.began is not None]
    decisions = Counter(str(r.get("decision")) for r in run.records if r.get("event") == "decision")
    step, most = newest_step(run), run.status.get("max_steps")
    steps_left = max(0, most - step) if most and step is not None else None
    pace = seconds_per_step(run.lines, run.attempts)
    lives = run.state.word == "running"
    eta = steps_left * pace if lives and steps_left is not None and pace else None
    # The last line may be a validation or a save, without the figures of a step.
    last = newest_line(run.lines, "tokens_per_s")
    rates = [
        line["tokens_per_s"] for line in recent_lines(run.lines, run.attempts) if has_rate(line)
    ]
    return {
        "run": str(run.path),
        "state": run.state.word,
        "attention": bool(why := run_trouble(run)),
        "why": why or run.state.reason or None,
        "warning": run.warning or None,
        "step": step,
        "max_steps": most,
        "progress": min(1.0, step / most) if most and step is not None else None,
        "eta_s": None if eta is None else round(eta, 1),
        "eta": None if eta is None else round(now + eta),
        "loss": newest_line(run.lines, "loss").get("loss"),
        "val_loss": newest_line(run.lines, "val_loss").get("val_loss"),
        "reward": last.get("reward"),
        "tokens": last.get("tokens"),
        "tokens_per_s": statistics.median(rates) if rates else last.get("tokens_per_s"),
        "seconds_per_step": pace,
        "idle": rounded_share(idle_share(run)),
        "idle_spares": rounded_share(spare_share(run)),
        "began": run.attempts[0].opened if run.attempts else None,
        "last_sign": last_sign(run),
        "attempts": len(started),
        "requeues": decisions["requeue"],
        "decisions": dict(decisions),
        "no_progress": attempts_without_progress(run.records),
        "hosts": list(started[-1].hosts) if started else [],
        "world_size": started[-1].world_size if started else None,
        "excluded": sorted({host for a in run.attempts for host in a.excluded.split(",") if host}),
        "last_end": last_end(run.attempts),
        "job": job_facts(run),
    }


def rounded_share(share: float | None) -> float | None:
    return None if share is None or not math.isfinite(share) else round(share, 4)


def run_trouble(run: History) -> str:
    """Return why the run needs attention; "" if it does not."""
    if full := sorted(each.stem for each in run.path.glob("rl/*/*.full")):
        return f"disk full: {', '.join(full)} waits"
    return (run.state.reason or run.state.word) if run.state.attention else ""


def job_facts(run: History) -> dict[str, Any] | None:
    """Return the job as Slurm shows it; without an answer, only its number."""
    number = next((attempt.job for attempt in reversed(run.attempts) if attempt.job), None)
    job = run.job or (SlurmJob(number, "") if number else None)
    return asdict(job) if job else None


def newest_step(run: History) -> int | None:
    """Return the step; None if unknown: then a program's lines are only signs of life."""
    if run.step is None:
        return None
    last = recent_lines(run.lines, run.attempts)[-1:]
    return int(max(run.step, run.status.get("step", 0), *(line["step"] for line in last)))


def newest_line(lines: Sequence[Record], key: str) -> Record:
    """Return the last line with a number under this key; {} without one."""
    return next((line for line in reversed(lines) if line.get(key) is not None), {})


def last_sign(run: History) -> float | None:
    """Return the Unix time of the last line or event."""
    times = [*(attempt.ended for attempt in run.attempts), *(line["time"] for line in run.lines)]
    return max(times, default=None)


def seconds_per_step(lines: Sequence[Record], attempts: Sequence[Attempt]) -> float | None:
    """Return the wall time per recent step of the last attempt, with saves and validations."""
    own = recent_lines(lines, attempts)
    steps = own[-1]["step"] - own[0]["step"] if own else 0
    if steps > 0 and own[-1]["time"] > own[0]["time"]:
        return float(own[-1]["time"] - own[0]["time"]) / steps
    step_time = newest_line(own, "step_time").get("step_time")
    return float(step_time) if step_time and math.isfinite(step_time) else None


def recent_lines(lines: Sequence[Record], attempts: Sequence[Attempt]) -> list[Record]:
    """Return the recent lines that are of the last attempt."""
    number = attempts[-1].number if attempts else 0
    return [line for line in lines[-PACE_LINES:] if line.get("attempt", 0) == number]


def has_rate(line: Record) -> bool:
    return line.get("tokens_per_s") is not None


def attempts_without_progress(records: Sequence[Record]) -> int:
    """Count the attempts in a row, up to the last decision, that made no new checkpoint."""
    counts = [r["no_progress"] for r in records if type(r.get("no_progress")) is int]
    return counts[-1] if counts else 0


def last_end(attempts: Sequence[Attempt]) -> str | None:
    """Describe the end of the last finished attempt and the action after it."""
    return next((a.short_ending for a in reversed(attempts) if a.state != "running"), None)
