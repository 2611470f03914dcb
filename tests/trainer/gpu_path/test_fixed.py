"""Shapes that stay the same while texts are generated with a cache of a fixed size, whoever joins
and leaves: no other kernel, and no other order of additions, with each token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kempner.extensions.generate.config import Sampling
from kempner.extensions.generate.engine import Engine, GenerationRequest
from kempner.extensions.generate.token_step import TokenStep
from kempner.model.decoder import Decoder
from tests.trainer.gpu_path.test_step import SHAPE, T

SLOTS = 4


def shapes(monkeypatch: pytest.MonkeyPatch, fixed: bool) -> set[tuple[int, ...]]:
    """Of the tokens of each pass, while three requests join at different times and leave."""
    torch.manual_seed(0)
    model = Decoder(SHAPE).eval()
    engine: Engine[GenerationRequest] = Engine(model, 64, T, SLOTS, fixed)
    found: set[tuple[int, ...]] = set()
    forward = Decoder.forward

    def watched(self: Any, tokens: Any, *words: Any, **named: Any) -> Any:
        found.add(tuple(tokens.shape))
        return forward(self, tokens, *words, **named)

    logits = TokenStep.logits

    def watched_step(self: Any, tokens: Any, *words: Any) -> Any:
        found.add((len(tokens), 1))
        return logits(self, tokens, *words)

    monkeypatch.setattr(Decoder, "forward", watched)
    monkeypatch.setattr(TokenStep, "logits", watched_step)
    sampling = Sampling(max_tokens=8)
    for number, prompt in enumerate(([1, 2, 3], [4], [1, 2, 3], [5, 6])):
        engine.join([GenerationRequest(number, prompt, sampling)])
        engine.step()
    for _ in range(SLOTS):
        engine.step()
        engine.leave(engine.requests[0])
    return found


def test_every_pass_has_one_of_two_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shapes(monkeypatch, True) == {(1, T), (SLOTS, 1)}


def test_otherwise_they_follow_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(shapes(monkeypatch, False)) > SLOTS
