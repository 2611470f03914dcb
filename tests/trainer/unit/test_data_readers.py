"""Data of other tools: the same tokens as were written, by writers that know nothing of ours."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kempner.config.option import ConfigError
from kempner.data.config import DataConfig, SourceConfig
from kempner.data.mixture import Mixture
from kempner.data.opening import Opening, open_held_out, open_sources
from kempner.data.source import IGNORE, DataError, Shape, Source
from kempner.data.text.tokenizer import FileTokenizer, train_bpe

DOCUMENTS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=8, max_size=30)
TEXTS = [f"document {n} says {'word ' * (n % 7)}{n * n}" for n in range(300)]


def opened(
    path: Path | str, seq_len: int = 4, vocab: int = 100, separate: bool = False,
    bookmarks: Path = Path("nowhere"), **more: Any,
) -> Source:  # fmt: skip
    cfg = DataConfig(sources=(SourceConfig(str(path), **more),))
    return open_sources(cfg, Opening(Shape(seq_len, vocab, separate), True, bookmarks))[0]


def refused(path: Path | str, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        opened(path, **more)
    return str(caught.value)


def check_samples(source: Source, documents: Sequence[Sequence[int]], seq_len: int) -> None:
    """All of them, against the plain stream of the documents."""
    stream = [*itertools.chain(*documents)]
    begins = set(itertools.accumulate(map(len, documents), initial=0))
    count = len(stream) // seq_len if source.ordered else len(source)
    assert source.ordered or len(source) == (len(stream) - 1) // seq_len
    rows = source.read(np.arange(count))
    stream += stream  # what is streamed begins anew
    begins |= {place + sum(map(len, documents)) for place in begins}
    assert rows.documents is not None
    for i, (inputs, targets, index) in enumerate(
        zip(rows.inputs.tolist(), rows.targets.tolist(), rows.documents.tolist(), strict=True)
    ):
        a, b = i * seq_len, (i + 1) * seq_len
        assert inputs == stream[a:b]
        ahead = zip(stream[a + 1 : b + 1], range(a + 1, b + 1), strict=True)
        assert targets == [IGNORE if at in begins else token for token, at in ahead]
        assert index == [sum(a < place <= at for place in begins) for at in range(a, b)]


# --- Megatron ---------------------------------------------------------------------------------


def write_megatron(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], code: int) -> None:
    """As its documentation says; a document is one or more sequences."""
    letter = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}[code]
    sequences = [sequence for document in documents for sequence in document]
    binary = [struct.pack(f"<{len(s)}{letter}", *s) for s in sequences]
    pointers = [0, *itertools.accumulate(map(len, binary))][:-1]
    counts = [0, *itertools.accumulate(map(len, documents))]
    prefix.with_name(prefix.name + ".bin").write_bytes(b"".join(binary))
    prefix.with_name(prefix.name + ".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(sequences), len(counts))
        + struct.pack(f"<{len(sequences)}i", *map(len, sequences))
        + struct.pack(f"<{len(sequences)}q", *pointers)
        + struct.pack(f"<{len(counts)}q", *counts)
    )


@settings(deadline=None, max_examples=30)
@given(DOCUMENTS, st.integers(1, 7), st.sampled_from([1, 2, 3, 4, 5, 8]), st.integers(1, 3))
def test_megatron_files_hold_the_tokens_that_were_written(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]], seq_len: int, code: int, parts: int,
) -> None:  # fmt: skip
    prefix = tmp_path_factory.mktemp("megatron") / "corpus_text.document"
    unit = {1: 1, 2: 1, 3: 300}.get(code, 600)  # up to the largest ids that the dtype holds
    documents = [[unit * token for token in document] for document in documents]
    cut = [[list(p) for p in np.array_split(d, parts) if len(p)] for d in documents]
    write_megatron(prefix, cut, code)
    if sum(map(len, documents)) <= seq_len:
        return
    given: dict[str, Any] = {"seq_len": seq_len, "vocab": 60_000}
    source = opened(f"{prefix}.idx" if code == 4 else prefix, **given, separate=True)
    check_samples(source, documents, seq_len)
    assert source.identity() == opened(prefix, **given).identity()


def test_bad_megatron_files_are_named(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    assert "no dataset.json" in refused(tmp_path)
    assert "No such file" in refused(f"{prefix}.bin")
    write_megatron(prefix, [[[1, 2, 300]], [[4] * 20]], 8)
    assert "token ids go up to 300" in refused(prefix)
    assert "23 tokens in split train" in refused(prefix, seq_len=30, vocab=400)
    index = (tmp_path / "corpus.idx").read_bytes()
    for content, said in (
        (index[:-1], "cut off"), (index[:20], "a Megatron index"), (b"x" * 99, "a Megatron index"),
        (index[:17] + b"\x06" + index[18:], "dtype code 6"), (index[:17] + b"\x04" + index[18:],
        "46 bytes, the .idx beside it has 23 tokens of int32"),
    ):  # fmt: skip
        (tmp_path / "corpus.idx").write_bytes(content)
        assert said in refused(prefix, vocab=400), said
    cfg = DataConfig(str(prefix))
    with pytest.raises(ConfigError, match=r"no validation split; or do not validate: give --eval"):
        open_held_out(cfg, (), Opening(Shape(4, 400), True, tmp_path))


# --- Hugging Face -----------------------------------------------------------------------------


@settings(deadline=None, max_examples=5)
@given(DOCUMENTS, st.integers(1, 7))
def test_a_saved_data_set_of_tokens_is_mapped(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], seq_len: int
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    path = tmp_path_factory.mktemp("hf") / "tokens"
    data = datasets.Dataset.from_dict({"input_ids": documents, "other": [0] * len(documents)})
    whole = datasets.concatenate_datasets([data.select(range(3)), data.select(range(3, len(data)))])
    datasets.DatasetDict({"train": whole, "test": data}).save_to_disk(path)
    check_samples(opened(path, seq_len, separate=True), documents, seq_len)
    (held_out,) = open_held_out(DataConfig(str(path)), (), Opening(Shape(seq_len, 100), True, path))
    assert len(held_out) == len(opened(path, seq_len))


@pytest.mark.parametrize("kind", ["fixed", "fixed-nulls", "large", "nulls"])
def test_lists_of_any_kind_are_documents(tmp_path: Path, kind: str) -> None:
    """Also those of one length, the usual form of a packed corpus, and rows that are null."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    documents = [[i % 90 + j for j in range(8)] for i in range(40)]
    rows = [None if "nulls" in kind and i % 5 == 2 else row for i, row in enumerate(documents)]
    int32 = datasets.Value("int32")
    lists = {"large": datasets.LargeList(int32), "nulls": datasets.Sequence(int32)}
    column = lists.get(kind, datasets.Sequence(int32, length=8))
    whole = datasets.Dataset.from_dict(
        {"input_ids": rows}, features=datasets.Features({"input_ids": column})
    )
    whole.select(range(3, 37)).save_to_disk(tmp_path / "saved")
    kept = [row for row in rows[3:37] if row]
    check_samples(opened(tmp_path / "saved", 11, separate=True), kept, 11)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(train_bpe(TEXTS, 400))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_text_is_streamed_in_its_order(tmp_path: Path, tokenizer: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"text": ["", *TEXTS]})
    if kind == "saved":
        path = tmp_path / "saved"
        data.save_to_disk(path)
    else:
        path = tmp_path / f"*.{kind}"
        for i in range(3):  # in the order of their names
            part, name = data.shard(3, i, contiguous=True), tmp_path / f"part-{i}.{kind}"
            part.to_parquet(name) if kind == "parquet" else part.to_json(name)
    given = {"vocab": 400, "tokenizer": str(tokenizer), "seq_len": 16, "separate": True}
    source = opened(path, **given)
    encoded = [ids.tolist() for ids in FileTokenizer(tokenizer).encode_documents(TEXTS)]
    check_samples(source, encoded, 16)
    assert Mixture.alone(source, 5).draw(7, 3)[1].tolist() == [7, 8, 9]
    assert "name its tokenizer.json with" in refused(path, vocab=400)
    assert "--model.vocab_size=" in refused(path, **{**given, "vocab": 60})
    assert "(has: text); name it with `column`" in refused(path, **given, column="content")


def test_a_stream_whose_rows_are_all_empty_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    """It is not read for ever."""
    pytest.importorskip("datasets")
    (tmp_path / "x.jsonl").write_text('{"text": ""}\n' * 10)
    source = opened(tmp_path / "x.jsonl", vocab=400, tokenizer=str(tokenizer), seq_len=16)
    with pytest.raises(DataError, match="column 'text' is empty in all rows"):
        source.read(np.arange(1))


def test_files_that_are_gone_when_a_stream_opens_them_again(
    tmp_path: Path, tokenizer: Path
) -> None:
    """At the start this is bad input; later it is an error of the system."""
    pytest.importorskip("datasets")
    path, given = tmp_path / "x.jsonl", {"vocab": 400, "tokenizer": str(tokenizer), "seq_len": 16}
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:9]))
    source = opened(path, **given)
    source.read(np.arange(1))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        source.read(np.arange(1, 99))
    assert str(path) in refused(path, **given)


@pytest.mark.parametrize("kind", ["jsonl", "saved"])
def test_the_first_row_of_a_column_may_be_empty_and_another_column_is_refused(
    tmp_path: Path, tokenizer: Path, kind: str
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = {"text": [None, *TEXTS], "n": [7] * 301, "x": [[0.5] * 9] * 301, "w": [["a"]] * 301}
    data, path = datasets.Dataset.from_dict(rows), tmp_path / f"data.{kind}"
    data.save_to_disk(path) if kind == "saved" else data.to_json(path)
    given = {"vocab": 400, "tokenizer": str(tokenizer), "seq_len": 16, "separate": True}
    encoded = [ids.tolist() for ids in FileTokenizer(tokenizer).encode_documents(TEXTS)]
    check_samples(opened(path, **given), encoded, 16)
    for column in ("n", "x", "w"):
        said = refused(path, **given, column=column)
        assert f"column {column} holds neither text nor lists of token ids" in said


def test_text_of_a_saved_validation_split_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    """It is streamed: a shuffle over samples that nobody has counted was read for ever."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    splits = {name: datasets.Dataset.from_dict({"text": TEXTS}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    cfg = DataConfig(sources=(SourceConfig(str(tmp_path / "saved"), tokenizer=str(tokenizer)),))
    how = Opening(Shape(16, 400), True, tmp_path / "marks")
    assert len(open_sources(cfg, how)) == 1
    with pytest.raises(ConfigError, match=r"streamed and has no validation .* --eval.interval=0"):
        open_held_out(cfg, (), how)


def test_a_stream_resumes_at_a_bookmark(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any sample, over epochs and in any order, also after a torn line; and it does not begin at
    the start."""
    pytest.importorskip("datasets")
    monkeypatch.setattr("kempner.data.formats.streamed.BOOKMARK", 10)
    monkeypatch.setattr("kempner.data.formats.streamed.READ_AHEAD", 7)
    lines = [json.dumps({"text": text, "n": n}) for n, text in enumerate(TEXTS)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    given: dict[str, Any] = {"vocab": 400, "tokenizer": str(tokenizer), "seq_len": 16}
    given |= {"separate": True, "bookmarks": tmp_path / "marks"}
    whole = opened(tmp_path / "x.jsonl", **given).read(np.arange(700))
    marks = tmp_path / "marks/x.jsonl.jsonl"
    with marks.open("a") as file:
        file.write('{"sample": 3')
    for first in (0, 9, 101, 333, 650):
        again = opened(tmp_path / "x.jsonl", **given)
        reads = Mock(wraps=again._documents)  # type: ignore[attr-defined]
        monkeypatch.setattr(again, "_documents", reads)
        for indices in (np.arange(first, first + 9), np.arange(first + 20, first + 25)):
            rows = again.read(indices)
            for got, want in zip(
                (rows.inputs, rows.targets, rows.documents),
                (whole.inputs, whole.targets, whole.documents), strict=True,
            ):  # fmt: skip
                assert np.array_equal(got, want[indices])  # type: ignore[index]
        assert reads.call_count < 15
    assert again.read(np.array([2])).inputs.tolist() == whole.inputs[[2]].tolist()  # back
