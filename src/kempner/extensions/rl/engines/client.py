"""The client of one engine. No torch.

All methods may be called from any thread; abort() ends calls that wait for an answer. A completion
has no timeout: the caller watches progress(), and calls abort() when there is none.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from kempner.extensions.generate.config import Sampling
from kempner.extensions.serve.lease import RUN

SLOTS = {"kit": 16, "vllm": 128}  # if the configuration gives none
ENGINE_HEARTBEAT_S = 3.0  # the longest that an engine may take to report that it is alive
ENGINE_CONNECT_S = 10.0
VERSION_S = 60.0  # vLLM reports its weights' version between two steps of the model
SCORE_S = 600.0  # the longest that an engine may take to score one text
UPDATE_S = 3600.0  # the longest that an engine may read new weights


class Completion(NamedTuple):
    token_ids: list[int]  # all sampled tokens, including the one that ended the text
    logprobs: list[float]  # of each, under the distribution that it was drawn from
    versions: list[int]  # of the weights that drew them, each once
    finish: str  # stop or length


class Scores(NamedTuple):
    logprobs: list[float]  # of each token but the first
    version: int  # of the weights that computed them


class About(NamedTuple):
    """The model of an engine."""

    vocab_size: int  # of its tokenizer
    ends: set[int]  # tokens that end a text
    tokenizer: str  # see Words.fingerprint
    shape: dict[str, Any]  # see ModelConfig.shape


class Lost(Exception):
    """The engine does not answer, or not like an engine of this job; the message says why."""


class Silent(Lost):
    """No answer, or not in time."""


class Busy(Exception):
    """The engine accepts no requests now."""


class Cancelled(Exception):
    """The answer is no longer wanted."""


class GivenUp(Exception):
    """The request has failed too often."""


class EngineLeased(Busy):
    """Another run uses the engine."""


class Rejected(Exception):
    """The engine understands the request but refuses it, as any other engine would."""


class Closed(Exception):
    """The run is ending."""


class NoEngines(Exception):
    """No engine can take work, and none will come."""


class Flight:
    """Requests of one group, which any thread can cancel."""

    def __init__(self) -> None:
        self.version: int | None = None  # of the engine that began it; None: not begun
        self.cancelled = False
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()

    def begin(self, version: int) -> None:
        """Note that an engine with these weights gets a request. Raises Cancelled."""
        if self.cancelled:
            raise Cancelled
        self.version = version if self.version is None else min(self.version, version)

    def cancel(self) -> None:
        """Close the connections: the engine notices, and frees the slots."""
        with self._lock:
            self.cancelled = True
            for each in self._sockets:
                shut_socket(each)

    def add(self, opened: socket.socket) -> None:
        with self._lock:
            self._sockets.add(opened)
            # cancel() came before this connection was opened, and has not closed it.
            if self.cancelled:
                shut_socket(opened)

    def remove(self, opened: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(opened)


def shut_socket(opened: socket.socket) -> None:
    """Shut a connection down, which wakes a thread waiting on it."""
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)


class RouterEngine(Protocol):
    """An engine, as the router needs it."""

    url: str

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        flight: Flight | None = None,
    ) -> list[list[Completion]]:
        """Return `n` samples of each prompt, determined by sampling.seed, their numbers
        and the weights."""
        ...

    def alive(self) -> None:
        """Raise Lost if the engine is not alive; works even while it reads new weights."""
        ...

    def version(self) -> int | None:
        """Return the version of the weights it serves, once it accepts requests. None: it is alive,
        but too busy to answer."""
        ...

    def progress(self) -> int | None:
        """Return the number of tokens read and generated so far; None: not counted."""
        ...

    def update(self, body: dict[str, Any]) -> int:
        """Load new weights; returns their version once they are in use."""
        ...

    def score(self, tokens: Sequence[int], temperature: float) -> Scores | None:
        """Return log-probabilities of a text sampled earlier; None: not supported."""
        ...

    def tokens_read(self) -> int | None:
        """Return the prompt tokens read since its start; None: not counted."""
        ...

    def release(self) -> None:
        """Free the engine for other runs, because this one has ended."""
        ...

    def abort(self) -> None: ...


class KitEngine:
    """An engine of scripts/serve.py."""

    living: tuple[int, ...] = (200, 503)  # codes of /health; 503: without weights
    counters: tuple[str, ...] = ("kempner_prefill_tokens_total", "kempner_generated_tokens_total")

    def __init__(self, url: str, token: str, run: str | None = "") -> None:
        """`run`: see RolloutExchange.run; an engine with weights of another attempt must first
        receive this attempt's. None: it may have any weights, unless another run uses it."""
        self.url, self._token, self._run = url, token, run
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        flight: Flight | None = None,
    ) -> list[list[Completion]]:
        body = {
            "prompt": [list(prompt) for prompt in prompts],
            "n": n,
            # No alternatives: only the log-probability of the sampled token.
            "logprobs": 0,
            "seed": sampling.seed,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
        }
        answer = self._ask("/v1/completions", body, None, flight)
        # Checked afterwards, because another run may have replaced its weights meanwhile.
        self._own(answer.get("run", ""))
        try:
            # The order of their numbers matters, because their seeds follow from it.
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            texts = [
                Completion(
                    choice["token_ids"],
                    choice["logprobs"]["token_logprobs"],
                    choice["weight_versions"],
                    choice["finish_reason"],
                )
                for choice in choices
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise Lost(f"its answer is not an engine's: {error!r}") from None
        if len(texts) != len(prompts) * n:
            raise Lost(f"it was asked for {len(prompts) * n} texts, and returned {len(texts)}")
        return [texts[i : i + n] for i in range(0, len(texts), n)]

    def alive(self) -> None:
        code, _ = self._exchange("/health", None, ENGINE_HEARTBEAT_S)
        # Not by _ask(), which raises Busy on 503: an engine without weights is alive.
        if code not in self.living:
            raise Lost(f"/health: {code}")

    def version(self) -> int | None:
        answer = self._ask("/health", None, ENGINE_HEARTBEAT_S)
        self._ours(answer.get("run", ""), lambda: bool(answer.get("leased")))
        return self._version_in(answer)

    def _own(self, run: str) -> None:
        """Raise Lost if the weights belong to another run, if that matters."""
        if self._run is not None and run not in ("", self._run):
            raise Lost(f"it has weights of another run, {run}")

    def _ours(self, run: str, leased: Callable[[], bool]) -> None:
        """Check the weights before a request. Raises Busy; EngineLeased if that run
        uses the engine."""
        if run not in ("", self._run) and leased():
            raise EngineLeased(f"it has weights of another run, {run}, which uses it")
        try:
            self._own(run)
        except Lost as other:
            raise Busy(str(other)) from None

    def update(self, body: dict[str, Any]) -> int:
        # Weights sent by the ranks need no lease: no other run has the token of this attempt.
        run_field = {"run": self._run} if self._run and "path" in body else {}
        return self._version_in(self._ask("/update_weights", body | run_field, UPDATE_S))

    def release(self) -> None:
        if self._run:
            self._ask("/release", {"run": self._run}, ENGINE_HEARTBEAT_S)

    def score(self, tokens: Sequence[int], temperature: float) -> Scores | None:
        answer = self._ask("/score", {"tokens": list(tokens), "temperature": temperature}, SCORE_S)
        self._own(answer.get("run", ""))
        try:
            return Scores(list(map(float, answer["logprobs"])), self._version_in(answer))
        except (KeyError, TypeError, ValueError) as error:
            raise Lost(f"its answer is not an engine's: {error!r}") from None

    def about(self) -> About:
        try:
            (model,) = self._ask("/v1/models", None, ENGINE_HEARTBEAT_S)["data"]
            tokenizer = int(model["vocab_size"]), set(model["ends"]), str(model["tokenizer"])
            return About(*tokenizer, dict(model["shape"]))
        except (KeyError, TypeError, ValueError) as error:
            raise Lost(f"its answer is not an engine's: {error!r}") from None

    def tokens_read(self) -> int | None:
        return self._count(KitEngine.counters[0])

    def progress(self) -> int | None:
        counts = [self._count(name) for name in self.counters]
        return None if None in counts else sum(each or 0 for each in counts)

    def _count(self, name: str) -> int | None:
        """Return the sum of a counter over all labels."""
        _, text = self._exchange("/metrics", None, ENGINE_HEARTBEAT_S)
        # vLLM's Prometheus client writes large numbers as 1.5e+06.
        line = rf"^{re.escape(name)}(?:{{.*}})? ([0-9.e+]+)$".encode()
        found = re.findall(line, text, re.MULTILINE)
        return int(sum(map(float, found))) if found else None

    def _version_in(self, answer: dict[str, Any]) -> int:
        version = answer.get("weight_version")
        if not isinstance(version, int):
            raise Lost("its answer is not an engine's: it names no weight_version")
        return version

    def abort(self) -> None:
        with self._lock:
            for each in self._open:
                shut_socket(each)

    def _ask(
        self,
        path: str,
        body: dict[str, Any] | None,
        timeout: float | None,
        flight: Flight | None = None,
    ) -> dict[str, Any]:
        """Return the answer as JSON. Raises Lost, Busy, Rejected."""
        return _read(path, *self._exchange(path, body, timeout, flight))

    def _exchange(
        self,
        path: str,
        body: dict[str, Any] | None,
        timeout: float | None,
        flight: Flight | None = None,
    ) -> tuple[int, bytes]:
        """Return code and text of the answer. `timeout`: seconds; None: no limit. Raises Lost."""
        connection = http.client.HTTPConnection(
            self._host, self._port, timeout=min(ENGINE_CONNECT_S, timeout or ENGINE_CONNECT_S)
        )
        opened: socket.socket | None = None
        try:
            connection.connect()
            opened = connection.sock
            # Connecting has a separate limit, because an answer may take much longer.
            opened.settimeout(timeout)
            with self._lock:
                self._open.add(opened)
            if flight:
                flight.add(opened)
            headers = {"Content-Type": "application/json"}
            headers |= {"Authorization": f"Bearer {self._token}"} if self._token else {}
            headers |= {RUN: self._run} if self._run else {}
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError as error:
            raise Silent(f"{path}: {str(error) or type(error).__name__}") from None
        except http.client.HTTPException as error:
            raise Lost(f"{path}: {str(error) or type(error).__name__}") from None
        finally:
            if opened:
                with self._lock:
                    self._open.discard(opened)
                if flight:
                    flight.remove(opened)
            connection.close()


# --- vLLM ---

CHANGES = {  # these change its computation; vllm_engine.py lets one run at a time use them
    "/pause",
    "/resume",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/update_weight_version",
}
ROUTES = CHANGES | {"/inference/v1/generate", "/weight_info"}  # these differ between its versions
LEASE = "/lease"  # of vllm_engine.py: which run uses the engine
NO_WEIGHTS = "none"  # its version while it reads weights


class VllmEngine(KitEngine):
    """A vLLM engine as vllm_engine.py starts it. The version of its weights is a string that
    includes the run, such as 4@RUN; the weights that it was started with are 4."""

    living = (200,)  # 503: its core is dead
    counters = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")

    def __init__(
        self, url: str, token: str, ends: Collection[int], seeded: bool = True, run: str | None = ""
    ) -> None:
        """`ends`: tokens that end a text; it has no tokenizer. `seeded`: samples follow from their
        seeds, for which vLLM abandons its fast sampler and draws row by row."""
        super().__init__(url, token, run)
        self._seeded = seeded
        self._ends, self._probed = sorted(ends), False

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        flight: Flight | None = None,
    ) -> list[list[Completion]]:
        words = {
            "n": n,
            "logprobs": 0,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            # For vLLM, 0 means all tokens.
            "top_k": sampling.top_k or 0,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "stop_token_ids": self._ends,
            "detokenize": False,
        }
        if self._seeded:
            words["seed"] = sampling.seed

        def one(prompt: Sequence[int]) -> list[Completion]:
            body = {"token_ids": list(prompt), "sampling_params": words}
            answer = self._ask("/inference/v1/generate", body, None, flight)
            try:
                choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
                texts = [
                    Completion(
                        choice["token_ids"],
                        [entry["logprob"] for entry in choice["logprobs"]["content"]],
                        self._versions(choice["weight_versions"]),
                        choice["finish_reason"],
                    )
                    for choice in choices
                ]
            except (KeyError, TypeError, ValueError) as error:
                raise Lost(f"its answer is not vLLM's: {error!r}") from None
            # A text that vLLM has aborted arrives as an answer, too.
            if len(texts) != n or any(each.finish not in ("stop", "length") for each in texts):
                raise Lost("it has not finished all texts")
            return texts

        # The route takes one prompt per request; vLLM batches them.
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(one, prompts))

    def version(self) -> int | None:
        # First, with its short limit, because the core may take long to answer the next request.
        self.alive()
        if not self._probed:
            missing = ROUTES - set(self._ask("/openapi.json", None, VERSION_S).get("paths", ()))
            if missing:
                raise Lost(f"this vLLM has no {', '.join(sorted(missing))}")
            self._probed = True
        try:  # answered by its core, which handles one thing at a time
            label = self._ask("/weight_info", None, VERSION_S).get("weight_version")
        except Silent:
            return None
        if label == NO_WEIGHTS:
            raise Busy("its weights could not be read")
        number, _, run = label.partition("@") if isinstance(label, str) else ("", "", "")
        if not number.isdecimal():
            raise Lost("its answer is not vLLM's: it names no weight_version")
        self._ours(run, self._leased)
        return int(number)

    def _leased(self) -> bool:
        with contextlib.suppress(Lost):  # a vLLM started by hand does not know
            return bool(self._ask(LEASE, None, ENGINE_HEARTBEAT_S).get("leased"))
        return False

    def _versions(self, spans: Sequence[dict[str, Any]]) -> list[int]:
        """Return the versions of this run's weights, each once. Raises Lost,
        KeyError or ValueError."""
        versions = set()
        for span in spans:
            number, _, run = str(span["version"]).partition("@")
            self._own(run)
            versions.add(int(number))
        return sorted(versions)

    def update(self, body: dict[str, Any]) -> int:
        """Load new weights. Keeps unfinished texts, but not keys and values from
        the old weights."""
        if "path" not in body:
            raise Rejected("vLLM takes weights only from files")
        reload = {"method": "reload_weights", "kwargs": {"weights_path": body["path"]}}
        # No step of the model may run on half-read weights.
        self._do("/pause?mode=keep", {})
        try:
            # If the next call fails, the weights are neither the old nor the new ones.
            self._do("/update_weight_version", {"new_version": NO_WEIGHTS})
            self._do("/collective_rpc", reload)
            self._do("/reset_prefix_cache?reset_running_requests=true", {})
            new = f"{body['version']}@{self._run}" if self._run else f"{body['version']}"
            self._do("/update_weight_version", {"new_version": new})
        finally:
            # Even after an error, because a paused engine would never answer its requests.
            self._do("/resume", {})
        return int(body["version"])

    def release(self) -> None:
        with contextlib.suppress(Lost):  # a vLLM started by hand has no lease
            self._ask(LEASE, {}, ENGINE_HEARTBEAT_S)

    def score(self, tokens: Sequence[int], temperature: float) -> Scores | None:
        """Return the log-probabilities at temperature 1, else None: vLLM offers those of a prompt
        at no other temperature."""
        if temperature != 1.0:
            return None
        # vLLM must sample at least one token.
        words = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": list(tokens), "sampling_params": words}
        answer = self._ask("/inference/v1/generate", body, SCORE_S)
        try:
            (version,) = self._versions(answer["choices"][0]["weight_versions"])  # of its token
            # The first token has no log-probability, because nothing precedes it.
            entries = zip(tokens[1:], answer["prompt_logprobs"][1:], strict=True)
            logprobs = [float(entry[str(token)]["logprob"]) for token, entry in entries]
            return Scores(logprobs, version)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise Lost(f"its answer is not vLLM's: {error!r}") from None

    def _do(self, path: str, body: dict[str, Any]) -> None:
        self._ask(path, body, UPDATE_S)


def _read(path: str, code: int, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if code == 200 and isinstance(content, dict):
        return content
    try:
        why = str(content["error"]["message"])
    except (KeyError, TypeError):
        why = text[:200].decode(errors="replace")
    # No weights, or a full queue: it may accept the request later.
    if code == 503:
        raise Busy(why)
    # Both kinds of engines answer this if another run has the lease.
    if code == 409:
        raise EngineLeased(why)
    if code in (400, 422):
        raise Rejected(f"{path}: {why}")
    raise Lost(f"{path}: {code} {why}")
