"""Text requests of an engine, and the queue of requests waiting for room."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from kempner.data.text.tokenizer import Tokenizer
from kempner.extensions.generate.config import Sampling
from kempner.extensions.generate.engine import Engine, GenerationRequest
from kempner.extensions.generate.stream import TextStream

PATIENCE = 4  # see Texts._room
PREFILL = 8192  # tokens read at once, unless one prompt has more: other texts wait meanwhile


class Text(GenerationRequest):
    """A request for text, which ends at one of the tokens `ends` or at a stop string."""

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        sampling: Sampling,
        tokenizer: Tokenizer,
        ends: Collection[int],
    ) -> None:
        super().__init__(number, prompt, sampling)
        self.finish = ""  # why it has ended: stop or length
        self._ends, self._stream = ends, TextStream(tokenizer, prompt, sampling.stop)

    def grow(self) -> str:
        """Return the text that the newest token settles; sets `finish` if it is the last token."""
        token = self.new[-1]
        text = "" if token in self._ends else self._stream.add(token)
        if token in self._ends or self._stream.stopped:
            self.finish = "stop"
        elif len(self.new) == self.sampling.max_tokens:
            self.finish = "length"
        return text + (self._stream.end() if self.finish else "")


class Texts:
    """The texts in an engine, and the texts that wait."""

    def __init__(self, engine: Engine[Text]) -> None:
        self.engine, self.waiting = engine, deque[Text]()
        self._passed = 0  # steps in which a slot stayed free

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.engine.requests)

    def turn(self) -> Iterator[tuple[Text, str]]:
        """Run one forward pass: texts join if there is room, otherwise all get a token. Yields each
        text with its new piece; finished texts leave."""
        for text in self.engine.join(self._next()) if self._room() else self.engine.step():
            grown = text.grow()
            if text.finish:
                self.engine.leave(text)
            yield text, grown

    def _room(self) -> bool:
        """Return whether a text may join now. Reading a prompt alone costs about a quarter of a
        step more than as one of two; a free slot costs its share of every step. So the last free
        slot waits that long for a second one, if two texts are waiting."""
        engine = self.engine
        if not engine.free or not self.waiting:
            return False
        alone = engine.free == 1 and len(self.waiting) > 1 and not engine.holds(self.waiting[0])
        if alone and self._passed < engine.cache.slots // PATIENCE:
            self._passed += 1
            return False
        self._passed = 0
        return True

    def _next(self) -> list[Text]:
        contexts: dict[tuple[int, ...], int] = {}

        def fits(text: Text) -> bool:
            context = text.context(self.engine.cache.length)
            # Equal prompts count once, because the engine reads them once.
            contexts[context] = len(context)
            # All are padded to the longest one.
            return len(contexts) == 1 or len(contexts) * max(contexts.values()) <= PREFILL

        first = list(self.waiting)[: self.engine.free]
        batch = list(takewhile(fits, first))
        for _ in batch:
            self.waiting.popleft()
        return batch

    def drop(self, text: Text) -> None:
        """Remove a text that is no longer wanted."""
        if text in self.waiting:
            self.waiting.remove(text)
        elif text in self.engine.requests:
            self.engine.leave(text)

    def read_again(self) -> None:
        """Let unfinished texts continue with new weights by reading them again."""
        running = list(self.engine.requests)
        for text in running:
            self.engine.leave(text)
        # They go ahead of texts that have not begun.
        self.waiting.extendleft(reversed(running))
        self.engine.forget()


class TextPiece(NamedTuple):
    """A new piece of one prompt's text."""

    prompt: int  # number of the prompt
    text: str
    done: bool


def generate_texts(
    engine: Engine[Text],
    tokenizer: Tokenizer,
    ends: Collection[int],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
) -> Iterator[TextPiece]:
    """Yield the texts that continue the prompts, piece by piece."""
    texts = Texts(engine)
    texts.waiting.extend(
        Text(number, prompt, sampling, tokenizer, ends) for number, prompt in enumerate(prompts)
    )
    while texts.busy:
        for text, grown in texts.turn():
            yield TextPiece(text.number, grown, bool(text.finish))
