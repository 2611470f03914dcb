"""An engine without a model: its texts follow from prompt, seed, number and version, after delays
and faults that a test asks for."""

from __future__ import annotations

import hashlib
import json
import random
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kempner.model.config import ModelConfig

TOKEN = "secret"
END = 256  # of the bytes tokenizer
SCORE = -0.25  # of each token
LOST = "lost"  # what a fault gives back to break the connection

Fault = Callable[["FakeEngine", str], int | str | None]
"""What is wrong with the answer to a path: a code, LOST, or None for nothing."""


class FakeEngine(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, fault: Fault | None = None, delay: float = 0.0, version: int = 0) -> None:
        """`delay`: the longest of a completion, in seconds."""
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault, self.delay, self.version = fault or (lambda engine, path: None), delay, version
        self.said: int | None = None  # version that texts claim, in place of the real one
        self.requests: list[dict[str, Any]] = []  # bodies of completions
        self.updates: list[int] = []
        self.faulty = False  # a fault has begun
        self.about = {"vocab_size": 257, "tokenizer": "bytes", "shape": ModelConfig().shape}
        self.owner: dict[str, Any] = {}  # what it says of the run whose weights it has
        self.tokens = 0  # generated; of a text that is slow, one for each moment
        self.local = threading.local()
        self.slow: Callable[[dict[str, Any]], float] = lambda body: 0.0  # seconds of a completion
        self.holder = ""  # another run that uses it, and keeps others out
        self.ended = threading.Event()
        self.random = random.Random(0)
        threading.Thread(target=lambda: self.serve_forever(0.01), daemon=True).start()

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def body(self) -> dict[str, Any]:
        """What the request has that is being answered, for a fault."""
        found: dict[str, Any] = self.local.body
        return found

    def end(self) -> None:
        """Dies: nothing is answered any more, and the port is free."""
        if not self.ended.is_set():
            self.ended.set()
            self.shutdown()
            self.server_close()

    def hang(self) -> None:
        self.faulty = True
        self.ended.wait(60)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass

    def complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = []
        for prompt in body["prompt"]:
            for _ in range(body["n"]):
                seed = 0 if body["temperature"] == 0 else body["seed"]
                choices.append(text(prompt, seed, len(choices), self.version, body["max_tokens"]))
        for index, choice in enumerate(choices):
            choice["index"] = index
            choice["weight_versions"] = [self.version if self.said is None else self.said]
        return choices


def text(prompt: list[int], seed: int, number: int, version: int, most: int) -> dict[str, Any]:
    draw = random.Random(hashlib.sha256(f"{prompt} {seed} {number} {version}".encode()).digest())
    ids = [draw.randrange(48, 58) for _ in range(draw.randrange(1, most + 2))]
    ended = len(ids) <= most - 1
    ids = [*ids, END] if ended else ids[:most]
    return {
        "token_ids": ids,
        "logprobs": {"token_logprobs": [-draw.random() for _ in ids]},
        "finish_reason": "stop" if ended else "length",
    }


class Handler(BaseHTTPRequestHandler):
    server: FakeEngine
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        engine = self.server
        engine.local.body = body
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        fault = engine.fault(engine, self.path) if allowed else 401
        engine.faulty = engine.faulty or fault is not None
        if fault == LOST or engine.ended.is_set():
            self.close_connection = True
            return
        if isinstance(fault, int):
            self._say(fault, {"error": {"message": f"fault {fault}"}})
            return
        if self.path == "/v1/completions":
            engine.requests.append(body)
            choices = engine.complete(body)
            time.sleep(engine.random.random() * engine.delay)
            until = time.monotonic() + engine.slow(body)
            while time.monotonic() < until and not engine.ended.is_set():
                time.sleep(0.05)
                engine.tokens += 1
            if not engine.ended.is_set():
                self._say(200, {"choices": choices} | engine.owner)
            return
        if self.path == "/update_weights" and engine.holder:
            self._say(409, {"error": {"message": f"the run {engine.holder} uses it"}})
            return
        if self.path == "/update_weights":
            if "manifest" in body:  # of a version that is no files
                body = json.loads(Path(body["manifest"]).read_text())
            engine.version, engine.said = body["version"], None
            engine.updates.append(engine.version)
        if self.path == "/score":
            found = [SCORE] * (len(body["tokens"]) - 1)
            version = engine.version if engine.said is None else engine.said
            self._say(200, {"logprobs": found, "weight_version": version})
            return
        if self.path == "/metrics":
            text = f"kempner_prefill_tokens_total 0\nkempner_generated_tokens_total {engine.tokens}"
            self._send(200, f"{text}\n".encode())
            return
        more = {"data": [engine.about | {"ends": [END]}]} if self.path == "/v1/models" else {}
        more |= {"run": engine.holder, "leased": True} if engine.holder else engine.owner
        self._say(200, {"weight_version": engine.version} | more)

    def _say(self, code: int, content: dict[str, Any]) -> None:
        self._send(code, json.dumps(content).encode())

    def _send(self, code: int, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
