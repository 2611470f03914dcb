"""The thread that owns the model: all requests are carried out there, between two steps."""

from __future__ import annotations

import math
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Queue, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from kempner.config.option import ConfigError
from kempner.data.text.tokenizer import TokenPiece
from kempner.extensions.generate.engine import Engine
from kempner.extensions.generate.load import Loaded
from kempner.extensions.generate.texts import Text, Texts
from kempner.extensions.serve import weights
from kempner.extensions.serve.alternatives import Looked, score_alternatives
from kempner.extensions.serve.lease import LeaseRefused
from kempner.extensions.serve.protocol import Asked, BadRequest
from kempner.model.decoder import Decoder

_T = TypeVar("_T")
MOST_FAILURES = 3
FAILED = "the engine has failed; see its log"


class Unavailable(Exception):
    """The engine cannot take a request now; the message says why."""


class News(NamedTuple):
    """A new piece of a text."""

    text: Text
    grown: str
    length: int  # of its new tokens
    finish: str  # why it has ended; empty: it goes on


class CompletionJob:
    """One request: its texts and their news."""

    def __init__(self, stream: bool) -> None:
        self.stream = stream  # news of every token, not only of the last one
        self.texts: list[Text] = []
        # No SimpleQueue: up to Python 3.12 its get(timeout) may wait for ever after a signal.
        self.news: Queue[News | Unavailable] = Queue()


class Worker:
    """Owner of the model. Other threads use call(), take() and drop(); news of a job arrive in its
    queue."""

    def __init__(
        self,
        loaded: Loaded,
        slots: int,
        window: int,
        queue: int,
        version: int = 0,
        fixed: bool = False,
        compiled: bool = False,
    ) -> None:
        """`slots`: texts at a time; `window`: the most tokens of one; `queue`: the most texts that
        wait; `version`: of the weights; `fixed`: see KVCache; `compiled`: see TokenStep."""
        self.words, self.window, self.queue = loaded.words, window, queue
        self.tokenizer = loaded.words.fingerprint()
        vocab_size = loaded.words.tokenizer.vocab_size
        self.texts = Texts(Engine(loaded.model, vocab_size, window, slots, fixed, compiled))
        self.texts.engine.version = version
        self.paused = False
        self.broken = ""  # why there are no weights
        self.exit_code = 0  # of the program
        self.finished: Counter[str] = Counter()  # texts by the reason of their end
        self.generated = 0  # tokens
        self._jobs: dict[Text, CompletionJob] = {}
        self._parts: dict[Text, list[str]] = {}
        self._pieces: dict[int, TokenPiece] = {}
        self._inbox: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._ended = ""  # why no more is taken
        self._failures = 0  # turns that have failed since a text has ended as it should
        self._lock = threading.Lock()  # nothing is put into the inbox after the end

    @property
    def version(self) -> int:
        return self.texts.engine.version

    # --- for other threads ---

    def call(self, action: Callable[[], _T]) -> _T:
        """Run `action` in the worker's thread, between two steps, and return its result. Raises
        what it raises, and Unavailable if the worker has ended."""
        answer: Future[_T] = Future()
        with self._lock:
            # Under the lock: run() empties the inbox under it once, after the end has been noted.
            if self._ended:
                raise Unavailable(self._ended)
            self._inbox.put((action, answer))
        return answer.result()

    def take(self, request: Asked, job: CompletionJob) -> None:
        """Queue the texts of a request. Raises Unavailable."""
        self.call(lambda: self._take(request, job))

    def look(self, text: Text, top: int) -> Looked:
        """Compute log-probabilities of a text and its prompt, in one more pass. Other texts get a
        token between two such passes: a call for each."""
        engine = self.texts.engine
        ids = [*text.prompt, *text.new]
        return self.call(lambda: score_alternatives(engine.model, engine.vocab_size, ids, top))

    def score(self, ids: list[int], temperature: float) -> tuple[list[float], int]:
        """Return the log-probability of each token after the first one, and the version of the
        weights that computed it."""
        engine = self.texts.engine

        def look() -> tuple[list[float], int]:
            if self.broken:
                raise Unavailable(self.broken)
            looked = score_alternatives(engine.model, engine.vocab_size, ids, 0, temperature)
            return looked.values, self.version

        return self.call(look)

    def pieces(self, ids: Sequence[int]) -> list[TokenPiece]:
        """Look up the pieces of tokens. A tokenizer is not thread-safe, so each token is looked up
        once, in the worker, and cached."""
        # Not by a difference of sets, which walks through all that is cached.
        if new := {token for token in ids if token not in self._pieces}:
            look = self.words.tokenizer.piece
            self.call(lambda: self._pieces.update({token: look(token) for token in new}))
        return [self._pieces[token] for token in ids]

    def decode(self, texts: Sequence[Sequence[int]]) -> list[str]:
        return self.call(lambda: [*map(self.words.tokenizer.decode, texts)])

    def drop(self, job: CompletionJob) -> None:
        """Drop a job whose client has gone away."""
        self.call(lambda: self._drop(job))

    def pause(self, paused: bool) -> None:
        """Pause or resume; paused texts stay where they are."""
        self.call(lambda: setattr(self, "paused", paused))

    def update(self, source: str, version: int | None) -> int:
        """Load new weights; texts in work continue with them. Returns their version. Raises
        LeaseRefused: the old ones stay; Unavailable: none are loaded now."""

        def read(model: Decoder) -> int:
            weights.replace_weights(model, source)
            return self.version + 1 if version is None else version

        return self.call(lambda: self._update(read, source))

    def receive(self, manifest: str, token: str) -> int:
        """Receive new weights straight from the ranks of a trainer, otherwise as update()."""
        return self.call(
            lambda: self._update(
                partial(weights.receive_version, manifest=manifest, token=token), manifest
            )
        )

    def refuse(self, why: str) -> None:
        """Refuse all texts that wait or are in work."""
        self.call(lambda: self._refuse_all(why))

    def end(self, why: str) -> None:
        """Refuse all current and later requests."""
        with self._lock:
            if not self._ended:
                self._ended = why
                self._inbox.put((lambda: None, Future()))  # wake it

    # --- in the worker's thread ---

    def run(self) -> None:
        try:
            while not self._ended:
                self._answer_calls()
                if self.texts.busy and not self.paused:
                    self._turn()
        except Exception:
            traceback.print_exc()
            self._fail_for_good()
        self._refuse_all(self._ended)
        with self._lock:  # what has come before the end
            while not self._inbox.empty():
                self._inbox.get()[1].set_exception(Unavailable(self._ended))

    def _turn(self) -> None:
        """Draw a token for each text. Texts that fail are refused, and the others continue; after
        MOST_FAILURES failures in which no text ends, as with NaN weights, the engine is broken for
        good."""
        failures: list[Text] = []
        try:
            for text, grown in self.texts.turn():
                if math.isnan(text.logprobs[-1]):
                    failures.append(text)
                else:
                    self._tell(text, grown)
            why = cause = "the model's output for this text is not a number"
        except Exception as error:  # out of memory, for example
            traceback.print_exc()
            cause = repr(error)
            # A failed pass leaves the cache in an unknown state.
            self.texts.engine.clear()
            # Texts that still wait were not in the pass.
            failures = [text for text in self._jobs if text not in self.texts.waiting]
            why = FAILED
        for job in {self._jobs[text] for text in failures if text in self._jobs}:
            self._drop(job)
            job.news.put(Unavailable(why))
        self._failures += bool(failures)
        if self._failures >= MOST_FAILURES:
            print(
                f"serve: ends after {self._failures} failures without a completed text between: "
                f"{cause}",
                file=sys.stderr,
                flush=True,
            )
            self._fail_for_good()

    def _fail_for_good(self) -> None:
        self.exit_code = 1
        self.end(FAILED)

    def _answer_calls(self) -> None:
        """Answer the calls that wait now, not those that come meanwhile: texts go on. Without work,
        wait for one."""
        idle = self.paused or not self.texts.busy
        for _ in range(max(idle, self._inbox.qsize())):
            if self._ended:
                return
            action, answer = self._inbox.get()
            try:
                answer.set_result(action())
            except (ConfigError, Unavailable, ValueError) as error:  # of the caller
                answer.set_exception(error)
            except Exception:  # out of memory, for example
                traceback.print_exc()
                # Not the error itself: its frames would hold what has filled the memory.
                answer.set_exception(Unavailable(FAILED))

    def _take(self, request: Asked, job: CompletionJob) -> None:
        if self.broken:
            raise Unavailable(self.broken)
        count, waiting = len(request.prompts) * request.n, len(self.texts.waiting)
        if count > self.queue:
            raise BadRequest(
                f"{count} texts in one request, and the queue holds {self.queue}: send fewer "
                "prompts at once, or start the server with a larger --queue"
            )
        if waiting + count > self.queue:
            raise Unavailable(f"the queue is full: {waiting} of {self.queue} texts wait; try later")
        tokenizer, ends = self.words.tokenizer, self.words.ends
        for prompt in request.prompts:
            for _ in range(request.n):
                text = Text(len(job.texts), prompt, request.sampling, tokenizer, ends)
                job.texts.append(text)
        # Nothing is drawn: with echo the prompt is scored, by look().
        if request.sampling.max_tokens == 0:
            for text in job.texts:
                text.finish = "length"
                job.news.put(News(text, "", 0, text.finish))
            return
        for text in job.texts:
            self._jobs[text], self._parts[text] = job, []
        self.texts.waiting.extend(job.texts)

    def _drop(self, job: CompletionJob) -> None:
        for text in job.texts:
            if self._jobs.pop(text, None) is not None:
                del self._parts[text]
                self.texts.drop(text)
                self.finished["abort"] += 1

    def _tell(self, text: Text, grown: str) -> None:
        self.generated += 1
        job, parts = self._jobs[text], self._parts[text]
        parts.append(grown)
        if text.finish:
            self.finished[text.finish] += 1
            self._failures = 0
            del self._jobs[text], self._parts[text]
        if job.stream or text.finish:
            text_so_far = grown if job.stream else "".join(parts)
            job.news.put(News(text, text_so_far, len(text.new), text.finish))

    def _update(self, read_weights: Callable[[Decoder], int], source: str) -> int:
        engine = self.texts.engine
        try:
            version = read_weights(engine.model)
        # Raised before the first tensor was overwritten: the old weights go on.
        except LeaseRefused:
            raise
        except Exception as error:
            # The model may have some of the new tensors and some of the old ones.
            self.broken = f"no weights are loaded: those of {source} could not be read ({error})"
            self._refuse_all(self.broken)
            raise Unavailable(self.broken) from None
        self.broken = ""
        # Keys and values of the old weights are worth nothing.
        self.texts.read_again()
        engine.version = version
        return version

    def _refuse_all(self, why: str) -> None:
        # A copy, as _drop() takes entries out.
        for job in set(self._jobs.values()):
            self._drop(job)
            job.news.put(Unavailable(why))
