"""A dialogue with a model, in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kempner.data.text.chat_template import ChatMessage
from kempner.extensions.generate.config import Sampling
from kempner.extensions.generate.engine import Engine
from kempner.extensions.generate.load import Loaded
from kempner.extensions.generate.texts import Text, generate_texts


def run_dialogue(loaded: Loaded, sampling: Sampling) -> None:
    """Answer what the user types, until Ctrl-D or Ctrl-C. The model reads the dialogue so far,
    minus its oldest turns if they leave no room for an answer."""
    loaded.words.chat_template()  # refuses a model without one before anything is typed
    messages: list[ChatMessage] = []
    try:
        while True:
            if not (text := input("> ")).strip():
                continue
            messages.append({"role": "user", "content": text})
            try:
                ids = encode_turns(loaded, messages, sampling)
            except ValueError as refusal:
                print(refusal, file=sys.stderr)
                messages.pop()
                continue
            answer = ""
            for piece in generate_reply(loaded, ids, sampling):
                print(piece, end="", flush=True)
                answer += piece
            print()
            messages.append({"role": "assistant", "content": answer})
    except (EOFError, KeyboardInterrupt):
        print()


def encode_turns(loaded: Loaded, messages: list[ChatMessage], sampling: Sampling) -> list[int]:
    """Encode the dialogue for the next answer; removes turns that do not fit from `messages`.
    Raises ValueError if the template refuses the dialogue."""
    room = max(1, loaded.window - sampling.max_tokens)
    while len(ids := loaded.words.chat(messages)) > room and len(messages) > 1:
        # A turn and its answer: templates require alternating roles.
        del messages[:2]
    return ids


def generate_reply(loaded: Loaded, ids: list[int], sampling: Sampling) -> Iterator[str]:
    """Yield the model's answer to the dialogue `ids`, piece by piece."""
    words = loaded.words
    # An engine for each answer: its cache covers this answer's greatest length, not the model's
    # window.
    window = min(loaded.window, len(ids) + sampling.max_tokens)
    engine = Engine[Text](loaded.model, words.tokenizer.vocab_size, window, 1)
    for piece in generate_texts(engine, words.tokenizer, words.ends, [ids], sampling):
        yield piece.text
