"""scripts/convert.py: a round trip changes no bit, and bad input ends with one clear message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kempner.checkpoint import commit, history
from kempner.checkpoint.fits import check_compatible
from kempner.checkpoint.format.plan import CheckpointLayout, StoredTensor, own_box
from kempner.checkpoint.format.reader import read_tensors, verify_checkpoint
from kempner.config.option import ConfigError
from kempner.extensions.hf import exporting, families, importing, load
from kempner.extensions.hf.adapter import weights_fingerprint
from kempner.extensions.hf.load import ReadJob, fill_tensors, load_weights
from kempner.extensions.hf.source import find_weights, source_tokenizer
from kempner.extensions.hf.stored import Stored
from kempner.extensions.hf.tensors import tensor_names
from kempner.jobs.system.directories import Kind, mark_directory
from kempner.jobs.system.front_door import INTERRUPTED
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from tests.hf_models import FAMILIES, convert, load_quietly, make, ours, theirs


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def equal_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name])
        for name in first
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 in bf16, in several files, with a tokenizer and what else is beside a model."""
    path = tmp_path_factory.mktemp("models") / "my model"
    make("qwen3", path, torch.bfloat16, max_shard_size="40KB")
    vocabulary = {f"t{i}": i for i in range(256)}
    added = [{"id": 256, "content": "<eos>"}]
    content = {"model": {"type": "WordLevel", "vocab": vocabulary}, "added_tokens": added}
    (path / "tokenizer.json").write_text(json.dumps(content))
    (path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "README.md").write_text("not ours to copy")
    return path


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "imported"
    convert("import", model, path)
    return path


@pytest.mark.parametrize(
    ("family", "dtype"), [*((name, "float32") for name in FAMILIES), ("qwen2", "bfloat16")]
)
def test_a_round_trip_changes_no_bit(family: str, dtype: str, tmp_path: Path) -> None:
    reference = make(family, tmp_path / "in", getattr(torch, dtype))
    convert("import", tmp_path / "in", tmp_path / "run")
    convert("export", tmp_path / "run", tmp_path / "out")
    assert equal_bits(tensors(tmp_path / "in"), tensors(tmp_path / "out"))
    for name in ("config.json", "generation_config.json"):
        texts = [json.loads((tmp_path / d / name).read_text()) for d in ("in", "out")]
        assert texts[0] == texts[1]
    if dtype == "float32":
        logits = theirs(reference)
        for source in (ours(tmp_path / "run"), theirs(load_quietly(tmp_path / "out"))):
            torch.testing.assert_close(source, logits, atol=1e-5, rtol=0)


def test_biases_of_routers_are_not_rounded(tmp_path: Path) -> None:
    """In bf16 they would choose other experts."""
    make("glm4_moe", tmp_path / "in")
    convert("import", tmp_path / "in", tmp_path / "run")
    convert("export", tmp_path / "run", tmp_path / "out", "--dtype=bf16", "--max-shard-size=1MB")
    before, after = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    kept = {name for name, tensor in after.items() if tensor.dtype == torch.float32}
    assert len(kept) == 2 and all(name.endswith("e_score_correction_bias") for name in kept)
    assert all(torch.equal(before[name], after[name]) for name in kept)
    load_quietly(tmp_path / "out")


def test_in_many_files(
    model: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files so small that there are more of them than a norm has elements."""
    monkeypatch.setattr(importing, "TENSOR_FILE_BYTES", 4000)
    convert("import", model, tmp_path / "run")
    path = find_weights(str(tmp_path / "run")).path
    manifest = history.read_manifest(path)
    assert manifest["world_size"] > 48 and manifest["step"] == 0 and verify_checkpoint(path) == []
    one = read_tensors(find_weights(str(run)).path)
    assert equal_bits(read_tensors(path), one)
    monkeypatch.setattr(exporting, "READ_BYTES", 6000)
    exporting.export_checkpoint(path, tmp_path / "out", "auto", 20_000)
    assert equal_bits(tensors(tmp_path / "out"), tensors(model))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    sizes = [file.stat().st_size for file in (tmp_path / "out").glob("model-*.safetensors")]
    assert len(sizes) == len(set(index["weight_map"].values())) > 5 and max(sizes) < 30_000
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(model).values())
    load_quietly(tmp_path / "out")


def test_a_part_is_not_overwritten_while_it_is_written(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "READ_BYTES", 6000)
    reader = exporting._Reader(
        find_weights(str(run)).path, ["embed.weight", "norm.weight"], torch.float32
    )
    first, second = (part.data_ptr() for part in reader.parts(["embed.weight", "norm.weight"]))
    assert first != second


def test_a_tensor_that_no_table_names_is_not_left_out(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a new option of the decoder adds it, before the tables know of it."""
    plain = exporting.read_table

    def with_bias(path: Path, manifest: dict[str, Any]) -> Any:
        table = plain(path, manifest)
        return {**table, "model.norm.bias": table["model.norm.weight"]}

    monkeypatch.setattr(exporting, "read_table", with_bias)
    checkpoint = find_weights(str(run)).path
    with pytest.raises(ConfigError, match=r"has model\.norm\.bias, which an export would leave"):
        exporting.export_checkpoint(checkpoint, tmp_path / "out", "auto", 1 << 30)
    assert not [*tmp_path.iterdir()]


def test_what_is_beside_the_weights_goes_along(model: Path, run: Path, tmp_path: Path) -> None:
    convert("export", run, tmp_path / "out", "--dtype=fp32")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "float32" and config["eos_token_id"] == 256
    assert {t.dtype for t in tensors(tmp_path / "out").values()} == {torch.float32}
    mode = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert len(mode) == 1  # others may read the weights, too, if they may read the rest


def test_the_weights_are_cast_to_the_model(model: Path, run: Path) -> None:
    """The reference of DPO computes in bf16, from a directory or from a run in fp32."""
    for path in (model, run):
        source = find_weights(str(path))
        cfg = ModelConfig(**source.model())
        decoder = Decoder(cfg).bfloat16()
        load_weights(decoder, cfg, source)
        got = dict(decoder.named_parameters())
        for name, other in tensor_names(cfg, "qwen3").items():
            assert torch.equal(got[name], tensors(model)[other]), name


def test_a_rank_reads_its_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 rows in 4 parts the second has rows 3 to 5; here of columns 1 and 2 alone."""
    wide = torch.arange(40.0).view(10, 4)
    save_file({"x": wide, "y": wide.bfloat16()}, tmp_path / "model.safetensors")
    read: list[int] = []

    class Counted(FileIO):
        def readinto(self, buffer: Any) -> int:
            read.append(super().readinto(buffer))
            return read[-1]

    monkeypatch.setattr(Path, "open", lambda path, mode, buffering=-1: Counted(path, mode[:1]))
    monkeypatch.setattr(load, "PIECE", 32)  # two rows
    targets = torch.empty(3, 2), torch.empty(10, 4)
    box = own_box(StoredTensor(wide.shape, torch.float32, CheckpointLayout((4,), (0,)), 0), 1)
    with Stored(tmp_path, "pt") as stored:
        jobs = [
            ReadJob(targets[0], "x", (box[0], (1, 2))),
            ReadJob(targets[1], "y", ((0, 10), (0, 4))),
        ]
        fill_tensors(stored, jobs)
    assert targets[0].equal(wide[3:6, 1:3]) and targets[1].equal(wide)
    assert read == [32, 16, 32, 32, 16]  # rows of 16 bytes, then of 8


def test_an_imported_model_is_no_run_to_continue(run: Path) -> None:
    path = find_weights(str(run)).path
    manifest = history.read_manifest(path)
    with pytest.raises(ConfigError, match=r"was imported from .*--model\.init_from=THIS_RUN"):
        check_compatible(path, manifest, {"run": manifest["run"], "fixed": {}})


def test_check_says_what_it_is(model: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source in (model, run, f"{run}@0"):
        convert("check", source)
        out = capsys.readouterr().out
        assert "Qwen3ForCausalLM" in out and "tokenizer has 257 tokens" in out


def test_check_compares_the_reading_with_that_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make("qwen3", tmp_path / "model")
    convert("check", tmp_path / "model")
    assert "reads the same shape" in capsys.readouterr().out
    file = tmp_path / "model/config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    file.write_text(json.dumps(config))
    other = families.FAMILIES["qwen3"]._replace(rope_theta=5e5)  # a default that is not theirs
    monkeypatch.setitem(families.FAMILIES, "qwen3", other)
    convert("check", tmp_path / "model", code=2)
    assert "model.rope_theta is 500000.0 here, but 10000.0 for transformers" in (
        capsys.readouterr().err
    )


def test_retention_leaves_what_is_being_exported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []
    real = exporting.read_wanted

    def read(path: Path, *args: Any, **more: Any) -> None:
        held.append(commit.is_read(path))
        real(path, *args, **more)

    monkeypatch.setattr(exporting, "read_wanted", read)
    convert("export", run, tmp_path / "out")
    assert held == [True]


def test_a_tied_output_layer_may_be_there_if_it_is_the_embedding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("smollm", tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    content = load_file(file)
    content["lm_head.weight"] = content["model.embed_tokens.weight"].clone()
    content["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)  # as Llama 2 has it
    save_file(content, file)
    convert("check", tmp_path / "model")
    content["lm_head.weight"][259, 5] += 1
    save_file(content, file)
    convert("check", tmp_path / "model", code=2)
    assert "lm_head.weight is not part of the model" in capsys.readouterr().err


# --- Bad input ----------------------------------------------------------------------------------


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a model, which is one file then."""
    content = tensors(directory)
    for file in directory.glob("model*"):
        file.unlink()
    change(content)
    save_file(content, directory / "model.safetensors")


def edit(directory: Path, **keys: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | keys))


def truncate(directory: Path) -> None:
    file = sorted(directory.glob("*.safetensors"))[1]
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 10)


def lose_a_file(directory: Path) -> None:
    sorted(directory.glob("*.safetensors"))[1].unlink()


def only_pickles(directory: Path) -> None:
    for file in directory.glob("model*"):
        file.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"")


def larger_tokenizer(directory: Path) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())
    content["added_tokens"].append({"id": 300, "content": "<more>"})
    (directory / "tokenizer.json").write_text(json.dumps(content))


K = "model.layers.1.self_attn.k_norm.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "00004.safetensors: truncated or not a safetensors file"),
    "a-file-is-missing": (lose_a_file, "is missing; download or copy it again"),
    "no-weights": (only_pickles, "its weights are pickles, which can run code"),
    "not-json": (lambda d: (d / "config.json").write_text("{"), "config.json: cannot be read"),
    "not-an-index": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}'),
        "names a file in another directory",
    ),
    "architecture": (lambda d: edit(d, model_type="gemma3_text"), "norms multiply by 1 + weight"),
    "tokenizer": (larger_tokenizer, "ids of its tokenizer go up to 300, but vocab_size is 260"),
    "missing-tensor": (
        lambda d: rewrite(d, lambda t: t.pop(K)),
        f"{K} is missing, which the model needs",
    ),
    "superfluous-tensor": (
        lambda d: rewrite(d, lambda t: t.update({"model.extra": torch.ones(2)})),
        "model.extra is not part of the model; nothing is left out silently",
    ),
    "shape": (
        lambda d: rewrite(d, lambda t: t.update({K: torch.ones(8)})),
        f"{K} has shape [8], the model needs [16]",
    ),
    "dtype": (
        lambda d: rewrite(d, lambda t: t.update({K: torch.ones(16, dtype=torch.int8)})),
        f"{K} is I8; only BF16, F16, F32, F64 are read",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_model_is_refused(
    case: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, why = BAD[case]
    broken = shutil.copytree(model, tmp_path / "model")
    change(broken)
    convert("import", broken, tmp_path / "run", code=2)
    err = capsys.readouterr().err
    assert err.startswith("convert: error: ") and err.count("\n") == 1 and why in err, err
    assert not (tmp_path / "run").exists()


def test_the_first_of_many_wrong_tensors_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(model, tmp_path / "model")
    rewrite(broken, lambda t: t.update({name: torch.ones(3) for name in t}))
    convert("import", broken, tmp_path / "run", code=2)
    first, *lines, last = capsys.readouterr().err.splitlines()
    assert first.endswith("6 problems with the input") and len(lines) == 5, lines
    assert "model.embed_tokens.weight has shape [3]" in lines[0]
    count = len(tensors(broken))
    assert last.endswith(f": {count - 5} more wrong shapes or dtypes")


def test_a_torn_generation_config(model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "model")
    for content in ("{", "[]"):
        (broken / "generation_config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"generation_config\.json: "):
            source_tokenizer(find_weights(str(broken)))


def test_a_model_whose_router_has_no_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it lacks for a training is no problem of the files."""
    make("mixtral", tmp_path / "model")
    edit(tmp_path / "model", num_experts_per_tok=1)
    convert("check", tmp_path / "model")
    assert "all accounted for" in capsys.readouterr().out


def test_weights_in_files_of_any_name_are_told_apart(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    before = weights_fingerprint(find_weights(str(copy)))
    index = copy / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-0', '"part-0'))
    for file in sorted(copy.glob("model-*")):
        last = file.rename(copy / file.name.replace("model-", "part-"))
    renamed = weights_fingerprint(find_weights(str(copy)))
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    assert len({before, renamed, weights_fingerprint(find_weights(str(copy)))}) == 3


def test_what_is_there_is_left_alone(
    model: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").touch()
    for words, why in (
        (("import", model, run), "is a run; give another directory"),
        (("export", run, tmp_path / "out"), "give another directory, or remove it"),
        (("export", f"{run}@7", tmp_path / "new"), "no complete checkpoint of step 7"),
        (("export", model, tmp_path / "new"), "already in Hugging Face format"),
        (("import", run, tmp_path / "new"), f"--model.init_from={run}"),
        (("push", run, "me/model"), "export it first"),
        (("push", "me/gone", "me/model"), "me/gone: no such directory; name one written by export"),
        (("check", tmp_path / "out"), "neither a model, with a config.json, nor a run"),
        (("check", "./nowhere"), "no such directory, and not the id of a model on the hub"),
        (("check", tmp_path / "ou"), f"ou: no such directory; there are {tmp_path / 'out'}\n"),
        (("check", f"{run}@last"), f"last is not a step; name one, as {run}@250"),
    ):
        convert(*words, code=2)
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and why in err, err
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_full_disk_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "x.safetensors")

    monkeypatch.setattr(exporting, "write_all", full)
    convert("export", run, tmp_path / "out", code=2)
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_import_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "mine").mkdir()
    for name in ("write_file", "write_atomic"):  # in the weights, and after them
        with monkeypatch.context() as patch:
            patch.setattr(importing, name, interrupted)
            for place in ("new", "mine"):
                convert("import", model, tmp_path / place, code=INTERRUPTED)
        assert [*tmp_path.rglob("*")] == [tmp_path / "mine"]


def test_a_killed_import_is_no_run(model: Path, tmp_path: Path) -> None:
    """What it has left is removed by the next one."""
    convert("import", model, tmp_path / "run")
    root = tmp_path / "run/checkpoints"
    for name in ("config.toml", "id"):
        (tmp_path / "run" / name).unlink()
    mark_directory(tmp_path / "run", Kind.IMPORT)
    (root / "latest").unlink()
    (root / "step_00000000").rename(root / "step_00000000.partial")
    convert("import", model, tmp_path / "run")
    assert sorted(path.name for path in root.iterdir()) == [".kempner", "latest", "step_00000000"]


def test_a_damaged_checkpoint_is_not_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(run, tmp_path / "run", symlinks=True)
    file = next(broken.glob("checkpoints/*/*/*.distcp"))
    with file.open("r+b") as opened:
        opened.seek(5000)
        opened.write(b"\xff\xff\xff")
    convert("export", broken, tmp_path / "out", code=2)
    assert "CRC-32" in capsys.readouterr().err and not (tmp_path / "out").exists()
