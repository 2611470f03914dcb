"""The server of one engine, in this process, over real connections."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kempner.config.option import ConfigError
from kempner.data.text.tokenizer import ByteTokenizer, TokenPiece
from kempner.extensions.generate import load as loading
from kempner.extensions.generate import sampling
from kempner.extensions.generate.config import Sampling
from kempner.extensions.generate.engine import Engine
from kempner.extensions.generate.load import Words, load_model_and_tokenizer
from kempner.extensions.generate.texts import Text, Texts
from kempner.extensions.hf.load import not_finite
from kempner.extensions.hf.source import find_weights
from kempner.extensions.rl.engines.client import Busy, EngineLeased, KitEngine, Lost
from kempner.extensions.rl.opening import open_parts
from kempner.extensions.rl.trainer.transfer import Gone, Withdrawn
from kempner.extensions.serve import http
from kempner.extensions.serve.alternatives import score_alternatives
from kempner.extensions.serve.http import Server
from kempner.extensions.serve.lease import Lease
from kempner.extensions.serve.protocol import CompletionResponse, read_request
from kempner.extensions.serve.weights import first_version
from kempner.extensions.serve.worker import CompletionJob, News, Worker
from kempner.jobs import this_job
from kempner.train.configure import load_config
from tests.conftest import ROOT, load_program
from tests.pages import blocks
from tests.served import Client, make_model
from tests.waiting import LIMIT_S, until

FEW = Words(ByteTokenizer(), [], set(), Path())
PROMPT, WINDOW, SLOTS, QUEUE = [40, 69, 76, 76, 79], 128, 3, 16


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make a busy machine slow."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "first")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return make_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture
def worker(folder: Path) -> Worker:
    return Worker(load_model_and_tokenizer(str(folder), "cpu"), SLOTS, WINDOW, QUEUE)


@contextlib.contextmanager
def serving(worker: Worker) -> Iterator[Client]:
    server = Server("127.0.0.1", 0, "small", "secret")
    server.worker = worker
    threads = [
        threading.Thread(target=run) for run in (worker.run, lambda: server.serve_forever(0.02))
    ]
    for thread in threads:
        thread.start()
    yield Client(server.port, "secret")
    worker.end("the test is over")
    server.shutdown()
    for thread in threads:
        thread.join()
    server.server_close()


@pytest.fixture
def engine(worker: Worker) -> Iterator[Client]:
    with serving(worker) as client:
        yield client


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "[", "Origin": "http://localhost"}, 403),
    ],
)
def test_a_page_in_a_browser_of_this_machine(
    engine: Client, worker: Worker, headers: dict[str, str], code: int
) -> None:
    """Without a token the loopback is the fence: any page that a browser here has open reached it,
    and paused the engine."""
    server = Server("127.0.0.1", 0, "small", "")
    server.worker = worker
    thread = threading.Thread(target=lambda: server.serve_forever(0.02))
    thread.start()
    try:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/pause", "", {"Content-Type": "text/plain"} | headers)
        assert connection.getresponse().status == code
        connection.close()
        assert worker.paused == (code == 200)
    finally:
        worker.pause(False)
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_command_of_the_page_keeps_the_token_to_itself(engine: Client, tmp_path: Path) -> None:
    """docs/extensions/serve.md; every user of the host sees the words of curl."""
    (block,) = (block for block in blocks("docs/extensions/serve.md") if "Bearer" in block.text)
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "curl").write_text(
        f'#!/bin/sh\necho "$@" >words\nexec {shutil.which("curl")} --silent --fail "$@"\n'
    )
    (tmp_path / "curl").chmod(0o755)
    done = subprocess.run(
        ["bash", "-ec", block.text.replace("node1:34113", f"127.0.0.1:{engine.port}")],
        cwd=tmp_path, env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["status"] == "ok"
    assert "/health" in (words := (tmp_path / "words").read_text()) and "secret" not in words
    assert (tmp_path / "header").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("limit", "value"), [("STRANGER_S", 0.3), ("FULL_HOUSE", 40)])
def test_strangers_who_say_nothing_keep_nobody_out(
    engine: Client, monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    """Each had a thread and a descriptor for a minute; who has been allowed something keeps its
    connection. So many more are dropped at once."""
    monkeypatch.setattr(http, "MOST_STRANGERS", 20)
    ours = engine.open("/health")
    assert ours.getresponse().read()
    monkeypatch.setattr(http, "STRANGER_S", 60.0)
    monkeypatch.setattr(http, limit, value)
    strangers = [socket.create_connection(("127.0.0.1", engine.port), 60) for _ in range(100)]
    assert strangers[0].recv(1) == b""  # the oldest was ended
    assert engine.ask("/health")["status"] == "ok"
    ours.request("GET", "/health", headers={"Authorization": "Bearer secret"})
    assert ours.getresponse().status == 200
    for stranger in strangers:
        stranger.close()
    ours.close()


def test_many_clients_at_once_are_no_strangers(
    engine: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connect before the first of them sends its request."""
    monkeypatch.setattr(http, "MOST_STRANGERS", 20)
    clients = [HTTPConnection("127.0.0.1", engine.port, timeout=60) for _ in range(100)]
    for client in clients:
        client.connect()
    for client in clients:
        client.request("GET", "/health", headers={"Authorization": "Bearer secret"})
    assert {client.getresponse().status for client in clients} == {200}
    for client in clients:
        client.close()


def test_a_post_without_a_length_has_an_empty_body(engine: Client) -> None:
    """As `curl -X POST` sends it (RFC 9112, 6.3)."""
    head = "POST /{} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n{}\r\n"
    for path, more, code in (
        ("pause", "", b"200"), ("resume", "", b"200"),
        ("pause", "Transfer-Encoding: chunked\r\n", b"400"),
    ):  # fmt: skip
        with socket.create_connection(("127.0.0.1", engine.port), 60) as connection:
            connection.sendall(head.format(path, more).encode())
            assert connection.recv(12)[9:] == code


def test_a_completion_is_what_the_model_says(engine: Client, folder: Path) -> None:
    """Greedy tokens and their log-probabilities equal those of a full forward pass."""
    found = engine.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 20, "temperature": 0,
                                           "logprobs": 0, "model": "small"})  # fmt: skip
    (choice,) = found["choices"]
    model, words, *_ = load_model_and_tokenizer(str(folder), "cpu")
    ids = choice["token_ids"]
    logits = model(torch.tensor([PROMPT + ids]))[0, len(PROMPT) - 1 : -1]
    assert ids == logits[:, :259].argmax(-1).tolist()[: len(ids)] and len(set(ids)) > 5
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1).tolist()
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    (as_ids,) = engine.complete(PROMPT, max_tokens=2, temperature=0, logprobs=0,
                                return_tokens_as_token_ids=True)  # fmt: skip
    assert as_ids["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids[:2]]
    assert choice["text"] == words.tokenizer.decode(ids)
    assert (choice["finish_reason"], choice["prompt_token_ids"]) == ("length", PROMPT)
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}
    assert engine.complete(words.tokenizer.decode(PROMPT), max_tokens=20, temperature=0) == [
        choice | {"logprobs": None}
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_vocabulary_that_is_padded(tmp_path: Path, temperature: float) -> None:
    """Most published models have more rows than their tokenizers have tokens. The engine draws none
    of those, and the probability of a token is that of the whole model, as a trainer has it."""
    loaded = load_model_and_tokenizer(str(make_model(tmp_path, vocab_size=320)), "cpu")
    worker = Worker(loaded, 2, WINDOW, QUEUE)
    engine = worker.texts.engine
    whole = Text(0, PROMPT, Sampling(temperature, max_tokens=30), loaded.words.tokenizer, set())
    cut = Text(1, PROMPT, Sampling(temperature, top_k=1), loaded.words.tokenizer, set())
    engine.join([whole, cut])
    while len(whole.new) < 30:
        engine.step()
    assert max(whole.new) < 259 and cut.logprobs == pytest.approx([0.0] * len(cut.new))
    ids = [*PROMPT, *whole.new]
    logits = loaded.model(torch.tensor([ids[:-1]]))[0] / temperature
    own = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()
    assert whole.logprobs == pytest.approx(own[len(PROMPT) - 1 :], abs=1e-4)
    looked = score_alternatives(loaded.model, engine.vocab_size, ids, 5, temperature)
    assert looked.values == pytest.approx(own, abs=1e-4)
    assert max(max(top) for top in looked.tops) < 259


def spelled(name: str) -> bytes:
    """A token of `logprobs` as bytes."""
    return bytes.fromhex(name[6:].replace("\\x", "")) if name[:6] == "bytes:" else name.encode()


def test_tokens_in_log_probabilities_are_texts(engine: Client, worker: Worker) -> None:
    """And places in the text; a part of a character is its bytes, and no alternative is lost."""
    prompt = "a few wörds ☃, and 🦊"
    words: dict[str, Any] = {"max_tokens": 3, "seed": 4}  # so few that no broken character is cut
    (choice,) = engine.complete(prompt, echo=True, logprobs=5, **words)
    found, ids = choice["logprobs"], [*choice["prompt_token_ids"], *choice["token_ids"]]
    data = [spelled(name) for name in found["tokens"]]
    assert b"".join(data).decode("utf-8", "replace") == choice["text"]
    assert any(name.startswith("bytes:") for name in found["tokens"])
    for number, begin in enumerate(found["text_offset"]):
        before = b"".join(data[:number]).decode("utf-8", "replace")
        assert begin == len(before.rstrip("\ufffd")) or before.endswith("\ufffd")
        if found["tokens"][number] == "w":
            assert choice["text"][begin] == "w"
    assert [len(top) for top in found["top_logprobs"][1:]] == [5] * (len(ids) - 1)
    for name, top, value in zip(*(found[key][1:] for key in (
        "tokens", "top_logprobs", "token_logprobs")), strict=True):  # fmt: skip
        assert name not in top or top[name] == pytest.approx(value, abs=1e-4)
    (whole,) = engine.complete(prompt, logprobs=0, **words)
    with engine.send(
        "/v1/completions", {"prompt": prompt, "logprobs": 0, "stream": True, **words}
    ) as answer:
        parts = [event["choices"][0]["logprobs"] for event in events(answer)]
    for key in ("tokens", "text_offset"):
        assert [value for part in parts for value in part[key]] == whole["logprobs"][key]
    assert whole["logprobs"]["text_offset"][0] == 0
    messages = [{"role": "user", "content": "a few"}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 3, **words}
    (chat,) = engine.ask("/v1/chat/completions", body)["choices"]
    entries = chat["logprobs"]["content"]
    said = bytes(byte for entry in entries for byte in entry["bytes"] or ())
    assert said.decode("utf-8", "replace") == worker.words.tokenizer.decode(chat["token_ids"])
    for entry in (each for one in entries for each in (one, *one["top_logprobs"])):
        if entry["bytes"] is None:  # special: it adds nothing to the text
            assert entry["token"] == "<|endoftext|>"
        else:
            assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]


def test_no_alternative_is_lost_among_tokens_with_the_same_text() -> None:
    pieces = {
        1: TokenPiece(b"a", False),
        2: TokenPiece(b"\xe2\x98", False),
        3: TokenPiece(b"a", False),
    }
    asked = read_request(b'{"prompt": [1], "logprobs": 3}', False, "m", 99, FEW, None)  # type: ignore[arg-type]
    answer = CompletionResponse(asked, "m", lambda ids: [pieces[token] for token in ids])
    assert answer._names([1, 2, 3, 2]) == {1: "a", 2: "bytes:\\xe2\\x98", 3: "token_id:3"}


def test_samples_depend_on_their_seed_alone(engine: Client) -> None:
    """Not on what shares the batch, nor on the number of slots that are free."""
    words = {"max_tokens": 30, "seed": 5, "n": 4, "logprobs": 0}
    quiet = engine.complete([PROMPT, [1, 2]], **words)
    read = engine.figures()["prefill_tokens_total"]
    assert len({tuple(choice["token_ids"]) for choice in quiet}) == 8 and read == 5 + 2
    with ThreadPoolExecutor(4) as pool:
        noise = [
            pool.submit(engine.complete, [n], max_tokens=7 * n + 3, temperature=0.5 * n)
            for n in range(3)
        ]
        busy = engine.complete([PROMPT, [1, 2]], **words)
        for one in noise:
            one.result()
    for a, b in zip(quiet, busy, strict=True):
        values = [choice["logprobs"].pop("token_logprobs") for choice in (a, b)]
        assert a == b and values[0] == pytest.approx(values[1], abs=1e-5)
    assert engine.complete(PROMPT, max_tokens=9) != engine.complete(PROMPT, max_tokens=9)


def events(answer: Any) -> list[Any]:
    lines = answer.read().decode().split("\n\n")
    assert lines.pop() == "" and lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_stream_is_the_whole_in_parts(engine: Client) -> None:
    words = {"max_tokens": 25, "seed": 1, "n": 2, "logprobs": 0}
    whole = engine.complete("a few", **words)
    asked = {"stream": True, "stream_options": {"include_usage": True}, **words}
    with engine.send("/v1/completions", {"prompt": "a few", **asked}) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        parts = events(answer)
    counts = [len(choice["token_ids"]) for choice in whole]
    assert parts.pop()["usage"]["completion_tokens"] == sum(counts) == len(parts)
    for choice in whole:
        own = [p["choices"][0] for p in parts if p["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [token for part in own for token in part["token_ids"]] == choice["token_ids"]
        *before, last = (part["finish_reason"] for part in own)
        assert set(before) == {None} and last == choice["finish_reason"]
        values = [part["logprobs"]["token_logprobs"][0] for part in own]
        assert values == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)


def test_a_conversation(engine: Client) -> None:
    """The tokenizer's own template makes the prompt."""
    messages = [{"role": "user", "content": "a few words"}]
    words = {"temperature": 0, "max_tokens": 6, "logprobs": True}
    found = engine.ask("/v1/chat/completions", {"messages": messages, **words})
    (choice,) = found["choices"]
    (plain,) = engine.complete("user: a few words\nassistant:", temperature=0, max_tokens=6)
    assert choice["message"] == {"role": "assistant", "content": plain["text"]}
    assert choice["token_ids"] == plain["token_ids"]
    assert len(choice["logprobs"]["content"]) == 6 and found["object"] == "chat.completion"
    asked = {"messages": messages, "stream": True, **words}
    with engine.send("/v1/chat/completions", asked) as answer:
        parts = events(answer)
    assert "".join(p["choices"][0]["delta"]["content"] for p in parts) == plain["text"]
    limits = {"max_tokens": 6, "max_completion_tokens": 2}
    found = engine.ask("/v1/chat/completions", {"messages": messages, "seed": 1, **limits})
    assert found["usage"]["completion_tokens"] == 2
    filled = engine.ask("/v1/chat/completions", {"messages": messages, "seed": 1})
    assert filled["usage"]["total_tokens"] <= WINDOW  # as far as the window goes


def test_a_template_is_read_once_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts of the engine wait while it is; and it may write the date."""
    words = load_model_and_tokenizer(str(make_model(tmp_path)), "cpu").words
    about = {"chat_template": "{{ messages[0].content }}{{ strftime_now('%d') }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    days = [date(2026, 12, day) for day in (24, 24, 25)]
    monkeypatch.setattr(loading, "date", SimpleNamespace(today=lambda: days.pop(0)))
    read, count = loading.read_tokenizer_config, []
    monkeypatch.setattr(
        loading, "read_tokenizer_config", lambda folder: count.append(folder) or read(folder)
    )
    said = [words.tokenizer.decode(words.chat([{"role": "user", "content": "a"}])) for _ in "abc"]
    assert said == ["a24", "a24", "a25"] and len(count) == 2


def test_a_request_waits_for_few_steps(
    engine: Client, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of the worker waits for one: there was one for every text of a list, and for every
    place with a new alternative. Nor does a token walk through all that is cached."""
    calls, call = [], worker.call

    def counted(action: Any) -> Any:
        calls.append(action)
        return call(action)

    class Cache(dict[int, TokenPiece]):
        def keys(self) -> Any:
            raise AssertionError

    monkeypatch.setattr(worker, "call", counted)
    monkeypatch.setattr(worker, "_pieces", Cache())
    engine.complete(["a few"] * 4 + ["words"] * 4, max_tokens=0, echo=True)
    assert len(calls) == 3  # encode, take, decode
    calls.clear()
    engine.complete("a few words", max_tokens=0, echo=True, logprobs=5)
    assert len(calls) == 5  # and look, and pieces


def test_texts_go_on_while_others_are_scored(
    engine: Client, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests follow each other: there is always one that waits."""
    done = threading.Event()

    def score(*words: Any) -> Any:
        until(lambda: done.is_set() or not worker._inbox.empty())
        return score_alternatives(*words)

    def keep_scoring() -> None:
        while not done.is_set():
            engine.ask("/score", {"tokens": PROMPT})

    monkeypatch.setattr("kempner.extensions.serve.worker.score_alternatives", score)
    with ThreadPoolExecutor(2) as pool:
        scorers = [pool.submit(keep_scoring) for _ in range(2)]
        try:
            assert engine.complete(PROMPT, max_tokens=5, seed=1)[0]["finish_reason"] == "length"
        finally:
            done.set()
        for scorer in scorers:
            scorer.result()


def test_where_a_text_ends(engine: Client) -> None:
    (whole,) = engine.complete(PROMPT, temperature=0, max_tokens=40)
    stop = whole["text"][10:13]
    (cut,) = engine.complete(PROMPT, temperature=0, max_tokens=40, stop=["\x01\x02", stop])
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]


BAD = [
    ({"prompt": None}, "prompt: must be a text"),
    ({"prompt": []}, "prompt: must be a text"),
    ({"prompt": [1, 259]}, "token ids must be from 0 to 258"),
    ({"prompt": [1, True]}, "prompt: must be"),
    ({"prompt": [1] * 120}, "120 tokens of the prompt and max_tokens = 16 are more than 128"),
    ({"max_tokens": -1}, "max_tokens = -1: must be a whole number from 0 to 128"),
    ({"prompt": [1] * 129, "max_tokens": 0}, "129 tokens of the prompt and max_tokens = 0 are"),
    ({"prompt": [1] * 127, "max_tokens": 2}, "127 tokens of the prompt and max_tokens = 2 are"),
    ({"stop": ["a", None]}, "stop = ['a', null]: must be a string or a list of strings"),
    ({"n": 1.5}, "n = 1.5: must be a whole number"),
    ({"temperature": 1e-9}, "temperature = 1e-09: must be 0, or"),
    ({"temperature": float("nan")}, "temperature = NaN: must be a number"),
    ({"top_p": -1}, "top_p = -1: must be a number from 0 to 1"),
    ({"top_k": -2}, "top_k = -2: must be a whole number from -1"),
    ({"stop": [""]}, "stop = ['']: must not be empty"),
    ({"stop": 3}, "stop = 3: must be a string"),
    ({"stream": 1}, "stream = 1: must be true or false"),
    ({"model": "large"}, "the model here is small"),
    ({"best_of": 2}, "best_of = 2: is not supported here; only 1 is"),
    ({"guided_json": {}}, "guided_json: is not supported here"),
]


def test_bad_requests(engine: Client) -> None:
    for change, problem in BAD:
        body = {"prompt": PROMPT, **change}
        message = engine.ask("/v1/completions", body, code=400)["error"]["message"]
        assert problem in message.replace('"', "'") and "\n" not in message
    assert engine.ask("/health")["status"] == "ok"


def test_other_bad_requests(engine: Client) -> None:
    for path, body, problem in [
        ("/v1/completions", b"{", "not JSON"),
        ("/v1/completions", b"[" * 100_000, "not JSON"),
        ("/v1/completions", [1], "must be a JSON object"),
        ("/v1/chat/completions", {"messages": []}, "must be a list of messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0},
            "max_tokens = 0: must be a whole number from 1 to 128",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "content of each"),
        ("/update_weights", {}, "path: is required"),
        ("/release", {}, "run: is required"),
        ("/update_weights", {"path": "/gone"}, "/gone: "),
        ("/update_weights", {"manifest": 5, "run": "/runs/b#1"}, "manifest: is required"),
    ]:
        assert problem in engine.ask(path, body, code=400)["error"]["message"]
    assert "run" not in engine.ask("/health")  # nobody has got it by what was refused
    assert "the routes are /health" in engine.ask("/v1/complete", {}, code=404)["error"]["message"]


def test_other_methods_and_models(engine: Client) -> None:
    """Answers are JSON, whatever is asked, and HEAD is GET without the body."""

    def send(method: str, path: str, body: str | None = None) -> tuple[int, bytes, Any]:
        connection = HTTPConnection("127.0.0.1", engine.port, timeout=60)
        connection.request(method, path, body, {"Authorization": "Bearer secret"})
        with contextlib.closing(connection), connection.getresponse() as answer:
            return answer.status, answer.read(), answer.headers

    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "FOO"):
        code, text, headers = send(method, "/health", "{}" if method != "FOO" else None)
        assert code == (501 if method == "FOO" else 405), text
        assert json.loads(text)["error"]["code"] == code
        assert method == "FOO" or headers["Allow"] == "GET, HEAD"
    assert send("PUT", "/v1/completions")[2]["Allow"] == "POST"
    assert send("PUT", "/nowhere")[0] == 404
    code, _, headers = send("GET", "/v1/completions")
    assert code == 405 and headers["Allow"] == "POST"
    # The client has sent all of it before it reads.
    code, text, _ = send("POST", "/v1/completions", " " * (http.LARGEST_REQUEST_BYTES + 1))
    assert code == 413 and b"the body has 67,108,865 bytes: at most 67,108,864" in text
    for path in ("/health", "/v1/models", "/v1/models/small", "/metrics"):
        code, text, headers = send("HEAD", path)
        assert (code, text) == (200, b"") and headers["Content-Length"] == str(
            len(send("GET", path)[1])
        )
    assert send("HEAD", "/nowhere")[:2] == (404, b"")
    code, text, _ = send("GET", "/v1/models/NOPE")
    assert code == 404 and "no such model: NOPE; the model here is small" in text.decode()


def test_the_scheme_of_a_token_may_be_spelled_in_any_case(engine: Client) -> None:
    """RFC 9110, 11.1."""
    codes = []
    for given in ("bearer secret", "BEARER  secret", "Bearer Secret", "Basic secret", "secret", ""):
        connection = HTTPConnection("127.0.0.1", engine.port, timeout=60)
        connection.request("GET", "/health", headers={"Authorization": given})
        codes.append(connection.getresponse().status)
        connection.close()
    assert codes == [200, 200, 401, 401, 401, 401]


def test_strangers_are_refused(engine: Client) -> None:
    for token in ("", "wrong", "secret2"):
        stranger = Client(engine.port, token)
        for path, body in (("/health", None), ("/metrics", None), ("/pause", {})):
            assert "Bearer TOKEN" in stranger.ask(path, body, code=401)["error"]["message"]
    assert engine.ask("/health")["status"] == "ok"


def test_a_stranger_keeps_no_thread(engine: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """By sending a request byte by byte."""
    monkeypatch.setattr(http, "CLIENT_SILENCE_S", 0.3)
    with socket.create_connection(("127.0.0.1", engine.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX:")
        end = time.monotonic() + 30
        with contextlib.suppress(OSError):
            while time.monotonic() < end:
                connection.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() < end
    assert engine.ask("/health")["status"] == "ok"


def test_a_full_queue_says_so(engine: Client, worker: Worker) -> None:
    engine.ask("/pause", {})
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(engine.complete, PROMPT, n=QUEUE)
        until(lambda: engine.figures()["requests_waiting"] == QUEUE)
        refused = engine.ask("/v1/completions", {"prompt": PROMPT}, code=503)
        assert f"the queue is full: {QUEUE} of {QUEUE} texts wait" in refused["error"]["message"]
        engine.ask("/resume", {})
        assert len(waits.result()) == QUEUE
    body = {"prompt": [PROMPT] * (QUEUE + 1)}
    refused = engine.ask("/v1/completions", body, code=400)["error"]["message"]
    assert f"{QUEUE + 1} texts in one request, and the queue holds {QUEUE}" in refused


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slots(
    engine: Client, worker: Worker, stream: bool
) -> None:
    """While its texts are paused, and while they are generated."""
    body = {"prompt": PROMPT, "max_tokens": 100, "n": 6, "stream": stream}
    engine.ask("/pause", {})
    for state in ("paused", "resumed"):
        connection = engine.open("/v1/completions", body)
        until(lambda: engine.figures()["requests_waiting"] >= 3)
        if state == "resumed":
            engine.ask("/resume", {})
        connection.close()
        until(lambda: engine.busy() == 0)
    assert engine.figures()['texts_total{finish_reason="abort"}'] >= 6
    assert not worker._jobs and not worker._parts  # nor their memory
    assert len(engine.complete(PROMPT, temperature=0)[0]["token_ids"]) == 16


def test_a_client_that_goes_away_is_noticed_while_texts_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often one of them does."""
    monkeypatch.setattr(http, "CLIENT_POLL_S", 0.0)
    ours, theirs = socket.socketpair()
    theirs.close()
    handler, job = http.Handler.__new__(http.Handler), CompletionJob(False)
    handler.connection = ours
    nothing: Any = None
    job.texts = [nothing] * 100
    for _ in job.texts:
        job.news.put(News(nothing, "", 1, "stop"))
    with ours, pytest.raises(http.ClientGone):
        list(handler._news(job))
    assert job.news.qsize() > 90


def test_scores_are_those_of_the_distribution_that_samples_are_drawn_from(engine: Client) -> None:
    """What a trainer compares: tokens that were sampled before, at the temperature of then."""
    (choice,) = engine.complete(PROMPT, max_tokens=20, temperature=0.7, seed=3, logprobs=0)
    tokens = [*choice["prompt_token_ids"], *choice["token_ids"]]
    answer = engine.ask("/score", {"tokens": tokens, "temperature": 0.7})
    assert answer["weight_version"] == 0 and len(answer["logprobs"]) == len(tokens) - 1
    sampled = choice["logprobs"]["token_logprobs"]
    assert answer["logprobs"][-len(sampled) :] == pytest.approx(sampled, abs=1e-4)
    for body, why in (
        ({}, "tokens: is required"),
        ({"tokens": [1, "a"]}, "tokens: is required"),
        ({"tokens": [10**6]}, "tokens: token ids must be from 0 to"),
        ({"tokens": [1] * 10**4}, "the window"),
        ({"tokens": [1, 2], "temperature": 0}, "temperature = 0: must be a number"),
        ({"tokens": [1, 2], "top_p": 1}, "top_p"),
    ):
        assert why in engine.ask("/score", body, 400)["error"]["message"]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("most", [0, 1])
def test_a_text_is_scored(folder: Path, most: int, fixed: bool) -> None:
    """With echo and without a token more, as OpenAI's API does it, or with one; also a text that
    fills the window, whose next token needs no room: nothing reads it."""
    loaded = load_model_and_tokenizer(str(folder), "cpu")
    with serving(Worker(loaded, SLOTS, WINDOW, QUEUE, fixed=fixed)) as engine:
        for length in (1, 5, WINDOW):
            ids = [7 * n % 250 for n in range(length)]
            words = {"max_tokens": most, "echo": True, "logprobs": 1, "temperature": 0, "n": 2}
            for choice in engine.complete([ids, ids], **words):
                assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", most)
                values = choice["logprobs"]["token_logprobs"]
                assert len(values) == length + most and values[0] is None
                logits = loaded.model(torch.tensor([ids]))[0].log_softmax(-1)
                own = logits[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
                assert values[1:length] == pytest.approx(own.tolist(), abs=1e-4)
                assert len(choice["logprobs"]["top_logprobs"]) == length + most
        (plain,) = engine.complete([1, 2], max_tokens=0)
        assert (plain["text"], plain["token_ids"]) == ("", [])
        asked = {"prompt": [1], "max_tokens": 0, "stream": True}
        with engine.send("/v1/completions", asked) as raw:
            (part,) = events(raw)
        assert part["choices"][0]["finish_reason"] == "length"


def test_paused_texts_go_on_where_they_were(engine: Client) -> None:
    expected = engine.complete(PROMPT, max_tokens=100, seed=2)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.complete, PROMPT, max_tokens=100, seed=2)
        until(lambda: engine.figures()["requests_running"] == 1 or running.done())
        assert engine.ask("/pause", {}) == {"paused": True, "weight_version": 0}
        count = engine.figures()["generated_tokens_total"]
        time.sleep(0.1)
        assert engine.figures()["generated_tokens_total"] == count
        assert engine.ask("/health")["status"] == "paused"
        engine.ask("/resume", {})
        assert running.result() == expected


def test_two_runs_do_not_share_an_engine(
    engine: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their versions are told apart; the second one is refused, with the reason, as long as the
    first one asks how the engine is."""
    first, second, resumed = (
        KitEngine(f"http://127.0.0.1:{engine.port}", engine.token, run)
        for run in ("/runs/a#7.0", "/runs/b#8.0", "/runs/a#7.1")
    )
    assert first.update({"path": str(folder), "version": 5}) == first.version() == 5
    with pytest.raises(EngineLeased, match=r"another run, /runs/a#7\.0, which uses it"):
        second.version()
    with pytest.raises(
        EngineLeased, match="the weights of the run /runs/a, which uses it; end that"
    ):
        second.update({"path": str(folder), "version": 7})
    with pytest.raises(Lost, match="weights of another run, /runs/a"):
        second.complete([PROMPT], 1, Sampling(max_tokens=2))
    assert first.complete([PROMPT], 1, Sampling(max_tokens=2))[0][0].versions == [5]
    # Another attempt of the same run is no stranger.
    with pytest.raises(Busy, match="weights of another run") as busy:
        resumed.version()
    assert not isinstance(busy.value, EngineLeased)
    assert resumed.update({"path": str(folder), "version": 5}) == resumed.version() == 5
    first.release()  # it holds nothing any more
    with pytest.raises(EngineLeased):
        second.version()
    resumed.release()
    assert second.update({"path": str(folder), "version": 7}) == second.version() == 7
    with pytest.raises(EngineLeased):
        resumed.update({"path": str(folder), "version": 7})
    monkeypatch.setattr(Lease, "SECONDS", -1.0)
    assert second.version() == 7
    with pytest.raises(Busy, match="weights of another run, /runs/b"):
        resumed.version()
    assert resumed.update({"path": str(folder), "version": 9}) == 9


def test_an_engine_waits_for_an_orchestrator_as_long_as_its_job_does() -> None:
    watch = (ROOT / "scripts/slurm/lib/rl_watch.sh").read_text()
    (silent,) = re.findall(r"KP_ORCHESTRATOR_SILENT_S=(\d+)", watch)
    assert int(silent) + 30 < Lease.SECONDS


def test_new_weights(engine: Client, folder: Path, other: Path) -> None:
    """The answer has the version. A text that is in work has both; what comes after it is what the
    new model says."""
    before = engine.complete(PROMPT, temperature=0)
    engine.ask("/pause", {})
    with ThreadPoolExecutor(1) as pool:
        words = {"temperature": 0, "max_tokens": 60}
        running = pool.submit(engine.complete, PROMPT, **words)
        until(lambda: engine.figures()["requests_waiting"] == 1)
        assert engine.ask("/update_weights", {"path": str(other)}) == {"weight_version": 1}
        engine.ask("/resume", {})
        assert running.result()[0]["weight_versions"] == [1]
    after = engine.complete(PROMPT, temperature=0)
    assert after[0]["token_ids"] != before[0]["token_ids"]
    assert after[0]["token_ids"] == running.result()[0]["token_ids"][:16]
    ids, model = after[0]["token_ids"], load_model_and_tokenizer(str(other), "cpu").model
    logits = model(torch.tensor([PROMPT + ids]))[0, len(PROMPT) - 1 : -1, :259]
    assert ids == logits.argmax(-1).tolist()
    back = engine.ask("/update_weights", {"path": str(folder), "version": 7})
    assert back == {"weight_version": 7}
    again = engine.complete(PROMPT, temperature=0)
    assert again == [before[0] | {"weight_versions": [7]}]
    assert engine.ask("/v1/models")["data"][0]["weight_version"] == 7


def test_weights_of_another_model_change_nothing(engine: Client, tmp_path: Path) -> None:
    before = engine.complete(PROMPT, temperature=0)
    wide = make_model(tmp_path / "wide", hidden_size=64)
    refused = engine.ask("/update_weights", {"path": str(wide)}, code=400)
    assert "model.dim is 64, here it is 48" in refused["error"]["message"]
    part = make_model(tmp_path / "part", seed=1)
    weights = (part / "model.safetensors").read_bytes()
    (part / "model.safetensors").write_bytes(weights[:-1000])
    assert engine.ask("/update_weights", {"path": str(part)}, code=400)
    assert engine.complete(PROMPT, temperature=0) == before


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_change_nothing(
    engine: Client, tmp_path: Path, value: float
) -> None:
    """Every text would fail, and after three of them the engine."""
    before = engine.complete(PROMPT, temperature=0)
    bad = make_model(tmp_path / "bad", seed=1)
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][7, 5] = value
    save_file(tensors, bad / "model.safetensors", {"format": "pt"})
    refused = engine.ask("/update_weights", {"path": str(bad)}, code=400)["error"]["message"]
    assert "model.layers.1.mlp.up_proj.weight has values that are not finite" in refused
    assert engine.complete(PROMPT, temperature=0) == before
    assert not_finite(find_weights(str(bad))) and not not_finite(
        find_weights(str(make_model(tmp_path / "good")))
    )


def test_half_of_the_weights_serve_nobody(
    engine: Client, worker: Worker, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until an update comes through."""

    def fail(*_: object) -> None:
        raise OSError("read error")

    with monkeypatch.context() as patch:
        patch.setattr("kempner.extensions.serve.weights.load_weights", fail)
        refused = engine.ask("/update_weights", {"path": str(other)}, code=503)
    assert "no weights are loaded" in refused["error"]["message"]
    assert engine.ask("/health", code=503) == engine.ask(
        "/v1/completions", {"prompt": PROMPT}, code=503
    )
    engine.ask("/update_weights", {"path": str(other), "version": 3})
    assert engine.complete(PROMPT)[0]["weight_versions"] == [3]


def test_weights_from_the_ranks_of_a_trainer(
    engine: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that nobody offers changes nothing; after half of one it serves nobody."""
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"version": 4, "transport": "direct"}))
    before, told, value = engine.complete(PROMPT, temperature=0), [], -1.0

    def receive(problem: Exception | None, model: Any, facts: Any, token: str) -> None:
        told.append((facts["version"], token))
        if problem:
            raise problem
        model.embed.weight.data.mul_(value)

    def update(problem: Exception | None, code: int) -> Any:
        monkeypatch.setattr(
            "kempner.extensions.rl.trainer.transfer.receive_weights", partial(receive, problem)
        )
        return engine.ask("/update_weights", {"manifest": str(manifest)}, code=code)

    for problem, code in ((Gone("nobody offers it"), 400), (Withdrawn("nobody waits"), 503)):
        assert "nobody" in update(problem, code)["error"]["message"]
        assert engine.complete(PROMPT, temperature=0) == before
    assert "broken off" in update(OSError("broken off"), 503)["error"]["message"]
    engine.ask("/v1/completions", {"prompt": PROMPT}, code=503)
    engine.ask("/health", code=503)
    assert update(None, 200) == {"weight_version": 4} and set(told) == {(4, "secret")}
    (after,) = engine.complete(PROMPT, temperature=0)
    assert after["weight_versions"] == [4] and after["token_ids"] != before[0]["token_ids"]
    value = math.inf
    assert "embed.weight is not finite" in update(None, 400)["error"]["message"]
    refused = engine.ask("/update_weights", {"manifest": "/gone"}, code=400)
    assert "/gone" in refused["error"]["message"]
    engine.ask("/health", code=503)  # of the values that are not finite


def test_an_engine_that_fails_says_so_to_all(
    engine: Client, worker: Worker, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(worker.texts.engine, "step", fail)
    for _ in range(4):
        # With this seed the first token, which join() draws, is not the end.
        refused = engine.ask("/v1/completions", {"prompt": PROMPT, "seed": 1}, code=503)
        assert "the engine has failed" in refused["error"]["message"]
    assert worker.exit_code == 1 and "MemoryError: no more" in capsys.readouterr().err


def test_a_pass_that_finds_no_memory_is_answered(
    engine: Client, worker: Worker, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """However often: the connection ended without a word. What has filled the memory is free."""
    left = []

    class Hidden:
        def __del__(self) -> None:
            left.append(1)

    def fail(*_: object) -> None:
        hidden = Hidden()
        raise RuntimeError(f"out of memory beside {hidden}")

    monkeypatch.setattr("kempner.extensions.serve.worker.score_alternatives", fail)
    echo = {"prompt": PROMPT, "max_tokens": 1, "echo": True, "logprobs": 1}
    gc.disable()  # it would find what the error holds, but only later
    try:
        for path, body in [("/score", {"tokens": PROMPT}), ("/v1/completions", echo)] * 2:
            refused = engine.ask(path, body, code=503)["error"]["message"]
            assert "the engine has failed; see its log" in refused
        assert engine.complete(PROMPT, max_tokens=2) and len(left) == 4
    finally:
        gc.enable()
    assert worker.exit_code == 0 and "out of memory beside" in capsys.readouterr().err


@pytest.mark.parametrize("call", ["step", "join"])
def test_a_turn_that_fails_once_ends_its_requests_alone(
    engine: Client, worker: Worker, monkeypatch: pytest.MonkeyPatch, capsys: Any, call: str
) -> None:
    before = engine.complete(PROMPT, seed=1)
    right = getattr(worker.texts.engine, call)

    def fail(*words: Any) -> Any:
        monkeypatch.setattr(worker.texts.engine, call, right)
        right(*words)
        raise MemoryError("no more")

    monkeypatch.setattr(worker.texts.engine, call, fail)
    refused = engine.ask("/v1/completions", {"prompt": PROMPT}, code=503)
    assert "the engine has failed" in refused["error"]["message"]
    after = engine.complete(PROMPT, seed=1)
    assert [c["token_ids"] for c in after] == [c["token_ids"] for c in before]
    assert worker.exit_code == 0 and "MemoryError: no more" in capsys.readouterr().err


def test_logits_that_are_no_numbers_end_their_text_alone(
    engine: Client, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = sampling.sample_tokens

    def spoilt(logits: torch.Tensor, how: Sampling, uniform: torch.Tensor, size: int) -> Any:
        rows = logits.clone()
        rows[0] = float("nan")
        return draw(rows, how, uniform, size)

    engine.ask("/pause", {})
    with ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(engine.send, "/v1/completions", {"prompt": [p] * 4, "seed": 1})
            for p in (40, 50)
        ]
        until(lambda: engine.figures()["requests_waiting"] == 2)
        monkeypatch.setattr("kempner.extensions.generate.sampling.sample_tokens", spoilt)
        right = worker.texts.engine.leave

        def leave(text: Text) -> None:
            monkeypatch.setattr("kempner.extensions.generate.sampling.sample_tokens", draw)
            right(text)

        monkeypatch.setattr(worker.texts.engine, "leave", leave)
        engine.ask("/resume", {})
        answers = [each.result() for each in asked]
    assert sorted(each.status for each in answers) == [200, 503]
    bad = next(each for each in answers if each.status == 503)
    assert "not a number" in json.loads(bad.read())["error"]["message"]
    assert worker.exit_code == 0


def test_a_model_that_says_nothing_but_nan_ends_its_engine(
    engine: Client, worker: Worker, capsys: Any
) -> None:
    """Its log says why."""
    worker.texts.engine.model.norm.weight.data.fill_(math.nan)
    for _ in range(3):
        assert (
            "not a number"
            in engine.ask("/v1/completions", {"prompt": PROMPT}, code=503)["error"]["message"]
        )
    until(lambda: worker.exit_code == 1)
    err = capsys.readouterr().err
    assert "serve: exits after 3 failures" in err and "is not a number" in err


def test_random_numbers_are_drawn_when_they_are_needed() -> None:
    how = Sampling(seed=3, max_tokens=10**12)
    numbers = sampling.Uniforms(how, 1)
    generator = torch.Generator().manual_seed(3 * 1_000_003 + 1)
    assert [numbers[i] for i in range(300)] == torch.rand(300, generator=generator).tolist()


def test_figures(engine: Client) -> None:
    engine.complete(PROMPT, n=2, max_tokens=4, temperature=0)
    assert engine.figures() == {
        "requests_running": 0, "requests_waiting": 0, "slots": SLOTS, "paused": 0,
        "weight_version": 0, "prefill_tokens_total": 5, "generated_tokens_total": 8,
        'texts_total{finish_reason="length"}': 2,
    }  # fmt: skip


def test_a_run_knows_the_model_of_its_engine(
    engine: Client, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shape, and what its token ids mean; other weights are welcome."""
    monkeypatch.setenv("KEMPNER_SERVE_TOKEN", "secret")

    def problem(**changes: Any) -> str:
        start = make_model(tmp_path / "start", seed=2, **changes)
        if exchanged:
            (start / "tokenizer.json").write_text(exchanged)
        words = [
            f"--model.init_from={start}", f"--run.dir={tmp_path / 'run'}", "--train.seq_len=64",
            "--rl.env=[{id='reverse'}]", "--rl.sampling.max_tokens=8", f"--rl.inference.urls={url}",
        ]  # fmt: skip
        try:
            open_parts(load_config([], words), servers=True)
        except ConfigError as error:
            return "; ".join(error.problems)
        return ""

    exchanged, url = "", [f"http://127.0.0.1:{engine.port}"]
    assert problem() == ""
    assert "its model has model.dim = 48, that of the run 64; serve" in problem(hidden_size=64)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    exchanged = json.dumps(content)
    assert "the token ids of its model mean different text than the run's" in problem()


# --- the program ---


@pytest.fixture
def serve() -> Iterator[ModuleType]:
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield load_program("serve")
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["/gone"], "/gone"),
        (["MODEL", "--slots=0"], "--slots 0: must be at least 1"),
        (["MODEL", "--port=70000"], "--port 70000: must be from 0 to 65535"),
        (["MODEL", "--slot"], "--slot"),
        ([], "give either MODEL or --weights DIR"),
        (["MODEL", "--weights=/gone"], "give either MODEL or --weights DIR"),
        (["MODEL", "--host=0.0.0.0"], "give a token by KEMPNER_SERVE_TOKEN or --token-file"),
        (["MODEL", "--token-file=OPEN"], "may be read by others; chmod 600 it"),
        (["MODEL", "--token-file=/gone"], "/gone"),
        (["MODEL", "--window=129", "--port=0"], "--window 129: the model sees 128 tokens at most"),
        (["MODEL", "--compile"], "--compile: it is for a GPU; leave it out"),
        (["MODEL", "--port=TAKEN"], "Address already in use; 0 takes a free one"),
    ],
)
def test_a_bad_command_line(
    serve: ModuleType, folder: Path, tmp_path: Path, capsys: Any, words: list[str], problem: str
) -> None:
    (tmp_path / "open").write_text("secret")
    (tmp_path / "open").chmod(0o640)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"MODEL": folder, "OPEN": tmp_path / "open", "TAKEN": taken.getsockname()[1]}
        for name, value in names.items():
            words = [word.replace(name, str(value)) for word in words]
        code = serve.main([*words, "--device=cpu"])
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1 and problem in err and "secret" not in err, err


@pytest.mark.parametrize("more", [["--check"], []])
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["MODEL", "--window=129"], "--window 129: the model sees 128 tokens at most"),
        (["MODEL", "--slots=10000000000"], "values of 10,000,000,000 texts of 128 tokens take"),
        pytest.param(
            ["MODEL", "--device=cuda"],
            "--device cuda: no GPU is visible; give --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
        (["CUT"], "model.safetensors: truncated or not a safetensors file"),
        (["MODEL", "--publish=MODEL/config.json/x"], "--publish: "),
        (["MODEL", "--token-file=SPACES"], "a token is one word"),
    ],
)
def test_a_check_refuses_what_the_start_refuses(
    serve: ModuleType, folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch,
    words: list[str], problem: str, more: list[str],
) -> None:  # fmt: skip
    """Before the model is read."""
    monkeypatch.setattr(
        loading, "load_model_and_tokenizer", lambda *_, **__: pytest.fail("the model was read")
    )
    monkeypatch.setattr(this_job, "is_here", lambda: False)
    cut = make_model(tmp_path / "cut")
    os.truncate(cut / "model.safetensors", 5000)
    (tmp_path / "spaces").write_text("sec ret\n")
    (tmp_path / "spaces").chmod(0o600)
    names = {"MODEL": folder, "CUT": cut, "SPACES": tmp_path / "spaces"}
    for name, value in names.items():
        words = [word.replace(name, str(value)) for word in words]
    code = serve.main(["--device=cpu", "--port=0", *words, *more])
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1 and problem in err and "sec ret" not in err, err


def test_an_engine_that_finds_no_memory_says_what_to_do(
    serve: ModuleType, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have taken it."""
    monkeypatch.setattr(serve, "check_room", lambda *_: None)
    code = serve.main([str(folder), "--device=cpu", "--port=0", "--slots=1000000000000"])
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1 and "give fewer --slots" in err, err


def test_the_versions_of_a_trainer(
    serve: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for one, takes the newest, and loads the next when one was removed meanwhile; its
    file has the number of the engine."""
    weights, engines, found = tmp_path / "weights", tmp_path / "engines", {}

    def publish(number: int, transport: str) -> Path:
        place = weights / f"v{number:08d}"
        shutil.copytree(folder, place)
        facts = {"version": number, "transport": transport}
        (place / "manifest.json").write_text(json.dumps(facts))
        return place

    (weights / "v00000009").mkdir(parents=True)  # not whole yet
    removed = []

    def load_later(name: str, **how: Any) -> Any:
        if not removed:  # by the trainer, while it is read
            removed.append(name)
            publish(4, "directory")
            shutil.rmtree(name)
        return load_model_and_tokenizer(name, **how)

    def drive() -> None:
        time.sleep(0.3)  # it waits
        publish(3, "directory")
        until(lambda: (engines / "engine-7").exists())
        port = int((engines / "engine-7").read_text().rpartition(":")[2])
        engine = Client(port)
        found.update(health=engine.ask("/health"), models=engine.ask("/v1/models")["data"][0])
        found["choice"] = engine.complete(PROMPT)[0]
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setenv("KEMPNER_ENGINE", "7")
    monkeypatch.setattr("kempner.extensions.generate.load.load_model_and_tokenizer", load_later)
    driver = threading.Thread(target=drive)
    driver.start()
    words = ["--weights", str(weights), "--publish", str(engines), "--port=0", "--device=cpu"]
    assert serve.main(words) == 0
    driver.join()
    # The newest one is in the ranks of the trainer; they are about to offer another one.
    publish(6, "direct")
    offers = iter([Withdrawn("not any more"), None])

    def fill(model: Any, *_: Any) -> None:
        if problem := next(offers):
            raise problem
        model.load_state_dict(load_model_and_tokenizer(str(folder), "cpu").model.state_dict())

    monkeypatch.setattr("kempner.extensions.rl.trainer.transfer.receive_weights", fill)
    loaded = first_version(
        weights, partial(load_model_and_tokenizer, device="cpu"), "", threading.Event()
    )
    assert loaded is not None and loaded[1] == 6 and next(offers, "all") == "all"
    assert removed == [str(weights / "v00000003")] and not list(engines.iterdir())
    assert found["health"] == {"status": "ok", "weight_version": 4}
    assert found["models"]["weight_version"] == 4
    assert found["choice"]["weight_versions"] == [4]


def test_a_model_of_bytes(tmp_path: Path) -> None:
    """A directory without a tokenizer whose texts end with token 256."""
    folder = make_model(tmp_path)
    (folder / "tokenizer.json").unlink()
    words = load_model_and_tokenizer(str(folder), "cpu").words
    assert words.prompt("ab") == [256, 97, 98] and words.ends == {256}
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_model_and_tokenizer(str(folder), "cpu")


def test_prompts_are_read_by_twos(folder: Path) -> None:
    """The last free slot waits a little for a second one, unless nobody else waits, or another row
    holds the prompt."""
    loaded = load_model_and_tokenizer(str(folder), "cpu")
    engine: Engine[Text] = Engine(loaded.model, 259, WINDOW, 8)
    texts, joined, clock = Texts(engine), [], 0
    join = engine.join

    def watch(requests: list[Text]) -> list[Text]:
        if requests:
            joined.append((clock, [text.number for text in requests]))
        return join(requests)

    engine.join = watch  # type: ignore[method-assign]

    def text(number: int, prompt: list[int], tokens: int) -> Text:
        sampling = Sampling(seed=1, max_tokens=tokens)
        return Text(number, prompt, sampling, loaded.words.tokenizer, set())

    lengths = [3, 4, 8, 12, 16, 30, 30, 30]
    texts.waiting.extend(text(n, [n, n], length) for n, length in enumerate(lengths))
    texts.waiting.extend(text(n, [n], 30) for n in (8, 9, 10))
    texts.waiting.extend(text(n, [7, 7], 30) for n in (11, 12))
    while texts.busy:
        list(texts.turn())
        clock += 1
    assert joined[0] == (0, [*range(8)])
    # Text 0 ends with turn 2 and text 1 with turn 3; text 2 ends alone, and its slot waits two
    # steps; what text 7 reads is there already.
    assert joined[1][1] == [8, 9] and joined[1][0] == 4
    assert joined[2][1] == [10] and joined[2][0] > joined[1][0] + 3
    assert joined[3][1] == [11]
