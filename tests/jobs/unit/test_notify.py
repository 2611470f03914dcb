"""Who is told of a run that has ended: each event once, by each way, and what fails is one line."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kempner.jobs.records.run_history import load_history
from kempner.jobs.report import notify
from tests.jobs.unit.test_report import write_run
from tests.jobs.unit.test_state import STATUS

NAMES = ("KEMPNER_MAIL", "KEMPNER_NOTIFY", "KEMPNER_WEBHOOK", "KEMPNER_MAX_CRASHES")


class Server(HTTPServer):
    got: list[tuple[str, dict[str, object]]]
    answer = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/xyzzy"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, json.loads(body)))
        self.send_response(self.server.answer)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.got = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(STATUS.slurm, "my_jobs", lambda: None)


def ended(path: Path, state: str = "failed", ago: float = 9.0, **decision: object) -> Path:
    now = time.time() - ago
    head = {"job": "12", "attempt_id": "12.0", "time": now}
    line = {"step": 20, "time": now, "attempt": 0, "loss": 2.5, "tokens_per_s": 10.0}
    start = {**head, "event": "start", "attempt": 0, "step": 0, "nodes": ["n1", "n2"]}
    known = [start]
    if state in ("failed", "done", "stopped"):
        known.append({**head, "event": "end", "attempt": 0, "state": state, "reason": "<so> & so"})
    if decision:
        known.append({**head, "event": "decision", "decision": "end", "step": 10, **decision})
    text = "".join(json.dumps(each) + "\n" for each in known)
    run = write_run(path, json.dumps(line) + "\n", text)
    (run / "status.json").unlink()
    return run


def test_a_command_gets_the_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ended(tmp_path / "a run")
    out = tmp_path / "out"
    monkeypatch.setenv("KEMPNER_WEBHOOK", "")
    command = f"cat >{out}.json; env -0 >{out}.env"
    monkeypatch.setenv("KEMPNER_NOTIFY", command)
    assert STATUS.main([str(run), "--notify"]) == 1
    told = json.loads(Path(f"{out}.json").read_text())
    env = dict(x.split("=", 1) for x in Path(f"{out}.env").read_text().split("\0") if "=" in x)
    assert told["event"] == env["KEMPNER_EVENT"] == "failed"
    assert told["text"] == f"{run}: failed at step 20: <so> & so" == env["KEMPNER_TEXT"]
    assert (told["step"], env["KEMPNER_STEP"], env["KEMPNER_JOB"]) == (20, "20", "12")
    assert env["KEMPNER_HOSTS"] == "n1,n2" and told["job"]["number"] == "12"


def test_a_webhook_gets_what_slack_shows(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended(tmp_path / "run")
    monkeypatch.setenv("KEMPNER_WEBHOOK", server.url)
    assert STATUS.main([str(run), "--notify"]) == 1
    ((path, body),) = server.got
    assert path == "/xyzzy"
    assert body["text"] == f"{run}: failed at step 20: &lt;so&gt; &amp; so"  # no <!channel>
    (attachment,) = body["attachments"]  # type: ignore[misc]
    assert {"title": "step", "value": "20", "short": True} in attachment["fields"]  # type: ignore[index]


def test_each_event_is_told_once(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the batch script or by cron, whoever comes first; a later attempt has its own end."""
    run = ended(tmp_path / "run")
    monkeypatch.setenv("KEMPNER_WEBHOOK", server.url)
    monkeypatch.setenv("KEMPNER_ATTEMPT_ID", "12.0")
    assert notify.main(str(run), "failed", "the run is failed") == 0
    STATUS.main([str(run), "--notify"])
    STATUS.main([str(run), "--notify"])
    assert len(server.got) == 1
    threads = [
        threading.Thread(
            target=notify.notify_event, args=(load_history(run), "ended", "", "12.1", 0.0)
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.got) == 2


def test_what_has_failed_is_told_later(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = ended(tmp_path / "run")
    monkeypatch.setenv("KEMPNER_WEBHOOK", server.url)
    monkeypatch.setenv("KEMPNER_NOTIFY", "exit 3")
    server.answer = 500
    STATUS.main([str(run), "--notify"])
    first, second = capsys.readouterr().err.splitlines()
    assert first == "status: KEMPNER_NOTIFY was not told of failed: exit code 3"
    assert second == "status: KEMPNER_WEBHOOK was not told of failed: the server answered 500"
    server.answer = 200
    STATUS.main([str(run), "--notify"])
    STATUS.main([str(run), "--notify"])
    assert len(server.got) == 2  # the second one has worked


URLS = ("http://127.0.0.1:9/xyzzy", "nonsense://xyzzy", "xyzzy", "http://[xyzzy")


@pytest.mark.parametrize("url", URLS, ids=range(len(URLS)))
def test_the_url_is_a_secret(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEMPNER_WEBHOOK", url)
    STATUS.main([str(ended(tmp_path / "run")), "--notify"])
    told = capsys.readouterr()
    assert "KEMPNER_WEBHOOK was not told of failed: " in told.err
    assert "xyzzy" not in told.out + told.err


def test_a_command_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notify, "NOTIFY_TIMEOUT_S", 0.5)
    monkeypatch.setenv("KEMPNER_NOTIFY", f"sleep 60; touch {tmp_path}/late")
    STATUS.main([str(ended(tmp_path / "run")), "--notify"])
    assert "KEMPNER_NOTIFY was not told of failed: no end within" in capsys.readouterr().err


def test_a_mail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What s-nail, bsd-mailx and mailutils all take: no "--", after which s-nail sees no address.
    A reason with what cannot be written is told all the same."""
    mail = tmp_path / "bin/mail"
    mail.parent.mkdir()
    mail.write_text(f'#!/bin/bash\nprintf "%s|" "$@" >{tmp_path}/words; cat >{tmp_path}/text\n')
    mail.chmod(0o755)
    monkeypatch.setenv("PATH", f"{mail.parent}:/usr/bin:/bin")
    for name in ("SLURM_JOB_NAME", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KEMPNER_MAIL", "me@example.com")
    monkeypatch.setenv("KEMPNER_NOTIFY", f"echo $KEMPNER_WHY >{tmp_path}/why")
    run = load_history(ended(tmp_path / "run"))
    assert notify.notify_event(run, "failed", "so\0 and\nso \ud800", "7.0", 0.0) == []
    why = "so\\u0000 and so \\ud800"
    assert (tmp_path / "words").read_text() == f"-s|run {run.path}: {why}|me@example.com|"
    assert (tmp_path / "text").read_text() == f"{why}\nrun directory {run.path}\n"
    assert (tmp_path / "why").read_text() == f"{why}\n"


def test_what_there_is_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def event(run: Path) -> str | None:
        return notify.event_of(load_history(run), 3)

    assert event(ended(tmp_path / "a", "done")) == "done"
    assert event(ended(tmp_path / "b", "crashed", no_progress=3, why="...")) == "crash_loop"
    assert event(ended(tmp_path / "c", "crashed", no_progress=1, why="no requeue")) == "ended"
    old = ended(tmp_path / "d", ago=2 * notify.RECENT_S)
    monkeypatch.setenv("KEMPNER_NOTIFY", f"touch {tmp_path}/told")
    assert notify.tell_if_new(load_history(old), time.time()) == []
    assert not (tmp_path / "told").exists() and not (old / "notified").exists()


def test_nobody_to_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert STATUS.main([str(ended(tmp_path / "run")), "--notify"]) == 2
    assert "KEMPNER_WEBHOOK" in capsys.readouterr().err


def test_a_limit_that_is_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cron has site.env, and no batch script has checked it."""
    monkeypatch.setenv("KEMPNER_NOTIFY", "true")
    monkeypatch.setenv("KEMPNER_MAX_CRASHES", "three")
    assert STATUS.main([str(ended(tmp_path / "run")), "--notify"]) == 2
    assert "KEMPNER_MAX_CRASHES=three: must" in capsys.readouterr().err
