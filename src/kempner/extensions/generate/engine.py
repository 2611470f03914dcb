"""Batched generation: requests share one key-value cache, join it while there is room, and leave
when done; each forward pass draws one token per request. B requests, T tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kempner.extensions.generate.config import Sampling
from kempner.extensions.generate.sampling import Uniforms, draw_rows
from kempner.extensions.generate.token_step import TokenStep
from kempner.model.cache import KVCache, whole_blocks
from kempner.model.decoder import Decoder


class GenerationRequest:
    """A prompt, and the tokens that continue it."""

    def __init__(self, number: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """`number`: distinguishes requests with the same seed, so that each draws other tokens."""
        self.number, self.prompt, self.sampling = number, prompt, sampling
        self.new: list[int] = []
        self.logprobs: list[float] = []  # of each new token: see draw()
        self.versions: list[int] = []  # of the weights that drew them, each once, in order
        self.uniforms = Uniforms(sampling, number)

    def context(self, window: int) -> tuple[int, ...]:
        """Return the tokens that the model reads when the request joins: all, or only the last ones
        if all would leave no room in the window for new ones."""
        tokens = (*self.prompt, *self.new)
        # Leaves room for all tokens that may come, but keeps at least half a window of the text.
        tokens_left = self.sampling.max_tokens - len(self.new) - 1  # the last one is never read
        return tokens if len(tokens) < window else tokens[min(tokens_left, window // 2) - window :]

    @property
    def last(self) -> int:
        return self.new[-1] if self.new else self.prompt[-1]


Draw = Callable[[Sequence[Sampling], Sequence[float], int], tuple[Tensor, Tensor]]
_R = TypeVar("_R", bound=GenerationRequest)


class Engine(Generic[_R]):
    """Draws one token at a time for each of its requests.

    A text that outgrows the window is read again from its last tokens, at least half a window:
    rotary positions beyond the training length are noise to the model.
    """

    def __init__(
        self,
        model: Decoder,
        vocab_size: int,
        window: int,
        slots: int,
        fixed: bool = False,
        compiled: bool = False,
    ) -> None:
        """`vocab_size`: of the tokenizer; no other token is drawn. `window`: the most tokens that
        the model sees. `slots`: the most requests at a time. `fixed`: see KVCache. `compiled`: see
        TokenStep."""
        weight = model.embed.weight
        self.model, self.vocab_size = model, vocab_size
        self.cache = KVCache(model.cfg, slots, window, weight.device, weight.dtype, fixed)
        self._compiled = compiled
        self._token_step: TokenStep | None = None
        self.requests: list[_R] = []  # number i has row i of the cache
        self.version = 0  # of the weights
        self.prefilled = 0  # tokens read when requests joined
        # Tokens whose keys and values each row of the cache holds, even after its request has left.
        self._held: list[tuple[int, ...]] = [()] * slots

    @property
    def free(self) -> int:
        return self.cache.slots - len(self.requests)

    def holds(self, request: _R) -> bool:
        """Return whether a row holds the beginning of this request, so that joining is free."""
        return request.context(self.cache.length) in self._held

    def join(self, requests: Sequence[_R]) -> list[_R]:
        """Read the prompts, and draw the first token of each; returns these requests. With fixed
        shapes no token is drawn yet.

        A prompt that another row holds is copied, so it is read once for all of its samples. Its
        last token is left out: the request's next step reads it.
        """
        groups: dict[tuple[int, ...], _R] = {}
        again: list[tuple[_R, tuple[int, ...]]] = []
        for request in requests:
            context = request.context(self.cache.length)
            if context in groups:
                again.append((request, context))
            elif context in self._held:
                self._copy(request, context)
            else:
                groups[context] = request
        if self.cache.fixed:
            for context, request in groups.items():
                self._read(request, context)
        elif groups:
            first, counts = len(self.requests), [len(context) for context in groups]
            # Whole blocks: kernels are chosen, or compiled, for each shape.
            width = whole_blocks(max(counts), self.cache.length)
            padded = [[*context] + [0] * (width - len(context)) for context in groups]
            self._held[first : first + len(groups)] = groups
            self.requests += groups.values()
            self.prefilled += sum(counts)
            self._prefill([*groups.values()], torch.tensor(padded), counts)
        for request, context in again:
            self._copy(request, context)
        return [] if self.cache.fixed else [*groups.values()]

    @torch.inference_mode()
    def _read(self, request: _R, context: tuple[int, ...]) -> None:
        """Read a prompt alone, padded to the window, except its last token, which the next step
        reads: thus the first token is drawn in the same shape as all the others."""
        row, length = len(self.requests), self.cache.length
        self._held[row] = context
        self.requests.append(request)
        self.prefilled += len(context)
        padded = torch.tensor([[*context] + [0] * (length - len(context))])
        self.model(padded.to(self.cache.keys.device), cache=self.cache.join([length]))
        self.cache.lengths[row] = len(context) - 1

    def _copy(self, request: _R, context: tuple[int, ...]) -> None:
        self.cache.copy(self._held.index(context), len(context) - 1)
        self._held[len(self.requests)] = context
        self.requests.append(request)

    def step(self) -> list[_R]:
        """Draw the next token of every request; returns the requests that have one."""
        sizes = zip(self.requests, self.cache.lengths, strict=True)
        full = [request for request, size in sizes if size == self.cache.length]
        # These outgrow the window: join() reads them again from their last tokens.
        for request in full:
            self.leave(request)
        grown = list(self.requests)
        if grown:
            self._grow(grown)
        return grown + self.join(full)

    def leave(self, request: _R) -> None:
        row = self.requests.index(request)
        self.cache.leave(row)
        last = self.requests.pop()
        if last is not request:
            # The last row fills the gap, as in the cache.
            self.requests[row] = last
            self._held[row] = self._held[len(self.requests)]

    def clear(self) -> None:
        """Drop all requests after a failed step: the contents of the rows are undefined."""
        self.requests.clear()
        self.cache.lengths.clear()
        self.forget()

    def forget(self) -> None:
        """Forget the cached texts: the weights have changed."""
        assert not self.requests
        self._held = [()] * self.cache.slots
        if self._token_step is not None and not self._token_step.is_valid:
            self._token_step = None

    @torch.inference_mode()
    def _prefill(self, requests: Sequence[_R], tokens: Tensor, counts: Sequence[int]) -> None:
        """Read tokens [B, T] into new rows, and draw a token for each."""
        tokens = tokens.to(self.cache.keys.device)
        logits = self.model(tokens, cache=self.cache.join(counts))[:, 0]
        self._draw(requests, partial(draw_rows, logits))

    @torch.inference_mode()
    def _grow(self, requests: Sequence[_R]) -> None:
        """Read the last token of every row, and draw the next one."""
        if self._token_step is None:
            self._token_step = TokenStep(self.model, self.cache, self._compiled)
        self._token_step([request.last for request in requests], self.cache.advance())
        self._draw(requests, self._token_step.draw)

    def _draw(self, requests: Sequence[_R], draw: Draw) -> None:
        """Draw one token for each request."""
        uniforms = [request.uniforms[len(request.new)] for request in requests]
        samplings = [request.sampling for request in requests]
        new_tokens, logprobs = draw(samplings, uniforms, self.vocab_size)
        for request, token, logprob in zip(
            requests, new_tokens.tolist(), logprobs.tolist(), strict=True
        ):
            request.new.append(token)
            request.logprobs.append(logprob)
            if request.versions[-1:] != [self.version]:
                request.versions.append(self.version)
