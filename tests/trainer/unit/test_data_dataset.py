"""Token shards: what is read, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kempner.config.loading import load_config_files
from kempner.config.option import ConfigError
from kempner.data.config import DataConfig
from kempner.data.formats import dataset
from kempner.data.formats.dataset import TokenDataset
from kempner.data.sidecar import SIDECAR, Shard, Sidecar
from kempner.data.text.chat_marks import files_of_shard
from kempner.train.checks import combination_problems
from kempner.train.parts import open_data
from kempner.train.sections import RunConfig


def write_data(
    path: Path,
    train: Sequence[Any],
    val: Sequence[Any] = (),
    dtype: str = "uint16",
    vocab: int = 257,
) -> Path:
    """A data directory whose shards hold these tokens."""
    path.mkdir(exist_ok=True)
    splits: dict[str, list[Shard]] = {}
    for split, shards in (("train", train), ("val", val)):
        splits[split] = []
        for i, tokens in enumerate(shards):
            name = f"{split}_{i:05d}.npy"
            np.save(path / name, np.asarray(tokens, dtype))
            splits[split].append(Shard(name, len(tokens), 0, int(np.max(tokens))))
    about = {"name": "bytes", "kind": "bytes", "hash": ""}
    Sidecar(about, dtype, vocab, 256, splits, {}).save(path / SIDECAR)
    return path


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(1, 12),
    st.sampled_from([2, 4]),
)
def test_samples_are_windows_of_the_stream_across_shards(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seq_len: int, width: int
) -> None:
    stream = np.arange(sum(sizes)) + (100_000 if width == 4 else 0)
    shards = np.split(stream, np.cumsum(sizes)[:-1])
    dtype, vocab = f"uint{8 * width}", int(stream.max()) + 1
    path = write_data(tmp_path_factory.mktemp("data"), shards, dtype=dtype, vocab=vocab)
    if len(stream) <= seq_len:
        with pytest.raises(ConfigError, match=f"{len(stream)} tokens in split train"):
            TokenDataset.open(path, "train", seq_len, vocab)
        return
    data = TokenDataset.open(path, "train", seq_len, vocab)
    assert len(data) == (len(stream) - 1) // seq_len
    order = np.random.default_rng(0).permutation(len(data))
    rows = data.read(order)
    assert rows.inputs.dtype == rows.targets.dtype == np.int64
    for i, inputs, targets in zip(order, rows.inputs, rows.targets, strict=True):
        assert inputs.tolist() == stream[i * seq_len : (i + 1) * seq_len].tolist()
        assert targets.tolist() == stream[i * seq_len + 1 : (i + 1) * seq_len + 1].tolist()


def refused(path: Path, *, split: str = "train", seq_len: int = 4, vocab_size: int = 257) -> str:
    with pytest.raises(ConfigError) as error:
        TokenDataset.open(path, split, seq_len, vocab_size)
    return str(error.value)


def edit_sidecar(path: Path, **changes: Any) -> None:
    values = json.loads((path / SIDECAR).read_text())
    (path / SIDECAR).write_text(json.dumps({**values, **changes}))


def test_missing_or_broken_directories_are_named_with_the_fix(tmp_path: Path) -> None:
    assert "no such directory; make the data by" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no dataset.json in it; make the data by" in refused(tmp_path / "empty")
    (tmp_path / "empty" / "dataset.partial.json").write_text("{}")
    assert "has not finished; run the same" in refused(tmp_path / "empty")
    path = write_data(tmp_path / "data", [range(50)])
    edit_sidecar(path, format=99)
    assert "format 99" in refused(path)
    for text in ("{}", "[]", "nonsense", '{"format": 1, "splits": {"train": [{"x": 1}]}}'):
        (path / SIDECAR).write_text(text)
        assert "not a sidecar" in refused(path)


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    path = write_data(tmp_path / "data", [range(50), range(60)])
    (path / "train_00000.npy").unlink()
    np.save(path / "train_00001.npy", np.zeros(59, np.uint16))
    message = refused(path, seq_len=200, vocab_size=100)
    assert len(message.splitlines()) == 4
    assert "train_00000.npy: No such file" in message
    assert "sidecar says 60 tokens" in message
    assert "--model.vocab_size=257" in message
    assert "110 tokens in split train, a sample needs 201" in message


@pytest.mark.parametrize("said, written", [("uint16", "uint32"), ("uint32", "uint16")])
def test_tokens_of_another_width_are_never_read_as_if_right(
    tmp_path: Path, said: str, written: str
) -> None:
    """The sizes agree: only the type tells the two apart."""
    path = write_data(tmp_path / "data", [range(64)], dtype=said)
    count = 64 * np.dtype(said).itemsize // np.dtype(written).itemsize
    np.save(path / "train_00000.npy", np.zeros(count, written))
    assert f"holds {written}, the sidecar says {said}" in refused(path)


def test_byte_order_truncation_trailing_bytes_and_other_files_are_refused(tmp_path: Path) -> None:
    path = write_data(tmp_path / "data", [range(64)])
    shard = path / "train_00000.npy"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    assert f"is cut off: {len(whole) - 2} of {len(whole)} bytes" in refused(path)
    shard.write_bytes(whole + b"\0\0")
    assert "the sidecar says 64 tokens" in refused(path)
    np.save(shard, np.arange(64, dtype=">u2"))
    assert "holds >u2" in refused(path)
    np.save(shard, np.zeros((8, 8), np.uint16))
    assert "(8, 8)" in refused(path)
    for content in (b"", b"\x93NUMPY\x09\x00", b"no numpy at all"):
        shard.write_bytes(content)
        assert "not a .npy file" in refused(path)
    shard.write_bytes(whole)
    edit_sidecar(path, dtype="float16")
    assert "must be uint16 or uint32" in refused(path)


def test_a_vocabulary_above_the_model_is_refused_even_if_the_sidecar_forgot(tmp_path: Path) -> None:
    path = write_data(tmp_path / "data", [range(64)], vocab=257)
    assert "token ids go up to 256" in refused(path, vocab_size=256)
    path = write_data(tmp_path / "data", [range(64)], vocab=10)
    assert "token ids go up to 63" in refused(path, vocab_size=63)
    assert len(TokenDataset.open(path, "train", 4, 64)) == 15


def test_an_empty_split_says_what_to_do(tmp_path: Path) -> None:
    path = write_data(tmp_path / "data", [range(64)])
    assert "0 tokens in split val" in refused(path, split="val")
    assert "--val-fraction" in refused(path, split="val")


def test_a_token_outside_the_vocabulary_is_named_by_shard_and_offset(tmp_path: Path) -> None:
    tokens = np.arange(40) % 10
    path = write_data(tmp_path / "data", [tokens, tokens], vocab=10)
    wrong = tokens.astype(np.uint16)
    wrong[21] = 10
    np.save(path / "train_00001.npy", wrong)
    data = TokenDataset.open(path, "train", 4, 10)
    data.read(np.arange(15))
    with pytest.raises(
        ConfigError, match=r"train_00001.npy: token 10 at offset 21, .*vocab_size is 10"
    ):
        data.read(np.arange(len(data))[::-1])


def test_rank_0_checks_every_shard_and_other_ranks_open_only_what_they_read(
    tmp_path: Path,
) -> None:
    path = write_data(tmp_path / "data", [range(17), range(17), range(17)])
    (path / "train_00002.npy").unlink()
    settings = [f"--data.dataset_path={path}", "--train.seq_len=8", "--model.max_seq_len=8"]
    cfg = load_config_files(RunConfig, [], settings)
    with pytest.raises(ConfigError, match=r"train_00002\.npy: No such file"):
        open_data(cfg, check=True)
    (data,), _ = open_data(cfg, check=False)
    (path / "train_00001.npy").write_bytes(b"not one")
    assert data.read(np.array([0])).targets[0].tolist() == list(range(1, 9))
    with pytest.raises(ConfigError, match=r"train_00001\.npy: not a \.npy file"):
        data.read(np.array([3]))
    with pytest.raises(FileNotFoundError, match=r"train_00002\.npy"):
        data.read(np.array([5]))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_shard_that_cannot_be_read_is_bad_input_only_at_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A run ends for good after bad input, but restarts after an error of the system."""
    path = write_data(tmp_path / "data", [range(64)])
    data = TokenDataset.open(path, "train", 4, 257)

    def broken(file: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(dataset, "_read_header", broken)
    assert f"train_00000.npy: {os.strerror(number)}; check the file system" in refused(path)
    with pytest.raises(OSError, match=rf"\[Errno {number}\].*train_00000\.npy"):
        data.read(np.array([0]))


def test_more_shards_than_the_limit_of_open_files(tmp_path: Path) -> None:
    path = write_data(tmp_path / "data", [[i % 7] * 5 for i in range(80)], vocab=7)
    program = """
        import resource, sys, numpy
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        from kempner.data.formats.dataset import TokenDataset
        data = TokenDataset.open(sys.argv[1], "train", 4, 7)
        rows = [data.read(numpy.arange(99)) for _ in range(2)][1]
        print(rows.inputs[[0, 98]].tolist(), "torch" in sys.modules)
    """
    run = [sys.executable, "-c", textwrap.dedent(program), str(path)]
    result = subprocess.run(run, capture_output=True, text=True)
    assert result.stdout.strip() == "[[0, 0, 0, 0], [1, 1, 1, 2]] False", result.stderr


def test_several_data_sets_share_the_limit_of_open_files(tmp_path: Path) -> None:
    shards = [[i % 7] * 5 for i in range(80)]
    text = write_data(tmp_path / "text", shards, shards, vocab=7)
    chat = write_data(tmp_path / "chat", shards, vocab=7)
    for file in sorted(chat.glob("*.npy")):
        beside = files_of_shard(file)
        np.save(beside["loss_mask"], np.ones(5, np.uint8))
        np.save(beside["ends"], np.array([5], np.int64))
    told = json.loads((chat / SIDECAR).read_text())["splits"]
    edit_sidecar(chat, kind="chat", splits={**told, "train": [
        {**shard, "documents": 1} for shard in told["train"]
    ]})  # fmt: skip
    program = """
        import resource, sys, numpy
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        from kempner.data.formats.chat_dataset import ChatDataset
        from kempner.data.formats.dataset import TokenDataset
        from kempner.data.source import Shape
        sets = [TokenDataset.open(sys.argv[1], split, 4, 7) for split in ("train", "val")]
        sets.append(ChatDataset.open(sys.argv[2], "train", Shape(8, 7)))
        for _ in range(2):
            print(*[each.read(numpy.arange(len(each))).inputs.sum() for each in sets])
    """
    run = [sys.executable, "-c", textwrap.dedent(program), str(text), str(chat)]
    result = subprocess.run(run, capture_output=True, text=True)
    first, second = result.stdout.splitlines() or ("", result.stderr)
    assert first == second and result.returncode == 0, result.stderr


def test_the_section_says_how_to_make_data() -> None:
    (problem,) = combination_problems(RunConfig())
    assert "scripts/prepare_data.py" in problem and problem.startswith("data.dataset_path")
    assert combination_problems(RunConfig(data=DataConfig(dataset_path="data/x"))) == []
