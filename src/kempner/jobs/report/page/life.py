"""Life of a run on the page: how its time was spent, its attempts and their events. No torch."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence

from kempner.jobs.records.attempts import AFTER, Attempt, Record
from kempner.jobs.records.run_history import History
from kempner.jobs.report.page.markup import (
    escape_html,
    format_clock,
    format_lasting,
    render_pill,
    same_day,
)
from kempner.jobs.report.wall_time import TIME_PARTS, UNCOUNTED, TimePhase

BAR_COLUMNS = 360  # per bar; each shows the shares of its time
HEIGHT = 20
QUEUE_LABEL, IDLE_LABEL = "in the queue", "nobody runs it"
ORDER = (*(part for part in TIME_PARTS if part != "not running"), QUEUE_LABEL, IDLE_LABEL)
MEANING = {
    "training": "steps that count",
    UNCOUNTED: "a program whose steps are not known",
    "lost": "steps that a restart has done again",
    "stalled": "steps that took far longer than usual",
    "start-up": "from the start of the batch script to the first step",
    "shutdown": "from the last step to the end",
    QUEUE_LABEL: "between an attempt and the next one of a requeued job",
    IDLE_LABEL: "between attempts, and no job was waiting",
    "ended": "done or stopped as asked, until a user continued it; not in the ratio",
}
# Events already shown in the rows of attempts.
TOLD = frozenset(("start", "first_step", "end", "fault", "decision"))
EVENT_HEAD = frozenset(("event", "time", "job", "restart", "attempt_id", "attempt", "step"))
SHOWN_REFUSALS = 20  # that are shown
NOTES = 20  # of an attempt


def phases_of(run: History, now: float) -> list[TimePhase]:
    """Return the phases of the wall time, queue waits apart, up to now if the run continues."""
    phases = []
    goes_on = {a.ended: a.decision not in ("", "end") for a in run.attempts}
    ends = sorted(goes_on)
    for phase in run.wall_time.phases:
        part = phase.part
        if part == "not running":
            before = [end for end in ends if end <= phase.began]
            part = QUEUE_LABEL if before and goes_on[before[-1]] else IDLE_LABEL
        phases.append(phase._replace(part=part))
    if phases and run.state.word in ("waiting", "starting") and now > phases[-1].ended:
        part = QUEUE_LABEL if run.state.word == "waiting" else "start-up"
        phases.append(TimePhase(part, phases[-1].ended, now))
    return phases


def render_bar(
    phases: Sequence[TimePhase], began: float, ended: float, columns: int = BAR_COLUMNS
) -> str:
    """Draw a bar over the time from `began` to `ended`. A phase shorter than a column takes its
    share of the column's height."""
    width = (ended - began) / columns or 1.0
    seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for phase in phases:
        first = max(0, int((phase.began - began) / width))
        last = min(columns - 1, max(first, math.ceil((phase.ended - began) / width) - 1))
        for column in range(first, last + 1):
            left, right = began + column * width, began + (column + 1) * width
            inside = min(phase.ended, right) - max(phase.began, left)
            # Never 0: the shares of a column are divided by their sum.
            seconds[column][phase.part] += max(inside, 1e-9)
    boxes: dict[str, list[tuple[int, int, float, float]]] = defaultdict(list)
    for column in sorted(seconds):
        base, total = 0.0, sum(seconds[column].values())
        for part in ORDER:
            # The same order in all columns, so that the boxes of a part are side by side.
            if share := seconds[column].get(part, 0.0) / total:
                before = boxes[part][-1] if boxes[part] else None
                low, high = round(HEIGHT * base, 1), round(HEIGHT * (base + share), 1)
                # Merge equal neighbours: a page has the bars of many attempts.
                if before and before[1] == column and before[2:] == (low, high):
                    boxes[part][-1] = (before[0], column + 1, low, high)
                else:
                    boxes[part].append((column, column + 1, low, high))
                base += share
    paths = "".join(
        f'<path class="{css_class(part)}" d="'
        + "".join(
            f"M{a} {HEIGHT - high:g}h{b - a}v{high - low:g}h-{b - a}z"
            for a, b, low, high in part_boxes
        )
        + '"/>'
        for part, part_boxes in boxes.items()
    )
    return (
        f'<svg class="life" viewBox="0 0 {columns} {HEIGHT}" preserveAspectRatio="none" '
        f'aria-hidden="true">{paths}</svg>'
    )


def css_class(part: str) -> str:
    return "p-" + part.replace(" ", "-")


def render_life(run: History, now: float) -> str:
    """Show how the wall time was spent: a bar with its axis, and a legend with sums."""
    phases = phases_of(run, now)
    if not phases:
        return ""
    began, ended = phases[0].began, phases[-1].ended
    total = max(ended - began, 1e-9)
    sums = {part: math.fsum(p.ended - p.began for p in phases if p.part == part) for part in ORDER}
    keys = "".join(
        f'<li title="{MEANING.get(part, part)}"><b class="{css_class(part)}"></b>{part} '
        f"<span>{format_lasting(sums[part])}, {sums[part] / total:.1%}</span></li>"
        for part in ORDER
        if sums[part] > 0
    )
    share = f", {sums['training'] / total:.1%} of it in steps that count"
    return (
        f"<section><h2>Where the time went <span>{format_lasting(total)} since the first start"
        f"{'' if sums[UNCOUNTED] else share}</span></h2>"
        f"{render_bar(phases, began, ended)}{render_time_axis(began, ended, now)}"
        f'<ul class="key">{keys}</ul></section>'
    )


def render_time_axis(began: float, ended: float, now: float) -> str:
    """Write round local times below a bar."""
    span = ended - began
    units = (
        1,
        5,
        15,
        60,
        120,
        300,
        600,
        1800,
        3600,
        7200,
        10800,
        21600,
        43200,
        86400,
        172800,
        604800,
    )
    unit = next((u for u in units if span / u <= 6), math.ceil(span / 6 / 86400) * 86400)
    # Rounded in local time: a day's tick is at midnight.
    offset = time.localtime(began).tm_gmtoff
    first = math.ceil((began + offset) / unit) * unit - offset
    labels = []
    # More than enough: the unit allows at most six intervals.
    for k in range(8):
        at = first + k * unit
        if at > ended:
            break
        text = (
            format_clock(at, now, words=False)
            if unit >= 60
            else time.strftime("%H:%M:%S", time.localtime(at))
        )
        place = 100 * (at - began) / (span or 1)
        side = ' class="first"' if place < 8 else ' class="last"' if place > 92 else ""
        labels.append(f'<i{side} style="left:{place:.4g}%">{text}</i>')
    return f'<div class="hours">{"".join(labels)}</div>'


def render_attempts(run: History, now: float, name: str, most: int) -> str:
    """List all attempts, the newest first. `name`: of the run within the page."""
    phases = phases_of(run, now)
    if not run.attempts:
        return (
            f"<section><h2>Attempts</h2>{render_refused(run, now)}</section>"
            if run.refusals
            else ""
        )
    began, ended = (phases[0].began, phases[-1].ended) if phases else (0.0, 0.0)
    notes = notes_of(run)
    rows = []
    last = len(run.attempts) - 1
    for i in range(last, max(-1, last - most), -1):
        a = run.attempts[i]
        inside = [
            p._replace(began=max(p.began, a.opened), ended=min(p.ended, a.ended))
            for p in phases
            if p.ended > a.opened and p.began < a.ended
        ]
        # A single attempt's bar would equal the whole run's.
        bar = render_bar(inside, began, ended, BAR_COLUMNS // 2) if last and inside else ""
        rows.append(render_attempt(run, i, now, f"{name}a{i}", bar, notes.get(i, [])))
    rest = len(run.attempts) - len(rows)
    more = f'<p class="none">{rest:,} earlier attempts are in attempts.jsonl</p>' if rest else ""
    return (
        f"<section><h2>Attempts <span>{len(run.attempts):,}, the newest first</span></h2>"
        f'<ol class="attempts">{"".join(rows)}</ol>{more}{render_refused(run, now)}</section>'
    )


def render_refused(run: History, now: float) -> str:
    """List the starts that never became attempts, the newest first."""
    return "".join(
        f'<p class="none">{format_clock(each.time, now)}'
        f"{f' · job {escape_html(each.job, 40)}' if each.job else ''}: "
        f"{escape_html(each.text, 600)}</p>"
        for each in run.refusals[: -1 - SHOWN_REFUSALS : -1]
    )


def render_attempt(
    run: History, i: int, now: float, name: str, bar: str, notes: list[Record]
) -> str:
    a, times = run.attempts[i], run.wall_time
    startup, lost_steps = times.startups[i], times.lost[i]
    hosts = f"{a.hosts[0]} and {len(a.hosts) - 1} more" if len(a.hosts) > 3 else ", ".join(a.hosts)
    job = f" · job {a.job}.{a.restart}" if a.job else ""
    ranks = f" · {a.world_size:,} rank{'s' * (a.world_size > 1)}" if a.world_size else ""
    cells = (
        f"<b>{escape_html(a.name, 20)}</b>",
        f"{format_clock(a.opened, now)} – "
        f"{'now' if a.state == 'running' else format_end_time(a, now)}",
        format_lasting(a.ended - a.opened),
        "no step" if a.steps == "-" else f"steps {a.steps.replace(' to ', ' – ')}",
        (f"start-up {format_lasting(startup)}" if startup is not None else "")
        + (f" · {lost_steps:,} steps done again" if lost_steps else ""),
        escape_html(f"{hosts}{ranks}{job}", 160),
    )
    items = "".join(f"<li>changed: {escape_html(what, 400)}</li>" for what in a.changed)
    if a.startup:
        parts = ", ".join(
            f"{escape_html(part, 40)} {format_lasting(s)}" for part, s in a.startup.items()
        )
        items += f"<li>start-up: {parts}</li>"
    items += "".join(render_event(record, now) for record in notes[:NOTES])
    more = f"<li>and {len(notes) - NOTES:,} more events</li>" if len(notes) > NOTES else ""
    return (
        f'<li id="{name}">{"".join(f"<div>{cell}</div>" for cell in cells)}{bar}'
        f"<p>{render_ending(a)}</p>{f'<ul>{items}{more}</ul>' if items else ''}</li>"
    )


def format_end_time(a: Attempt, now: float) -> str:
    """Format the end time, with the day only if it differs from the start's."""
    return format_clock(a.ended, a.opened if same_day(a.ended, a.opened) else now)


def render_ending(a: Attempt) -> str:
    if a.state == "running":
        return render_pill("running")
    word = a.state if a.began or a.state != "killed" else "died"
    why = a.reason or ("no error recorded" if a.began else "before it began")
    text = f"{render_pill(word)} {escape_html(why, 600)}"
    if done := AFTER.get(a.decision):
        text += f' <span class="then">→ {done}'
        text += f" without {escape_html(a.excluded, 200)}</span>" if a.excluded else "</span>"
    elif a.decision == "end" and a.state not in ("done", "stopped", "failed"):
        text += f' <span class="then bad">→ not requeued: {escape_html(a.why, 600)}</span>'
    return text


def notes_of(run: History) -> dict[int, list[Record]]:
    """Return the events that the rows do not show, also of unknown kinds, by index of attempt."""
    notes: dict[int, list[Record]] = defaultdict(list)
    numbers = {a.number: i for i, a in enumerate(run.attempts)}
    ids = {a.attempt_id: i for i, a in enumerate(run.attempts) if a.attempt_id}
    for record in run.records:
        if record.get("event") in TOLD:
            continue
        number, name = record.get("attempt"), record.get("attempt_id")
        place = numbers.get(number) if type(number) is int else None
        if place is None and isinstance(name, str):
            place = ids.get(name)
        if place is None:  # by its time
            place = max(
                (i for i, a in enumerate(run.attempts) if a.opened <= record["time"]), default=0
            )
        notes[place].append(record)
    return notes


def render_event(record: Record, now: float) -> str:
    """Describe an event of any kind: its name and its specific fields, beginning with host and
    reason without their names."""
    fields = {
        k: v for k, v in record.items() if k not in EVENT_HEAD and v not in (None, "", [], {})
    }
    texts = [": ".join(str(fields.pop(key)) for key in ("host", "reason") if key in fields)]
    texts = [*filter(None, texts), *(f"{k} {v}" for k, v in fields.items())]
    step = record.get("step")
    where = f" at step {step:,}" if type(step) is int and step >= 0 else ""
    name = str(record.get("event", "?")).replace("_", " ")
    when, more = format_clock(record["time"], now), escape_html(" · ".join(texts), 400)
    return f"<li>{when} <b>{escape_html(name, 60)}</b>{where} {more}</li>"
