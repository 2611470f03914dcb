"""The text of `report.py`: one column of figures per run, one row per attempt. No torch.

A figure may be None, if not finite, or be missing in a damaged line: `values` skips both.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable

from kempner.jobs.ranks.startup import START_PARTS
from kempner.jobs.records.attempts import Attempt, Record
from kempner.jobs.records.results import PREFIX
from kempner.jobs.records.run_history import History, is_number
from kempner.jobs.report.idle import idle_share, spare_share
from kempner.jobs.report.replicas import ReplicaHistory
from kempner.jobs.report.tables import align_table, format_duration
from kempner.jobs.report.wall_time import UNCOUNTED

STEP_PARTS = ("data", "compute", "checkpoint", "eval")
IDLE_TIMES = ("wait", "engine_idle")  # of reinforcement learning, both sides


def summary_table(runs: list[History]) -> str:
    """Format one row per figure, one column per run."""
    several = any(len(run.attempts) > 1 for run in runs)
    forks = any(run.lineage for run in runs)
    columns = [
        {
            "run": str(run.path),
            **({"fork of": " <- ".join(run.lineage) or "-"} if forks else {}),
            **summary_facts(run),
            **wall_time(run, several),
        }
        for run in runs
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    return align_table(
        [[name, *(column.get(name, "-") for column in columns)] for name in names], gap=3
    )


def summary_facts(run: History) -> dict[str, str]:
    if not run.losses:
        return {"state": run.state.word, "step": run.step_text}
    losses = [line for line in run.losses if line["loss"] is not None]  # None: not finite
    last = run.status.get("max_steps")
    return {
        "state": state_words(run),
        "step": run.step_text + (f" of {last:,}" if last else ""),
        "loss, first": at_step(losses[:1], "loss"),
        "loss, last": at_step(losses[-1:], "loss"),
        "loss, best": at_step(best_lines(losses, "loss"), "loss"),
        "validation, last": at_step(run.validations[-1:], "val_loss"),
        "validation, best": at_step(best_lines(run.validations, "val_loss"), "val_loss"),
        **result_rows(run),
        "skipped steps": f"{skipped_steps(run.losses):,}",
        "tokens": f"{max(numbers_of_key(run.losses, 'tokens'), default=0):,}",
        "tokens/s, median": median_of_key(run.losses, "tokens_per_s", ",.0f"),
        "step time, median": median_of_key(run.losses, "step_time", ".3g", " s"),
        **time_shares(run.losses),
        **save_rows(run),
        "MFU, median": median_of_key(run.losses, "mfu", ".1%"),
        **replica_rows(run),
        **reward_rows(run),
        "memory, peak": f"{max(numbers_of_key(run.losses, 'memory_gib'), default=0.0):.2f} GiB",
    }


def state_words(run: History) -> str:
    if run.state.word not in ("running", "silent"):
        return run.state.word
    return f"{run.state.word}, last line {format_duration(time.time() - run.lines[-1]['time'])} ago"


def numbers_of_key(lines: list[Record], key: str) -> list[float]:
    """Return the numbers under this key."""
    return [value for line in lines if is_number(value := line.get(key))]


def at_step(lines: list[Record], key: str) -> str:
    """Format the value of the first of these lines; "-" without one."""
    if not lines:
        return "-"
    value = lines[0][key]
    return f"{f'{value:.4f}' if is_number(value) else 'not finite'} at step {lines[0]['step']:,}"


def best_lines(lines: list[Record], key: str, choose: Callable[..., Record] = min) -> list[Record]:
    finite = [line for line in lines if is_number(line[key])]
    return [choose(finite, key=lambda line: line[key])] if finite else []


def replica_rows(run: History) -> dict[str, str]:
    """Return the figures of a run whose replicas meet once per round; bytes and time are those of
    the first replica."""
    if not run.rounds:
        return {}
    last = run.rounds[-1]
    own, others = (sum(r[f"bytes_{x}"] for r in run.rounds) for x in ("sent", "data_parallel"))
    loss = f"{last['round_loss']:.4f}" if is_number(last["round_loss"]) else "not finite"
    return {
        "replicas": f"{last['replicas']:,}",
        "rounds": f"{last['round']:,}, loss of all {loss}",
        "sent by a replica": f"{format_count(own)}"
        + (f", {own / others:.2%} of data parallel's {format_count(others)}" if others else ""),
        "  outer steps": f"{sum(r['outer_time'] for r in run.rounds):.1f} s",
        **_not_finite(run.rounds),
    }


def _not_finite(rounds: list[Record]) -> dict[str, str]:
    """Return the replicas that had non-finite weights, and in how many rounds."""
    counts = Counter(
        replica
        for line in rounds
        if isinstance(entries := line.get("not_finite"), list)
        for replica in entries
        if is_number(replica)
    )
    entries = [f"replica {x} in {n} round{'s' * (n > 1)}" for x, n in sorted(counts.items())]
    return {"  not finite": ", ".join(entries)} if entries else {}


def reward_rows(run: History) -> dict[str, str]:
    """Return the figures of reinforcement learning. Time shares are of the steps' wall time."""
    lines = [line for line in run.losses if "reward" in line]
    if not lines:
        return {}
    idle = [math.fsum(numbers_of_key(lines, name)) / len(lines) for name in IDLE_TIMES]
    drop_names = ("dropped_stale", "cancelled", "failed_rewards")
    stale, cancelled, failed = (sum(numbers_of_key(lines, name)) for name in drop_names)
    dropped = f"{stale + cancelled:,.0f} groups dropped"
    dropped += f", {cancelled:,.0f} of them unfinished" if cancelled else ""
    return {
        "reward, first": at_step(lines[:1], "reward"),
        "reward, last": at_step(lines[-1:], "reward"),
        "reward, best": at_step(best_lines(lines, "reward", max), "reward"),
        "sampled tokens, "
        "mean": f"{mean_of_key(lines, 'length'):.1f}; {mean_of_key(lines, 'truncated'):.1%} cut",
        "versions behind, mean": f"{mean_of_key(lines, 'staleness'):.2f}; {dropped}",
        "rewards that failed": f"{failed:,.0f}",
        "trainer - sampler": f"{policy_distance(lines)} (mean |log ratio|)",
        "the trainer waits": f"{idle[0]:.1%}",
        "the engines are idle": f"{idle[1]:.1%}",
    }


def mean_of_key(lines: list[Record], key: str) -> float:
    """Return the mean, 0 without a value."""
    return statistics.fmean(numbers_of_key(lines, key) or [0.0])


def policy_distance(lines: list[Record]) -> str:
    """Describe the distance between the log-probabilities of trainer and sampler."""
    parts = []
    for name, weights in (("mismatch", "the same weights"), ("drift", "older weights")):
        if values := numbers_of_key(lines, name):
            parts.append(f"{statistics.fmean(values):.2g} for {weights}")
    return ", ".join(parts)


def format_count(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def result_rows(run: History) -> dict[str, str]:
    """Return the latest figures of each task run by eval.py, without their errors."""
    # In step order, so that the newest figures of each task remain.
    last = {name: line for line in run.results for name in line if name.startswith(PREFIX)}
    return {
        name.removeprefix(PREFIX): at_step([line], name)
        for name, line in last.items()
        if "stderr" not in name
    }


def median_of_key(lines: list[Record], key: str, form: str, unit: str = "") -> str:
    """Format the median. `form`: as in a format string."""
    values = numbers_of_key(lines, key)
    return f"{statistics.median(values):{form}}{unit}" if values else "-"


def time_shares(lines: list[Record]) -> dict[str, str]:
    """Return the shares of the steps' time. A median would hide parts of every 100th line."""
    total = sum(numbers_of_key(lines, "step_time"))
    times = (
        {part: sum(numbers_of_key(lines, f"{part}_time")) for part in STEP_PARTS} if total else {}
    )
    return {f"  {part}": f"{seconds / total:.1%}" for part, seconds in times.items()}


def save_rows(run: History) -> dict[str, str]:
    """Return the median costs of the saves; empty without saves."""
    if not run.saves:
        return {}
    stall, drain = (
        statistics.median(numbers_of_key(run.saves, key)) for key in ("save_stall", "save_drain")
    )
    rows = {"saves": f"{len(run.saves):,}: stall {stall:.2g} s, durable {drain:.2g} s later"}
    if longest := numbers_of_key(run.saves, "save_step_max"):
        text = f"{slowdown(run):.2f} of a step's usual time, longest {max(longest):.2g} s"
        rows["  steps meanwhile"] = text
    return rows


def slowdown(run: History) -> float:
    """Return the median time of steps during the write of a save, relative to other steps."""
    ratios: list[float] = []
    for line in run.saves:
        busy, quiet = line.get("save_step_mean"), line.get("quiet_step_time")
        if is_number(busy) and is_number(quiet) and quiet > 0:
            ratios.append(busy / quiet)
    return statistics.median(ratios or [1.0])


def skipped_steps(lines: list[Record]) -> int:
    """Count the non-finite steps and spikes: every attempt counts its own."""
    counts: dict[int, int] = {}
    for line in lines:
        attempt, count = line.get("attempt", 0), line.get("skipped", 0)
        if type(count) is int:
            # `skipped` accumulates within an attempt, and restarts at 0 in the next one.
            counts[attempt] = max(count, counts.get(attempt, 0))
    return sum(counts.values())


def wall_time(run: History, several: bool) -> dict[str, str]:
    """Return the time from the first start to the last sign of life. `several`: with its parts."""
    times = run.wall_time
    parts = {
        f"  {part}": f"{format_duration(seconds)}, {seconds / max(times.total, 1e-9):.1%}"
        for part, seconds in times.parts.items()
        if seconds or part != UNCOUNTED
    }
    lost_steps = [n for a, n in zip(run.attempts, times.lost, strict=True) if a.began or n is None]
    counts = [steps for steps in lost_steps if steps is not None]
    # An attempt with an unknown number of undone steps makes the sum a lower bound.
    at_least = " or more" if counts != lost_steps else killed_more(*run.attempts)
    recomputed = f"{sum(counts):,}{at_least}" if counts or not lost_steps else "-"
    return {
        "wall time": format_duration(times.total),
        **(parts if several else {}),
        "effective training time ratio": format_percent(times.effective),
        **idle_rows(run),
        **({"steps recomputed": recomputed} if several else {}),
        "attempts": f"{len(run.attempts):,}",
        **({"  started again": restart_counts(run)} if several else {}),
    }


def idle_rows(run: History) -> dict[str, str]:
    """Return the shares of the allocated time in which nothing was computed."""
    spares = spare_share(run)
    return {
        "idle in the allocation": format_percent(idle_share(run)),
        **({"  spare nodes": f"{spares:.1%} of the nodes' time"} if spares is not None else {}),
    }


def format_percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def restart_counts(run: History) -> str:
    """Describe what the batch scripts did after the attempts."""
    decisions = [attempt.decision for attempt in run.attempts]
    return f"{decisions.count('restart'):,} in place, {decisions.count('requeue'):,} by a requeue"


def killed_more(*attempts: Attempt) -> str:
    """Return " or more" for a killed attempt: after its last line it has done up to
    metrics.log_interval - 1 steps."""
    return " or more" if any(a.state == "killed" and a.began for a in attempts) else ""


def attempt_table(run: History) -> str:
    """Format one row per attempt; a run with one attempt needs fewer columns."""
    rows = [["", "job", "ranks", "hosts", "steps", "recomputed", "start-up", "time", "end"]]
    times = run.wall_time
    for attempt, startup, lost_steps in zip(run.attempts, times.startups, times.lost, strict=True):
        hosts = attempt.hosts
        job = attempt.job and f"{attempt.job}.{attempt.restart}"
        rows.append([
            attempt.name,
            job or "-",
            str(attempt.world_size or "-"),
            (f"{hosts[0]} and {len(hosts) - 1} more" if len(hosts) > 2 else ",".join(hosts) or "-")
            + (f"; spare: {','.join(attempt.spares)}" if attempt.spares else ""),
            attempt.steps,
            "-" if lost_steps is None else f"{lost_steps:,}{killed_more(attempt)}",
            "-" if startup is None else format_duration(startup),
            format_duration(attempt.ended - attempt.opened),
            attempt.ending,
        ])  # fmt: skip
    alone = len(run.attempts) == 1
    return align_table([row[:5] + row[7:] if alone else row for row in rows], gap=3, wrap=True)


def start_times(run: History) -> str:
    """Describe each start: its duration, and what it changed; "" if unknown."""
    lines = []
    if any(attempt.startup for attempt in run.attempts):
        lines.append(f"\nstart-up of {run.path}, seconds\n{startup_table(run)}")
    for attempt in run.attempts:
        if less := attempt.smaller(run.attempts):
            lines.append(f"attempt {attempt.name}: {less}")
        lines += [f"attempt {attempt.name}, changed: {text}" for text in attempt.changed]
    return "".join(f"\n{line}" for line in lines)


def refused_starts(run: History) -> str:
    """Describe the starts that never became attempts."""
    return "".join(
        f"\na start {format_duration(time.time() - each.time)} ago"
        f"{f' (job {each.job})' if each.job else ''} was {each.text}"
        for each in run.refusals
    )


def startup_table(run: History) -> str:
    """Format one row per attempt that has trained, one column per part of its start-up."""
    attempts = [attempt for attempt in run.attempts if attempt.startup]
    parts = [part for part in START_PARTS if any(part in attempt.startup for attempt in attempts)]
    rows = [["", *parts, "all but the queue"]]
    for attempt in attempts:
        seconds = attempt.startup
        total = sum(seconds.values()) - seconds.get("queue", 0.0)
        cells = [f"{seconds[part]:.1f}" if part in seconds else "-" for part in parts]
        rows.append([attempt.name, *cells, f"{total:.1f}"])
    return align_table(rows, gap=3)


def replica_table(history: ReplicaHistory) -> str:
    rows = [["replica", "starts", "rounds", "lost"]]
    for number, replica in history.by_number.items():
        rows.append([str(number), str(replica.starts), str(replica.rounds), replica.losses])
    last = max(history.rounds, default=0)
    return (
        f"{align_table(rows, gap=3, wrap=True)}\n"
        f"{last:,} rounds; {history.sent / 1e6:,.1f} MB sent by all replicas"
    )
