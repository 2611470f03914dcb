"""Chat data: prepared by scripts/prepare_data.py, packed, and learned from."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kempner.config.option import ConfigError
from kempner.data.batch import MicroBatch
from kempner.data.formats.chat_dataset import ChatDataset
from kempner.data.source import IGNORE, Shape
from kempner.model.attention import Documents
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from tests.templates import CHATML, GENERATION, LLAMA3, THINKING, ZEPHYR, write_tokenizer

ROOT = Path(__file__).parents[3]
VOCABULARY = 265


def prepare(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/prepare_data.py", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def prepared(path: Path, rows: Sequence[Any], *words: str | Path, template: Any = CHATML) -> str:
    """Prepare rows (a string is a line as it is) in path/data; returns what was printed."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.mkdir(exist_ok=True)
    if not (path / "chat.jsonl").is_file():
        (path / "chat.jsonl").write_text("\n".join(lines) + "\n")
    model = write_tokenizer(path / "model", template)
    words = ("--kind", "chat", "--tokenizer", model, "--val-fraction", "0", *words)
    done = prepare(path / "chat.jsonl", "--out", path / "data", *words)
    if done.returncode:
        raise ConfigError(done.stderr)
    return done.stdout


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def open_data(path: Path, seq_len: int, too_long: str = "drop") -> ChatDataset:
    shape = Shape(seq_len, VOCABULARY, cut=too_long == "cut")
    return ChatDataset.open(path / "data", "train", shape)


def in_loss(data: ChatDataset) -> list[str]:
    """What is in the loss of each row; a special token is one letter."""
    decode = np.array([*_bytes(), *"SE[]O<>{}"])
    targets = data.read(np.arange(len(data))).targets
    return ["".join(decode[row[row != IGNORE]]) for row in targets]


def _bytes() -> list[str]:
    """The byte that each of the ids from 0 to 255 stands for, in the order of ByteLevel."""
    from tokenizers import pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    known = {level.pre_tokenize_str(chr(i))[0][0]: chr(i) for i in range(128)}
    return [known.get(letter, "?") for letter in sorted(level.alphabet())]


THREE = [
    {"messages": turns("Hi", "Yes")},
    {"messages": [{"role": "system", "content": "Be kind."}, *turns("a", "bc", "d", "ef")]},
    {"prompt": "1 + 1", "completion": "2"},
]


def test_masked_tokens_of_three_conversations_counted_by_hand(tmp_path: Path) -> None:
    """With and without the generation tag, and of another role. Each letter is a token; `]` and `O`
    stand for the special token that ends a turn."""
    prepared(tmp_path / "a", THREE, template=GENERATION)
    assert in_loss(open_data(tmp_path / "a", 256)) == ["bc]ef]2]Yes]"]  # the longest comes first
    prepared(tmp_path / "b", THREE, template=LLAMA3)
    assert in_loss(open_data(tmp_path / "b", 512)) == ["bcOefO2OYesO"]
    prepared(tmp_path / "c", THREE, "--loss-on", "user", template=ZEPHYR)
    # Of a completion nothing is the user's, and nothing comes before the first `<` to predict it.
    assert in_loss(open_data(tmp_path / "c", 100)) == [
        "<|user|>\na]\n<|user|>\nd]\n",
        "|user|>\nHi]\n",
    ]


def conversations(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": turns(*(f"{i} {'so ' * ((i * 7) % 5)}{j}" for j in range(2 + 2 * (i % 3))))}
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    assert "conversations in" in prepared(path, conversations(40))
    return path


def sums(model: Decoder, batches: list[MicroBatch]) -> tuple[float, float, list[torch.Tensor]]:
    """The trainer's: loss, tokens that count, gradients."""
    from kempner.train.objective import NextToken
    from kempner.train.step import StepSums, forward_backward

    model.zero_grad()
    start = StepSums([], torch.device("cpu"))
    found: Any = forward_backward(model, NextToken(), batches, start, 1, leave=None)
    grads = [parameter.grad for parameter in model.parameters()]
    return float(found["loss_sum"]), float(found["tokens"]), [g for g in grads if g is not None]


def test_packed_conversations_have_the_loss_and_gradients_of_unpacked_ones(packed: Path) -> None:
    data = open_data(packed, 300)
    rows = data.read(np.arange(len(data)))
    assert rows.documents is not None and 1 < len(data) < 20
    index = torch.from_numpy(rows.documents)
    inputs, targets = torch.from_numpy(rows.inputs), torch.from_numpy(rows.targets)
    together = MicroBatch(inputs, targets, Documents.of(index, reset_positions=True))
    alone = [
        MicroBatch(inputs[row][None, at], targets[row][None, at])
        for row in range(len(index))
        for document in index[row].unique()
        for at in [index[row] == document]
    ]
    assert len(alone) >= 40
    torch.manual_seed(0)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48}
    model = Decoder(ModelConfig(vocab_size=VOCABULARY, max_seq_len=300, **shape))
    loss, tokens, grads = sums(model, [together])
    loss_alone, tokens_alone, grads_alone = sums(model, alone)
    assert tokens == tokens_alone == sum(map(len, in_loss(data)))
    assert loss == pytest.approx(loss_alone, rel=1e-6)
    for grad, other in zip(grads, grads_alone, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-4)


def test_rows_hold_whole_conversations_and_each_of_them_once(packed: Path) -> None:
    data = open_data(packed, 300)
    rows = data.read(np.arange(len(data)))
    assert rows.documents is not None
    alone = open_data(packed, 100_000)
    one = alone.read(np.arange(1))
    assert len(alone) == 1 and one.documents is not None

    def documents(inputs: Any, index: Any) -> list[list[int]]:
        borders = np.flatnonzero(np.diff(index)) + 1
        return [part.tolist() for part in np.split(inputs, borders)]

    every = documents(one.inputs[0], one.documents[0])[:-1]
    found = [
        part for i in range(len(data)) for part in documents(rows.inputs[i], rows.documents[i])
    ]
    padding = [part for part in found if set(part) == {259}]  # <|im_end|>
    assert len(every) == 40 and sorted(p for p in found if p not in padding) == sorted(every)
    again = open_data(packed, 300).read(np.arange(len(data))[::-1])
    assert (again.inputs[::-1] == rows.inputs).all()


@pytest.mark.parametrize("too_long", ["drop", "cut"])
def test_conversations_longer_than_the_row_are_counted(packed: Path, too_long: str) -> None:
    lengths = np.diff(np.load(packed / "data/train_00000.ends.npy"), prepend=0) - 1
    data = open_data(packed, 120, too_long)
    longer = int((lengths > 120).sum())
    assert 0 < longer == data.longer < 40
    words = {"drop": "dropped", "cut": "cut"}[too_long]
    assert f"{longer} longer than that {words}" in data.describe()
    index = data.read(np.arange(len(data))).documents
    assert index is not None
    kept = lengths[lengths <= 120].sum() + (120 * longer if too_long == "cut" else 0)
    assert data.filled == pytest.approx(kept / (120 * len(data)))
    with pytest.raises(ConfigError, match="all are longer than that"):
        open_data(packed, 16)


def test_parquet_and_any_number_of_workers_give_the_same(tmp_path: Path, packed: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{**row, "tools": None if i % 2 else []} for i, row in enumerate(conversations(40))]
    rows[0]["messages"][1]["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    rows[2]["messages"][1]["tool_calls"] = [{"function": {"name": "g", "arguments": {"y": 1}}}]
    prepared(tmp_path, rows)
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "chat.parquet", row_group_size=7)
    words = ["--kind", "chat", "--tokenizer", tmp_path / "model", "--val-fraction", "0"]
    done = prepare(
        tmp_path / "chat.parquet", "--out", tmp_path / "other", *words,
        "--shard-tokens", "2000", "--workers", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "other").glob("*.ends.npy"))) > 1
    for what in ("", ".loss_mask"):
        one, several = (
            np.concatenate([np.load(f) for f in sorted(path.glob(f"train_00*[0-9]{what}.npy"))])
            for path in (tmp_path / "data", tmp_path / "other")
        )
        assert one.tolist() == several.tolist()
    a, b = (
        ChatDataset.open(tmp_path / name, "train", Shape(512, VOCABULARY))
        for name in ("data", "other")
    )
    assert a.describe() == b.describe()
    assert (a.read(np.arange(len(a))).inputs == b.read(np.arange(len(b))).inputs).all()


def test_a_preference_keeps_its_answers_side_by_side(tmp_path: Path) -> None:
    """However the prompt is given; only the answers are in the loss."""
    asked, good, bad = turns("Why?", "ok", "And?"), "So.", "No!"
    answers = [[{"role": "assistant", "content": text}] for text in (good, bad)]
    prepared(
        tmp_path,
        [
            {"prompt": "a" * 30, "chosen": good, "rejected": bad},
            {"prompt": asked, "chosen": answers[0], "rejected": answers[1]},
            {"chosen": asked + answers[0], "rejected": asked + answers[1]},
            {"prompt": asked, "chosen": asked + answers[0], "rejected": asked + answers[1]},
        ],
        "--kind", "preference", template=GENERATION,
    )  # fmt: skip
    data = open_data(tmp_path, 180)
    assert [text.replace("\n", "") for text in in_loss(data)] == ["So.]No!]"] * 4
    assert data.describe().startswith("4 preferences in 4 rows")


def test_of_a_cut_pair_something_of_its_answers_is_left(tmp_path: Path) -> None:
    """Where the prompt takes the whole half of a row, two equal documents would count as a pair."""
    answers = {"chosen": "a good answer" * 5, "rejected": "no"}
    pairs = [{"prompt": "p" * length, **answers} for length in (9, 40, 200)]
    prepared(tmp_path, pairs * 3, "--kind", "preference", template=GENERATION)
    data = open_data(tmp_path, 180, "cut")
    assert len(in_loss(data)) == 6 and all(in_loss(data))
    assert data.longer == 6 and data.packing["without_answer"] == 3
    assert "of which 3 are dropped: no answer was left" in data.describe()
    kept = open_data(tmp_path, 180).identity()  # a resumed run packs the same rows
    assert kept != data.identity() and data.identity()["without_answer"] == 3
    with pytest.raises(ConfigError, match="longer than that, even their prompts alone"):
        open_data(tmp_path, 20, "cut")


BAD = [
    ('{"messages": [', "not JSON"),
    ({"text": "a"}, "no key 'messages', and not both of 'prompt' and 'completion' (has: text)"),
    ({"messages": "a"}, "'messages' is not a list of messages"),
    ({"messages": []}, "'messages' is not a list of messages"),
    ({"messages": [{"content": "a"}]}, "message 1 of 'messages' has no role (has: content)"),
    ({"messages": [{"role": "user", "content": 1}]}, "neither a string nor a list of parts"),
    ({"messages": turns("a", "b"), "tools": "[1]"}, "'tools' is not a list of JSON schemas"),
    ({"messages": [{"role": "critic", "content": "a"}]}, "of the role 'critic'"),
]


def test_bad_rows_are_named_by_their_numbers_or_left_out_and_counted(tmp_path: Path) -> None:
    for i in range(0, len(BAD), 4):
        path = tmp_path / str(i)
        with pytest.raises(ConfigError) as error:
            prepared(path, [THREE[0], *(row for row, _ in BAD[i : i + 4])], template=ZEPHYR)
        for number, (_, reason) in enumerate(BAD[i : i + 4], 2):
            named = [part for part in str(error.value).split("\n") if f"l:{number}: " in part]
            assert len(named) == 1 and reason in named[0], str(error.value)
    rows = [THREE[0], *(row for row, _ in BAD), {"messages": turns("no answer")}]
    out = prepared(tmp_path / "all", rows, "--skip-bad-lines", template=ZEPHYR)
    assert f"skipped {len(BAD)} bad lines of JSON" in out
    assert "1 empty documents left out" in out
    with pytest.raises(ConfigError, match="the input has no text"):
        prepared(tmp_path / "none", rows[1:], "--skip-bad-lines", template=ZEPHYR)


def test_a_template_that_rewrites_the_past_is_refused_by_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat.jsonl:1: .* put {% generation %}"):
        prepared(tmp_path, [{"messages": turns("a", "b", "c", "d")}], template=THINKING)


def test_a_template_that_asks_for_the_date_is_told_the_same_one_each_time(tmp_path: Path) -> None:
    prepared(tmp_path, THREE, "--date", "2024-07-26", template=LLAMA3)
    shard = (tmp_path / "data/train_00000.npy").read_bytes()
    assert "complete" in prepared(tmp_path, THREE, "--date", "2024-07-26", template=LLAMA3)
    assert "complete" in prepared(tmp_path, THREE, template=LLAMA3)  # on another day
    with pytest.raises(ConfigError, match="date = 2024-07-26, not 2024-07-27"):
        prepared(tmp_path, THREE, "--date", "2024-07-27", template=LLAMA3)
    assert (tmp_path / "data/train_00000.npy").read_bytes() == shard


def test_a_preparation_goes_on_with_the_date_on_which_it_began(tmp_path: Path) -> None:
    """As a job of prepare.sh does that is requeued after midnight."""
    prepared(tmp_path / "a", THREE, "--date", "2024-07-26", template=LLAMA3)
    prepared(tmp_path / "b", THREE, "--date", "2024-07-26", "--only", "begin", template=LLAMA3)
    prepared(tmp_path / "b", THREE, template=LLAMA3)
    one, other = (np.load(tmp_path / name / "data/train_00000.npy") for name in "ab")
    assert one.tolist() == other.tolist()
    prepared(tmp_path / "b", THREE, "--overwrite", template=LLAMA3)  # anew, with that of today
    assert np.load(tmp_path / "b/data/train_00000.npy").tolist() != one.tolist()


def test_roles_may_have_spaces_between_them(tmp_path: Path) -> None:
    prepared(tmp_path / "a", THREE, "--loss-on", "user,assistant")
    prepared(tmp_path / "b", THREE, "--loss-on", "user, assistant")
    one, other = (np.load(tmp_path / x / "data/train_00000.loss_mask.npy") for x in "ab")
    assert one.tolist() == other.tolist()


def test_wrong_options(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    words = (tmp_path / "a.jsonl", "--out", tmp_path / "out", "--kind", "chat")
    assert "--kind chat needs the tokenizer of a model" in prepare(*words).stderr
    write_tokenizer(tmp_path / "model", None)
    done = prepare(*words, "--tokenizer", tmp_path / "model")
    assert done.returncode == 2 and "no chat template" in done.stderr


def test_damaged_data_are_refused(tmp_path: Path) -> None:
    prepared(tmp_path, THREE)
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 100"):
        ChatDataset.open(tmp_path / "data", "train", Shape(256, 100))
    np.save(tmp_path / "data/train_00000.loss_mask.npy", np.zeros(3, np.uint8))
    with pytest.raises(ConfigError, match="prepare the data again"):
        open_data(tmp_path, 256)


@pytest.mark.parametrize("name", ["train_00000.npy", "train_00000.ends.npy"])
def test_a_file_that_is_missing_is_bad_input_only_at_the_check(tmp_path: Path, name: str) -> None:
    prepared(tmp_path, THREE)
    data = ChatDataset.open(tmp_path / "data", "train", Shape(256, VOCABULARY), False)
    (tmp_path / "data" / name).unlink()
    with pytest.raises(ConfigError, match=rf"{name}: No such file .*; prepare the data again"):
        open_data(tmp_path, 256)
    if name == "train_00000.npy":
        with pytest.raises(FileNotFoundError, match=r"train_00000\.npy"):
            data.read(np.array([0]))
