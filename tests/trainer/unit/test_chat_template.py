"""Chat templates: what is written equals transformers' apply_chat_template, and which part of it
is in the loss."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from kempner.config.option import ConfigError
from kempner.data.text.chat_template import ChatTemplate, read_tokenizer_config
from kempner.data.text.tokenizer import FileTokenizer
from tests.templates import (
    CHATML,
    GENERATION,
    LLAMA3,
    MISTRAL,
    THINKING,
    ZEPHYR,
    write_tokenizer,
)

transformers = pytest.importorskip("transformers")

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather of a <city> & more: größe",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
PLAIN = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Where is Köln? 🙂"},
    {"role": "assistant", "content": "On the Rhine."},
    {"role": "user", "content": "And Bonn?"},
    {"role": "assistant", "content": "  There, too.\n", "name": None},
]
CALLS = [
    {"role": "user", "content": "How is it in Rome?"},
    {"role": "assistant", "content": None,
     "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome", "n": 1}}}]},
    {"role": "tool", "content": '{"sky": "blue"}'},
    {"role": "assistant", "content": "Blue sky."},
]  # fmt: skip
REASONED = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2", "reasoning": "One and one."},
]
CASES = {
    "chatml": (CHATML, PLAIN, None),
    "chatml without a system message": (CHATML, PLAIN[1:], None),
    "chatml with tools": (CHATML, CALLS, [TOOL]),
    "generation": (GENERATION, PLAIN, None),
    "llama 3": (LLAMA3, PLAIN, None),
    "llama 3 with tools": (LLAMA3, CALLS, [TOOL, TOOL]),
    "mistral": (MISTRAL, PLAIN, None),
    "zephyr": (ZEPHYR, PLAIN, None),
    "thinking": (THINKING, REASONED, None),
    "thinking, before": (THINKING, [*REASONED, *PLAIN[1:]], None),
    "named": (
        [{"name": "default", "template": ZEPHYR}, {"name": "tool_use", "template": CHATML}],
        CALLS,
        [TOOL],
    ),
}


def test_threads_encode_beside_each_other(tmp_path: Path) -> None:
    """Prompts of conversations and plain texts, as in reinforcement learning: one object that was
    switched between the two gave a thread what the other one wanted."""
    tokenizer = FileTokenizer(write_tokenizer(tmp_path) / "tokenizer.json", eod="<|im_end|>")
    text = "<|im_start|>user\n" + "hello world " * 40 + "<|im_end|>\n<|im_start|>assistant\n"
    right = {True: tokenizer.encode_prompt(text), False: tokenizer.encode(text)}
    assert len(right[True]) < len(right[False])

    def is_right(number: int) -> bool:
        prompt = number % 4 > 0
        return (tokenizer.encode_prompt if prompt else tokenizer.encode)(text) == right[prompt]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_right, range(1000)))


def ours(directory: Path) -> ChatTemplate:
    return ChatTemplate(read_tokenizer_config(directory), date.today())


def by_both_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reasoning as transformers up to 5.20 wants it, the newest for torch 2.9. Later ones give
    it to the template by both names, which is what we are compared with there."""
    if tuple(map(int, transformers.__version__.split(".")[:2])) > (5, 20):
        return messages
    return [{"reasoning_content": one.get("reasoning"), **one} for one in messages]


def template_of(text: str, tmp_path: Path) -> ChatTemplate:
    return ours(write_tokenizer(tmp_path, text))


@pytest.mark.parametrize("name", CASES)
def test_it_writes_what_transformers_writes(name: str, tmp_path: Path) -> None:
    """From tokenizer_config.json, and from chat_template.jinja beside it."""
    template, messages, tools = CASES[name]
    for i, jinja_file in enumerate([False, True][: 1 + isinstance(template, str)]):
        path = write_tokenizer(tmp_path / str(i), template, jinja_file=jinja_file)
        reference = transformers.AutoTokenizer.from_pretrained(path)
        for prompt in (False, True):
            expected = reference.apply_chat_template(
                by_both_names(messages), tools, add_generation_prompt=prompt, tokenize=False
            )
            assert ours(path).render(messages, tools, add_generation_prompt=prompt) == expected


def in_loss(
    template: ChatTemplate, messages: list[dict[str, Any]], role: str = "assistant"
) -> list[str]:
    numbers = [i for i, message in enumerate(messages) if message["role"] == role]
    text, spans = template.render_with_spans(messages, None, numbers)
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CHATML, ["On the Rhine.<|im_end|>\n", "  There, too.\n<|im_end|>\n"]),
        (GENERATION, ["On the Rhine.<|im_end|>", "  There, too.\n<|im_end|>"]),
        (LLAMA3, ["On the Rhine.<|eot_id|>", "There, too.<|eot_id|>"]),
        (MISTRAL, [" On the Rhine.<|im_end|>", " There, too.<|im_end|>"]),
        (ZEPHYR, ["On the Rhine.<|im_end|>\n", "  There, too.\n<|im_end|>\n"]),
    ],
)
def test_answers_are_in_the_loss_with_their_end_and_without_their_header(
    text: str, expected: list[str], tmp_path: Path
) -> None:
    assert in_loss(template_of(text, tmp_path), PLAIN) == expected


def test_the_generation_tag_gives_the_mask_of_transformers(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, GENERATION)
    reference = transformers.AutoTokenizer.from_pretrained(path)
    expected = reference.apply_chat_template(
        PLAIN, return_dict=True, return_assistant_tokens_mask=True
    )
    text, spans = ours(path).render_with_spans(PLAIN, None, [2, 4])
    bytes_before = [len(text[:i].encode()) for i in range(len(text) + 1)]
    # The tokenizer has one token a byte, and one for each special word.
    counted = sum(bytes_before[b] - bytes_before[a] - len("<|im_end|>") + 1 for a, b in spans)
    assert sum(expected["assistant_masks"]) == counted


def test_other_roles_can_be_in_the_loss(tmp_path: Path) -> None:
    template = template_of(GENERATION, tmp_path)
    assert in_loss(template, PLAIN, "user") == [
        "<|im_start|>user\nWhere is Köln? 🙂<|im_end|>\n",
        "<|im_start|>user\nAnd Bonn?<|im_end|>\n",
    ]


def refusal(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    with pytest.raises(ValueError) as error:
        in_loss(template, messages)
    return str(error.value)


def test_a_role_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    """Zephyr's ifs would drop the message without a word; Mistral's raises by itself."""
    messages = [PLAIN[1], {"role": "critic", "content": "Longer!"}, PLAIN[2]]
    text = refusal(template_of(ZEPHYR, tmp_path), messages)
    assert "does not write message 2, of the role 'critic'" in text
    assert "roles must alternate user/assistant" in refusal(
        template_of(MISTRAL, tmp_path), messages
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),  # OverflowError
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),  # RecursionError
        ("{{ 1 / 0 }}", "division by zero"),  # ArithmeticError
    ],
)
def test_whatever_a_template_raises_is_its_refusal(body: str, reason: str, tmp_path: Path) -> None:
    text = refusal(template_of(body, tmp_path), PLAIN)
    assert text.startswith("the chat template refuses it: ") and reason in text


def test_a_call_of_a_tool_needs_no_words(tmp_path: Path) -> None:
    calls = [CALLS[0], {**CALLS[1], "content": ""}, *CALLS[2:]]
    end = '{"name": "weather", "parameters": {"city": "Rome", "n": 1}}<|eot_id|>'
    assert in_loss(template_of(LLAMA3, tmp_path), calls) == [end, "Blue sky.<|eot_id|>"]
    assert "does not write message 2" in refusal(
        template_of(LLAMA3, tmp_path), [CALLS[0], {**CALLS[1], "content": "Let me see."}]
    )


def test_a_template_that_rewrites_earlier_messages_is_refused(tmp_path: Path) -> None:
    template = template_of(THINKING, tmp_path)
    assert in_loss(template, REASONED) == ["<think>\nOne and one.\n</think>\n\n2<|im_end|>\n"]
    assert "put {% generation %}" in refusal(template, [*REASONED, *PLAIN[1:]])


def test_a_filter_over_the_generation_tag_is_refused(tmp_path: Path) -> None:
    filtered = (
        "{% for m in messages %}{% filter trim %}{% generation %} {{ m.content }}"
        "{% endgeneration %}{% endfilter %}{% endfor %}"
    )
    assert "such as trim" in refusal(template_of(filtered, tmp_path), PLAIN[2:3])


def test_the_sandbox_holds(tmp_path: Path) -> None:
    template = template_of("{{ messages.append(1) }}", tmp_path)
    assert "refuses it" in refusal(template, PLAIN)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chat data need the directory of a model's tokenizer"):
        read_tokenizer_config(tmp_path)
    write_tokenizer(tmp_path, None)
    with pytest.raises(ConfigError, match="no chat template"):
        read_tokenizer_config(tmp_path)
    (tmp_path / "other.jinja").write_text("{% for %}")
    config = read_tokenizer_config(tmp_path, tmp_path / "other.jinja")
    with pytest.raises(ConfigError, match="not a Jinja template"):
        ChatTemplate(config, date.today())
