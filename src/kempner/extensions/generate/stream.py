"""Incremental decoding: the text of tokens as they come, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from kempner.data.text.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # what the bytes of an incomplete character decode to
CHARACTER = 4  # bytes, and so tokens, of the longest one
CONTEXT_TOKENS = 8  # prompt tokens that the first new token is decoded with


class TextStream:
    """Tokens in, pieces of text out, each as soon as later tokens cannot change it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        # A token's text depends on the tokens before it (spaces, parts of a character): it is
        # decode(_ids[begin:]) without the prefix decode(_ids[begin:read]).
        self._begin, self._read = 0, len(self._ids)
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False  # a stop string has come; the text ends before it

    def add(self, token: int) -> str:
        """Add a token; returns the text that is now certain."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids[self._begin :])
        # May be part of a character, which the next tokens complete.
        if text.endswith(UNFINISHED) and len(self._ids) - self._read < CHARACTER:
            return ""
        return self._certain(text)

    def end(self) -> str:
        """Return the rest of the text, as no token follows."""
        if self.stopped:
            return ""
        certain = self._certain(self._tokenizer.decode(self._ids[self._begin :]))
        return certain + ("" if self.stopped else self._held)

    def _certain(self, text: str) -> str:
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        self._begin, self._read = self._read, len(self._ids)
        text = self._held + text[len(before) :]
        positions = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if positions:
            self.stopped, self._held = True, ""
            return text[: min(positions)]
        # Hold back an end that may begin a stop string.
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
