"""scripts/prepare_data.py, run as a user runs it."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import inspect
import json
import lzma
import os
import random
import re
import resource
import shlex
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kempner.config.option import ConfigError
from kempner.data.formats import compressed
from kempner.data.formats.dataset import TokenDataset
from kempner.data.prepare import sources
from kempner.data.prepare.units import load_unit, save_unit
from kempner.data.sidecar import copy_tokenizer
from kempner.data.text.encode import Encoded, Encoding, in_workers
from kempner.data.text.tokenizer import Tokenizer, load_tokenizer
from kempner.extensions.generate.load import words_of_run
from tests.conftest import load_program
from tests.trainer.distributed.test_bad_input import without_privileges
from tests.waiting import LIMIT_S

REPO = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, str(REPO / "scripts/prepare_data.py")]
PREPARE = load_program("prepare_data")
EOD = 256


def prepare(*words: str | Path, limit: Callable[[], None] | None = None, **environment: str) -> Any:
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limit,
        env={**os.environ, **environment},
    )


def done(*words: str | Path, **environment: str) -> str:
    result = prepare(*words, **environment)
    assert result.returncode == 0, result.stderr
    return str(result.stdout)


def refused(*words: str | Path, limit: Callable[[], None] | None = None) -> str:
    """The message of a run that must end with exit code 2 and one clear error."""
    result = prepare(*words, limit=limit)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("error: ") == 1
    return str(result.stderr)


def tokens(path: Path, split: str) -> list[int]:
    shards = json.loads((path / "dataset.json").read_text())["splits"][split]
    result: list[int] = []
    for shard in shards:
        result += np.load(path / shard["file"]).tolist()
    return result


def documents(path: Path, split: str) -> list[str]:
    """What the token shards of a directory say."""
    sidecar = json.loads((path / "dataset.json").read_text())
    tokenizer = load_tokenizer(path)
    stream = tokens(path, split)
    ends = [i for i, token in enumerate(stream) if token == sidecar["eod"]]
    starts = [0, *(end + 1 for end in ends)]
    assert not stream or stream[-1] == sidecar["eod"]
    return [tokenizer.decode(stream[a:b]) for a, b in zip(starts, ends, strict=False)]


def everything(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def write_texts(path: Path, count: int, size: int, seed: int = 0) -> list[str]:
    """Text files of random words, some of them outside ASCII."""
    random_ = random.Random(seed)
    words = ["alpha", "beta", "größe", "\n", "emoji 🙂", "x = 1", "<|endoftext|>", "日本"]
    texts = []
    path.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        texts.append(f"{i} " + " ".join(random_.choices(words, k=size // 6)))
        (path / f"{i:04d}.txt").write_text(texts[-1])
    return texts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 documents, 1.5 MB."""
    path = tmp_path_factory.mktemp("texts") / "with space"
    write_texts(path, 300, 5000)
    return path


# --- What comes out ---------------------------------------------------------------------------


def test_every_document_is_in_one_split_once_in_every_format(tmp_path: Path) -> None:
    """Also: a directory is searched, and each file taken once though it is named twice."""
    top = tmp_path / "in"
    texts = write_texts(top / "deep/er", 40, 300)
    rows = [f"row {i} ünï\r\n" for i in range(60)]
    lines = [
        json.dumps({"body": row, "n": 1}, ensure_ascii=i % 2 == 0) for i, row in enumerate(rows)
    ]
    (top / "rows.jsonl").write_text("\n".join([*lines[:30], "", *lines[30:]]))
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    cells = [f"cell {i}" for i in range(70)]
    table = arrow.table({"body": [*cells, None, ""]})
    parquet.write_table(table, top / "cells.parquet", row_group_size=16)
    (top / ".hidden").write_text("secret")
    (top / "__pycache__").mkdir()
    (top / "__pycache__/x.py").write_text("secret")
    (top / "picture").write_bytes(b"\xff\xfe\x00binary")
    (top / "empty.txt").write_text("")
    out = top / "out"  # inside the input: it must not read itself
    words = [top, top / "rows.jsonl", "--out", out, "--text-key", "body", "--val-fraction", "0.1"]
    for again in ([], ["--overwrite"]):
        said = done(*words, *again)
        train, val = documents(out, "train"), documents(out, "val")
        assert sorted(train + val) == sorted(texts + rows + cells)
        assert 5 < len(val) < 40 and not set(train) & set(val)
        assert (
            "skipped 1 files, or parts of them, that are not UTF-8 text (picture)" in said
            and "2 empty documents" in said
        )
    sidecar = json.loads((out / "dataset.json").read_text())
    assert sum(shard["documents"] for shard in sidecar["splits"]["val"]) == len(val)
    assert (sidecar["dtype"], sidecar["vocab_size"], sidecar["eod"]) == ("uint16", 257, EOD)
    assert sidecar["splits"]["train"][0]["max_id"] == EOD
    assert str(tmp_path) not in (out / "dataset.json").read_text()


def test_a_long_text_is_cut_at_line_ends_and_between_characters(tmp_path: Path) -> None:
    lines = "".join(f"{i} größe 🙂\n" for i in range(150_000))  # 2.9 MB
    (tmp_path / "lines.txt").write_text(lines)
    (tmp_path / "one-line.txt").write_text("🙂" * 700_000)  # 2.8 MB
    out = tmp_path / "out"
    done(tmp_path / "lines.txt", tmp_path / "one-line.txt", "--out", out, "--val-fraction", "0")
    found = documents(out, "train")
    assert len(found) > 4 and documents(out, "val") == []
    smileys = [text for text in found if text.startswith("🙂")]
    assert "".join(smileys) == "🙂" * 700_000
    assert "".join(text for text in found if text not in smileys) == lines
    assert all(text.endswith("\n") for text in found if text not in smileys)


PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def test_compressed_files_are_what_is_in_them(tmp_path: Path) -> None:
    """A directory of them was a finished data set of its README, and exit code 0."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.mkdir(), packed.mkdir()
    rows = "".join(json.dumps({"text": f"row {i} ünï"}) + "\n" for i in range(2000))
    contents = {
        "a.jsonl": "\ufeff" + rows,
        "b.txt": "\ufeff" + "".join(f"{i} größe 🙂\n" for i in range(150_000)),  # 2.9 MB
        "c.md": "a" + "🙂" * 700_000,  # 2.8 MB without a line end
    }
    for (name, text), (suffix, pack) in zip(contents.items(), PACK.items(), strict=True):
        (plain / name).write_text(text)
        data = text.encode()
        cut = len(data) // 2  # as of several files in one, or of a program with many threads
        (packed / f"{name}{suffix}").write_bytes(pack(data[:cut]) + pack(data[cut:]))
    for place in (plain, packed):
        done(place, "--out", place / "out", "--workers", "2", "--val-fraction", "0")
    assert documents(packed / "out", "train") == documents(plain / "out", "train")
    (packed / "photos.tar.gz").write_bytes(gzip.compress(b"x"))
    (packed / "old.jsonl.gz").write_bytes(gzip.compress(rows.encode())[:-20])
    said = refused(packed, "--out", packed / "other")
    assert "photos.tar.gz: an archive, or" in said and "or leave it out of the inputs" in said
    (packed / "photos.tar.gz").unlink()
    assert "old.jsonl.gz: cannot be unpacked" in refused(packed, "--out", packed / "other")


def zstd_of(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


@pytest.mark.parametrize("suffix", [*PACK, ".zst"])
def test_nothing_of_a_compressed_file_is_left_out(tmp_path: Path, suffix: str) -> None:
    """A later stream that is damaged, cut off, or no stream is an error: Python's bz2 and lzma take
    it for the end of the file. So is a file of 0 bytes, beside one that is whole."""
    pack = (PACK | {".zst": zstd_of})[suffix]
    half = pack(b'{"text": "one half"}\n')
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    corpus.mkdir()
    (corpus / "b.jsonl").write_text('{"text": "a whole file"}\n')
    file = corpus / f"a.jsonl{suffix}"
    damaged = bytes([half[0] ^ 0xFF]) + half[1:]
    for more in (damaged, half[:-5], half[:3], b"garbage", b"x"):
        file.write_bytes(half + more)
        assert f"{file}: cannot be unpacked" in refused(corpus, "--out", out), more
    file.write_bytes(b"")
    assert f"a.jsonl{suffix}: has 0 bytes" in refused(corpus, "--out", out)
    if suffix == ".xz":  # which may be padded, as the zeros of a tape
        file.write_bytes(half + bytes(8) + half + bytes(4))
        done(corpus, "--out", out, "--val-fraction", "0")
        assert documents(out, "train").count("one half") == 2


def test_a_small_file_that_unpacks_to_much_is_read_in_parts(tmp_path: Path) -> None:
    line = b"x" * 1023 + b"\n"
    for suffix in (".bz2", ".xz"):
        file = tmp_path / f"a.txt{suffix}"
        file.write_bytes(PACK[suffix](line * 20_000) + PACK[suffix](b"y\n"))  # 20 MB
        parts = [*compressed.unpacked_texts(str(file), 1 << 20)]
        assert b"".join(parts) == line * 20_000 + b"y\n" and max(map(len, parts)) <= 1 << 20


def test_rows_of_json_are_named_so_by_c4_and_dolma(tmp_path: Path) -> None:
    line = json.dumps({"text": "a document"}).encode() + b"\n"
    (tmp_path / "c4-train.00000-of-01024.json.gz").write_bytes(gzip.compress(3 * line))
    done(tmp_path, "--out", tmp_path / "out", "--val-fraction", "0")
    assert documents(tmp_path / "out", "train") == ["a document"] * 3


def test_a_vocabulary_is_trained_on_a_part_of_a_compressed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small the file is: what it unpacks to may be any size."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(10_000 * (json.dumps({"text": "x" * 100}).encode() + b"\n")))
    monkeypatch.setattr(PREPARE, "BPE_SAMPLE", 50_000)
    options = PREPARE.parse([str(path), "--out", str(tmp_path / "out"), "--train-bpe", "300"])
    pieces = sources.cut_units(sources.find_source_files([str(path)], tmp_path), 1 << 22)[0]
    assert len(list(PREPARE.training_texts(options, pieces))) <= 500


@pytest.mark.parametrize("frames", [1, 3])
def test_zstd(tmp_path: Path, frames: int) -> None:
    """Every frame; and a file that was cut off is not taken for a whole one."""
    zstandard = pytest.importorskip("zstandard")
    line = json.dumps({"text": "a document " * 1000}).encode() + b"\n"
    data = b"".join(zstandard.ZstdCompressor().compress(100 * line) for _ in range(frames))
    path = tmp_path / "in/a.jsonl.zst"
    path.parent.mkdir()
    path.write_bytes(data)
    done(path.parent, "--out", tmp_path / "out", "--val-fraction", "0")
    assert len(documents(tmp_path / "out", "train")) == 100 * frames
    path.write_bytes(data[:-4])
    assert "a.jsonl.zst: cannot be unpacked" in refused(path, "--out", tmp_path / "other")


def test_zstd_without_a_package_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    monkeypatch.setattr(compressed, "_zstd", lambda: None)
    with pytest.raises(ConfigError, match=r"cannot read zstd; install zstandard with .*\[data\]"):
        sources.find_source_files([str(tmp_path)], tmp_path / "out")


def test_one_core_and_several_write_the_same_bytes(tmp_path: Path, corpus: Path) -> None:
    small = ["--shard-tokens", "200000"]
    done(corpus, "--out", tmp_path / "one", "--workers", "1", *small)
    done(corpus, "--out", tmp_path / "three", "--workers", "3", *small)
    assert everything(tmp_path / "one") == everything(tmp_path / "three")
    sizes = [len(np.load(file)) for file in sorted((tmp_path / "one").glob("train_*"))]
    assert len(sizes) > 4 and all(150_000 < size < 250_000 for size in sizes[:-1])


@pytest.mark.parametrize("count", [1, 2, 12])
def test_a_small_input_has_its_share_held_out(tmp_path: Path, count: int) -> None:
    texts = write_texts(tmp_path / "in", count, 40_000 // count)
    for fraction in (0.1, 0.02):
        out = tmp_path / f"out{fraction}"
        done(tmp_path / "in", "--out", out, "--val-fraction", str(fraction))
        train, val = (tokens(out, split) for split in ("train", "val"))
        share = len(val) / (len(train) + len(val))
        assert fraction / 2.1 <= share <= fraction * 2.1
        if count == 1:  # cut in two; the first part has an end of its own
            assert bytes(train[:-1] + val[:-1]).decode() == texts[0]
        TokenDataset.open(out, "val", 128, 257)


def test_the_quickstart_source_is_there_and_reads_as_python(tmp_path: Path) -> None:
    said = done("--source", "stdlib", "--out", tmp_path / "out", "--workers", "2")
    data = TokenDataset.open(tmp_path / "out", "train", 1024, 257)
    assert len(data) > 3000
    text = load_tokenizer(tmp_path / "out").decode(data.read(np.arange(20)).inputs.ravel().tolist())
    assert "def " in text and "import " in text
    assert f"--data.dataset_path={tmp_path / 'out'} --model.vocab_size=257" in said


# --- Tokenizers -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    pytest.importorskip("tokenizers")
    out = tmp_path_factory.mktemp("bpe")
    assert "training a vocabulary of 400 tokens" in done(corpus, "--out", out, "--train-bpe", "400")
    return out


def test_a_trained_vocabulary_says_the_text_and_is_reproducible(
    tmp_path: Path, corpus: Path, bpe: Path
) -> None:
    texts = [file.read_text() for file in sorted(corpus.iterdir())]
    # "<|endoftext|>" stands in the documents: it must stay text, and end nothing
    assert sorted(documents(bpe, "train") + documents(bpe, "val")) == sorted(texts)
    sidecar = json.loads((bpe / "dataset.json").read_text())
    assert sidecar["tokenizer"]["name"] == f"bpe of {sidecar['vocab_size']} tokens"
    assert sidecar["vocab_size"] <= 400 and sidecar["tokenizer"]["hash"].startswith("sha256:")
    words = ["--train-bpe", "400", "--workers", "1", "--shard-tokens", "100000000"]
    done(corpus, "--out", tmp_path / "again", *words, RAYON_NUM_THREADS="1")
    assert everything(tmp_path / "again") == everything(bpe)


def test_a_given_tokenizer_is_stored_beside_the_data_and_travels_with_the_run(
    tmp_path: Path, corpus: Path, bpe: Path
) -> None:
    out, run = tmp_path / "out", tmp_path / "run"
    run.mkdir()
    done(corpus, "--out", out, "--tokenizer", bpe / "tokenizer.json", "--val-fraction", "0.01")
    assert tokens(out, "train") == tokens(bpe, "train")
    copy_tokenizer(out, run)
    tokenizer = load_tokenizer(run / "dataset.json")
    assert tokenizer.decode(tokenizer.encode("alpha größe 🙂")) == "alpha größe 🙂"
    with (run / "tokenizer.json").open("a") as file:
        file.write("\n")
    with pytest.raises(ConfigError, match="not the tokenizer that made the data"):
        load_tokenizer(run)


def test_tokenizers_that_cut_pad_and_add_are_kept_from_it(tmp_path: Path, bpe: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    hostile = tokenizers.Tokenizer.from_file(str(bpe / "tokenizer.json"))
    hostile.enable_truncation(5)
    hostile.enable_padding(length=50)
    hostile.add_special_tokens(["<s>"])
    hostile.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", hostile.token_to_id("<s>"))]
    )
    hostile.save(str(tmp_path / "hostile.json"))
    text = "alpha beta größe <s> x = 1 " * 20
    (tmp_path / "a.txt").write_text(text)
    words = ["--tokenizer", tmp_path / "hostile.json", "--val-fraction", "0"]
    done(tmp_path / "a.txt", "--out", tmp_path / "out", *words)
    assert documents(tmp_path / "out", "train") == [text]
    ids = tokens(tmp_path / "out", "train")
    assert hostile.token_to_id("<s>") not in ids and ids.count(ids[-1]) == 1
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "lone \ud800 surrogate"}))
    done(tmp_path / "b.jsonl", "--out", tmp_path / "b", *words)
    assert documents(tmp_path / "b", "train") == ["lone ? surrogate"]


def test_the_directory_of_a_model_is_a_tokenizer_too(tmp_path: Path, bpe: Path) -> None:
    """As docs/guide/prepare.md has it. Its own end-of-sequence token counts."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tmp_path / "models/llama3"
    model.mkdir(parents=True)
    unusual = json.loads((bpe / "tokenizer.json").read_text().replace("<|endoftext|>", "<|fin|>"))
    (model / "tokenizer.json").write_text(json.dumps(unusual))
    write_texts(tmp_path / "corpus", 3, 500)
    document = (REPO / "docs/guide/prepare.md").read_text()
    (words,) = re.findall(
        r"^    python scripts/prepare_data.py (.* models/llama3)$", document, re.M
    )
    where = {"cwd": str(tmp_path), "check": False, "capture_output": True, "text": True}
    said = subprocess.run([*COMMAND, *words.split()], **where)  # type: ignore[call-overload]
    assert said.returncode == 2 and "name the one that ends a document with --eod" in said.stderr
    config = {"eos_token": {"content": "<|fin|>", "special": True}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    said = subprocess.run([*COMMAND, *words.split()], **where)  # type: ignore[call-overload]
    assert said.returncode == 0, said.stderr
    sidecar = json.loads((tmp_path / "data/llama/dataset.json").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    assert sidecar["eod"] == tokenizer.token_to_id("<|fin|>")
    assert sidecar["tokenizer"]["name"] == "llama3/tokenizer.json"


def test_a_document_ends_with_a_special_token(tmp_path: Path) -> None:
    """Not with "</s>" where that is a tag of HTML, which documents have in the middle."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*letters, "</", "</s", "</s>"])}
    merges = [("<", "/"), ("</", "s"), ("</s", ">")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = split
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    (model := tmp_path / "model").mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    config = json.dumps({"eos_token": "<eos>", "bos_token": "<bos>"})
    (model / "tokenizer_config.json").write_text(config)
    (tmp_path / "a.txt").write_text("a <s>struck</s> word")
    words = (tmp_path / "a.txt", "--tokenizer", model, "--val-fraction", "0")
    done(*words, "--out", tmp_path / "out")
    stream = tokens(tmp_path / "out", "train")
    assert stream[-1] == tokenizer.token_to_id("<eos>") and stream.count(stream[-1]) == 1

    # And begins with one, if asked: what a run on these data continues begins so, too.
    done(*words, "--out", tmp_path / "begun", "--bos", "<bos>")
    bos = tokenizer.token_to_id("<bos>")
    assert tokens(tmp_path / "begun", "train") == [bos, *stream]
    (tmp_path / "config.toml").write_text('[run]\ndir = ""\n[data]\ndataset_path = ""\n')
    assert words_of_run(tmp_path / "begun", tmp_path).prompt("a")[0] == bos
    assert words_of_run(tmp_path / "out", tmp_path).prompt("a")[0] == stream[-1]
    assert "was made with bos = <bos>, not None" in refused(*words, "--out", tmp_path / "begun")
    assert "has no token <b>" in refused(*words, "--out", tmp_path / "x", "--bos", "<b>")
    said = refused(tmp_path / "a.txt", "--out", tmp_path / "x", "--bos", "<bos>")
    assert "--bos requires --tokenizer FILE" in said


def test_a_wide_vocabulary_takes_32_bits(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<eos>": 70_000, "[UNK]": 0, "hello": 69_999}  # with gaps
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(tmp_path / "wide.json"))
    (tmp_path / "a.txt").write_text("hello")
    words = ["--tokenizer", tmp_path / "wide.json", "--val-fraction", "0", "--eod", "<eos>"]
    done(tmp_path / "a.txt", "--out", tmp_path / "out", *words)
    assert tokens(tmp_path / "out", "train") == [69_999, 70_000]
    assert np.load(tmp_path / "out/train_00000.npy").dtype == np.uint32
    with pytest.raises(ConfigError, match=r"--model.vocab_size=70001"):
        TokenDataset.open(tmp_path / "out", "train", 1, 70_000)
    assert "has no token <end>" in refused(
        tmp_path / "a.txt", "--out", tmp_path / "x", *words, "--eod", "<end>"
    )


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    from kempner.data.text.tokenizer import ByteTokenizer

    assert ByteTokenizer().decode([104, 105, 0xFF, EOD, 33]) == "hi\ufffd!"
    assert ByteTokenizer().encode("hü") == [104, 0xC3, 0xBC]


# --- Going on, and refusing -------------------------------------------------------------------


def test_a_killed_run_goes_on_after_its_whole_shards(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 100, 60_000)
    words = ["--shard-tokens", "100000", "--workers", "2"]
    done(tmp_path / "in", "--out", tmp_path / "whole", *words)
    out = tmp_path / "out"
    process = subprocess.Popen([*COMMAND, tmp_path / "in", "--out", out, *words])
    while not (out / "train_00005.npy").exists():
        assert process.poll() is None
        time.sleep(0.001)
    workers = children(process.pid)
    process.kill()
    process.wait()
    assert not (out / "dataset.json").exists()
    with pytest.raises(ConfigError, match="has not finished; run the same"):
        TokenDataset.open(out, "train", 128, 257)
    assert workers and wait_for_end(workers), "workers live on without their parent"
    kept = (out / "train_00003.npy").stat()
    (out / ".train_00009.npy.1.new").write_text("half a shard")
    assert "resuming after" in done(tmp_path / "in", "--out", out, *words)
    assert everything(out) == everything(tmp_path / "whole")
    now = (out / "train_00003.npy").stat()
    assert (now.st_ino, now.st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_end(pids: list[int]) -> bool:
    for _ in range(500):
        if not any(Path(f"/proc/{pid}/exe").exists() for pid in pids):
            return True
        time.sleep(0.01)
    return False


def test_ctrl_c_is_answered_in_one_line(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 100, 60_000)
    command = [*COMMAND, tmp_path / "in", "--out", tmp_path / "out", "--shard-tokens", "100000"]
    process = subprocess.Popen(
        [*command, "--workers", "2"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a shell that puts `make test` in the background has SIGINT ignored in all below it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (tmp_path / "out/train_00002.npy").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 130
    assert "interrupted; run the same command again" in said and len(said.splitlines()) == 1


def test_a_killed_worker_is_noticed(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 100, 60_000)
    command = [*COMMAND, tmp_path / "in", "--out", tmp_path / "out", "--shard-tokens", "100000"]
    process = subprocess.Popen([*command, "--workers", "2"], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out/train_00001.npy").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    with contextlib.suppress(ProcessLookupError):
        os.kill(children(process.pid)[-1], signal.SIGKILL)
    said = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 1 and "a worker was killed" in said


def die_while_sending(item: int, how: Encoding, tokenizer: Tokenizer) -> int:
    """The executor's thread reads the beginning of a result, and waits for the rest."""
    frame = inspect.currentframe()
    while frame is not None and "result_queue" not in frame.f_locals:
        frame = frame.f_back
    assert frame is not None
    pipe = frame.f_locals["result_queue"]._writer.fileno()
    os.write(pipe, struct.pack("!i", 1_000_000) + b"torn")
    os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_a_worker_that_is_killed_while_it_sends_is_noticed() -> None:
    """Results are megabytes, so that a worker that runs out of memory often dies there."""
    how = Encoding("", 256, "uint16", "text", 0.0)
    with pytest.raises(BrokenProcessPool):
        list(in_workers(die_while_sending, range(4), how, workers=2))


def test_finished_data_are_complete_or_refused_and_replaced_only_on_request(
    tmp_path: Path, bpe: Path
) -> None:
    write_texts(tmp_path / "in", 5, 2000)
    out = tmp_path / "out"
    words: list[str | Path] = [tmp_path / "in", "--out", out, "--val-fraction", "0.2"]
    done(*words)
    before = everything(out)
    assert "complete, nothing to do" in done(*words)
    assert "val_fraction = 0.2, not 0.3" in refused(*words, "--val-fraction", "0.3")
    message = refused(*words, "--tokenizer", bpe / "tokenizer.json")
    assert "was made with tokenizer bytes, not" in message and "never mixed" in message
    assert "tokenizer bytes, not bpe of 300 tokens" in refused(*words, "--train-bpe", "300")
    (tmp_path / "in/new.txt").write_text("more")
    assert "other inputs" in refused(*words)
    (tmp_path / "in/new.txt").unlink()
    assert "complete, nothing to do" in done(*words)
    text = (tmp_path / "in/0000.txt").read_text()
    (tmp_path / "in/0000.txt").write_text(text.replace("alpha", "omega"))  # the same name and size
    assert "other inputs" in refused(*words)
    assert everything(out) == before
    (tmp_path / "in/new.txt").write_text("more")
    for name in ("train_00007.npy", "tokenizer.json"):  # the user's own
        (out / name).write_text("mine")
        assert name in refused(*words, "--overwrite") and (out / name).read_text() == "mine"
        (out / name).unlink()
    done(*words, "--tokenizer", bpe / "tokenizer.json", "--overwrite")
    assert len(documents(out, "train") + documents(out, "val")) in (6, 7)  # one may be cut in two
    assert "belongs to the data in --out" in refused(*words, "--tokenizer", out / "tokenizer.json")
    (out / "train_00000.npy").unlink()
    message = refused(*words, "--tokenizer", bpe / "tokenizer.json")
    assert "train_00000.npy: missing or cut off" in message
    (out / "dataset.json").write_text("broken")
    assert "not a sidecar" in refused(*words)
    done(*words, "--overwrite")
    assert not (out / "tokenizer.json").exists()
    (out / "dataset.json").unlink()
    assert "a shard without a dataset.json" in refused(*words)


def test_unfinished_data_of_other_settings_are_refused_too(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 30, 60_000)
    out = tmp_path / "out"
    bad = tmp_path / "z.jsonl"
    bad.write_text("nonsense")
    words = ["--out", out, "--shard-tokens", "100000", "--workers", "1"]
    assert f"{bad}:1: not JSON" in refused(tmp_path / "in", bad, *words)
    assert (out / "train_00003.npy").exists() and not (out / "dataset.json").exists()
    assert "unfinished data in it was made from other inputs" in refused(tmp_path / "in", *words)
    done(tmp_path / "in", *words, "--overwrite")
    done(tmp_path / "in", "--out", tmp_path / "fresh", *words[2:])
    assert everything(out) == everything(tmp_path / "fresh")


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 10, 60_000)
    words = [tmp_path / "in", "--out", tmp_path / "out", "--workers", "1"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    message = refused(*words, limit=limit)
    assert "File too large" in message and "run the same command again" in message
    assert sorted(os.listdir(tmp_path / "out")) == [".kempner", "dataset.partial.json"]
    done(*words)


def test_two_writers_of_one_directory_are_refused(tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").mkdir()
    handle = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    message = refused(tmp_path / "a.txt", "--out", tmp_path / "out")
    os.close(handle)
    assert "another prepare_data.py is writing it" in message


# --- Bad input --------------------------------------------------------------------------------


def test_bad_command_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text("text")
    given: list[str | Path] = [tmp_path / "a.txt", "--out", tmp_path / "out"]
    for words, message in (
        (["--out", tmp_path / "out"], "give input files or directories, or --source stdlib"),
        ([*given, "--source", "stdlib"], "give input files or directories, or --source stdlib"),
        ([*given, "--val-fraction", "1.5"], "--val-fraction 1.5: must be from 0 to 0.5"),
        ([*given, "--train-bpe", "100"], "--train-bpe 100: must be at least 257"),
        ([*given, "--tokenizer", tmp_path / "none.json"], "no such file; give `bytes`"),
        ([*given, "--tokenizer", tmp_path / "a.txt"], "not a tokenizer.json"),
        ([*given, "--tokenizer", tmp_path], "no tokenizer.json in it, which AutoTokenizer"),
        ([tmp_path / "nowhere", tmp_path / "no", "--out", tmp_path / "out"], "nowhere: no such"),
        ([tmp_path, "--out", tmp_path], "is also an input"),
        ([tmp_path / "a.txt", "--out", tmp_path / "b.txt"], "b.txt is a file"),
        ([tmp_path / "a.txt", "--out", "/proc/data"], "/proc/data: "),
    ):
        assert message in refused(*words), words
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("empty.txt", b"", "contains no text"),
        ("blank.jsonl", b"\n\n", "the input has no text"),
        ("latin.txt", b"gr\xf6\xdfe", "latin.txt: not text (byte 2 is not UTF-8)"),
        ("zero.txt", b"a\0b", "zero.txt: not text (a zero byte)"),
        ("bad.jsonl", b'{"text": "a"}\n\n{"text": ', "bad.jsonl:3: not JSON"),
        (
            "key.jsonl",
            b'{"text": "a"}\n{"body": 1, "id": 2}',
            "key.jsonl:2: no key 'text' (has: body, id)",
        ),
        ("list.jsonl", b"[1]", "list.jsonl:1: not a JSON object but list"),
        ("type.jsonl", b'{"text": 5}', "type.jsonl:1: 'text' is int, not a string"),
        ("bytes.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "bytes.jsonl:2: not JSON"),
        ("no.parquet", b"PAR1 no", "no.parquet: not a Parquet file"),
        ("a.zip", b"PK", "a.zip: an archive, or an unsupported compression; unpack it first"),
        ("a.tar.gz", b"\x1f\x8b", "a.tar.gz: an archive, or"),
        ("a.parquet.gz", b"\x1f\x8b", "unpack it first"),
        ("a.txt.gz", b"\x1f\x8b", "a.txt.gz: cannot be unpacked (Compressed file ended before"),
        ("a.txt.gz", b"plain", "a.txt.gz: cannot be unpacked (Not a gzipped file"),
        ("a.txt.gz", gzip.compress(b"a\xff"), "a.txt.gz: not text (byte 1 is not UTF-8)"),
        ("a.json.bz2", bz2.compress(b'{"text": 5}'), "a.json.bz2:1: 'text' is int"),
        ("a.jsonl.xz", lzma.compress(b"x" * 9000)[:-9], "a.jsonl.xz: cannot be unpacked"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # bytes of gzip have the time
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    said = refused(tmp_path / name, "--out", tmp_path / "out", "--workers", "1")
    assert message in said
    assert not (tmp_path / "out/dataset.json").exists()


def test_bad_lines_are_named_and_counted_or_skipped(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "x" * 1000})] * 20_000  # 20 MB: five pieces and units
    lines[17_000] = '{"text": 5}'
    for number in range(100, 108):
        lines[number] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    words = [tmp_path / "a.jsonl", "--out", tmp_path / "out", "--workers", "2"]
    said = refused(*words)
    assert [f"a.jsonl:{number}: not JSON" in said for number in range(100, 107)] == [False] + [
        True
    ] * 5 + [False]
    assert "; correct them, or give --skip-bad-lines to leave them out" in said
    names = tmp_path / "out/bad_lines.txt"
    assert f"4 more such lines, all named in {names}" in said
    numbers = [*range(101, 109), 17_001]
    assert [
        int(line.split(":")[1]) for line in names.read_text().splitlines()
    ] == numbers  # all, also one in the last piece
    assert not (tmp_path / "out/dataset.json").exists()
    (tmp_path / "b.jsonl").write_text('{"text": "good"}\nbad\n')  # a file begins inside a unit
    words = [tmp_path / "b.jsonl", *words, "--skip-bad-lines", "--shard-tokens", "4000000"]
    assert "skipped 10 bad lines of JSON: see bad_lines.txt" in done(*words)
    found = [line.split(":")[:2] for line in names.read_text().splitlines()]
    assert found == [["b.jsonl", "2"], *(["a.jsonl", str(number)] for number in numbers)]
    splits = json.loads((tmp_path / "out/dataset.json").read_text())["splits"]
    assert sum(shard["documents"] for shards in splits.values() for shard in shards) == 19_992
    assert str(tmp_path) not in names.read_text()


def test_bad_lines_with_any_character_are_listed_one_a_line(tmp_path: Path) -> None:
    """Keys and names of files with line ends and with what is not UTF-8."""
    folder = tmp_path / "in"
    folder.mkdir()
    lines = ['{"text": "good"}', r'{"\ud800\n": 1}', r'{"\u2028": 1}']
    (folder / "a\udcff\n.jsonl").write_text("\n".join(lines))
    words = [folder, "--out", tmp_path / "out", "--workers", "1"]
    assert "choose one with --text-key" in refused(*words)
    done(*words, "--skip-bad-lines")
    found = (tmp_path / "out/bad_lines.txt").read_text().splitlines()
    assert [line.split(":")[1] for line in found] == ["2", "3"]


def test_a_unit_that_is_damaged_at_any_byte_is_as_it_was_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "00000000.npz"
    train, val = np.arange(50, dtype=np.uint16), np.arange(5, dtype=np.uint16)
    save_unit(path, Encoded({"train": train, "val": val}, documents=3))
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in (1, 4, 8):
            damaged = bytearray(whole)
            damaged[place] ^= bit
            path.write_bytes(damaged)
            unit = load_unit(path)
            assert unit is None or unit.tokens["train"].tolist() == train.tolist()


def test_a_wrong_key_stops_at_the_first_thousand_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n' * 1200)
    said = refused(tmp_path / "a.jsonl", "--out", tmp_path / "out", "--workers", "1")
    assert "a.jsonl:1: no key 'text' (has: body); choose one with --text-key" in said
    assert "1195 more such lines, all named in" in said and "stopped looking there" in said


def test_all_wrong_options_and_all_wrong_files_are_named_at_once(tmp_path: Path) -> None:
    given = [tmp_path / "no", "--out", tmp_path / "out"]
    said = refused(*given, "--workers", "0", "--val-fraction", "2", "--eod", "x")
    assert "--workers 0" in said and "--val-fraction 2.0" in said and "--eod requires" in said
    said = refused(tmp_path / "nor this", *given, "--tokenizer", tmp_path / "t.json")
    assert "no: no such file" in said and "nor this: no such" in said and "t.json: no such" in said


def test_a_vocabulary_that_the_text_does_not_fill_is_named_by_its_size(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("abc " * 100)
    said = done(tmp_path / "a.txt", "--out", tmp_path / "out", "--train-bpe", "9000")
    size = json.loads((tmp_path / "out/dataset.json").read_text())["vocab_size"]
    assert size < 300 and f"the text yields only {size} of 9000 tokens" in said
    assert f"tokenizer bpe of {size} tokens" in said


def test_parquet_without_the_column_or_with_another_type(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"body": ["a"], "n": [1]}), tmp_path / "a.parquet")
    given = [tmp_path / "a.parquet", "--out", tmp_path / "out"]
    assert "no column 'text' (has: body, n); choose one with --text-key" in refused(*given)
    assert "column 'n' is int64, not string" in refused(*given, "--text-key", "n")


@pytest.mark.parametrize(
    "words, package", [(["--train-bpe", "300"], "tokenizers"), ([], "pyarrow")]
)
def test_an_absent_package_is_named_with_its_extra(
    tmp_path: Path, words: list[str], package: str
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise ImportError")
    (tmp_path / "a.parquet").write_bytes(b"")
    (tmp_path / "a.txt").write_text("text")
    given = tmp_path / ("a.txt" if words else "a.parquet")
    result = prepare(given, "--out", tmp_path / "out", *words, PYTHONPATH=str(tmp_path))
    assert result.returncode == 2
    assert f"the package {package} is not installed" in result.stderr
    assert "-c constraints.txt -e '.[data]'" in result.stderr


def test_the_script_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    done(tmp_path / "a.txt", "--out", tmp_path / "out", PYTHONPATH=str(tmp_path))


def test_held_out_documents_are_a_share_of_all_and_stay_so() -> None:
    texts = [f"document {i}" for i in range(20_000)]
    small = {text for text in texts if sources.is_held_out(text, 0.01)}
    large = {text for text in texts if sources.is_held_out(text, 0.05)}
    assert 150 < len(small) < 250 and 900 < len(large) < 1100
    assert small < large  # a larger share keeps what was held out before


def test_what_is_left_out_of_a_corpus_is_named(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 2, 100)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "in/folder").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "in/pipe")
    said = done(tmp_path / "in", "--out", tmp_path / "out")
    what = "links to directories or special files"
    assert f"left out 2 {what} (folder, pipe)" in said
    assert f"left out 2 {what}" in done(tmp_path / "in", "--out", tmp_path / "out")  # once more


def test_what_cannot_be_read_of_a_corpus_is_an_error(tmp_path: Path) -> None:
    """Files, folders, and links to such; all are named at once, and nothing is made."""
    corpus = tmp_path / "in"
    write_texts(corpus, 2, 100)
    (corpus / "gone").symlink_to("nowhere")
    for name in ("closed", "elsewhere"):
        (tmp_path / name).mkdir()
    (corpus / "linked").symlink_to(tmp_path / "closed")
    (tmp_path / "closed").chmod(0)
    (corpus / "folder").mkdir(mode=0)
    command = [*without_privileges(), sys.executable, "scripts/prepare_data.py", corpus]
    for expected in (("folder", "gone", "linked"), ("own.txt", "mine.jsonl")):
        ran = subprocess.run(
            [*command, "--out", tmp_path / "out"], cwd=REPO, capture_output=True, text=True
        )
        assert ran.returncode == 2 and f"{len(expected)} problems" in ran.stderr, ran
        for name in expected:
            assert re.search(
                rf"  - {corpus}/{name}: .*; (correct or remove|make it)", ran.stderr
            ), ran
        for name in ("gone", "linked"):
            (corpus / name).unlink(missing_ok=True)
        (corpus / "folder").chmod(0o700)
        for name in ("own.txt", "mine.jsonl"):
            (corpus / name).write_text('{"text": "a"}')
            (corpus / name).chmod(0)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read all: the system call fails here."""
    write_texts(tmp_path / "in", 2, 100)
    write_texts(tmp_path / "in/locked", 2, 100)
    scan = os.scandir

    def scandir(path: str) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    wrong = f"{tmp_path}/in/locked: Permission denied; make it readable"
    with pytest.raises(ConfigError, match=wrong):
        sources.find_source_files([str(tmp_path / "in")], tmp_path / "out")
    for pattern in ("in/**/*.jsonl", "in/*/*.jsonl", "in/l*/x.jsonl"):
        with pytest.raises(ConfigError, match=wrong):
            sources.check_readable(f"{tmp_path}/{pattern}")
    for pattern in ("in/*.jsonl", "in/a*/x.jsonl", "in/x.jsonl", "none/*.jsonl"):
        sources.check_readable(f"{tmp_path}/{pattern}")


def test_data_that_an_older_version_has_begun_are_finished(tmp_path: Path) -> None:
    """It left no mark."""
    write_texts(tmp_path / "in", 4, 1000)
    words = [tmp_path / "in", "--out", tmp_path / "out", "--shard-tokens", "500"]
    done(*words)
    (tmp_path / "out/.kempner").unlink()
    assert "complete, nothing to do" in done(*words)
    (tmp_path / "out/dataset.json").rename(tmp_path / "out/dataset.partial.json")
    assert "resuming after" in done(*words)
    done(*words, "--train-bpe", "260", "--overwrite")


def test_a_json_file_of_rows(tmp_path: Path) -> None:
    """Two rows are JSON lines under any name; one object, as of a program's settings, is a text."""
    (tmp_path / "rows.json").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "package.json").write_text('{"name": "x"}\n')
    for name, expected in (("rows", ["one", "two"]), ("package", ['{"name": "x"}\n'])):
        out = tmp_path / f"of-{name}"
        done(tmp_path / f"{name}.json", "--out", out, "--val-fraction", "0")
        assert documents(out, "train") == expected


def test_the_options_to_train_with_are_for_a_shell(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 10)
    out = tmp_path / "it's two words"
    last = done(tmp_path / "a.txt", "--out", out, "--workers", "1").splitlines()[-1]
    words = shlex.split(last.partition(": ")[2])
    assert words == [f"--data.dataset_path={out}", "--model.vocab_size=257"]
