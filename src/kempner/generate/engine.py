"""Prompts in, texts out: the requests share one key-value cache, join it while there is room, and
leave when they are done. B requests, T tokens, V vocabulary."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kempner.data.tokenizer import Tokenizer
from kempner.generate.sampling import Sampling, draw, uniforms
from kempner.generate.stream import TextStream
from kempner.model.cache import KVCache, Rows
from kempner.model.decoder import Decoder


class Piece(NamedTuple):
    """News of one prompt: what its text has grown by."""

    prompt: int  # number of the prompt
    text: str
    done: bool


class Request:
    """A prompt, and the tokens that continue it."""

    def __init__(self, number: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self.number, self.prompt, self.new = number, prompt, list[int]()
        self.most = sampling.max_tokens
        self.uniforms = uniforms(sampling, number)

    def context(self, window: int) -> list[int]:
        """What the model reads when the request joins: all tokens, or, where they would leave no
        room in the window for those to come, the last ones."""
        tokens = [*self.prompt, *self.new]
        room = min(self.most - len(self.new) - 1, window // 2)  # the last one is never read
        return tokens if len(tokens) < window else tokens[room - window :]


class Engine:
    """Draws one token at a time for each of its requests.

    A text that outgrows the window is read again from its last tokens on, at least half a window:
    rotary positions beyond those of the training are noise to the model.
    """

    def __init__(
        self, model: Decoder, sampling: Sampling, vocab_size: int, window: int, slots: int
    ) -> None:
        """`vocab_size`: of the tokenizer; the model may have more rows. `window`: tokens that the
        model sees at most. `slots`: requests at a time."""
        weight = model.embed.weight
        self.model, self.sampling, self.vocab_size = model, sampling, vocab_size
        self.cache = KVCache(model.cfg, slots, window, weight.device, weight.dtype)
        self.requests: list[Request] = []  # number i has row i of the cache

    def join(self, requests: Sequence[Request]) -> None:
        """Read the prompts, and draw the first token of each."""
        contexts = [request.context(self.cache.length) for request in requests]
        counts = [len(context) for context in contexts]
        padded = [context + [0] * (max(counts) - len(context)) for context in contexts]
        self.requests += requests
        self._draw(requests, torch.tensor(padded), self.cache.join(counts))

    def step(self) -> None:
        """Draw the next token of every request."""
        sizes = zip(self.requests, self.cache.lengths, strict=True)
        full = [request for request, size in sizes if size == self.cache.length]
        for request in full:
            self.leave(request)
        if self.requests:
            tokens = torch.tensor([[request.new[-1]] for request in self.requests])
            self._draw(self.requests, tokens, self.cache.step())
        if full:
            self.join(full)

    def leave(self, request: Request) -> None:
        row = self.requests.index(request)
        self.cache.leave(row)
        last = self.requests.pop()
        if last is not request:
            self.requests[row] = last

    @torch.inference_mode()
    def _draw(self, requests: Sequence[Request], tokens: Tensor, rows: Rows) -> None:
        """One token for each, after tokens [B, T]."""
        device = self.cache.keys.device
        logits = self.model(tokens.to(device), cache=rows)[:, 0, : self.vocab_size]  # [B, V]
        uniform = torch.stack([request.uniforms[len(request.new)] for request in requests])
        drawn = draw(logits, self.sampling, uniform.to(device))
        for request, token in zip(requests, drawn.tolist(), strict=True):
            request.new.append(token)


def generate(
    engine: Engine, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], ends: Collection[int]
) -> Iterator[Piece]:
    """The texts that continue the prompts, piece by piece, up to one of the tokens `ends`."""
    sampling = engine.sampling
    waiting = deque(Request(n, prompt, sampling) for n, prompt in enumerate(prompts))
    streams = {r: TextStream(tokenizer, r.prompt, sampling.stop) for r in waiting}
    while waiting or engine.requests:
        free = engine.cache.slots - len(engine.requests)
        if waiting and free:
            grown = [waiting.popleft() for _ in range(min(free, len(waiting)))]
            engine.join(grown)
        else:
            engine.step()
            grown = list(engine.requests)
        for request in grown:
            stream, token = streams[request], request.new[-1]
            text = "" if token in ends else stream.add(token)
            done = token in ends or stream.stopped or len(request.new) == request.most
            if done:
                engine.leave(request)
                text += stream.end()
            yield Piece(request.number, text, done)
