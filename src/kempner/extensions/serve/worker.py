"""The thread that owns the model and executes all requests, between two steps."""

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
from kempner.extensions.serve.lease import LeaseRefused, WeightsWithdrawn
from kempner.extensions.serve.protocol import Asked, BadRequest
from kempner.model.decoder import Decoder

_T = TypeVar("_T")
MOST_FAILURES = 3
FAILED = "the engine has failed; see its log"


class Unavailable(Exception):
    """The engine accepts no requests now; the message says why."""


class News(NamedTuple):
    """A new piece of a text."""

    text: Text
    grown: str
    length: int  # of its new tokens
    finish: str  # reason for its end; empty while it goes on


class CompletionJob:
    """One request: its texts and their news."""

    def __init__(self, stream: bool) -> None:
        self.stream = stream  # news of every token, not only of the last
        self.texts: list[Text] = []
        # Not SimpleQueue: up to Python 3.12 its get(timeout) may wait for ever after a signal.
        self.news: Queue[News | Unavailable] = Queue()


class Worker:
    """Owner of the model. Other threads use call(), take() and drop(); news of a job arrive
    in its queue."""

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
        """`slots`: texts at a time; `window`: the most tokens of a text; `queue`: the most waiting
        texts; `version`: of the weights; `fixed`: see KVCache; `compiled`: see TokenStep."""
        self.words, self.window, self.queue = loaded.words, window, queue
        self.tokenizer = loaded.words.fingerprint()
        vocab_size = loaded.words.tokenizer.vocab_size
        self.texts = Texts(Engine(loaded.model, vocab_size, window, slots, fixed, compiled))
        self.texts.engine.version = version
        self.paused = False
        self.broken = ""  # why there are no weights
        self.exit_code = 0  # of the program
        self.finished: Counter[str] = Counter()  # number of texts by finish reason
        self.generated = 0  # tokens
        self._jobs: dict[Text, CompletionJob] = {}
        self._parts: dict[Text, list[str]] = {}
        self._pieces: dict[int, TokenPiece] = {}
        self._inbox: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._ended = ""  # reason why nothing is accepted any more
        self._failures = 0  # failed turns since a text last ended normally
        self._lock = threading.Lock()  # nothing enters the inbox after the end

    @property
    def version(self) -> int:
        return self.texts.engine.version

    # --- for other threads ---

    def call(self, action: Callable[[], _T]) -> _T:
        """Run `action` on the worker's thread, between two steps, and return its result. Raises its
        exceptions, and Unavailable if the worker has ended."""
        answer: Future[_T] = Future()
        with self._lock:
            # Under the lock, under which run() empties the inbox once, after noting the end.
            if self._ended:
                raise Unavailable(self._ended)
            self._inbox.put((action, answer))
        return answer.result()

    def take(self, request: Asked, job: CompletionJob) -> None:
        """Queue the texts of a request. Raises Unavailable."""
        self.call(lambda: self._take(request, job))

    def look(self, text: Text, top: int) -> Looked:
        """Compute log-probabilities of a text and its prompt, in one more pass. One call per text,
        so that other texts get a token in between."""
        engine = self.texts.engine
        ids = [*text.prompt, *text.new]
        return self.call(lambda: score_alternatives(engine.model, engine.vocab_size, ids, top))

    def score(self, ids: list[int], temperature: float) -> tuple[list[float], int]:
        """Return the log-probability of each token but the first, and the version of the weights
        that computed it."""
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
        # Not a difference of sets, which would walk through the whole cache.
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
        """Pause or resume; paused texts keep their state."""
        self.call(lambda: setattr(self, "paused", paused))

    def update(self, source: str, version: int | None) -> int:
        """Load new weights, with which unfinished texts continue. Returns their version. Raises
        LeaseRefused if the weights are at fault, Unavailable if another try may succeed."""

        def read(model: Decoder) -> int:
            weights.replace_weights(model, source)
            return self.version + 1 if version is None else version

        return self.call(lambda: self._update(read, source))

    def receive(self, manifest: str, token: str) -> int:
        """Receive new weights directly from a trainer's ranks; otherwise like update()."""
        return self.call(
            lambda: self._update(
                partial(weights.receive_version, manifest=manifest, token=token), manifest
            )
        )

    def refuse(self, why: str) -> None:
        """Refuse all waiting and unfinished texts."""
        self.call(lambda: self._refuse_all(why))

    def end(self, why: str) -> None:
        """Refuse all current and later requests."""
        with self._lock:
            if not self._ended:
                self._ended = why
                self._inbox.put((lambda: None, Future()))  # wakes the worker

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
        with self._lock:  # requests that came before the end
            while not self._inbox.empty():
                self._inbox.get()[1].set_exception(Unavailable(self._ended))

    def _turn(self) -> None:
        """Draw a token for each text. Texts that fail are refused, and the others continue;
        after MOST_FAILURES failures without a finished text, as with NaN weights, the engine is
        broken for good."""
        failures: list[Text] = []
        try:
            for text, grown in self.texts.turn():
                if math.isnan(text.logprobs[-1]):
                    failures.append(text)
                else:
                    self._tell(text, grown)
            why = cause = "the model's output for this text is not a number"
        except Exception as error:  # for example out of memory
            traceback.print_exc()
            cause = repr(error)
            # A failed pass leaves the cache in an unknown state.
            self.texts.engine.clear()
            # Waiting texts were not part of the pass.
            failures = [text for text in self._jobs if text not in self.texts.waiting]
            why = FAILED
        for job in {self._jobs[text] for text in failures if text in self._jobs}:
            self._drop(job)
            job.news.put(Unavailable(why))
        self._failures += bool(failures)
        if self._failures >= MOST_FAILURES:
            print(
                f"serve: exits after {self._failures} failures with no completed text in between: "
                f"{cause}",
                file=sys.stderr,
                flush=True,
            )
            self._fail_for_good()

    def _fail_for_good(self) -> None:
        self.exit_code = 1
        self.end(FAILED)

    def _answer_calls(self) -> None:
        """Answer the calls waiting now, but not later ones, so that texts go on. Without work, wait
        for a call."""
        idle = self.paused or not self.texts.busy
        for _ in range(max(idle, self._inbox.qsize())):
            if self._ended:
                return
            action, answer = self._inbox.get()
            try:
                answer.set_result(action())
            except (ConfigError, Unavailable, ValueError) as error:  # the caller's
                answer.set_exception(error)
            except Exception:  # for example out of memory
                traceback.print_exc()
                # Not the error itself, whose frames would hold what has filled the memory.
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
        # Nothing is sampled: with echo, look() scores the prompt.
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
        # Raised before any tensor was overwritten: continue with the old weights.
        except WeightsWithdrawn as error:
            raise Unavailable(str(error)) from None  # newer ones will be offered
        except LeaseRefused:
            raise
        except Exception as error:
            # The model may mix new and old tensors.
            self.broken = f"no weights are loaded: those of {source} could not be read ({error})"
            self._refuse_all(self.broken)
            # Values that are not finite are no better when read again.
            refused = isinstance(error, OverflowError)
            raise (LeaseRefused if refused else Unavailable)(self.broken) from None
        self.broken = ""
        # Keys and values of the old weights are useless.
        self.texts.read_again()
        engine.version = version
        return version

    def _refuse_all(self, why: str) -> None:
        # A copy, because _drop() removes entries.
        for job in set(self._jobs.values()):
            self._drop(job)
            job.news.put(Unavailable(why))
