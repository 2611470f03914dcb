"""Chat data -> token ids, with a mark on those in the loss and on the end of each conversation.

A row (a line of JSON, a row of Parquet) is one of

    messages                  a conversation: [{"role": ..., "content": ...}, ...]
    prompt, completion        two texts or two lists of messages; the prompt is not in the loss
    prompt, chosen, rejected  a preference: two answers, as texts or lists of messages; the prompt
                              may also be the part that both lists begin with

and may have `tools`, a list of JSON schemas or its text. In the loss is what the messages of the
chosen roles wrote (see chat_template); of a preference only what comes after the prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from kempner.config.option import ConfigError
from kempner.data.prepare.sources import BadLine, Lines, SourcePiece, is_held_out, read_piece_rows
from kempner.data.sidecar import DATA_SPLITS, PROGRESS, SIDECAR, TOKENIZER_CONFIG, Sidecar
from kempner.data.text.chat_marks import GROUP, IN_LOSS_BIT, mark_tokens
from kempner.data.text.chat_template import ChatMessage, ChatTemplate, read_tokenizer_config
from kempner.data.text.encode import Encoded, Encoding
from kempner.data.text.tokenizer import FileTokenizer, Span, TokenArray, Tokenizer
from kempner.jobs.system.files import write_atomic


@dataclass(frozen=True)
class ChatEncoding:
    """Settings that a worker needs to encode chat data, in addition to those for text."""

    directory: str  # has tokenizer_config.json, with the template
    kind: str  # chat or preference
    loss_on: tuple[str, ...]  # roles
    today: date  # for templates that ask

    def encode(self, unit: list[SourcePiece], how: Encoding, tokenizer: Tokenizer) -> Encoded:
        """Encode the conversations of a unit. One without a token in the loss counts as empty."""
        assert isinstance(tokenizer, FileTokenizer)
        template = _template(self)
        parts: dict[str, list[TokenArray]] = {split: [] for split in DATA_SPLITS}
        result = Encoded({})
        for number, piece in enumerate(unit):
            result.size += piece.size
            lines = Lines()
            rendered = list(self._render(piece, template, lines))
            path, name = piece.source.path, piece.source.name
            result.lines.append((piece.start == 0, lines.count))
            result.bad += [BadLine(path, name, number, *bad) for bad in lines.bad]
            result.documents += len(rendered)
            encoded = iter(tokenizer.encode_rendered([text for row in rendered for text, _ in row]))
            for row in rendered:
                conversations = [mark_tokens(*next(encoded), spans) for _, spans in row]
                # Not the first token: nothing predicts it.
                if not all((tokens[1:] & IN_LOSS_BIT).any() for tokens in conversations):
                    result.empty += 1
                    continue
                # Only by the first text: both answers of a preference go to one split.
                held_out = is_held_out(row[0][0], how.val_fraction)
                parts["val" if held_out else "train"] += conversations
        nothing = np.empty(0, np.uint32)
        result.tokens = {name: np.concatenate([nothing, *arrays]) for name, arrays in parts.items()}
        return result

    def _render(
        self, piece: SourcePiece, template: ChatTemplate, lines: Lines
    ) -> Iterator[list[tuple[str, list[Span]]]]:
        """Yield each row's text, two for a preference, with its spans that are in the loss."""
        for number, row in read_piece_rows(piece, lines):
            try:
                yield [
                    template.render_with_spans(
                        conversation.messages, conversation.tools, conversation.in_loss
                    )
                    for conversation in row_conversations(row, self.kind, self.loss_on)
                ]
            except ValueError as error:
                lines.bad.append((number, str(error)))


@functools.cache  # of this process
def _template(chat: ChatEncoding) -> ChatTemplate:
    return ChatTemplate(read_tokenizer_config(Path(chat.directory)), chat.today)


@dataclass(frozen=True)
class MarkedConversation:
    messages: list[ChatMessage]
    tools: Any
    in_loss: list[int]  # numbers of the messages


def row_conversations(
    row: dict[str, Any], kind: str, loss_on: Sequence[str]
) -> list[MarkedConversation]:
    """Parse the conversations of a row. Raises ValueError with the keys or types found instead."""
    has = {key for key, value in row.items() if value is not None}
    tools = _tools(row.get("tools"))
    if kind == "preference":
        if not {"chosen", "rejected"} <= has:
            raise ValueError(f"no keys 'chosen' and 'rejected' (has: {', '.join(row)})")
        prompt = _messages(row, "prompt", "user") if "prompt" in has else []
        answers = [_messages(row, key, "assistant") for key in ("chosen", "rejected")]
        # Many data sets repeat the prompt in the answers, or have it only there.
        answers = [each[len(prompt) * (each[: len(prompt)] == prompt) :] for each in answers]
        # The common beginning of both answers belongs to the prompt, too.
        same = next((i for i, (a, b) in enumerate(zip(*answers, strict=False)) if a != b), -1)
        if same < 0:
            raise ValueError("'chosen' and 'rejected' do not differ, or one of them is empty")
        prompt = prompt + answers[0][:same]
        return [_conversation(prompt, each[same:], tools, loss_on) for each in answers]
    if "messages" in has:
        return [_conversation([], _messages(row, "messages", ""), tools, loss_on)]
    if {"prompt", "completion"} <= has:
        prompt = _messages(row, "prompt", "user")
        return [_conversation(prompt, _messages(row, "completion", "assistant"), tools, loss_on)]
    raise ValueError(
        f"no key 'messages', and not both of 'prompt' and 'completion' (has: {', '.join(row)})"
    )


def _conversation(
    prompt: list[ChatMessage], rest: list[ChatMessage], tools: Any, loss_on: Sequence[str]
) -> MarkedConversation:
    messages = [*prompt, *rest]
    in_loss = [i for i in range(len(prompt), len(messages)) if messages[i]["role"] in loss_on]
    return MarkedConversation(messages, tools, in_loss)


def _messages(row: dict[str, Any], key: str, role: str) -> list[ChatMessage]:
    """Read the list of messages under a key; a text is one message of `role`."""
    value = row[key]
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not (value or role):
        raise ValueError(f"{key!r} is not a list of messages")
    for i, message in enumerate(value):
        where = f"message {i + 1} of {key!r}"
        if not isinstance(message, dict):
            raise ValueError(f"{where} is {type(message).__name__}, not an object")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where} has no role (has: {', '.join(message)})")
        if not isinstance(message.get("content"), str | list | None):
            raise ValueError(f"the content of {where} is neither a string nor a list of parts")
    return value


def _tools(value: Any) -> Any:
    tools = json.loads(value) if isinstance(value, str) else value
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise ValueError("'tools' is not a list of JSON schemas, nor the text of one")
    return tools or None


# --- The options of scripts/prepare_data.py ---------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    kind = "what a row is: text (default), chat or preference (see docs/guide/fine-tune.md)"
    add("--kind", choices=("text", *GROUP), default="text", help=kind)
    loss_on = "for chat data: roles in the loss, separated by commas (default: assistant)"
    add("--loss-on", metavar="ROLES", default="assistant", help=loss_on)
    template = "for chat data: a Jinja template in place of the tokenizer's own"
    add("--chat-template", metavar="FILE", type=Path, help=template)
    today = "for chat data: the date for a template that asks for it (default: the starting day)"
    add("--date", metavar="YYYY-MM-DD", type=date.fromisoformat, help=today)


def chat_option_problems(options: argparse.Namespace) -> list[str]:
    if options.kind == "text":
        return []
    checks = {
        f"--kind {options.kind} needs the tokenizer of a model: give --tokenizer DIRECTORY, with "
        "tokenizer.json and tokenizer_config.json": options.tokenizer == "bytes",
        f"--kind {options.kind} reads files of rows, not --source": options.source is not None,
        "--text-key belongs to --kind text: give prepare_data.py the keys that "
        "docs/guide/fine-tune.md lists": options.text_key != "text",
    }
    return [problem for problem, wrong in checks.items() if wrong]


def _config(options: argparse.Namespace) -> dict[str, Any]:
    path = Path(options.tokenizer).expanduser()
    return read_tokenizer_config(path if path.is_dir() else path.parent, options.chat_template)


def end_of_turn(options: argparse.Namespace) -> str | None:
    """Return the tokenizer's own end-of-sequence token for chat data: it ends generation."""
    if options.kind == "text" or options.eod is not None:
        return None
    return ChatTemplate(_config(options), _date(options)).special.get("eos_token")


def _roles(options: argparse.Namespace) -> list[str]:
    return [role.strip() for role in options.loss_on.split(",")]


def _date(options: argparse.Namespace) -> date:
    day: date = options.date or date.today()
    return day


def chat_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings, besides tokenizer and inputs, that the prepared data depend on."""
    config = _config(options)
    template = ChatTemplate(config, _date(options))
    sources = json.dumps([template.sources, template.special], sort_keys=True)
    return {
        "kind": options.kind,
        "loss_on": sorted(_roles(options)),
        "chat_template": "sha256:" + hashlib.sha256(sources.encode()).hexdigest(),
        # Without a date in the template the data is the same on any day.
        **({"date": str(_date(options))} if template.uses_date else {}),
    }


def keep_date(options: argparse.Namespace, out: Path, settings: dict[str, Any]) -> None:
    """Take the date of an earlier start with the same settings, unless --date is given: a requeued
    job may continue on another day."""
    if "date" not in settings:
        return
    finished = (out / SIDECAR).is_file()
    earlier: dict[str, Any] = {}
    if not (options.date or (finished and options.overwrite)):
        with contextlib.suppress(ConfigError):  # nothing begun, or not resumable
            record = Sidecar.load(out / (SIDECAR if finished else PROGRESS))
            earlier = record.prepared.get("settings", {})
    if settings == {**earlier, "date": settings["date"]}:
        settings["date"] = earlier.get("date", settings["date"])
    options.date = date.fromisoformat(settings["date"])


def write_template(options: argparse.Namespace, out: Path) -> None:
    config = json.dumps(_config(options), indent=1, ensure_ascii=False)
    write_atomic(out / TOKENIZER_CONFIG, f"{config}\n")


def chat_encoding(options: argparse.Namespace, out: Path) -> ChatEncoding:
    return ChatEncoding(str(out), options.kind, tuple(_roles(options)), _date(options))
