"""Activations on disk: those that hooks on the plain model see, each with its place in the text,
whatever is killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kempner.checkpoint import named
from kempner.data.formats.dataset import TokenDataset
from kempner.data.text.tokenizer import train_bpe
from kempner.extensions.generate import load
from kempner.extensions.generate.load import load_model_and_tokenizer
from kempner.jobs.system.files import swap_link
from kempner.model.attention import Documents
from tests import hf_models
from tests.conftest import ROOT, TINY, clean_env, load_program, start_train

SHAPE = ("--model.n_layers=4", "--model.n_experts=4", "--model.moe_frequency=2")
MORE = ("--model.post_norms", "--data.document_mask", "--train.max_steps=2")
PARTS = ["stream", "attention", "ffn"]


@pytest.fixture(scope="module")
def run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run") / "run"
    words = (*TINY, *SHAPE, *MORE, "--checkpoint.powers_of_two", f"--run.dir={run}")
    process = start_train(*words, f"--data.dataset_path={data_dir}")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    return run


def extract(monkeypatch: pytest.MonkeyPatch, *words: object, shard: int = 1 << 16) -> int:
    """In shards of 2 samples, where all four blocks are asked for in all parts."""
    program: Any = load_program("activations")
    monkeypatch.setattr(program, "SHARD_BYTES", shard)
    return program.main([*map(str, words)])


def shards(folder: Path) -> dict[str, Tensor]:
    parts = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def by_hooks(source: str, data: TokenDataset, samples: int) -> dict[str, Tensor]:
    """A sample at a time through the whole model. What a layer adds to the stream is what the
    stream has more after it than before."""
    model, found = load_model_and_tokenizer(source, "cpu").model, dict[str, list[Tensor]]()

    def keep(name: str, x: Tensor) -> None:
        found.setdefault(name, []).append(x)

    def watch(number: int, block: Any) -> None:
        def after(_: Any, args: Any, output: Any) -> None:
            keep(f"blocks.{number}.stream", output[0] if isinstance(output, tuple) else output)

        def middle(_: Any, args: Any) -> None:  # what comes into the norm of the second half
            keep(f"middle.{number}", args[0])

        block.register_forward_hook(after)
        block.register_forward_pre_hook(lambda _, args: keep(f"before.{number}", args[0]))
        block.ffn_norm.register_forward_pre_hook(middle)

    for number, block in enumerate(model.blocks):
        watch(number, block)
    for sample in range(samples):
        rows = data.read(np.arange(sample, sample + 1))
        model(
            torch.from_numpy(rows.inputs),
            documents=Documents.of(torch.from_numpy(rows.documents), True),
        )
    whole = {name: torch.cat(parts) for name, parts in found.items()}
    for number in range(len(model.blocks)):
        whole[f"blocks.{number}.attention"] = whole[f"middle.{number}"] - whole[f"before.{number}"]
        added = whole[f"blocks.{number}.stream"] - whole[f"middle.{number}"]
        whole[f"blocks.{number}.ffn"] = added
    return whole


def test_they_are_those_that_hooks_see_and_lead_back_to_the_text(
    run: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (run, data_dir, "--layers=1,-1", "--steps=0,2", f"--parts={','.join(PARTS)}")
    assert extract(monkeypatch, *words, "--samples=5", "--batch=2", "--out", tmp_path / "out") == 0
    data = TokenDataset.open(data_dir, "val", 32, 257, separate=True)
    stream = np.concatenate([data.part(n) for n in range(len(data.sidecar.splits["val"]))])
    texts = np.split(stream, np.flatnonzero(stream == 256) + 1)  # each with what ends it
    for step in (0, 2):
        found = shards(tmp_path / f"out/step_{step:08d}")
        assert len([*(tmp_path / f"out/step_{step:08d}").iterdir()]) == 5  # of one sample
        assert found["sample"].tolist() == [0, 1, 2, 3, 4]
        expected = by_hooks(f"{run}@{step}", data, 5)
        names = [f"blocks.{layer}.{part}" for layer in (1, 3) for part in PARTS]
        assert {*found} == {"sample", "tokens", "document", "position", *names}
        for name in names:
            torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-5)
        places = zip(
            *(found[x].flatten().tolist() for x in ("document", "position", "tokens")), strict=True
        )
        assert all(texts[document][position] == token for document, position, token in places)


def test_documents_are_numbered_across_samples_and_shards() -> None:
    from kempner.extensions.activations import DocumentNumbers

    rng = np.random.default_rng(0)
    stream = rng.integers(0, 4, 240)  # 3 ends a document, also twice in a row
    ends = np.cumsum(stream == 3) - (stream == 3)
    begins = [max([0, *(np.flatnonzero(stream[:i] == 3) + 1)]) for i in range(240)]
    for size in (240, 8, 1):
        where = DocumentNumbers(3)
        parts = [where.follow(part) for part in stream.reshape(-1, size, 1)]
        documents, positions = (np.concatenate([p[i].ravel() for p in parts]) for i in (0, 1))
        assert (documents == ends).all() and (positions == np.arange(240) - begins).all()


KILLED = """
import os, sys
from pathlib import Path
import kempner.extensions.activations
kempner.extensions.activations.SHARD_BYTES = 1 << 15  # one sample
whole = Path.replace
def replace(path, target):
    if str(target).endswith("00002.safetensors"):
        os.kill(os.getpid(), 9)
    return whole(path, target)
Path.replace = replace
sys.path.insert(0, "scripts")
import activations
activations.main(sys.argv[1:])
"""


def test_killed_and_started_again_it_has_the_same_bytes(
    run: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(run), str(data_dir), "--layers=all", "--samples=6", "--out"]
    command = [sys.executable, "-c", KILLED, *words, str(tmp_path / "killed")]
    env = clean_env(PYTHONPATH=str(ROOT / "src"))
    assert subprocess.run(command, cwd=ROOT, env=env, capture_output=True).returncode == -9
    folder, other = (tmp_path / name / "step_00000002" for name in ("killed", "whole"))
    names = sorted(path.name for path in folder.iterdir())
    assert names[1:] == ["00000.safetensors", "00001.safetensors"] and names[0].endswith(".new")
    for name in ("killed", "whole"):
        assert extract(monkeypatch, *words, tmp_path / name, shard=1 << 15) == 0
    assert len([*folder.iterdir()]) == len([*other.iterdir()]) == 6
    for path in other.iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes()


def test_what_does_not_fit_is_refused(
    run: Path,
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, first = tmp_path / "out", (run, data_dir, "--out", tmp_path / "out", "--samples=2")
    assert extract(monkeypatch, *first, "--layers=0") == 0
    refused = {
        "layers is [1] there": ("--layers=0,1",),
        "--layers 4: the model has 4 blocks, 0 to 3": ("--layers=4",),
        "--layers first: must be whole numbers": ("--layers=first",),
        "has no complete checkpoint of step 7": ("--layers=0", "--steps=7"),
        "--parts heads: must be of stream, attention, ffn": ("--layers=0", "--parts=heads"),
        "--batch 0: must be at least 1": ("--layers=0", "--batch=0"),
        "2 problems with the input": ("--layers=0", "--steps=7,1,9"),
        "fake:4: activations need text": ("--layers=0",),
        "@2 is one model: leave out --steps": ("--layers=0", "--steps=0"),
    }
    before = sorted(out.rglob("*"))
    read = load.read_checkpoint
    for message, words in refused.items():
        model = f"{run}@2" if "is one model" in message else run
        data = "fake:4" if "fake:" in message else data_dir
        early = message.startswith("--layers")  # before the model is read, which may take minutes
        monkeypatch.setattr(load, "read_checkpoint", None if early else read)
        assert extract(monkeypatch, model, data, *first[2:], *words) == 2
        said = capsys.readouterr().err
        assert message.replace("[1] there", "[0] there") in said, said
    assert sorted(out.rglob("*")) == before


def test_a_checkpoint_that_is_committed_meanwhile_is_not_read(
    run: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards of the older one are its own, whenever the newer one comes."""
    copy, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(run, copy, symlinks=True)
    root = copy / "checkpoints"
    newer = (root / "step_00000002").rename(root / "aside")
    swap_link(root / "latest", "step_00000000")
    program: Any = load_program("activations")

    def commit(source: Any) -> str:
        identity: str = identity_of(source)
        if asked:  # the second time: before it is read
            newer.rename(root / "step_00000002")
            swap_link(root / "latest", "step_00000002")
        asked.append(identity)
        return identity

    asked: list[str] = []
    identity_of = program.identity_of
    monkeypatch.setattr(program, "identity_of", commit)
    words = [str(copy), str(data_dir), "--layers=-1", "--samples=2", f"--out={out}"]
    assert program.main(words) == 0 and len(asked) == 2
    assert named.find_checkpoint(str(copy)).name == "step_00000002"
    expected = by_hooks(f"{run}@0", TokenDataset.open(data_dir, "val", 32, 257, separate=True), 2)
    found = shards(out / "step_00000000")["blocks.3.stream"]
    torch.testing.assert_close(found, expected["blocks.3.stream"], atol=1e-5, rtol=1e-5)


def test_a_tokenizer_with_the_same_ids_in_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tool has rewritten it, or the ids are others."""
    model, corpus = tmp_path / "model", tmp_path / "corpus"
    hf_models.make("llama2", model)
    (model / "tokenizer.json").write_bytes(train_bpe(["a few words"] * 3, 257))
    corpus.mkdir()
    (corpus / "text.md").write_text("a few words\n" * 2000)
    data = ["--out", str(tmp_path / "data"), "--tokenizer", str(model), "--val-fraction=0.5"]
    assert load_program("prepare_data").main([str(corpus), *data]) == 0
    content = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(content, indent=8))
    words = (model, tmp_path / "data", "--layers=0", "--samples=1")
    assert extract(monkeypatch, *words, "--out", tmp_path / "out") == 0
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (model / "tokenizer.json").write_text(json.dumps(content))
    assert extract(monkeypatch, *words, "--out", tmp_path / "other") == 2
    said = capsys.readouterr().err
    assert f"means different text; prepare it with --tokenizer {model}/tokenizer.json" in said, said


def test_other_weights_and_damaged_shards_are_noticed(
    run: Path,
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run went back and trained another way; another model lies at the same place; its
    config.json was changed. A shard that is not whole is made again."""
    copy, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(run, copy, symlinks=True)
    words = (copy, data_dir, "--layers", "-1,0", "--samples=2", "--out", out, "--steps=all")
    assert extract(monkeypatch, *words) == 0
    shard = out / "step_00000002/00000.safetensors"
    whole = shard.read_bytes()
    for torn in (b"garbage", b"", whole[:-4], whole[: len(whole) // 2]):
        shard.write_bytes(torn)
        assert extract(monkeypatch, *words) == 0 and shard.read_bytes() == whole
    manifest = copy / "checkpoints/step_00000002/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"time": 1e9}))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert extract(monkeypatch, *words) == 2
    said = capsys.readouterr().err
    assert f"{shard} was made with other weights" in said and "delete" in said, said
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before

    model, out = tmp_path / "model", tmp_path / "other"
    hf_models.make("llama2", model)
    words = (model, data_dir, "--layers=0", "--samples=2", "--out", out)
    assert extract(monkeypatch, *words) == 0 == extract(monkeypatch, *words)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert extract(monkeypatch, *words) == 2
    (model / "config.json").write_text(json.dumps(config))
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"abcd")
    assert extract(monkeypatch, *words) == 2
    assert capsys.readouterr().err.count("other weights") == 2
