"""Notifications of a run's end, each sent once: by mail, command or webhook. No torch.

    python -m kempner.jobs.report.notify RUN_DIR EVENT WHY   the batch script, at the run's end
    status.py --notify                                       cron, and what no batch script can tell

KEMPNER_MAIL is an address; KEMPNER_NOTIFY a command, which gets the facts as JSON on standard input
and in environment variables; KEMPNER_WEBHOOK a URL, which gets them by POST. Only the process that
creates the file RUN/notified/EVENT reports the event, across requeues and duplicates. If every way
fails the file is removed, and `status.py --notify` tries again. A failure is reported in one line
without the URL, which is a secret.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from kempner.jobs.records.attempts import Record
from kempner.jobs.records.facts import run_facts, run_trouble
from kempner.jobs.records.run_history import History, load_history
from kempner.jobs.report.tables import visible_text
from kempner.jobs.system.front_door import run_module

NOTIFY_TIMEOUT_S = 10.0  # per way
RECENT_S = 86400.0  # older events are not reported
NOTIFY_TAIL_BYTES = 1 << 16  # bytes read from the end of metrics.jsonl
LONGEST_REASON = 4000  # characters of a reason: a variable may have 128 KiB, a message far less
FIELDS = ("state", "step", "max_steps", "loss", "job", "attempts", "requeues", "hosts")


def notification_ways(
    env: Mapping[str, str] = os.environ,
) -> list[tuple[str, Callable[[Record], None]]]:
    """Return (variable, function) of each configured way; the function raises if it fails."""
    ways: dict[str, Callable[[Record], None]] = {
        "KEMPNER_MAIL": _mail,
        "KEMPNER_NOTIFY": _command,
        "KEMPNER_WEBHOOK": _post,
    }
    return [(name, act) for name, act in ways.items() if env.get(name)]


def event_of(run: History, most: int) -> str | None:
    """Return the event to report for a run: done, stopped, failed, crash_loop, ended (early, and
    nothing continues it), stall; None if there is none. `most`: KEMPNER_MAX_CRASHES."""
    state = run.state
    if state.word in ("done", "stopped", "failed"):
        return state.word
    if state.word == "silent":
        return "stall"
    if not run_trouble(run):
        return None
    if state.word in ("running", "starting"):  # it waits for attention
        return "stall"
    decided = [r for r in run.records if r.get("event") == "decision"]
    last = decided[-1] if decided else {}
    count = last.get("no_progress")
    loop = last.get("decision") == "end" and isinstance(count, int) and count >= most
    return "crash_loop" if loop else "ended"


def tell_if_new(run: History, now: float) -> list[str]:
    """Report a run's event, unless it is old or already reported; returns the problems."""
    event = event_of(run, int(os.environ.get("KEMPNER_MAX_CRASHES") or 3))
    facts = run_facts(run, now)
    if event is None or now - (facts["last_sign"] or 0.0) > RECENT_S:
        return []
    last = run.attempts[-1] if run.attempts else None
    name = "none" if last is None else last.attempt_id or last.name
    return notify_event(
        run, event, run_trouble(run) or run.state.reason or run.state.word, name, now
    )


def notify_event(
    run: History, event: str, why: str, attempt: str, now: float, *, sure: bool = False
) -> list[str]:
    """Report an event, unless already reported; returns the problems, one line each. `sure`: even
    if the report cannot be recorded, such as on a full disk."""
    facts, why = run_facts(run, now), visible_text(" ".join(why[:LONGEST_REASON].split()))
    # An attempt ends once, but may stall again at a later step.
    key = f"{attempt}-stall-{facts['step']}" if event == "stall" else f"{attempt}-end"
    claim = run.path / "notified" / re.sub(r"[^\w.-]", "_", key)
    name = visible_text(str(run.path))
    at = "" if facts["step"] is None else f" at step {facts['step']:,}"
    text = f"{name}: {event.replace('_', ' ')}{at}: {why}"
    message = {"event": event, "text": text, **facts, "why": why}
    try:
        claim.parent.mkdir(exist_ok=True)
        # Several processes may see the end of a run: the one that creates this file reports it.
        with open(claim, "x") as file:
            file.write(json.dumps(message) + "\n")
    except FileExistsError:
        return []
    except OSError as error:
        if sure:
            return _tell(message)
        return [f"{name}/notified: {error.strerror}; nobody was told that {text}"]
    problems = _tell(message)
    # Nobody was notified: the next process tries again.
    if len(problems) == len(notification_ways()):
        claim.unlink(missing_ok=True)
    return problems


def _tell(message: Record) -> list[str]:
    problems = []
    for name, act in notification_ways():
        try:
            act(message)
        except Exception as error:  # any fault of a user's command or the network
            problems.append(f"{name} was not told of {message['event']}: {_cause(error)}")
    return problems


def _cause(error: Exception) -> str:
    """Describe the error in one line, without the URL, which urllib and subprocess may include."""
    if isinstance(error, subprocess.TimeoutExpired | TimeoutError):
        return f"no end within {NOTIFY_TIMEOUT_S:.0f} s"
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code}"
    if isinstance(error, urllib.error.URLError):
        cause = error.reason
        return (cause.strerror or "no answer") if isinstance(cause, OSError) else "no answer"
    if isinstance(error, subprocess.CalledProcessError):
        return f"exit code {error.returncode}"
    if isinstance(error, FileNotFoundError):
        return f"no command '{error.filename}' on {os.uname().nodename}"
    if isinstance(error, ValueError):  # from urllib, or a NUL in an argument
        return "this is neither a URL nor an address"
    return type(error).__name__


def _run(words: list[str], text: str, env: Mapping[str, str]) -> None:
    """Run a command within the time limit; on a timeout kill all of its processes."""
    child = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=env,
        text=True,
        start_new_session=True,
    )
    try:
        child.communicate(text, timeout=NOTIFY_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    except BrokenPipeError:
        child.wait(NOTIFY_TIMEOUT_S)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, words[0])


def _mail(message: Record) -> None:
    job = message["job"] or {}
    number = job.get("number") or os.environ.get("SLURM_JOB_ID")
    name = os.environ.get("SLURM_JOB_NAME")
    about = f"job {number} ({name})" if number and name else f"run {message['run']}"
    why = message["why"]
    # No "--": s-nail, the mail of many distributions, passes what follows to its transport.
    words = ["mail", "-s", visible_text(f"{about}: {why}"), os.environ["KEMPNER_MAIL"]]
    _run(words, f"{why}\nrun directory {visible_text(message['run'])}\n", os.environ)


def _command(message: Record) -> None:
    # The URL of a webhook is a secret.
    env = {k: v for k, v in os.environ.items() if k != "KEMPNER_WEBHOOK"}
    for name in ("event", "text", "run", "why", *FIELDS):
        env[f"KEMPNER_{name.upper()}"] = _plain(message[name])
    _run(["bash", "-c", os.environ["KEMPNER_NOTIFY"]], json.dumps(message) + "\n", env)


def _plain(value: Any) -> str:
    """Format a value for an environment variable: None is empty, a job is its number, a list is
    joined with commas."""
    if isinstance(value, dict):
        value = value.get("number")
    if isinstance(value, list):
        value = ",".join(value)
    return "" if value is None else visible_text(str(value))


def _post(message: Record) -> None:
    """Post the message. Slack, Mattermost and others show `text` and the attachment's fields."""
    pairs = [(name, _plain(message[name])) for name in FIELDS]
    fields = [{"title": n, "value": escape(v, quote=False), "short": True} for n, v in pairs if v]
    text = escape(message["text"], quote=False)
    body = {**message, "text": text, "attachments": [{"fields": fields}]}
    request = urllib.request.Request(
        os.environ["KEMPNER_WEBHOOK"],
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "User-Agent": "kempner"},
    )
    with urllib.request.urlopen(request, timeout=NOTIFY_TIMEOUT_S) as answer:
        answer.read(1024)


def main(run_dir: str, event: str, why: str) -> int:
    run = load_history(Path(run_dir), None, NOTIFY_TAIL_BYTES)
    problems = notify_event(
        run, event, why, os.environ["KEMPNER_ATTEMPT_ID"], time.time(), sure=True
    )
    print(*problems, sep="\n", end="\n" * bool(problems))
    return 0


if __name__ == "__main__":
    run_module(main, __doc__, 3)
