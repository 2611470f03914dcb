"""The routes of an engine. Each connection has a thread that waits; the worker computes."""

from __future__ import annotations

import contextlib
import hmac
import json
import select
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty
from typing import Any
from urllib.parse import unquote, urlsplit

from kempner.extensions.serve.lease import RUN, Lease, LeaseHeld, LeaseRefused
from kempner.extensions.serve.protocol import (
    Asked,
    BadRequest,
    CompletionResponse,
    Fields,
    Json,
    error_body,
    read_ids,
    read_request,
)
from kempner.extensions.serve.worker import CompletionJob, News, Unavailable, Worker
from kempner.jobs.ranks.port_range import listen_in_range

LARGEST_REQUEST_BYTES = 64 << 20
DISCARDED_BYTES = 1 << 30  # read from a larger body
CLIENT_POLL_S = 0.5  # between two checks whether a client is still there
CLIENT_SILENCE_S = 60.0  # a client that sends and accepts nothing for so long is gone
# Connections without an allowed request: beyond MOST_STRANGERS, the oldest is dropped if it has
# waited for STRANGER_S; beyond FULL_HOUSE, at once. A client may open a thousand at the same time.
MOST_STRANGERS, FULL_HOUSE, STRANGER_S = 256, 4096, 2.0
MODEL = "/v1/models/"  # followed by its name
EMPTY: Mapping[str, str] = {}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
LAST_ANSWERS_S = 3.0  # at the end, for answers being written


class TooLarge(Exception):
    """A body of more than LARGEST_REQUEST_BYTES."""

    def __init__(self, length: int) -> None:
        super().__init__(f"the body has {length:,} bytes: at most {LARGEST_REQUEST_BYTES:,}")
        self.length = length


class ClientGone(Exception):
    pass


class Server(ThreadingHTTPServer):
    """An HTTP server, bound when made; it answers once it has a worker and serve_forever() runs."""

    # The process may end while threads still wait for their clients' next requests.
    daemon_threads = True
    request_queue_size = 1024  # connections that arrive at the same time
    worker: Worker

    def __init__(self, host: str, port: int, model: str, token: str) -> None:
        """`model`: its name for clients; `token`: required in each request, unless
        empty. Raises OSError."""
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.lease = Lease()
        self.model, self.token, self.began = model, token, int(time.time())
        self.names = (*LOOPBACK, host)  # names of this server, for clients without a token
        self.active = 0  # requests that are being answered
        self.heads: dict[Handler, float] = {}  # since when each waits for its request's head
        self.lock = threading.Lock()
        super().__init__((host, port), Handler)

    # http.server's own method asks the DNS for this host's name.
    def server_bind(self) -> None:
        # A port that the user has named is used as is; 0 means one in the site's range.
        if self.server_address[1]:
            socketserver.TCPServer.server_bind(self)
        else:
            self.socket.close()
            self.socket = listen_in_range(str(self.server_address[0]))
            self.server_address = self.socket.getsockname()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a broken connection is not an error here
            super().handle_error(request, client_address)

    def service_actions(self) -> None:
        """Drop slow senders, twice a second: a request without the token, sent byte by byte, must
        not hold a thread."""
        # A copy, in one step: other threads change it.
        for handler, since in self.heads.copy().items():
            if time.monotonic() > since + CLIENT_SILENCE_S:
                with contextlib.suppress(OSError):
                    handler.connection.shutdown(socket.SHUT_RDWR)
        self.make_room()

    def make_room(self) -> None:
        """Drop connections of strangers, which must not take all threads and descriptors."""
        heads = self.heads.copy()
        strangers = [handler for handler in heads if not handler.known]
        if (excess := len(strangers) - MOST_STRANGERS) <= 0:
            return
        strangers.sort(key=lambda handler: heads[handler])
        for handler in strangers[:excess]:
            if len(strangers) > FULL_HOUSE or time.monotonic() > heads[handler] + STRANGER_S:
                with contextlib.suppress(OSError):
                    # Shut down, not closed: the socket is its thread's, which ends by itself.
                    handler.connection.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        with self.lock:
            self.active += 1
        try:
            yield
        finally:
            with self.lock:
                self.active -= 1

    def wait_for_answers(self) -> None:
        until = time.monotonic() + LAST_ANSWERS_S
        while self.active and time.monotonic() < until:
            time.sleep(0.01)


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = CLIENT_SILENCE_S
    # Send each token of a stream immediately, not together with the next ones.
    disable_nagle_algorithm = True
    known = False  # a request on this connection was allowed

    def handle_one_request(self) -> None:
        # Set between requests, too: a connection kept open waits for a head.
        self.server.heads[self] = time.monotonic()
        try:
            self.server.make_room()
            super().handle_one_request()
        finally:
            self.server.heads.pop(self, None)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, instead of a line per request."""

    def do_GET(self) -> None:
        self._answer(GET)

    do_HEAD = do_GET  # _say() leaves the body out

    def do_POST(self) -> None:
        self._answer(POST)

    def do_PUT(self) -> None:
        self._answer({})

    do_DELETE = do_PATCH = do_OPTIONS = do_PUT

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer as JSON the requests that http.server itself refuses."""
        # It is unknown where the next request would begin.
        self.close_connection = True
        self._say(code, error_body(code, message or explain or HTTPStatus(code).phrase))

    def _answer(self, routes: dict[str, Callable[[Handler, bytes], None]]) -> None:
        # The head has arrived: service_actions() must not drop it while it is being answered.
        self.server.heads.pop(self)
        with self.server.answering():
            try:
                # Before reading the body: a stranger's may be as large as LARGEST_REQUEST_BYTES.
                self._allowed()
                body = self._body()
                path = self.path.partition("?")[0]
                # Not a key of GET: the name of a model is a path, with slashes in it.
                if routes is GET and path.startswith(MODEL):
                    self.model(unquote(path).removeprefix(MODEL))
                elif (route := routes.get(path)) is not None:
                    route(self, body)
                else:
                    self._no_route(path)
            except TooLarge as problem:
                self._say(413, error_body(413, str(problem)))
                self._discard(problem.length)
            except BadRequest as problem:
                self._say(400, error_body(400, str(problem)))
            except Unavailable as problem:
                self._say(503, error_body(503, str(problem)))
            except (ClientGone, OSError):
                self.close_connection = True

    def _no_route(self, path: str) -> None:
        """Answer a path that does not exist for this method."""
        methods = "GET, HEAD" if path in GET or path.startswith(MODEL) else "POST"
        if path not in GET | POST and not path.startswith(MODEL):
            message = f"{self.command} {path[:80]}: the routes are {', '.join(GET | POST)}"
            self._say(404, error_body(404, message))
        else:
            message = f"{self.command} {path[:80]}: this route takes {methods}"
            self._say(405, error_body(405, message), {"Allow": methods})

    def _allowed(self) -> None:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        # In constant time, so that timing does not reveal how much of a guess is right.
        is_right = hmac.compare_digest(token.strip().encode(), self.server.token.encode())
        if self.server.token and not (is_right and scheme.lower() == "bearer"):
            self.close_connection = True  # the rest of the request is not read
            self._say(
                401, error_body(401, "give the token of this engine: Authorization: Bearer TOKEN")
            )
            raise ClientGone
        if not self.server.token and not self._is_direct():
            self.close_connection = True
            reason = "clients of other machines need a token: docs/extensions/serve.md"
            self._say(403, error_body(403, reason))
            raise ClientGone
        self.known = True

    def _is_direct(self) -> bool:
        """Return whether the request is not from a foreign web page in a browser on this machine,
        which has a foreign Origin or, if its name resolves to here, a foreign Host."""
        headers = [
            f"//{self.headers.get('Host', 'localhost')}",
            self.headers.get("Origin", "//localhost"),
        ]
        with contextlib.suppress(ValueError):
            return all(urlsplit(url).hostname in self.server.names for url in headers)
        return False

    def _body(self) -> bytes:
        if self.command in ("GET", "HEAD"):
            return b""
        if self.command != "POST":
            self.close_connection = True  # the rest of the request is not read
            return b""
        # RFC 9112, 6.3: without either header there is no body.
        chunked = "Transfer-Encoding" in self.headers
        length = self.headers.get("Content-Length", "" if chunked else "0")
        # int() raises for more than 4,300 digits.
        if not length.isdecimal() or len(length) > 12:
            self.close_connection = True
            raise BadRequest(f"Content-Length: is required, at most {LARGEST_REQUEST_BYTES}")
        if int(length) > LARGEST_REQUEST_BYTES:
            self.close_connection = True
            raise TooLarge(int(length))
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ClientGone
        return body

    def _discard(self, length: int) -> None:
        """Read what a refused client sends, up to DISCARDED_BYTES: only then does it read the
        answer, and it would otherwise find the connection closed."""
        left = min(length, DISCARDED_BYTES)
        while left > 0 and (part := self.rfile.read(min(left, 1 << 20))):
            left -= len(part)

    def _say(self, code: int, content: Json | str, headers: Mapping[str, str] = EMPTY) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        data = text.encode()
        self.send_response(code)
        # 0.0.4 is the version of Prometheus's text format.
        kind = "text/plain; version=0.0.4" if isinstance(content, str) else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # --- what the engine is ---

    def health(self, _: bytes) -> None:
        worker = self.server.worker
        if worker.broken:
            raise Unavailable(worker.broken)
        run = self.headers.get(RUN, "")
        self.server.lease.renew(run)
        about: Json = {"status": "paused" if worker.paused else "ok"}
        about |= {"leased": True} if self.server.lease.held(run) else {}
        self._say(200, about | self._version())

    def _version(self) -> Json:
        return {"weight_version": self.server.worker.version} | self._run()

    def _run(self) -> Json:
        run = self.server.lease.run
        return {"run": run} if run else {}

    def models(self, _: bytes) -> None:
        self._say(200, {"object": "list", "data": [self._model()]})

    def model(self, name: str) -> None:
        if name == self.server.model:
            self._say(200, self._model())
        else:
            about = f"no such model: {name[:80]}; the model here is {self.server.model}"
            self._say(404, error_body(404, about))

    def _model(self) -> Json:
        one: Json = {"id": self.server.model, "object": "model", "owned_by": "kempner"}
        worker = self.server.worker
        one |= {"created": self.server.began, "max_model_len": worker.window}
        one |= {"vocab_size": worker.words.tokenizer.vocab_size, "ends": sorted(worker.words.ends)}
        one |= {"tokenizer": worker.tokenizer, "shape": worker.texts.engine.model.cfg.shape}
        return one | self._version()

    def metrics(self, _: bytes) -> None:
        worker = self.server.worker
        engine = worker.texts.engine
        figures = [
            ("requests_running", "gauge", {"": len(engine.requests)}),
            ("requests_waiting", "gauge", {"": len(worker.texts.waiting)}),
            ("slots", "gauge", {"": engine.cache.slots}),
            ("paused", "gauge", {"": int(worker.paused)}),
            ("weight_version", "gauge", {"": worker.version}),
            ("prefill_tokens_total", "counter", {"": engine.prefilled}),
            ("generated_tokens_total", "counter", {"": worker.generated}),
            ("texts_total", "counter", dict(worker.finished)),
        ]
        lines = []
        for name, kind, values in figures:
            lines.append(f"# TYPE kempner_{name} {kind}")
            for label, value in values.items():
                of = f'{{finish_reason="{label}"}}' if label else ""
                lines.append(f"kempner_{name}{of} {value}")
        self._say(200, "\n".join(lines) + "\n")

    # --- what is done with it ---

    def pause(self, _: bytes) -> None:
        self.server.worker.pause(True)
        self._say(200, {"paused": True} | self._version())

    def resume(self, _: bytes) -> None:
        self.server.worker.pause(False)
        self._say(200, {"paused": False} | self._version())

    def release(self, body: bytes) -> None:
        """Free the engine for other runs at once, because a run has ended."""
        fields = Fields(body)
        self.server.lease.release(fields.text("run"))
        fields.end()
        self._say(200, self._version())

    def update_weights(self, body: bytes) -> None:
        fields = Fields(body)
        manifest = fields.text("manifest", "")
        path = "" if manifest else fields.text("path")
        # Above 2**53 a JSON number need not be exact.
        version = fields.number("version", None, 0, 2**53)
        run = fields.text("run", "")
        fields.end()
        worker = self.server.worker
        try:
            if manifest:
                worker.receive(manifest, self.server.token)
            else:
                # Before the update: another run's texts must not go on with these weights.
                if self.server.lease.take(run):
                    worker.refuse("this engine gets weights of another run")
                worker.update(path, version)
        except LeaseHeld as problem:
            self._say(409, error_body(409, str(problem)))
            return
        except LeaseRefused as problem:
            raise BadRequest(str(problem)) from None
        self._say(200, self._version())

    # --- texts ---

    def score(self, body: bytes) -> None:
        """Answer with the log-probabilities that the engine's weights give to a
        text sampled elsewhere."""
        fields, worker = Fields(body), self.server.worker
        ids = read_ids(fields.take("tokens"), "tokens", worker.words.tokenizer.vocab_size)
        temperature = fields.number("temperature", 1.0, 1e-6, 100, float)
        fields.end()
        if len(ids) > worker.window:
            raise BadRequest(f"tokens: {len(ids)} are more than {worker.window}, the window")
        logprobs, version = worker.score(ids, temperature)
        self._say(200, {"logprobs": logprobs, "weight_version": version} | self._run())

    def completions(self, body: bytes) -> None:
        self._complete(body, chat=False)

    def chat(self, body: bytes) -> None:
        self._complete(body, chat=True)

    def _complete(self, body: bytes, chat: bool) -> None:
        worker, model = self.server.worker, self.server.model

        def encode(function: Callable[[Any], list[int]], arguments: list[Any]) -> list[list[int]]:
            # A tokenizer is not thread-safe.
            return worker.call(lambda: [*map(function, arguments)])

        request = read_request(body, chat, model, worker.window, worker.words, encode)
        job = CompletionJob(request.stream)
        worker.take(request, job)
        try:
            (self._stream if request.stream else self._whole)(
                request, job, CompletionResponse(request, model, worker.pieces)
            )
        except (ClientGone, OSError):
            # Otherwise its texts would keep their slots, although nothing waits for them.
            with contextlib.suppress(Unavailable):
                worker.drop(job)
            raise

    def _whole(self, request: Asked, job: CompletionJob, answer: CompletionResponse) -> None:
        last_news = {news.text: news for news in self._news(job)}
        choices, befores = [], [""] * len(job.texts)
        if request.echo:
            befores = self.server.worker.decode([text.prompt for text in job.texts])
        for text, before in zip(job.texts, befores, strict=True):
            news, looked = last_news[text], None
            if request.top or (request.echo and request.logprobs):
                looked = self.server.worker.look(text, request.top)
            choices.append(
                answer.choice(text, before + news.grown, 0, news.length, news.finish, looked)
            )
        body = answer.whole | {"choices": choices, "usage": answer.usage(job.texts)}
        self._say(200, body | self._run())

    def _stream(self, request: Asked, job: CompletionJob, answer: CompletionResponse) -> None:
        """Send server-sent events, one per token; closing the connection ends them."""
        self.close_connection = True
        # Without a Content-Length, the answer ends with the connection.
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for news in self._news(job):
                first = max(0, news.length - 1)
                choice = answer.choice(news.text, news.grown, first, news.length, news.finish)
                self._event(json.dumps(answer.part | {"choices": [choice]}))
            if request.usage:
                usage = {"choices": [], "usage": answer.usage(job.texts)}
                self._event(json.dumps(answer.part | usage))
            self._event("[DONE]")
        except Unavailable as problem:  # the status has been sent
            self._event(json.dumps(error_body(503, str(problem))))

    def _event(self, text: str) -> None:
        self.wfile.write(f"data: {text}\n\n".encode())

    def _news(self, job: CompletionJob) -> Iterator[News]:
        """Yield the news until all texts have ended. Raises ClientGone, Unavailable."""
        unfinished, looked = len(job.texts), time.monotonic()
        while unfinished:
            if (
                time.monotonic() > looked + CLIENT_POLL_S
            ):  # also while there is always news of some text
                self._look()
                looked = time.monotonic()
            try:
                news = job.news.get(timeout=CLIENT_POLL_S)
            except Empty:
                continue
            if isinstance(news, Unavailable):
                raise news
            unfinished -= bool(news.finish)
            yield news

    def _look(self) -> None:
        """Raise ClientGone if the client is gone: a connection that it has closed is
        readable but empty."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        if poll.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
            raise ClientGone


GET: dict[str, Callable[[Handler, bytes], None]] = {
    "/health": Handler.health,
    "/v1/models": Handler.models,
    "/metrics": Handler.metrics,
}
POST: dict[str, Callable[[Handler, bytes], None]] = {
    "/v1/completions": Handler.completions,
    "/v1/chat/completions": Handler.chat,
    "/pause": Handler.pause,
    "/resume": Handler.resume,
    "/update_weights": Handler.update_weights,
    "/release": Handler.release,
    "/score": Handler.score,
}
