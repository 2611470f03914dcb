"""One run on the page: its state, its curves, its life, its nodes, its last log lines. No torch."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

from kempner.jobs.records.facts import last_sign
from kempner.jobs.records.nodes import NodeHistory, nodes_of
from kempner.jobs.records.run_history import History, main_figures
from kempner.jobs.report.page.charts import (
    BUCKETS,
    Curve,
    CurvePoints,
    curve_points,
    render_chart,
    spans_decades,
)
from kempner.jobs.report.page.layers import layers_table
from kempner.jobs.report.page.life import render_attempts, render_life
from kempner.jobs.report.page.markup import (
    escape_html,
    file_link,
    format_clock,
    format_lasting,
    format_loss,
    render_pill,
)
from kempner.jobs.system.reading import open_regular

DAY = 86400.0
MARKS = 40  # starts of attempts in a curve; more would hide the curve
LOG_LINES, LOG_WIDTH, LOG_BYTES = 25, 240, 1 << 16
FILES = (
    "config.toml",
    "metrics.jsonl",
    "attempts.jsonl",
    "status.json",
    "logs/latest",
    "checkpoints",
    "report.png",
    "timeline.png",
    "tensorboard",
)
DECIDED = {
    "requeue": "requeued",
    "restart": "in place",
    "chain": "by the chain's next job",
    "leave": "left to Slurm",
}
OWN_LINES = ("kempner: ", "srun: ", "slurmstepd: ")  # of the batch log: rank 0 has its own log
NODES = 30  # without a fault


def render_section(
    run: History, facts: dict[str, Any], page: Path, now: float, name: str, *, brief: bool
) -> str:
    """Write the section of a run. `facts`: run_facts(run); `name`: the anchor; `brief`: for a page
    of many runs."""
    return "".join((
        render_header(run, facts, now),
        render_curves(run, brief=brief),
        "" if brief else layers_table(run),
        render_life(run, now),
        render_attempts(run, now, name, 20 if brief else 100),
        nodes_table(nodes_of([run]), now, {}, 5 if brief else NODES),
        last_lines(run.path, 8 if brief else LOG_LINES),
        render_files(run.path, page),
    ))  # fmt: skip


def render_header(run: History, facts: dict[str, Any], now: float) -> str:
    state = facts["state"]
    why = f'<p class="why">{escape_html(facts["why"], 1000)}</p>' if facts["attention"] else ""
    if state == "waiting" or (run.refusal and not facts["attention"] and facts["why"]):
        why = f"<p>{escape_html(facts['why'], 400)}</p>"
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{more}</small></dd></div>"
        for name, value, more in figure_cells(run, facts, now)
    )
    lineage = f"<p>fork of {escape_html(' ← '.join(run.lineage), 300)}</p>" if run.lineage else ""
    return (
        f"<header><h1>{escape_html(run.path, 300)}</h1>"
        f"{render_pill(state, facts['attention'])}</header>{why}{lineage}"
        f"{render_progress(facts)}<dl>{cells}</dl>{recent_troubles(run, now)}"
    )


def render_progress(facts: dict[str, Any]) -> str:
    if facts["progress"] is None:
        return ""
    share = 100 * facts["progress"]
    return (
        f'<div class="progress" role="progressbar" aria-valuenow="{share:.1f}" aria-valuemin="0" '
        f'aria-valuemax="100"><div style="width:{share:.2f}%"></div></div>'
    )


def figure_cells(run: History, facts: dict[str, Any], now: float) -> list[tuple[str, str, str]]:
    """Return (name, value, more) of each figure, as HTML."""
    most = facts["max_steps"]
    sign = last_sign(run)
    step = "-" if facts["step"] is None else f"{facts['step']:,}"
    cells = [("step", step, f"of {most:,} · {facts['progress']:.1%}" if most else "")]
    if facts["eta"] is not None:
        cells.append(
            (
                "done",
                format_clock(facts["eta"], now),
                f"in {format_lasting(facts['eta_s'])} at this pace",
            )
        )
    if sign is not None:
        name = "last sign" if facts["state"] in ("running", "silent", "starting") else "ended"
        cells.append((name, f"{format_lasting(now - sign)} ago", format_clock(sign, now)))
    losses = [line for line in run.losses if line["loss"] is not None]
    if losses:
        low = min(losses, key=lambda line: line["loss"])
        more = f"lowest {format_loss(low['loss'])} at {low['step']:,}"
        cells.append(("loss", format_loss(losses[-1]["loss"]), more))
    checks = [line for line in run.validations if line["val_loss"] is not None]
    if checks:
        low = min(checks, key=lambda line: line["val_loss"])
        more = f"lowest {format_loss(low['val_loss'])} at {low['step']:,}"
        cells.append(("validation", format_loss(checks[-1]["val_loss"]), more))
    if facts["reward"] is not None:
        cells.append(("reward", format_loss(facts["reward"], 3), ""))
    if facts["tokens_per_s"] is not None:
        pace = facts["seconds_per_step"]
        more = f"{pace:.3g} s a step" if pace else ""
        cells.append(("tokens/s", f"{facts['tokens_per_s']:,.0f}", more))
    if run.saves:
        keys = ("saved_step", "save_stall", "save_drain")  # the last save has no line
        step, stall, drain = (run.saves[-1][key] for key in keys)
        cells.append(
            (f"save of step {step:,}", f"{stall:.2g} s", f"stall, durable {drain:.2g} s later")
        )
    others = [
        f"{n} {DECIDED.get(d) or escape_html(d, 20)}"
        for d, n in facts["decisions"].items()
        if d != "end"
    ]
    cells.append(("attempts", f"{len(run.attempts):,}", ", ".join(others)))
    if job := facts["job"]:
        time_left = f"{escape_html(job['left'], 30)} left" if job["state"] == "RUNNING" else ""
        cells.append(
            (
                "job",
                escape_html(job["number"], 30),
                time_left or escape_html(job["state"].lower(), 30),
            )
        )
    return cells


def recent_troubles(run: History, now: float) -> str:
    """Summarise the failures of the last 24 hours, and their hosts, in a sentence."""
    since = now - DAY
    attempts = [a for a in run.attempts if a.ended >= since and a.state != "running"]
    if not attempts or (len(run.attempts) == 1 and attempts[0].state == "done"):
        return ""
    kinds = Counter(a.state if a.began else "died before it began" for a in attempts)
    words = [f"{n} {escape_html(state)}" for state, n in kinds.most_common()]
    # A fault counts by its own time: its attempt may have begun days before.
    hosts = {n.host: sum(s.time >= since for s in n.sins) for n in nodes_of([run])}
    blamed = [f"{escape_html(h, 60)} ({n})" for h, n in hosts.items() if n][:6]
    out = sorted({h for a in attempts for h in a.excluded.split(",") if h})
    text = f"In the last 24 h {len(attempts):,} attempt{'s' * (len(attempts) > 1)} ended: "
    text += ", ".join(words)
    text += f". Faults on {', '.join(blamed)}" if blamed else ""
    text += f". Excluded: {escape_html(', '.join(out), 200)}" if out else ""
    return f'<p class="night">{text}.</p>'


def render_curves(run: History, *, brief: bool) -> str:
    buckets = BUCKETS // 3 if brief else BUCKETS
    marks = [a.first_step for a in run.attempts if a.began and a.counted and a.first_step][:MARKS]
    steps = [line["step"] for line in run.lines]
    most = max(steps, default=0) or None

    def figure(title: str, unit: str, curves: list[Curve], **how: Any) -> str:
        curves = [curve for curve in curves if any(y is not None for _, y in curve.points)]
        if not curves:
            return ""
        key = "".join(
            f'<span class="{c.style}">{escape_html(c.name)}</span>' for c in curves if c.name
        )
        ys = [y for curve in curves for _, y in curve.points if y is not None]
        scale = ", logarithmic" * (how.get("log", False) and spans_decades(min(ys), max(ys)))
        bad = sum(y is None for _, y in curves[0].points)
        bad_text = f"<em>{bad:,} lines not finite</em>" if bad else ""
        chart = render_chart(
            curves, marks, most=most, buckets=buckets, what=f"{title} over the steps", **how
        )
        caption = f"<b>{title}</b> <small>{(unit + scale).lstrip(', ')}</small>{key}{bad_text}"
        return f"<figure><figcaption>{caption}</figcaption>{chart}</figure>"

    training = Curve(curve_points(run.losses, "loss"), "training")
    checks = Curve(curve_points(run.validations, "val_loss"), "validation", "b", dots=True)
    both = [training, checks] if checks.points else [Curve(training.points)]
    rewards: CurvePoints = curve_points(run.losses, "reward")
    figures = [
        figure("Loss", "nats per token", both, log=True),
        figure("Reward", "mean of a step", [Curve(rewards, style="c")]),
        figure(
            "Throughput", "tokens/s", [Curve(curve_points(run.losses, "tokens_per_s"))], zero=True
        ),
        *(render_results(run, figure)),
    ]
    if not brief:
        figures += [
            figure("Gradient norm", "", [Curve(curve_points(run.losses, "grad_norm"))], log=True),
            figure("Learning rate", "", [Curve(curve_points(run.losses, "lr"))], zero=True),
        ]
    if not any(figures):
        what = "No losses are recorded." if run.step else "No step is recorded yet."
        return f'<section><p class="none">{what}</p></section>'
    many = len(run.losses) > 2 * buckets
    note = "x: step" + ("; dotted: a restart" if marks else "")
    note += f"; of {len(run.losses):,} lines, means and extremes" if many else ""
    note += f" (a sample: {run.share:.0%} of metrics.jsonl)" if run.share < 1 else ""
    head = f"<h2>Curves <span>{note}</span></h2>"
    return f'<section>{head}<div class="curves">{"".join(figures)}</div></section>'


def render_results(run: History, figure: Any) -> list[str]:
    """Draw the results of eval.py, one main figure per color; report.py's table has all."""
    rows = [{"step": line["step"], **main_figures(line)} for line in run.results]
    names = [name for name in dict.fromkeys(itertools.chain(*rows)) if name != "step"]
    curves = [
        Curve(curve_points(rows, name), name, color, dots=True)
        for color, name in zip("abcd", names, strict=False)
    ]
    more = f"{len(curves)} of {len(names)}" if len(names) > len(curves) else ""
    return [figure("Evaluation", more, curves)] if curves else []


def nodes_table(
    nodes: list[NodeHistory], now: float, anchors: dict[str, str], most: int = NODES
) -> str:
    """Write the hosts and their faults. `anchors`: of the runs, if there are several; `most`: hosts
    without a fault, in addition."""
    guilty = [node for node in nodes if node.sins or node.excluded]
    rest = [node for node in nodes if not (node.sins or node.excluded)]
    if not nodes:
        return ""
    rows = []
    for node in guilty + rest[:most]:
        kinds = " · ".join(f"{n} {escape_html(kind, 60)}" for kind, n in node.kinds.items())
        last = ""
        if sin := node.last:
            run = escape_html(sin.run, 80)
            run = f'<a href="#{anchors[sin.run]}">{run}</a> ' if sin.run in anchors else ""
            last = (
                f"{format_clock(sin.time, now)} {run}<small>{escape_html(sin.reason, 200)}</small>"
            )
        count = f'<td data-l="runs" class="n">{len(node.runs)}</td>' if anchors else ""
        rows.append(
            f'<tr><th scope="row">{escape_html(node.host, 100)}</th>{count}'
            f'<td data-l="attempts" class="n">{node.attempts:,}</td>'
            f'<td data-l="trained" class="n">{format_lasting(node.seconds)}</td>'
            f'<td data-l="faults">{kinds or "–"}</td>'
            f'<td data-l="excluded" class="n">{node.excluded or "–"}</td>'
            f'<td data-l="last fault" class="wide">{last or "–"}</td></tr>'
        )
    more = len(rest) - most
    head = "<th>host</th>" + '<th class="n">runs</th>' * bool(anchors)
    head += '<th class="n">attempts</th><th class="n">trained</th><th>faults</th>'
    head += '<th class="n">excluded</th><th>last fault</th>'
    tail = f'<p class="none">and {more:,} hosts without a fault</p>' if more > 0 else ""
    summary = f"{len(guilty):,} of {len(nodes):,} with faults" if guilty else "no faults"
    return (
        f'<section><h2 id="nodes">Nodes <span>{summary}</span></h2><table class="cards">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{tail}</section>"
    )


def last_lines(run: Path, most: int) -> str:
    """Show the last lines of rank 0's log and of the batch log."""
    rank = run / "logs/latest/rank-0.log"
    # With more than 64 ranks each host has its own folder: log_path() in run_log.py.
    ranks = [rank] if os.path.isfile(rank) else sorted(run.glob("logs/latest/*/rank-0.log"))[:1]
    batch = max(run.glob("logs/batch-*.log"), key=modified_time, default=None)
    sections = []
    for name, path in (("rank 0", ranks[0] if ranks else None), ("batch script", batch)):
        own = OWN_LINES if name == "batch script" and ranks else ("",)
        if lines := log_tail(path, most, own) if path else []:
            text = "\n".join(escape_html(line, LOG_WIDTH) for line in lines)
            sections.append(f"<h3>{name}</h3><pre>{text}</pre>")
    return f"<section><h2>Last log lines</h2>{''.join(sections)}</section>" if sections else ""


def modified_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def log_tail(path: Path, most: int, parts: tuple[str, ...]) -> list[str]:
    """Return the last lines that contain one of these parts."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            # A log may have gigabytes; the first line of the rest may be cut.
            file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = (line for line in text.splitlines() if line.strip())
    return [line for line in lines if any(part in line for part in parts)][-most:]


def render_files(run: Path, page: Path) -> str:
    there = [file_link(run / name, page, name) for name in FILES if os.path.exists(run / name)]
    there += [
        file_link(path, page, str(path.relative_to(run)))
        for path in sorted(run.glob("logs/batch-*.log"), key=modified_time)[-3:]
    ]
    newest = run / "checkpoints/latest"
    if os.path.exists(newest):
        there.append(file_link(newest, page, f"checkpoints/{newest.resolve().name}"))
    return (
        f'<section class="files"><h2>Files</h2><p>{" ".join(there)}</p></section>' if there else ""
    )
