"""The page: ONE HTML file about one run or many, without scripts or external resources. No torch.

Nothing written by a run can become markup (markup.escape_html), and even if it did, the page's
policy lets no script run and nothing load. While a run continues and the page is rewritten, a
`meta` element makes the browser reload it.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from kempner.jobs.records.facts import run_facts
from kempner.jobs.records.nodes import NodeHistory, merge_nodes, nodes_of
from kempner.jobs.records.run_history import load_history
from kempner.jobs.report.page.charts import curve_points, render_sparkline
from kempner.jobs.report.page.markup import (
    escape_html,
    format_clock,
    format_lasting,
    format_loss,
    render_pill,
)
from kempner.jobs.report.page.run import nodes_table, render_section
from kempner.jobs.slurm import SlurmJob
from kempner.jobs.system.files import write_atomic
from kempner.jobs.system.seal import SEAL, seal_text

STYLE = Path(__file__).with_name("page.css")
LISTED_FIRST = ("running", "starting", "waiting", "silent")
ALONE = 12  # runs that one process reads alone
CONTENT_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'"
)
PAGE_SIGN = f'content="{CONTENT_POLICY}"'  # marks a file as such a page


class Told(NamedTuple):
    """Facts about one run shown on the page."""

    facts: dict[str, Any]
    html: str
    spark: str
    nodes: list[NodeHistory]


def write_page(
    runs: list[Path], page: Path, jobs: dict[str, SlurmJob] | None, every: int | None = None
) -> bool:
    """Write the page; returns whether one of the runs continues. `every`: seconds until the next
    write. Raises OSError."""
    now = time.time()
    work = [(path, page, jobs, now, f"r{i}", len(runs) > 1) for i, path in enumerate(runs)]
    if len(work) > ALONE:
        # A fork has all modules loaded; a spawned process would import them again.
        fork = multiprocessing.get_context("fork")
        # The CPUs that this process may use: a login node or a step may limit them.
        count = min(8, len(os.sched_getaffinity(0)))
        with concurrent.futures.ProcessPoolExecutor(count, fork) as pool:
            results = list(pool.map(_tell, work, chunksize=4))
    else:
        results = [_tell(each) for each in work]
    lives = any(each.facts["state"] in LISTED_FIRST for each in results)
    # To a link's target: a rename would replace the link itself.
    write_atomic(page.resolve(), seal_text(render_document(results, now, every if lives else None)))
    return lives


def _tell(work: tuple[Path, Path, dict[str, SlurmJob] | None, float, str, bool]) -> Told:
    path, page, jobs, now, name, brief = work
    run = load_history(path, jobs, sample=brief)
    facts = run_facts(run, now)
    html = render_section(run, facts, page, now, name, brief=brief)
    small = render_sparkline(curve_points(run.losses, "loss")) if brief else ""
    return Told(facts, html, small, nodes_of([run]))


def render_document(runs: list[Told], now: float, every: int | None) -> str:
    alone = len(runs) == 1
    title = f"{runs[0].facts['run']}: {runs[0].facts['state']}" if alone else f"{len(runs):,} runs"
    body = f"<main>{runs[0].html}</main>" if alone else render_index(runs, now)
    again = f'<meta http-equiv="refresh" content="{every}">' if every else ""
    zone = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    foot = f"As of {zone}. Times are in {time.strftime('%Z', time.localtime(now))}."
    foot += f" The page reloads every {every} s." if every else ""
    return (
        # A policy in a meta element applies only to what follows it. The empty icon keeps the
        # browser from asking for /favicon.ico.
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">'
        f'<meta name="generator" content="kempner {SEAL}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light '
        f'dark">{again}<title>{escape_html(title, 200)}</title><link rel="icon" '
        f'href="data:,"><style>{STYLE.read_text()}</style></head>\n'
        f"<body>{body}<footer>{foot}</footer></body></html>\n"
    )


def render_index(runs: list[Told], now: float) -> str:
    """List all runs: first those that need attention, then those in progress."""

    def rank(i: int) -> tuple[bool, bool, float]:
        facts = runs[i].facts
        return (
            not facts["attention"],
            facts["state"] not in LISTED_FIRST,
            -(facts["last_sign"] or 0.0),
        )

    order = sorted(range(len(runs)), key=rank)
    anchors = {runs[i].facts["run"]: f"r{i}" for i in order}
    alarms = sum(each.facts["attention"] for each in runs)
    counts = {"needs attention" if alarms == 1 else "need attention": alarms}
    for each in runs:
        state = each.facts["state"]
        counts[state] = counts.get(state, 0) + 1
    summary = " · ".join(f"{n:,} {word}" for word, n in counts.items() if n)
    rows = "".join(render_row(runs[i], f"r{i}", now) for i in order)
    sections = "".join(
        f'<main class="one" id="r{i}"><p><a href="#all">← all runs</a></p>{runs[i].html}</main>'
        for i in order
    )
    return (
        f'<main id="all"><header><h1>Runs</h1></header><p class="night">{summary}</p>'
        '<table class="cards runs"><thead><tr><th>run</th><th>state</th><th>progress</th>'
        '<th>loss</th><th class="n"></th><th class="n">tokens/s</th><th class="n">attempts</th>'
        f"<th>expected end, or last sign</th></tr></thead><tbody>{rows}</tbody></table>"
        f"{nodes_table(merge_nodes(each.nodes for each in runs), now, anchors)}</main>{sections}"
    )


def render_row(each: Told, name: str, now: float) -> str:
    f = each.facts
    share = "" if f["progress"] is None else f'<div style="width:{100 * f["progress"]:.1f}%"></div>'
    most = f" of {f['max_steps']:,}" if f["max_steps"] else ""
    if f["eta"] is not None:
        when = f"{format_clock(f['eta'], now)} <small>in {format_lasting(f['eta_s'])}</small>"
    elif f["last_sign"]:
        when = (
            f"{format_clock(f['last_sign'], now)} "
            f"<small>{format_lasting(now - f['last_sign'])} ago</small>"
        )
    else:
        when = "–"
    why = f'<tr class="because"><td colspan="8">{escape_html(f["why"], 400)}</td></tr>'
    rate = "–" if f["tokens_per_s"] is None else f"{f['tokens_per_s']:,.0f}"
    again = f" <small>{f['requeues']:,} requeued</small>" if f["requeues"] else ""
    return (
        f'<tr><th scope="row"><a href="#{name}">{escape_html(f["run"], 120)}</a></th>'
        f'<td data-l="state">{render_pill(f["state"], f["attention"])}</td>'
        f'<td data-l="step"><div class="progress">{share}</div>'
        f"<small>{'–' if f['step'] is None else format(f['step'], ',')}{most}</small></td>"
        f'<td class="curve" data-l="loss">{each.spark}</td>'
        f'<td class="n" data-l="last loss">{format_loss(f["loss"])}</td>'
        f'<td class="n" data-l="tokens/s">{rate}</td>'
        f'<td class="n" data-l="attempts">{f["attempts"]:,}{again}</td>'
        f'<td data-l="when">{when}</td></tr>' + (why if f["attention"] and f["why"] else "")
    )
