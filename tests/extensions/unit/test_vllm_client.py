"""The client of vLLM, and the wrapper that starts it, beside a server that answers as vLLM 0.32
does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kempner.config.loading import load_config_files
from kempner.config.option import ConfigError
from kempner.extensions.generate.config import Sampling
from kempner.extensions.rl.engines import client as engines
from kempner.extensions.rl.engines import router, vllm_engine
from kempner.extensions.rl.engines.client import (
    ROUTES,
    Busy,
    EngineLeased,
    Flight,
    Lost,
    Rejected,
    VllmEngine,
)
from kempner.extensions.rl.engines.router import Router
from kempner.jobs.system.compiler import CACHE, HEADERS
from kempner.train.checks import combination_problems as problems_across
from kempner.train.sections import RunConfig
from tests.waiting import LIMIT_S, until


class Server(ThreadingHTTPServer):
    """`asked`: paths and bodies; `broken`: a path that fails; `door`: the middleware."""

    asked: list[tuple[str, Any]]
    broken, version = "", "3"
    routes = ROUTES
    reload = 0.0  # seconds
    core: threading.Lock  # it does one thing after another
    door: vllm_engine.Allowed | None = None


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: object) -> None: ...

    def refused(self) -> bool:
        """The middleware has answered in the place of the application."""
        if self.server.door is None:
            return False
        sent: list[dict[str, Any]] = []

        async def send(event: dict[str, Any]) -> None:
            sent.append(event)

        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        path = self.path.partition("?")[0]
        scope = {"type": "http", "method": self.command, "path": path, "headers": headers}
        asyncio.run(self.server.door(scope, None, send))
        if sent:
            self.send(sent[1]["body"], sent[0]["status"])
        return bool(sent)

    def do_GET(self) -> None:
        if self.refused():
            return None
        if self.path == "/health":  # of the process that listens
            return self.send(b"", 200)
        if self.path == "/weight_info":
            with self.server.core:
                pass
        self.say(
            {"/openapi.json": {"paths": {route: {} for route in self.server.routes}}}.get(
                self.path, {"weight_version": self.server.version}
            )
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return None
        self.server.asked.append((self.path, body))
        assert self.headers["Content-Type"] == "application/json"
        if self.path == self.server.broken:
            return self.say({"error": {"message": "no room"}}, 500)
        if self.path == "/update_weight_version":
            self.server.version = body["new_version"]
        if self.path == "/collective_rpc":
            with self.server.core:
                time.sleep(self.server.reload)
        found: dict[str, Any] = {}
        if self.path == "/inference/v1/generate":
            drawn = "3", "4" if self.server.door is None else self.server.version
            spans = [{"version": each, "start": i, "end": i + 1} for i, each in enumerate(drawn)]
            entries = {"content": [{"token_id": 7, "logprob": -0.5}, {"logprob": -0.25}]}
            choice = {"token_ids": [7, body["token_ids"][0]], "finish_reason": "stop"}
            choice |= {"weight_versions": spans, "logprobs": entries}
            found = {
                "choices": [choice | {"index": i} for i in range(body["sampling_params"]["n"])]
            }
        self.say(found)

    def say(self, content: Any, code: int = 200) -> None:
        self.send(json.dumps(content).encode(), code)

    def send(self, data: bytes, code: int) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as one:
        one.asked, one.core = [], threading.Lock()
        threading.Thread(target=one.serve_forever, args=(0.02,), daemon=True).start()
        yield one
        one.shutdown()


@pytest.fixture
def engine(server: Server) -> VllmEngine:
    return VllmEngine(f"http://127.0.0.1:{server.server_address[1]}", "secret", {256, 2})


def test_completions(server: Server, engine: VllmEngine) -> None:
    found = engine.complete([[5], [6]], 2, Sampling(seed=9, max_tokens=4, top_p=0.9), Flight())
    assert [[text.token_ids for text in each] for each in found] == [[[7, 5]] * 2, [[7, 6]] * 2]
    assert found[0][0][1:] == ([-0.5, -0.25], [3, 4], "stop")
    words = server.asked[0][1]["sampling_params"]
    assert (words["stop_token_ids"], words["seed"], words["top_p"]) == ([2, 256], 9, 0.9)
    VllmEngine(engine.url, "secret", {256}, seeded=False).complete([[5]], 1, Sampling(seed=9))
    assert "seed" not in server.asked[-1][1]["sampling_params"]


def test_weights(server: Server, engine: VllmEngine) -> None:
    """What was computed from the old ones is dropped; with half of the new ones it is busy."""
    assert engine.version() == 3
    assert engine.update({"path": "/w", "version": 4}) == engine.version() == 4
    assert [path.partition("?")[0] for path, _ in server.asked] == [
        "/pause", "/update_weight_version", "/collective_rpc", "/reset_prefix_cache",
        "/update_weight_version", "/resume",
    ]  # fmt: skip
    server.broken = "/collective_rpc"
    with pytest.raises(Lost, match="no room"):
        engine.update({"path": "/w", "version": 5})
    assert server.asked[-1][0] == "/resume"
    with pytest.raises(Busy):
        engine.version()
    with pytest.raises(Rejected, match="files"):
        engine.update({"manifest": "/w"})


def test_two_runs_do_not_share_an_engine(
    server: Server, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of the kit do not."""

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    monkeypatch.setenv(vllm_engine.TOKEN_VARIABLE, "secret")
    server.door = vllm_engine.Allowed(app)
    runs = [VllmEngine(engine.url, "secret", {256}, run=run) for run in ("/runs/a", "/runs/b")]
    first, second = runs
    assert first.version() == second.version() == 3  # of the file that it began with
    assert first.update({"path": "/w", "version": 4}) == first.version() == 4
    with pytest.raises(EngineLeased, match="another run, /runs/a, which uses it"):
        second.version()
    asked = len(server.asked)
    with pytest.raises(
        EngineLeased, match="the weights of the run /runs/a, which uses it; end that"
    ):
        second.update({"path": "/w", "version": 4})
    assert len(server.asked) == asked  # nothing was paused
    with pytest.raises(Lost, match="weights of another run, /runs/a"):
        second.complete([[5]], 1, Sampling(max_tokens=2))
    assert first.complete([[5]], 1, Sampling(max_tokens=2))[0][0].versions == [3, 4]
    first.release()
    with pytest.raises(Busy, match="weights of another run, /runs/a") as busy:
        second.version()
    assert not isinstance(busy.value, EngineLeased)
    assert second.update({"path": "/w", "version": 4}) == second.version() == 4
    with pytest.raises(Busy, match="weights of another run, /runs/b"):
        first.version()


def test_a_reload_that_is_slower_than_the_beats(
    server: Server, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its core says nothing meanwhile. The reload is waited for, and there is one."""
    monkeypatch.setattr(router, "BEAT_EVERY_S", 0.05)
    monkeypatch.setattr(engines, "ENGINE_HEARTBEAT_S", 0.2)
    server.reload, said = 1.5, list[str]()
    one = Router(lambda: {"engine-0": engine.url}, lambda url: engine, 8, 0, said.append, 60.0)
    one.offer(4, {"path": "/w", "version": 4})
    one.start()
    until(lambda: one.with_version(4) is not None)
    one.close()
    assert server.version == "4"
    assert [path for path, _ in server.asked].count("/collective_rpc") == 1
    assert not any("lost" in line for line in said), said


def test_a_core_that_is_busy_is_no_loss(
    server: Server, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an update whose answer was lost: the version is asked before a new reload."""
    monkeypatch.setattr(engines, "VERSION_S", 0.2)
    assert engine.version() == 3
    with server.core:
        assert engine.version() is None


def test_another_vllm(server: Server, engine: VllmEngine) -> None:
    server.routes = ROUTES - {"/weight_info"}
    with pytest.raises(Lost, match="this vLLM has no /weight_info"):
        engine.version()


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    given = ["--weights=w", "--publish=p", f"--token-file={tmp_path / 'token'}"]
    options, more = vllm_engine.parse_engine_arguments([*given, "--max-model-len", "64"])
    command = vllm_engine.vllm_arguments(Path("w/v00000003"), options, 80)
    assert more == ["--max-model-len", "64"] and "float32" in command
    assert (
        command[command.index("--middleware") + 1]
        == "kempner.extensions.rl.engines.vllm_engine.Allowed"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    command = vllm_engine.vllm_arguments(Path("w/v00000003"), options, 80)
    assert command[-2:] == ["--tensor-parallel-size", "2"]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in (CACHE, HEADERS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    found = vllm_engine.vllm_environment("secret")
    assert found[HEADERS] == "0"
    assert found[CACHE] == str(tmp_path / f"kempner-compiled-{os.getuid()}")
    monkeypatch.delenv("KEMPNER_VLLM", raising=False)
    assert vllm_engine.main(given) == 2
    assert "set KEMPNER_VLLM" in capsys.readouterr().err
    monkeypatch.setenv("KEMPNER_VLLM", sys.executable)
    for text, mode in (("", 0o600), ("secret", 0o644)):
        (tmp_path / "token").write_text(text)
        (tmp_path / "token").chmod(mode)
        assert vllm_engine.main(given) == 2
        assert "must have a token, and mode 600" in capsys.readouterr().err


FAKE = """#!{python}
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(200)
        self.end_headers()

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("0.0.0.0", port), Handler).serve_forever()
"""


def test_its_port_is_of_the_range_that_a_firewall_opens(tmp_path: Path) -> None:
    """And nobody of ours takes it while vLLM starts."""
    python, token, published = tmp_path / "python", tmp_path / "token", tmp_path / "engine-0"
    python.write_text(FAKE.format(python=sys.executable))
    python.chmod(0o700)
    token.touch(0o600)
    token.write_text("secret")
    (tmp_path / "v00000003").mkdir()
    (tmp_path / "v00000003/manifest.json").write_text("{}")
    while True:
        other = socket.create_server(("", 0))  # has the other port of the range
        port = other.getsockname()[1] - 1
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            break  # nobody has this one
        other.close()
    command = [
        sys.executable,
        "-m",
        "kempner.extensions.rl.engines.vllm_engine",
        f"--weights={tmp_path}",
    ]
    command += [f"--publish={tmp_path}", f"--token-file={token}"]
    env = {**os.environ, "KEMPNER_VLLM": str(python), "KEMPNER_PORTS": f"{port}-{port + 1}"}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        until(published.exists, alive=(process,))
        url = published.read_text()
        done = subprocess.run(
            [*command, f"--publish={tmp_path / 'other'}"],
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        process.terminate()
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and url == f"http://127.0.0.1:{port}\n"
    other.close()
    assert done.returncode == 1 and "none of these 2 ports is free" in done.stderr


def test_the_version_that_it_starts_with_stays_until_it_is_read(tmp_path: Path) -> None:
    """Also when the other engines have a newer one meanwhile, and the orchestrator removes it."""
    python, token, published = tmp_path / "python", tmp_path / "token", tmp_path / "engine-0"
    reads = (
        "import os, time\n"
        f"open({str(tmp_path / 'begun')!r}, 'w')\n"
        f"while os.path.exists({str(tmp_path / 'v00000003')!r}): time.sleep(0.05)\n"
        "assert open(sys.argv[sys.argv.index('serve') + 1] + '/model').read() == 'weights'\n"
    )
    python.write_text(FAKE.format(python=sys.executable).replace("\n\nclass", f"\n{reads}\nclass"))
    python.chmod(0o700)
    token.touch(0o600)
    token.write_text("secret")
    (tmp_path / "v00000003").mkdir()
    (tmp_path / "v00000003/model").write_text("weights")
    (tmp_path / "v00000003/manifest.json").write_text("{}")
    module = "kempner.extensions.rl.engines.vllm_engine"
    command = [sys.executable, "-m", module, f"--weights={tmp_path}"]
    command += [f"--publish={tmp_path}", f"--token-file={token}"]
    env = {**os.environ, "KEMPNER_VLLM": str(python)}
    with subprocess.Popen(command, env=env) as process:
        until((tmp_path / "begun").exists, alive=(process,))
        shutil.rmtree(tmp_path / "v00000003")
        until(published.exists, alive=(process,))
        process.terminate()
    assert process.returncode == 0 and not list(tmp_path.glob("**/model"))


def test_strangers_have_no_route_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the token among the words of its command line, which all users of a node see."""
    monkeypatch.setenv(vllm_engine.TOKEN_VARIABLE, "secret")
    reached: list[str] = []
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    def ask(kind: str, *headers: tuple[bytes, bytes]) -> None:
        scope = {"type": kind, "path": "/", "headers": headers}
        asyncio.run(vllm_engine.Allowed(app)(scope, None, send))

    ask("http")
    ask("http", (b"authorization", b"Bearer secret2"))
    ask("websocket")
    assert not reached
    assert [event.get("status", event.get("code")) for event in sent] == [401, None] * 2 + [1008]
    for kind in ("http", "websocket"):
        ask(kind, (b"authorization", b"Bearer secret"))
        ask(kind, (b"authorization", b"bearer secret"))
    ask("lifespan")
    assert reached == [*["http"] * 2, *["websocket"] * 2, "lifespan"]
    options, _ = vllm_engine.parse_engine_arguments(
        ["--weights=w", "--publish=p", "--token-file=t"]
    )
    assert "secret" not in str(vllm_engine.vllm_arguments(Path("w/v00000003"), options, 80))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["rl.weights=direct", "rl.inference.engine=vllm"],
            "rl.weights = direct with rl.inference.engine = vllm",
        ),
        (
            ["rl.weights=direct", "lora.rank=4", "model.init_from=x"],
            "lora.rank = 4 with rl.weights = direct",
        ),
        (["rl.weights=direct", 'rl.inference.urls=["http://x:1"]'], "with rl.inference.urls"),
        (
            ["rl.inference.engine=vllm", 'rl.sampling.stop=["x"]'],
            "rl.sampling.stop with rl.inference.engine = vllm",
        ),
    ],
)
def test_what_cannot_be_combined(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"{problem}: is not built"):
        given = [f"--{word}" for word in words]
        load_config_files(RunConfig, ["configs/rl/arithmetic.toml"], given, check=problems_across)
