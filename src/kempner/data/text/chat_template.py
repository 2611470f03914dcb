"""A tokenizer's chat template: messages -> text, and the characters that are in the loss.

The environment is the one that published templates are written for (transformers' documentation,
"Writing a chat template"): Jinja's immutable sandbox, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, `{% break %}`, and `{% generation %}` around what the model says.
Tests compare each rendering with transformers' apply_chat_template.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from kempner.data.sidecar import TOKENIZER_CONFIG
from kempner.data.source import DataError
from kempner.data.text.tokenizer import Span, import_data_package

TEMPLATE = "chat_template.jinja"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
           "mask_token")  # fmt: skip
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same, the usual one first
MESSAGE_BEGIN, MESSAGE_END = "\ufdd0", "\ufdd1"  # code points that Unicode keeps out of text

ChatMessage = dict[str, Any]


class ChatTemplate:
    """The chat template of a tokenizer. Raises ValueError for a conversation it cannot write."""

    def __init__(self, config: Mapping[str, Any], today: date) -> None:
        """`config`: the content of a tokenizer_config.json; `today`: the date of strftime_now."""
        templates = config["chat_template"]
        self.sources: dict[str, str] = (
            {"default": templates}
            if isinstance(templates, str)
            else {each["name"]: each["template"] for each in templates}
        )
        self.special = {
            name: value["content"] if isinstance(value, dict) else value
            for name in SPECIAL
            if (value := config.get(name)) is not None
        }
        self._today = today
        self._marks = False  # whether {% generation %} marks its contents
        self._templates = {name: self._compile(name, text) for name, text in self.sources.items()}

    @property
    def uses_date(self) -> bool:
        return any("strftime_now" in source for source in self.sources.values())

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Any = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render the messages as text. Raises ValueError with the template's own reason."""
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        try:
            text: str = self._templates[name].render(
                messages=[_clean(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special,
            )
        except Exception as error:  # from Jinja, or any Python that it calls
            reason = str(error) or type(error).__name__
            raise ValueError(f"the chat template refuses it: {reason}") from None
        return text

    def render_with_spans(
        self, messages: Sequence[ChatMessage], tools: Any, numbers: Collection[int]
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation and the spans written by the messages `numbers`:
        everything that the model would have to generate, including its end-of-turn token."""
        text = self.render(messages, tools)
        self._refuse_unwritten(messages, tools)
        spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        # The marks surround the assistant's text: use them if exactly that is in the loss.
        if self._has_generation and sorted(numbers) == spoken:
            return text, self._marked_spans(messages, tools, text)
        return text, [self._span(messages, tools, number, text) for number in sorted(numbers)]

    def _span(self, messages: Sequence[ChatMessage], tools: Any, number: int, text: str) -> Span:
        """Return the span that one message adds to the conversation before it. The header of an
        answer is the generation prompt: at inference it is given, not sampled."""
        answer = messages[number]["role"] == "assistant"
        try:
            before = self.render(messages[:number], tools, add_generation_prompt=answer)
        except ValueError:
            if number:
                raise
            # Many templates read messages[0] and refuse an empty conversation.
            before = ""
        after = self.render(messages[: number + 1], tools)
        if not (after.startswith(before) and text.startswith(after)):
            raise ValueError(
                f"the chat template changes what it wrote before message {number + 1} when that "
                "message or later ones follow, so the text of that message is not known; put "
                "{% generation %} ... {% endgeneration %} around the answers in a copy of the "
                "template and give it by --chat-template"
            )
        return len(before), len(after)

    def _marked_spans(self, messages: Sequence[ChatMessage], tools: Any, text: str) -> list[Span]:
        self._marks = True
        try:
            # Render once more, with marks; without them the text must be the same.
            rendered_text = self.render(messages, tools)
        finally:
            self._marks = False
        spans, start, plain = [], 0, []
        for i, part in enumerate(
            # Marks alternate: every second part lies between two of them.
            rendered_text.replace(MESSAGE_END, MESSAGE_BEGIN).split(MESSAGE_BEGIN)
        ):
            if i % 2:
                spans.append((start, start + len(part)))
            start += len(part)
            plain.append(part)
        if "".join(plain) != text:
            raise ValueError(
                "the chat template changes what {% generation %} surrounds (by a filter such as "
                "trim, or the conversation has U+FDD0 in it); move the tag to where the text is "
                "written"
            )
        return spans

    def _refuse_unwritten(self, messages: Sequence[ChatMessage], tools: Any) -> None:
        """Raise ValueError if a message is missing from the text. Many templates are a chain of ifs
        over the roles and drop the others silently: a word added to each message must show up."""
        words, probes = {}, []
        for i, message in enumerate(messages):
            content = message.get("content")
            if isinstance(content, str) and content.strip():
                # The x ends the number: written1 would also be found in written12.
                words[i] = f"written{i}x"
                message = {**message, "content": content + words[i]}
            probes.append(message)
        text = self.render(probes, tools)
        for i, word in words.items():
            if word not in text:
                raise ValueError(
                    f"the chat template does not write message {i + 1}, of the role "
                    f"{messages[i]['role']!r}; leave it out, rename its role, or change the "
                    "template"
                )

    @cached_property
    def _has_generation(self) -> bool:
        return all("endgeneration" in source for source in self.sources.values())

    @cached_property
    def _jinja(self) -> Any:
        return import_data_package("jinja2")

    @cached_property
    def _environment(self) -> Any:
        extension, sandbox = (
            import_data_package("jinja2.ext"),
            import_data_package("jinja2.sandbox"),
        )
        nodes, template = import_data_package("jinja2.nodes"), self

        # Jinja does not know the tag {% generation %}, an extension of transformers.
        class Generation(extension.Extension):  # type: ignore[name-defined, misc]
            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                # A call block, so that mark() gets the output of its body.
                return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

            def mark(self, caller: Any) -> str:
                return f"{MESSAGE_BEGIN}{caller()}{MESSAGE_END}" if template._marks else caller()

        def refuse(reason: str) -> None:
            raise self._jinja.exceptions.TemplateError(reason)

        # The settings of transformers, for which templates are written.
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extension.loopcontrols]
        )
        # Jinja's own filter escapes HTML characters.
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = self._today.strftime
        return environment

    def _compile(self, name: str, source: str) -> Any:
        try:
            return self._environment.from_string(source)
        except (self._jinja.exceptions.TemplateError, RecursionError) as error:
            raise DataError(f"chat template {name!r}: not a Jinja template ({error})") from None


def read_tokenizer_config(directory: Path, template_file: Path | None = None) -> dict[str, Any]:
    """Read tokenizer_config.json of a Hugging Face directory, with the chat template from
    `template_file`, chat_template.jinja, or the file itself."""
    path = directory / TOKENIZER_CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; chat data need the directory of a model's tokenizer, with "
            f"tokenizer.json and {TOKENIZER_CONFIG}"
        ) from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from None
    if template_file is not None:
        config["chat_template"] = _read(template_file)
    elif (directory / TEMPLATE).is_file():
        more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
        config["chat_template"] = [
            {"name": name, "template": _read(file)}
            for name, file in [("default", directory / TEMPLATE), *((f.stem, f) for f in more)]
        ]
    if not config.get("chat_template"):
        raise DataError(
            f"{path}: has no chat template, nor a {TEMPLATE} beside it (a base model?); "
            "give one with --chat-template FILE"
        )
    if isinstance(config["chat_template"], dict | list) and "default" not in {
        each.get("name") for each in config["chat_template"]
    }:
        raise DataError(f"{path}: has several chat templates, none of them named default")
    return config


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise DataError(f"chat template {path}: {error.strerror}") from None


def _clean(message: ChatMessage) -> ChatMessage:
    """Clean a message as transformers does: no empty values, its reasoning under
    all usual names."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
