"""Summary of a run, or of several side by side: a table and a picture.

    python scripts/report.py runs/quickstart
    python scripts/report.py runs/a runs/b --out compared.png

The picture shows loss, throughput and learning rate over the steps; dotted lines are the starts of
attempts. A run with several attempts gets a second one, timeline.png: what the run did when, and
how each attempt ended. Runs that still train can be reported too. Exit code 0, or 2 when a run has
nothing to show.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from pathlib import Path

from kempner import slurm
from kempner.history import plots
from kempner.history.attempts import Attempt, Record
from kempner.history.replicas import Replicas, replicas_of
from kempner.history.results import PREFIX
from kempner.history.run_history import History, is_run, load_history
from kempner.history.tables import aligned

STEP_PARTS = ("data", "compute", "checkpoint", "eval")
IDLE = ("wait", "engine_idle")  # of reinforcement learning: both sides
FORMATS = (".png", ".pdf", ".svg")


def main(argv: list[str]) -> int:
    options = parse(argv)
    runs, problems = find_runs(options.runs)
    if problems:
        return fail(*problems)
    print(table(runs))
    for run in runs:
        print(f"\nattempts of {run.path}\n{attempt_table(run)}")
        if replicas := replicas_of(run.path):
            print(f"\nreplicas of {run.path}\n{replica_table(replicas)}")
    alone = len(runs) == 1
    out = options.out or (runs[0].path / "report.png" if alone else Path("report.png"))
    timeline = None
    if alone and len(runs[0].attempts) > 1 and runs[0].wall_time.total:
        name = f"{out.stem}-timeline{out.suffix}" if options.out else "timeline.png"
        timeline = out.with_name(name)
    try:
        plots.draw(runs, out)
        if timeline is not None:
            plots.draw_timeline(runs[0], timeline)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        fix = ".venv/bin/pip install -c constraints.txt -e '.[plot]'"
        print(f"\nno plot: matplotlib is not installed; run {fix}")
        return 0
    except OSError as error:
        return fail(f"{out}: {error.strerror}; name another file by --out")
    print(f"\npicture: {out}")
    if timeline is not None:
        print(f"timeline: {timeline}")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="report.py",
        description=about,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"the picture, {', '.join(FORMATS)} (default: RUN/report.png; of several, report.png)",
    )
    options = parser.parse_args(argv)
    if options.out is not None and options.out.suffix not in FORMATS:
        parser.error(f"--out {options.out}: must end in {', '.join(FORMATS)}")
    return options


def fail(*problems: str) -> int:
    for problem in problems:
        print(f"report: error: {problem}", file=sys.stderr)
    return 2


def find_runs(paths: list[Path]) -> tuple[list[History], list[str]]:
    runs, problems, jobs = [], [], slurm.my_jobs()
    for path in dict.fromkeys(paths):
        if not path.is_dir():
            problems.append(f"{path}: no such directory; name the run.dir of a training")
            continue
        run = load_history(path, jobs)
        if run.losses:
            runs.append(run)
        elif is_run(path):
            ends = [a for a in run.attempts if a.state != "running"]
            last = f"; the last attempt: {ends[-1].ending}" if ends else ""
            problems.append(
                f"{path}: no step is recorded yet; there is a line every metrics.log_interval "
                f"steps{last}"
            )
        else:
            problems.append(f"{path}: not a run; name the run.dir of a training")
    return runs, problems


# --- The table --------------------------------------------------------------------------------


def table(runs: list[History]) -> str:
    """One row per figure, one column per run."""
    several = any(len(run.attempts) > 1 for run in runs)
    forks = any(run.lineage for run in runs)
    columns = [
        {
            "run": str(run.path),
            **({"fork of": " <- ".join(run.lineage) or "-"} if forks else {}),
            **facts(run),
            **wall_time(run, several),
        }
        for run in runs
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    return aligned(
        [[name, *(column.get(name, "-") for column in columns)] for name in names], gap=3
    )


def facts(run: History) -> dict[str, str]:
    losses = [line for line in run.losses if line["loss"] is not None]  # None: not finite
    last = run.losses[-1]
    return {
        "state": state(run),
        "step": f"{run.step:,} of {run.status.get('max_steps', 0):,}",
        "loss, first": at_step(losses[:1], "loss"),
        "loss, last": at_step(losses[-1:], "loss"),
        "loss, best": at_step(best(losses, "loss"), "loss"),
        "validation, last": at_step(run.validations[-1:], "val_loss"),
        "validation, best": at_step(best(run.validations, "val_loss"), "val_loss"),
        **results(run),
        "non-finite steps": f"{skipped(run.losses):,}",
        "tokens": f"{last['tokens']:,}",
        "tokens/s, median": f"{median(run.losses, 'tokens_per_s'):,.0f}",
        "step time, median": f"{median(run.losses, 'step_time'):.3g} s",
        **shares(run.losses),
        "MFU, median": mfu(run.losses),
        **replicas(run),
        **rewards(run),
        "memory, most": f"{max(line.get('memory_gib', 0.0) for line in run.losses):.2f} GiB",
    }


def state(run: History) -> str:
    if run.state.word not in ("running", "silent"):
        return run.state.word
    return f"{run.state.word}, last line {duration(time.time() - run.lines[-1]['time'])} ago"


def at_step(lines: list[Record], key: str) -> str:
    return f"{lines[0][key]:.4f} at step {lines[0]['step']:,}" if lines else "-"


def best(lines: list[Record], key: str) -> list[Record]:
    finite = [line for line in lines if line[key] is not None]
    return [min(finite, key=lambda line: line[key])] if finite else []


def replicas(run: History) -> dict[str, str]:
    """Of a run whose replicas meet once a round; bytes and time are those of the first one."""
    if not run.rounds:
        return {}
    last = run.rounds[-1]
    sent, others = (sum(r[f"bytes_{x}"] for r in run.rounds) for x in ("sent", "data_parallel"))
    return {
        "replicas": f"{last['replicas']:,}",
        "rounds": f"{last['round']:,}, loss of all {last['round_loss']:.4f}",
        "sent by a replica": f"{size(sent)}"
        + (f", {sent / others:.2%} of data parallel's {size(others)}" if others else ""),
        "  outer steps": f"{sum(r['outer_time'] for r in run.rounds):.1f} s",
    }


def rewards(run: History) -> dict[str, str]:
    """Of reinforcement learning. Shares of time are those of the wall time of the steps."""
    lines = [line for line in run.losses if "reward" in line]
    if not lines:
        return {}
    idle = [sum(line.get(name, 0.0) for line in lines) / len(lines) for name in IDLE]
    dropped = sum(line.get("dropped_stale", 0) for line in lines)
    failed = sum(line.get("failed_rewards", 0) for line in lines)
    return {
        "reward, first": at_step(lines[:1], "reward"),
        "reward, last": at_step(lines[-1:], "reward"),
        "reward, best": at_step([max(lines, key=lambda line: line["reward"])], "reward"),
        "sampled tokens, mean": f"{mean(lines, 'length'):.1f}; {mean(lines, 'truncated'):.1%} cut",
        "versions behind, mean": f"{mean(lines, 'staleness'):.2f}; {dropped:,.0f} groups dropped",
        "rewards that failed": f"{failed:,.0f}",
        "trainer - sampler": f"{mean(lines, 'mismatch'):.2g} (mean |log ratio|)",
        "the trainer waits": f"{idle[0]:.1%}",
        "the engines are idle": f"{idle[1]:.1%}",
    }


def mean(lines: list[Record], key: str) -> float:
    return statistics.mean(line.get(key, 0.0) for line in lines)


def size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def results(run: History) -> dict[str, str]:
    """The last figures of each task that eval.py has run, without their errors."""
    last = {name: line for line in run.results for name in line if name.startswith(PREFIX)}
    return {
        name.removeprefix(PREFIX): at_step([line], name)
        for name, line in last.items()
        if "stderr" not in name
    }


def median(lines: list[Record], key: str) -> float:
    return statistics.median(line[key] for line in lines)


def shares(lines: list[Record]) -> dict[str, str]:
    """Where the time of the steps went. A median would hide a part that comes every 100th line."""
    total = sum(line["step_time"] for line in lines)
    times = {part: sum(line.get(f"{part}_time", 0.0) for line in lines) for part in STEP_PARTS}
    return {f"  {part}": f"{seconds / total:.1%}" for part, seconds in times.items()}


def skipped(lines: list[Record]) -> int:
    """Steps whose update was left out, because it was not finite: every attempt counts its own."""
    counts: dict[int, int] = {}
    for line in lines:
        attempt, count = line.get("attempt", 0), line.get("skipped", 0)
        counts[attempt] = max(count, counts.get(attempt, 0))
    return sum(counts.values())


def mfu(lines: list[Record]) -> str:
    known = [line for line in lines if line.get("mfu") is not None]
    return f"{median(known, 'mfu'):.1%}" if known else "-"


def wall_time(run: History, several: bool) -> dict[str, str]:
    """From the first start to the last sign of life. `several`: and what each part of it went
    to."""
    spent = run.wall_time
    parts = {
        f"  {part}": f"{duration(seconds)}, {seconds / max(spent.total, 1e-9):.1%}"
        for part, seconds in spent.parts.items()
    }
    recomputed = f"{sum(spent.lost):,}" + more(*run.attempts)
    return {
        "wall time": duration(spent.total),
        **(parts if several else {}),
        "effective training time ratio": f"{spent.effective:.1%}",
        **({"steps recomputed": recomputed} if several else {}),
        "attempts": f"{len(run.attempts):,}",
    }


def more(*attempts: Attempt) -> str:
    """One that was killed has done steps after its last line, fewer than metrics.log_interval."""
    return " or more" if any(a.state == "killed" and a.began for a in attempts) else ""


def attempt_table(run: History) -> str:
    """One row an attempt; a run with one attempt needs fewer columns."""
    rows = [["", "job", "ranks", "hosts", "steps", "recomputed", "start-up", "time", "end"]]
    spent = run.wall_time
    for attempt, startup, lost in zip(run.attempts, spent.startups, spent.lost, strict=True):
        began, hosts = attempt.began, attempt.hosts
        job = attempt.job and f"{attempt.job}.{attempt.restart}"
        rows.append([
            attempt.name,
            job or "-",
            str(attempt.world_size or "-"),
            f"{hosts[0]} and {len(hosts) - 1} more" if len(hosts) > 2 else ",".join(hosts) or "-",
            f"{attempt.first_step:,} to {attempt.last_step:,}" if began else "-",
            f"{lost:,}{more(attempt)}",
            "-" if startup is None else duration(startup),
            duration(attempt.ended - attempt.opened),
            attempt.ending,
        ])  # fmt: skip
    alone = len(run.attempts) == 1
    return aligned([row[:5] + row[7:] if alone else row for row in rows], gap=3, wrap=True)


def replica_table(found: Replicas) -> str:
    rows = [["replica", "starts", "rounds", "lost"]]
    for number, replica in found.by_number.items():
        rows.append([str(number), str(replica.starts), str(replica.rounds), replica.losses])
    last = max(found.rounds, default=0)
    return (
        f"{aligned(rows, gap=3, wrap=True)}\n"
        f"{last:,} rounds; {found.sent / 1e6:,.1f} MB sent by all replicas"
    )


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return (
        f"{minutes} min {int(seconds) % 60} s" if minutes < 60 else f"{hours} h {minutes % 60} min"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly in `| head`, as other commands do
    sys.exit(main(sys.argv[1:]))
