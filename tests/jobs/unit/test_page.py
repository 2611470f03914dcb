"""The page of report.py --html, in a real browser: nothing that a run has written becomes markup,
nothing is wider than a phone, and it says what a run did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kempner.jobs.records.run_history import load_history
from kempner.jobs.report.page.charts import curve_envelope, curve_points
from kempner.jobs.report.page.write import write_page
from tests.browser import Browser, browser
from tests.jobs.unit.test_report import ROOT, event, hold_lock, start, step_line, write_run
from tests.waiting import until

SCRIPT = "<script>window.planted = 1</script>"
HOSTILE = (
    SCRIPT,
    '"><img src=x onerror="window.planted = 1">',
    "'; window.planted = 1; '",
    "</pre></script></style></title>" + SCRIPT,
    "]]>" + SCRIPT,
    "javascript:window.planted=1",
    "\u202egnp.exe \x1b[31mred\x1b[0m \x00",
    "w" * 5000,
    "{{7*7}} ${window.planted=1} &lt;b&gt;",
)


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as found:
        yield found


def hostile_run(parent: Path) -> Path:
    """Every place that a run can write to has something hostile in it, and the rest is damaged."""
    name = '<img src=x onerror="window.planted=1"> \' "javascript:'
    lines = [
        step_line(10, loss=float("nan"), lr="<b>"),
        step_line(20, loss=1e308, tokens_per_s=float("inf")),
        step_line(30, loss=-1e-320, grad_norm=SCRIPT),
        step_line(35, attempt=1, layers={"activation_rms": {"²": 1.0, SCRIPT: 1.0, "0": SCRIPT}}),
        step_line(40, attempt=1, loss=2.0, checkpoint_time=SCRIPT, eval_time=float("nan")),
        json.dumps({"step": 10**400, "time": 1}) + "\n",
        json.dumps({"step": 50, "time": "now", "loss": 1}) + "\n[1, 2]\n\x00\xff\n",
        json.dumps({"step": 40, "time": 1e9, SCRIPT: 1, f"eval/{SCRIPT}": 0.5}) + "\n",
        '{"step": 60, "time": 17',
    ]
    head = {"job": SCRIPT, "attempt_id": SCRIPT, "restart": 1}
    events = event("start", 0, 0, 0, nodes=list(HOSTILE), world_size=9, **head)
    for i, text in enumerate(HOSTILE):
        events += event("fault", 0, 30, 31 + i, kind="crash", reason=text, hosts=[text], **head)
        events += event(text, 0, 30, 31 + i, hosts=[text], kind=text, **{text: text})
    events += event("decision", 0, 20, 60, decision="requeue", why=SCRIPT, blamed=SCRIPT, **head)
    events += event("decision", 0, 20, float("nan")) + event("start", 10**400, 0, 1e300)
    events += '{"event": ["x"], "time": 5}\n{"event": "x", "time": 5, "attempt_id": []}\n{"ev'
    run = write_run(parent / name, "".join(lines), events, state="failed", reason=SCRIPT, attempt=1)
    (run / "status.json").write_text(json.dumps({"state": "failed", "reason": SCRIPT, "step": "x"}))
    (run / "logs/latest").mkdir(parents=True)
    (run / "logs/latest/rank-0.log").write_text("\n".join(HOSTILE), errors="surrogateescape")
    (run / f"logs/batch-{SCRIPT.replace('/', '')}.log").write_text("kempner: " + SCRIPT)
    return run


def long_run(parent: Path, each: int = 50) -> Path:
    """100 attempts, each of them with an end of its own, and 100 times so many lines."""
    lines, events = [], ""
    for attempt in range(100):
        first, head = attempt * 10 * each, {"job": "7", "attempt_id": f"7.{attempt}"}
        end = {"kind": "hang", "hosts": ["n2"], "reason": "x"}
        events += start(attempt, first, first, **head)
        lines += [step_line(first + 10 * i, attempt, 5 + i % 7) for i in range(1, each + 1)]
        events += event("fault", attempt, first, first + 10 * each - 1, **head, **end)
    run = write_run(parent / "long", "".join(lines), events, state="running", max_steps=10**6)
    (run / "checkpoints/step_00000100").mkdir(parents=True)
    return run


def check(tab: Browser, page: Path) -> None:
    for width, dark, policy in ((375, False, True), (375, True, False), (1280, False, True)):
        tab.open(page, width, dark=dark, policy=policy)
        assert tab.told == []
        assert tab.ask("window.planted") is None
        found = tab.ask(
            "document.querySelectorAll('script, img, iframe, object, [onerror]').length"
        )
        assert found == 0
        ids = tab.ask("[...document.querySelectorAll('main.one')].map(main => '#' + main.id)")
        for target in ["", *ids]:
            tab.ask(f"location.hash = '{target}'")
            assert tab.ask("document.documentElement.scrollWidth") == width
        back = tab.ask("getComputedStyle(document.documentElement).backgroundColor")
        assert back == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")


def test_hostile_runs_inject_nothing(tab: Browser, tmp_path: Path) -> None:
    runs = [
        hostile_run(tmp_path),
        write_run(tmp_path / "empty", "", "\n"),
        write_run(tmp_path / "no step", "", start(0, 0, 0)),
        long_run(tmp_path, 20),
    ]
    runs[1].joinpath("status.json").unlink()
    for paths in ([runs[0]], [runs[1]], runs):
        page = tmp_path / "page.html"
        write_page(paths, page, None)
        check(tab, page)
    text = tab.ask("document.body.textContent")
    assert SCRIPT in text and "\\u202egnp.exe" in text  # it is there, as text
    hrefs = tab.ask("[...document.links].map(link => link.getAttribute('href'))")
    assert all(href.startswith(("#", "./")) for href in hrefs)
    hostile = [href for href in hrefs if "config" not in href and "%3Cimg" in href]
    assert hostile
    tab.ask("location.hash = ''")
    assert tab.ask("[...document.links].every(link => ['file:'].includes(link.protocol))")


def test_a_table_on_a_terminal_is_as_safe(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    for words in ([], ["--nodes"], ["--json", "--nodes"]):
        command = [sys.executable, ROOT / "scripts/status.py", run, *words]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1, done.stderr
        assert not {"\x1b", "\x00", "\u202e"} & set(done.stdout)
    assert json.loads(done.stdout)["runs"][0]["state"] == "failed"


def test_what_the_page_of_a_run_says(tab: Browser, tmp_path: Path) -> None:
    now = time.time()
    lines = "".join(
        json.dumps({"step": s, "time": now - 400 + s, "attempt": int(s > 200), "loss": 3.0,
                    "tokens_per_s": 100.0, "step_time": 1.0, "tokens": s}) + "\n"
        for s in [*range(10, 301, 10), *range(210, 391, 10)]
    )  # fmt: skip
    head = {"job": "7", "attempt_id": "7.0", "attempt": 0}
    known = [
        {**head, "event": "start", "time": now - 400, "step": 0, "nodes": ["n1", "n2"]},
        {**head, "event": "fault", "time": now - 198, "step": 205, "kind": "hang", "hosts": ["n2"],
         "reason": "no step for 9 s"},
        {**head, "event": "decision", "time": now - 197, "step": 200, "decision": "requeue",
         "excluded": "n2", "blamed": "n2"},
        {**head, "attempt_id": "7.1", "attempt": 1, "event": "start", "time": now - 195,
         "step": 200, "nodes": ["n1", "n3"]},
        {**head, "attempt_id": "7.1", "attempt": 1, "event": "unheard_of", "time": now - 90,
         "step": 300, "host": "n3", "celsius": 99},
    ]  # fmt: skip
    run = write_run(tmp_path / "run", lines, "".join(json.dumps(e) + "\n" for e in known))
    status = {"state": "running", "step": 0, "max_steps": 1000, "attempt": 1}
    (run / "status.json").write_text(json.dumps(status))
    hold_lock(run)
    (run / "config.toml").write_text("")
    page = run / "report.html"
    assert write_page([run], page, None, every=60)
    assert '<meta http-equiv="refresh" content="60">' in page.read_text()
    tab.open(page, 1280)
    text = " ".join(tab.ask("document.body.innerText").split())
    for words in (
        "running step 390 of 1,000 · 39.0%",
        "in 10 min at this pace",
        "1 requeued",
        "In the last 24 h 1 attempt ended: 1 hung. Faults on n2 (1), n3 (1). Excluded: n2.",
        "hung no step for 9 s → requeued without n2",
        "unheard of at step 300 n3 · celsius 99",
    ):
        assert words in text, (words, text)
    link = tab.ask("[...document.links].find(a => a.innerText == 'config.toml').href")
    assert link == (run / "config.toml").as_uri()
    (run / "lock").unlink()
    assert not write_page([run], page, None, every=60)  # it is over: killed
    assert 'http-equiv="refresh"' not in page.read_text()


def test_results_of_evaluations(tmp_path: Path) -> None:
    """Accuracies, and not a perplexity beside them; with more tasks than colors, it says so."""
    figures = {f"eval/task{i}/acc": 0.1 * i for i in range(6)} | {"eval/text/perplexity": 20.0}
    result = {"step": 10, "time": time.time(), **figures, "eval/task0/acc_stderr": 0.01}
    run = write_run(tmp_path / "run", step_line(10) + json.dumps(result) + "\n")
    write_page([run], tmp_path / "page.html", None)
    text = (tmp_path / "page.html").read_text()
    assert "<b>Evaluation</b> <small>4 of 6</small>" in text
    assert "task3/acc" in text and "perplexity" not in text


def test_no_spike_is_lost(tmp_path: Path) -> None:
    run = long_run(tmp_path)
    text = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    text[3456] = step_line(34570, 69, 77.0)
    (run / "metrics.jsonl").write_text("".join(text))
    points = curve_points(load_history(run).losses, "loss")
    (piece,) = curve_envelope(points)
    assert len(points) == 5000 and len(piece) <= 301
    assert max(bucket.high for bucket in piece) == 77.0
    assert min(bucket.low for bucket in piece) == 5.0


def test_a_long_run_among_others_is_sampled(tmp_path: Path) -> None:
    run = long_run(tmp_path)
    history = load_history(run, sample=True)
    assert len(history.lines) < 2000 and history.step == 50_000 and history.share < 0.2


@pytest.mark.parametrize(
    "words",
    [
        ["--html", "x/y.html"],
        ["--html", "another-run"],
        ["--html", "--out", "x.png"],
        ["--watch", "5"],
        ["--html", "--watch", "0"],
    ],
    ids=" ".join,
)
def test_bad_words(words: list[str], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", step_line(10))
    command = [sys.executable, ROOT / "scripts/report.py", run, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "error: " in done.stderr and "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_watch_ends_with_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", step_line(10), state="running")
    hold_lock(run)
    command = [sys.executable, ROOT / "scripts/report.py", tmp_path, "--html", "--watch", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        page = tmp_path / "report.html"
        until(page.exists, alive=(process,))
        assert 'content="1"' in page.read_text()
        os.unlink(run / "lock")
        assert process.stdout is not None and process.stdout.read() == f"page: {page}\n"
    assert process.returncode == 0 and "refresh" not in page.read_text()
