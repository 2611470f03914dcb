"""scripts/serve.py with the clients that people have: OpenAI's package, lm-evaluation-harness, and
the bodies that LangChain and others send."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kempner.extensions.generate.load import load_model_and_tokenizer
from kempner.extensions.serve.protocol import NEUTRAL
from tests.conftest import ROOT, clean_env
from tests.served import TEMPLATE, Client, make_model
from tests.waiting import LIMIT_S

openai = pytest.importorskip("openai")
MESSAGES = [{"role": "user", "content": "a few words"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PAGE = (ROOT / "docs/extensions/serve.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_model(tmp_path_factory.mktemp("models") / "small")
    about = {
        "eos_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (made / "tokenizer_config.json").write_text(json.dumps(about))
    return made


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("engines")
    words = [str(folder), "--device", "cpu", "--port", "0", "--publish", str(place)]
    program = subprocess.Popen(
        [sys.executable, ROOT / "scripts/serve.py", *words], env=clean_env(OMP_NUM_THREADS="1")
    )
    while not (found := list(place.glob("engine-*"))) or not found[0].read_text().strip():
        assert program.poll() is None
        time.sleep(0.05)
    yield found[0].read_text().split()[0].rstrip("/")
    program.send_signal(signal.SIGTERM)
    assert program.wait(LIMIT_S) == 0


@pytest.fixture
def client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def plain(url: str) -> Client:
    return Client(int(url.rpartition(":")[2]))


def test_the_loops_of_openais_own_client(client: Any, folder: Path) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    words: dict[str, Any] = {"model": model.id, "max_tokens": 7, "temperature": 0}
    whole = client.chat.completions.create(messages=MESSAGES, **words)
    text = whole.choices[0].message.content
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **words))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == text
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * 6
    with client.chat.completions.stream(messages=MESSAGES, **words) as stream:
        stream.until_done()  # its helper puts the deltas together
        message = stream.current_completion_snapshot.choices[0].message
    assert (message.role, message.content) == ("assistant", text)
    options = {"include_usage": True}
    *parts, last = client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options=options, **words
    )
    assert not last.choices and last.usage.completion_tokens == 7 == len(parts)
    whole = client.completions.create(prompt="a few", **words)
    parts = client.completions.create(prompt="a few", stream=True, **words)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_alternatives_are_those_of_a_full_pass(client: Any, folder: Path) -> None:
    (model,) = client.models.list().data
    words: dict[str, Any] = {"model": model.id, "max_tokens": 4, "temperature": 0}
    (choice,) = client.completions.create(prompt="a few", echo=True, logprobs=2, **words).choices
    ids = [*choice.prompt_token_ids, *choice.token_ids]
    loaded = load_model_and_tokenizer(str(folder), "cpu")
    size = loaded.words.tokenizer.vocab_size
    with torch.no_grad():
        logprobs = loaded.model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    found = choice.logprobs
    assert choice.text.startswith("a few") and len(found.tokens) == len(ids)
    assert found.tokens[:3] == ["a", " ", "few"] and found.text_offset[:4] == [0, 1, 2, 5]
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    expected = logprobs.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    assert found.token_logprobs[1:] == pytest.approx(expected.tolist(), abs=1e-4)
    for top, row in zip(found.top_logprobs[1:], logprobs, strict=True):
        values, names = row[:size].topk(2)
        texts = [loaded.words.tokenizer.decode([name]) for name in names.tolist()]
        for name, text in zip(top, texts, strict=True):
            assert name in (text, "<|endoftext|>") or name.startswith("bytes:")
        assert list(top.values()) == pytest.approx(values.tolist(), abs=1e-4)
    (choice,) = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=3, **words
    ).choices
    for token in choice.logprobs.content:  # greedy: the first is the one that was drawn
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == token.logprob


@pytest.mark.soak
def test_lm_eval(url: str, folder: Path, tmp_path: Path) -> None:
    """Its own command, with a choice, which needs echo and log-probabilities, a text, and one that
    is scored in windows as long as the model's."""
    rows = [{"q": "a few", "choices": [" words", " more"], "answer": n} for n in (0, 1)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = "dataset_path: json\ntest_split: test\ndoc_to_text: '{{q}}'\n"
    data += f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
    (tmp_path / "choice.yaml").write_text(
        f"task: choice\n{data}output_type: multiple_choice\ndoc_to_choice: '{{{{choices}}}}'\n"
        "doc_to_target: '{{answer}}'\nmetric_list: [{metric: acc}]\n"
    )
    (tmp_path / "text.yaml").write_text(
        f"task: text\n{data}output_type: generate_until\ndoc_to_target: '{{{{choices[0]}}}}'\n"
        "generation_kwargs: {until: ['\\n'], max_gen_toks: 5}\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    (tmp_path / "long.jsonl").write_text(json.dumps({"q": "a few words, a few more; " * 40}))
    (tmp_path / "long.yaml").write_text(
        "task: long\ndataset_path: json\ntest_split: test\noutput_type: loglikelihood_rolling\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'long.jsonl'}}}}}\n"
        "doc_to_text: ''\ndoc_to_target: '{{q}}'\nmetric_list: [{metric: bits_per_byte}]\n"
    )
    # It takes one less.
    arguments = f"base_url={url}{TEXT},model={folder},tokenizer={folder},max_length=129"
    arguments += ",tokenizer_backend=huggingface,num_concurrent=1"
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks"),
        *("choice,text,long", "--include_path", tmp_path, "--model_args", arguments),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        command, env=clean_env(**offline), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Of two rows with the same question one is right, whatever the model.
    assert re.search(r"\|choice *\|.*\|acc *\|.*\| +0\.5\|", done.stdout), done.stdout
    assert re.search(r"\|text .*exact_match", done.stdout)
    assert re.search(r"\|long .*bits_per_byte", done.stdout)


def test_a_body_as_langchain_sends_it(plain: Client, folder: Path) -> None:
    body = {
        "model": str(folder), "n": 1, "temperature": 0.7, "max_completion_tokens": 3,
        "stream": False, "frequency_penalty": 0, "presence_penalty": 0.0, "top_p": 1.0,
        "logprobs": None, "metadata": {"run": "1"}, "store": False, "user": "somebody",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a few"}]},
            {"role": "assistant", "content": None},
            {"role": "user", "content": [{"type": "text", "text": text} for text in ("wor", "ds")]},
        ],
    }  # fmt: skip
    whole = plain.ask(CHAT, body)
    assert whole["usage"]["completion_tokens"] == 3
    plainly = [{**message, "content": text} for message, text in zip(
        body["messages"], ("Be brief.", "a few", "", "words"), strict=True)]  # fmt: skip
    asked = plain.ask(CHAT, body | {"messages": plainly})
    assert asked["choices"][0]["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"]


def test_fields_that_constrain_nothing_pass(plain: Client) -> None:
    """Those of newer clients."""
    body = {
        "reasoning_effort": "low", "modalities": ["text"], "verbosity": "medium",
        "prompt_cache_key": "a", "safety_identifier": "b",
    }  # fmt: skip
    assert plain.ask(CHAT, {"messages": MESSAGES, "max_tokens": 1, **body})["choices"]
    refused = {"messages": MESSAGES, "modalities": ["text", "audio"]}
    assert "modalities" in plain.ask(CHAT, refused, code=400)["error"]["message"]
    for name in body:
        assert f"`{name}`" in PAGE


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_value_that_changes_nothing_passes_and_another_is_refused(
    plain: Client, name: str
) -> None:
    for value in NEUTRAL[name]:
        body = {"prompt": "a", "max_tokens": 1, name: value}
        assert plain.ask(TEXT, body)["choices"]
    message = plain.ask(TEXT, {"prompt": "a", name: ["other"]}, code=400)["error"]["message"]
    assert message.startswith(f'{name} = ["other"]: is not supported here; only ')
    assert f"`{name}`" in PAGE


def test_top_p_0_is_the_most_likely_token(plain: Client) -> None:
    (greedy,) = plain.complete("a few", temperature=0)
    assert plain.complete("a few", top_p=0)[0]["token_ids"] == greedy["token_ids"]


@pytest.mark.parametrize("none", [0, -1])
def test_a_top_k_that_leaves_out_nothing(plain: Client, none: int) -> None:
    (all_tokens,) = plain.complete("a few", seed=1)
    assert plain.complete("a few", seed=1, top_k=none)[0]["token_ids"] == all_tokens["token_ids"]


@pytest.mark.parametrize(
    ("path", "change", "problem"),
    [
        (TEXT, {"logprobs": 6}, "logprobs = 6: must be a whole number from 0 to 5"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs: give logprobs = true, too"),
        (TEXT, {"stream": True, "echo": True}, "stream: with echo"),
        (TEXT, {"stream": True, "logprobs": 1}, "stream: with echo, or with alternatives"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools = "),
        (CHAT, {"stream_options": {"other": 1}}, "may have include_usage"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "a list of text parts",
        ),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "a list of text parts"),
    ],
)
def test_what_is_not_there_is_refused_with_the_reason(
    plain: Client, path: str, change: dict[str, Any], problem: str
) -> None:
    body = {"prompt": "a"} if path == TEXT else {"messages": MESSAGES}
    assert problem in plain.ask(path, body | change, code=400)["error"]["message"]
