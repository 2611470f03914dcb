"""Conversations as tokens, as the model reads them. Its own turns stay as sampled: decoding and
encoding them again may give other tokens, which it never sampled. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np

from kempner.config.option import ConfigError
from kempner.data.sidecar import SIDECAR, Sidecar
from kempner.data.source import DataError
from kempner.data.text.chat_template import ChatTemplate, read_tokenizer_config
from kempner.data.text.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer
from kempner.extensions.generate.load import (
    Words,
    words_in_run,
    words_of_directory,
    words_of_run,
)
from kempner.extensions.hf.source import TOKENIZER_FILE, find_weights, run_of
from kempner.extensions.rl.engines.client import Completion
from kempner.extensions.rl.environments.protocol import Message, Reply, Task
from kempner.extensions.rl.orchestrate.packing import Sample

CONVERSATION_BYTES = "bytes"
REPLY_PLACEHOLDER = "\ufdd2"  # stands for the model's words; Unicode keeps it out of text


def open_words(tokenizer: str, init_from: str | None, begun: Path | None = None) -> Words:
    """Open the tokenizer of the run: rl.tokenizer, or that of the weights; if these are a run's,
    that of its data. `begun`: the run's directory if it has a checkpoint; the weights may be gone,
    and their tokenizer is there. Raises ConfigError."""
    if tokenizer == CONVERSATION_BYTES:
        own = ByteTokenizer()
        return Words(own, [own.eod], {own.eod}, Path())
    if not tokenizer and init_from is None:
        raise ConfigError(
            'rl.tokenizer: is required (a directory or "bytes") without a model.init_from '
            "to take it from"
        )
    folder = Path(tokenizer).expanduser()
    if not tokenizer:
        if begun is not None and (words := words_in_run(begun)) is not None:
            return words
        source = find_weights(init_from or "")
        if source.is_checkpoint:
            return words_of_run(run_of(source.path), source.path)
        folder = source.path
    if (folder / TOKENIZER_FILE).is_file():
        words = words_of_directory(folder)
        if (folder / SIDECAR).is_file():  # of data: a conversation ends otherwise than a document
            words.ends.add(Sidecar.load(folder / SIDECAR).eod)
        return words
    if (folder / SIDECAR).is_file():
        found = load_tokenizer(folder)
        return Words(found, [found.eod], {found.eod}, folder)
    raise ConfigError(f"rl.tokenizer = {folder}: has neither {TOKENIZER_FILE} nor {SIDECAR}")


class DialogueWriter:
    """Prompts and environments' turns as tokens: as plain text, or by a chat template."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._template: ChatTemplate | None = None
        if isinstance(words.tokenizer, FileTokenizer):
            try:
                self._template = ChatTemplate(read_tokenizer_config(words.folder), date.today())
            except DataError:  # a tokenizer without one is for plain text
                self._template = None

    def prompt(self, task: Task) -> list[int]:
        """Return the prompt's tokens. Raises ValueError if the template refuses it."""
        if isinstance(task.prompt, str):
            return self._words.prompt(task.prompt)
        if self._template is None:
            raise ValueError(
                "its prompts are conversations, and the tokenizer has no chat template; set "
                "rl.tokenizer to one that has it"
            )
        # encode_prompt(), because special tokens spelled out by the template are single tokens.
        return self._words.tokenizer.encode_prompt(self._template.render(task.prompt, None, True))

    def reply(self, task: Task, reply: Reply, last: int) -> list[int]:
        """Return the tokens between the model's turn and its next one. `last`: the last token
        of that turn.

        The template writes the turn with a mark in its place; the text after the mark is the
        rest of that turn and the reply. The token that ends a turn is left out if the model
        has sampled it.
        """
        if isinstance(task.prompt, str) or self._template is None:
            return self._words.tokenizer.encode(reply.content)
        # Without earlier turns, because only the text after the mark is used.
        messages: list[Message] = [
            *task.prompt,
            {"role": "assistant", "content": REPLY_PLACEHOLDER},
        ]
        messages.append({"role": reply.role, "content": reply.content})
        text = self._template.render(messages, None, True)
        _, mark, after = text.partition(REPLY_PLACEHOLDER)
        if not mark:
            raise ValueError("the chat template does not write the assistant's messages")
        ids = self._words.tokenizer.encode_prompt(after)
        # A turn ended by a stop string lacks that token: here the template's stays.
        return ids[1:] if ids[:1] == [last] and last in self._words.ends else ids

    def text(self, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        """Decode a turn, without the token or stop string that ends it."""
        text_ids = ids[:-1] if ids and ids[-1] in self._words.ends else ids
        text = self._words.tokenizer.decode(text_ids)
        return text[: min((at for each in stop if (at := text.find(each)) >= 0), default=None)]


class Dialogue:
    """One sample as it grows."""

    def __init__(self, messages: Sequence[Message], prompt: Sequence[int]) -> None:
        self.messages = list(messages)
        self.tokens = list(prompt)
        self._sampled = [False] * len(prompt)
        self._logprobs = [0.0] * len(prompt)
        self.oldest = -1  # version; -1: nothing sampled yet
        self.truncated = False
        self.text = ""  # the model's last turn
        self.open = True  # the model may have another turn

    def say(self, completion: Completion, text: str) -> None:
        """Add the model's turn. A turn without room to end is the last."""
        self.tokens += completion.token_ids
        self._sampled += [True] * len(completion.token_ids)
        self._logprobs += completion.logprobs
        if completion.versions:
            oldest = min(completion.versions)
            self.oldest = oldest if self.oldest < 0 else min(self.oldest, oldest)
        self.text = text
        self.messages.append({"role": "assistant", "content": text})
        self.truncated = completion.finish == "length"
        self.open = not self.truncated

    def hear(self, reply: Reply, tokens: Sequence[int]) -> None:
        """Add the environment's turn, which does not count toward the loss."""
        self.tokens += tokens
        self._sampled += [False] * len(tokens)
        self._logprobs += [0.0] * len(tokens)
        self.messages.append({"role": reply.role, "content": reply.content})

    @property
    def sample(self) -> Sample:
        return Sample(
            np.array(self.tokens, np.int32),
            np.array(self._sampled),
            np.array(self._logprobs, np.float32),
        )
