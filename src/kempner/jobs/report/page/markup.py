"""Text of the page as HTML: everything that comes from a file goes through `escape_html`, and every
link through `file_link`. No torch."""

from __future__ import annotations

import os
import re
import time
from html import escape
from pathlib import Path
from urllib.parse import quote

from kempner.jobs.report.tables import visible_text

COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # terminal colors


def escape_html(value: object, most: int = 2000) -> str:
    """Escape text for HTML and attributes in double quotes; cut after `most` characters."""
    # Cut first: a reason or a log line may have megabytes.
    text = COLORS.sub("", str(value)[: 2 * most])
    text = text if len(text) <= most else text[: most - 1] + "…"
    return escape(visible_text(text))


def file_link(path: Path, page: Path, text: str) -> str:
    """Link to a file relative to the page, so that both can be copied together; `text`: plain."""
    relative = os.path.relpath(path.absolute(), page.absolute().parent)
    # As bytes: a file name need not be valid text. After ./ a name with a colon is not taken for a
    # scheme, such as javascript:.
    return f'<a href="./{escape(quote(os.fsencode(relative)))}">{escape_html(text)}</a>'


def same_day(a: float, b: float) -> bool:
    return time.localtime(a)[:3] == time.localtime(b)[:3]


def format_clock(at: float, now: float, words: bool = True) -> str:
    """Format the local time, with the day if not today. `words`: as an element with all of it."""
    try:
        local = time.localtime(at)
        text = time.strftime("%H:%M", local)
        if not same_day(at, now):
            day = "%a %-d %b " if local[0] == time.localtime(now)[0] else "%-d %b %Y "
            text = time.strftime(day, local) + text
        whole = time.strftime("%Y-%m-%d %H:%M:%S %Z", local)
    except (ValueError, OverflowError, OSError):  # an ETA may be in the year 10,000
        return "?"
    return f'<time title="{whole}">{text}</time>' if words else text


def format_lasting(seconds: float) -> str:
    """Format a duration with at most two units: 45 s, 12 min, 3 h 12 min, 2 d 4 h."""
    whole = int(max(0.0, min(seconds, 1e11)))
    if whole < 10:
        return f"{max(0.0, seconds):.1f} s"
    if whole < 60:
        return f"{whole} s"
    for big, one, many, other in (
        (60, "min", 1, "s"),
        (3600, "h", 60, "min"),
        (86400, "d", 3600, "h"),
    ):
        if whole < big * {60: 60, 3600: 24, 86400: 10**9}[big]:
            rest = whole % big // many
            short = not rest or (big == 60 and whole >= 600)
            return f"{whole // big} {one}" if short else f"{whole // big} {one} {rest} {other}"
    return "?"


def format_loss(value: float | None, digits: int = 4) -> str:
    """Format a loss: 2.4512; None: –."""
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.3g}"


def render_pill(word: str, attention: bool = False) -> str:
    alarm = " alarm" if attention else ""
    return f'<span class="pill {escape(word)}{alarm}">{escape(word)}</span>'
