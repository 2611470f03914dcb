"""Requests and answers: OpenAI's completions and chat completions, with token ids besides the text,
as in vLLM. No torch."""

from __future__ import annotations

import codecs
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from kempner.config.option import ConfigError
from kempner.extensions.generate.config import Sampling

if TYPE_CHECKING:
    from kempner.data.text.tokenizer import TokenPiece
    from kempner.extensions.generate.load import Words
    from kempner.extensions.generate.texts import Text
    from kempner.extensions.serve.alternatives import Looked

MOST_SAMPLES = 4096  # n
DEFAULT_TOKENS = 16  # of a completion, OpenAI's default
MOST_TOP = {False: 5, True: 20}  # alternatives to a token: completions, chats
# Fields accepted only with the value that changes nothing; any other value is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),  # there are no tools
    "tools": ([],),
    "use_beam_search": (False,),
}
# Ignored fields: the client's own, or hints to models that know them.
FIELD_LABELS = (
    "metadata",
    "prompt_cache_key",
    "reasoning_effort",
    "safety_identifier",
    "user",
    "verbosity",
)

Json = dict[str, Any]


class BadRequest(ValueError):
    """A request cannot be served; the message says what is allowed."""


class Asked(NamedTuple):
    prompts: list[list[int]]
    sampling: Sampling
    n: int  # samples of each prompt
    stream: bool
    usage: bool  # reported at the end of a stream
    logprobs: bool
    top: int  # alternatives to each token
    echo: bool  # the prompt, and its log-probabilities, before each text
    chat: bool
    as_ids: bool  # log-probabilities name tokens by id


class Fields:
    """Fields of a request, taken one by one; a field that is not taken is an error, because
    ignoring a client's request would be worse."""

    def __init__(self, body: bytes) -> None:
        try:
            self._left = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {error}") from None
        if not isinstance(self._left, dict):
            raise BadRequest("the body must be a JSON object")

    def take(self, name: str, default: Any = None) -> Any:
        """Take a field; null counts as missing."""
        value = self._left.pop(name, None)
        return default if value is None else value

    def number(self, name: str, default: Any, least: float, most: float, kind: type = int) -> Any:
        value = self.take(name)
        if value is None:
            return default
        kinds = (int,) if kind is int else (int, float)
        # True is an instance of int.
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            what = "a whole number" if kind is int else "a number"
            raise BadRequest(
                f"{name} = {shorten_value(value)}: must be {what} from {least:g} to {most:g}"
            )
        return kind(value)

    def switch(self, name: str) -> bool:
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise BadRequest(f"{name} = {shorten_value(value)}: must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.take(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not value:
            raise BadRequest(f"{name}: is required (a string)")
        return value

    def end(self) -> None:
        for name in FIELD_LABELS:
            self.take(name)
        for name, neutral in NEUTRAL.items():
            value = self.take(name)
            if value is not None and not any(value == neutral_value for neutral_value in neutral):
                values = " or ".join(json.dumps(neutral_value) for neutral_value in neutral)
                raise BadRequest(
                    f"{name} = {shorten_value(value)}: is not supported here; only {values} is"
                )
        self._left = {name: value for name, value in self._left.items() if value is not None}
        if self._left:
            raise BadRequest(f"{next(iter(self._left))}: is not supported here; leave it out")


def shorten_value(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 80 else f"{text[:77]}..."


def read_request(
    body: bytes, chat: bool, model: str, window: int, words: Words, encode: Callable[..., Any]
) -> Asked:
    """Parse a request to /v1/completions, or with `chat` to /v1/chat/completions. `encode(function,
    arguments)` maps them on the thread that owns the tokenizer. Raises BadRequest."""
    fields = Fields(body)
    model_name = fields.take("model", model)
    if model_name != model:
        raise BadRequest(f"model = {shorten_value(model_name)}: the model here is {model}")
    try:
        if chat:
            prompts = encode(words.chat, [parse_messages(fields.take("messages"))])
        else:
            prompts = parse_prompts(fields.take("prompt"), words, encode)
    # A ValueError, too, but it names the field itself.
    except BadRequest:
        raise
    except (ValueError, ConfigError) as error:  # the template's message; no template
        raise BadRequest(f"{'messages' if chat else 'prompt'}: {error}") from None
    longest = max(map(len, prompts))
    # A chat ends by itself; a completion need not, and gets OpenAI's small default.
    default = max(1, window - longest) if chat else DEFAULT_TOKENS
    most = fields.number("max_tokens", default, 1 if chat else 0, window)
    if chat:  # OpenAI's newer name
        most = fields.number("max_completion_tokens", most, 1, window)
    # The last token is never read. A client that scores a text requests one token or none.
    if longest + (most if most > 1 else 0) > window:
        raise BadRequest(
            f"{longest} tokens of the prompt and max_tokens = {most} are more than {window}, the "
            "most that the model sees"
        )
    request = Asked(
        prompts,
        read_sampling(fields, most),
        fields.number("n", 1, 1, MOST_SAMPLES),
        stream := fields.switch("stream"),
        read_stream_options(fields, stream),
        *read_logprobs(fields, chat),
        not chat and fields.switch("echo"),
        chat,
        fields.switch("return_tokens_as_token_ids"),
    )
    fields.end()
    if stream and (request.echo or request.top):
        raise BadRequest(
            "stream: with echo, or with alternatives to each token, the answer is made when the "
            "text has ended; leave stream out"
        )
    return request


def read_stream_options(fields: Fields, stream: bool) -> bool:
    """Return whether a stream ends with its usage."""
    options = fields.take("stream_options", {})
    if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
        raise BadRequest(
            f"stream_options = {shorten_value(options)}: may have include_usage, nothing else"
        )
    usage = options.get("include_usage") or False
    if not isinstance(usage, bool):
        raise BadRequest(
            f"stream_options.include_usage = {shorten_value(usage)}: must be true or false"
        )
    return usage and stream


def read_logprobs(fields: Fields, chat: bool) -> tuple[bool, int]:
    """Return whether log-probabilities are requested, and the number of alternatives."""
    most = MOST_TOP[chat]
    if not chat:
        top = fields.number("logprobs", None, 0, most)
        return top is not None, top or 0
    logprobs, top = fields.switch("logprobs"), fields.number("top_logprobs", 0, 0, most)
    if top and not logprobs:
        raise BadRequest("top_logprobs: give logprobs = true, too")
    return logprobs, top


def read_sampling(fields: Fields, most: int) -> Sampling:
    stop = fields.take("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(one, str) for one in stop):
        raise BadRequest(f"stop = {shorten_value(stop)}: must be a string or a list of strings")
    top_p, top_k = fields.number("top_p", 1.0, 0, 1, float), fields.number("top_k", 0, -1, 2**31)
    top_k = top_k if top_k > 0 else None  # 0 and -1: all tokens, as in vLLM
    if top_p == 0:  # only the most likely token, as in OpenAI's API
        top_p, top_k = 1.0, 1
    sampling = Sampling(
        temperature=fields.number("temperature", 1.0, 0, 100, float),
        top_k=top_k,
        top_p=top_p,
        min_p=fields.number("min_p", 0.0, 0, 1, float),
        # 7 bytes fit, because a seed has at most 63 bits.
        seed=fields.number("seed", int.from_bytes(os.urandom(7), "big"), 0, 2**63 - 1),
        max_tokens=most,
        stop=tuple(stop),
    )
    # With max_tokens 0 nothing is sampled.
    if problem := (sampling if most else replace(sampling, max_tokens=1)).problem():
        raise BadRequest(
            f"{problem[0]} = {shorten_value(getattr(sampling, problem[0]))}: {problem[1]}"
        )
    return sampling


def parse_prompts(prompt: Any, words: Words, encode: Callable[..., Any]) -> list[list[int]]:
    """Read the prompts: a string, token ids, or a list of either."""
    many = prompt if isinstance(prompt, list) and prompt and not is_ids(prompt) else [prompt]
    texts = [one for one in many if isinstance(one, str)]
    # In one call, because each call waits for a step of the model.
    encoded = iter(encode(words.prompt, texts) if texts else ())
    prompts = []
    for one in many:
        if isinstance(one, str):
            prompts.append(next(encoded))
        elif is_ids(one):
            prompts.append(read_ids(one, "prompt", words.tokenizer.vocab_size))
        else:
            raise BadRequest("prompt: must be a text, a list of token ids, or a list of either")
    return prompts


def read_ids(value: Any, name: str, vocab_size: int) -> list[int]:
    if not is_ids(value):
        raise BadRequest(f"{name}: is required (a list of token ids)")
    if not all(0 <= token < vocab_size for token in value):
        raise BadRequest(f"{name}: token ids must be from 0 to {vocab_size - 1}")
    return list(value)


def is_ids(value: Any) -> bool:
    # By type(): True is an instance of int, but not a token.
    return isinstance(value, list) and value != [] and all(type(token) is int for token in value)


def parse_messages(value: Any) -> list[Json]:
    if not isinstance(value, list) or not value:
        raise BadRequest("messages: must be a list of messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest("messages: each must be an object with a role")
    return [{**message, "content": content_of(message)} for message in value]


def content_of(message: Json) -> str:
    """Return the text of a message: a string, or a list of parts; an assistant's may be missing."""
    content = message.get("content")
    if content is None and message["role"] == "assistant" and not message.get("tool_calls"):
        return ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ]
    if not parts or len(texts) < len(parts):
        raise BadRequest("messages: the content of each must be a string, or a list of text parts")
    return "".join(texts)


# --- answers ---


class Offsets:
    """Start of each token of a text, in characters."""

    def __init__(self, begin: int = 0) -> None:
        # Incremental, because a character's bytes may be spread over several tokens.
        self._next, self._decoder = begin, codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""  # the incomplete beginning of a character

    def add(self, piece: TokenPiece) -> int:
        begin, data = self._next, b"" if piece.special else piece.data
        self._next += len(self._decoder.decode(data))
        # A character that this token does not continue became a replacement character.
        broken = bool(self._held) and not 0x80 <= (data or b"\x80")[0] < 0xC0
        self._held = self._decoder.getstate()[0]
        return max(0, begin + broken)


class CompletionResponse:
    """The answer to one request, whole or in parts."""

    def __init__(
        self, request: Asked, model: str, pieces: Callable[[Sequence[int]], list[TokenPiece]]
    ) -> None:
        self.asked, self._pieces = request, pieces
        self._offsets: dict[Text, Offsets] = {}  # of streamed texts
        kind = "chat.completion" if request.chat else "text_completion"
        self.whole = {
            "id": f"{kind}-{os.urandom(12).hex()}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self.part = self.whole | ({"object": f"{kind}.chunk"} if request.chat else {})

    def choice(
        self,
        text: Text,
        grown: str,
        first: int,
        count: int,
        finish: str,
        looked: Looked | None = None,
    ) -> Json:
        """Make a choice from tokens `first` to `count` of a text: all of it if it ended at once.
        `looked`: log-probabilities of all its tokens, including the prompt's."""
        ids: list[int] = text.new[first:count]
        values: list[float | None] = [*text.logprobs[first:count]]
        tops: list[dict[int, float] | None] = [None] * len(ids)
        if looked is not None:
            tops = self._tops(text, looked)
            if self.asked.echo:
                ids = [*text.prompt, *ids]
                values = [None, *looked.values[: len(text.prompt) - 1], *values]
                tops = [None, *tops]
            else:
                # looked omits the first token, so new ones begin one place earlier.
                tops = tops[len(text.prompt) - 1 :]
        new = text.new[first:count]
        choice: Json = {"index": text.number, "token_ids": new, "finish_reason": finish or None}
        # With the last part of a stream, when all versions are known.
        if finish:
            choice |= {"prompt_token_ids": text.prompt, "weight_versions": text.versions}
        logprobs: Json | None = None
        if self.asked.logprobs:
            # In one call: uncached tokens take a call, which waits for a step of the model.
            self._pieces([*ids, *chain.from_iterable(top or () for top in tops)])
            logprobs = (
                {"content": self._content(ids, values, tops)}
                if self.asked.chat
                else self._columns(text, grown, ids, values, tops)
            )
        if not self.asked.chat:
            return choice | {"text": grown, "logprobs": logprobs}
        key = "delta" if self.asked.stream else "message"
        # Once per stream, with the first token, as in OpenAI's API.
        role = {} if self.asked.stream and first else {"role": "assistant"}
        choice[key] = role | {"content": grown}
        return choice | {"logprobs": logprobs}

    @staticmethod
    def _tops(text: Text, looked: Looked) -> list[dict[int, float] | None]:
        """Return the alternatives, with each sampled token's own log-probability, which its filters
        may have changed."""
        tops: list[dict[int, float] | None] = [dict(top) for top in looked.tops]
        for top, token, value in zip(
            tops[len(text.prompt) - 1 :], text.new, text.logprobs, strict=True
        ):
            # Otherwise one token would have two log-probabilities in the same answer.
            if top is not None and token in top:
                top[token] = value
        return tops

    def _content(
        self,
        ids: Sequence[int],
        values: Sequence[float | None],
        tops: Sequence[dict[int, float] | None],
    ) -> list[Json]:
        """Make the log-probabilities of a chat."""

        def entries(chances: Iterable[tuple[int, float | None]]) -> list[Json]:
            of = dict(chances)
            return [
                {
                    "token": f"token_id:{token}"
                    if self.asked.as_ids
                    else piece.data.decode("utf-8", "replace"),
                    "logprob": of[token],
                    "bytes": None if piece.special else [*piece.data],
                }
                for token, piece in zip(of, self._pieces([*of]), strict=True)
            ]

        return [
            entries([(token, value)])[0] | {"top_logprobs": entries((top or {}).items())}
            for token, value, top in zip(ids, values, tops, strict=True)
        ]

    def _columns(
        self,
        text: Text,
        grown: str,
        ids: Sequence[int],
        values: Sequence[float | None],
        tops: Sequence[dict[int, float] | None],
    ) -> Json:
        """Make the log-probabilities of a completion."""
        pieces = self._pieces(ids)
        if (offsets := self._offsets.get(text)) is None:
            # The first word of a text may lack the space that its token has.
            first = next((piece.data for piece in pieces if not piece.special), b"")
            space_lost = self.asked.echo and first.startswith(b" ") and not grown.startswith(" ")
            offsets = self._offsets[text] = Offsets(-int(space_lost))
        begins = [offsets.add(piece) for piece in pieces]
        if not self.asked.stream:  # tokens after a stop string begin at its end
            begins = [min(begin, len(grown)) for begin in begins]
        token_names = [
            self._names([*(top or {}), token]) for token, top in zip(ids, tops, strict=True)
        ]
        top_logprobs: list[dict[str, float] | None] = [
            None if top is None else {names[token]: value for token, value in top.items()}
            for names, top in zip(token_names, tops, strict=True)
        ]
        return {
            "tokens": [names[token] for names, token in zip(token_names, ids, strict=True)],
            "token_logprobs": values,
            "top_logprobs": top_logprobs if self.asked.top else None,
            "text_offset": begins,
        }

    def _names(self, ids: Sequence[int]) -> dict[int, str]:
        """Name tokens by their ids, all differently: by their text or, as OpenAI does, by the bytes
        of a partial character. Of several tokens with the same text the first, most likely one gets
        it; the others are named by id."""
        names: dict[int, str] = {}
        ids = [*dict.fromkeys(ids)]
        for token, (data, _) in zip(ids, self._pieces(ids), strict=True):
            try:
                name = data.decode()
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            if self.asked.as_ids or name in names.values():
                name = f"token_id:{token}"
            names[token] = name
        return names

    def usage(self, texts: list[Text]) -> Json:
        prompt_tokens, new = sum(map(len, self.asked.prompts)), sum(len(text.new) for text in texts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new,
            "total_tokens": prompt_tokens + new,
        }


def error_body(code: int, message: str) -> Json:
    kind = "invalid_request_error" if 400 <= code < 500 else "server_error"
    message = message.replace("\n", "; ")
    return {"error": {"message": message, "type": kind, "code": code}}
