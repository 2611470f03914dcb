"""What stands at a path: one case for each kind, as programs and people leave them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kempner.config.option import ConfigError
from kempner.jobs.system.directories import (
    MARK_FILE,
    NOTHING_THERE,
    Kind,
    describe_directory,
    directory_kind,
    mark_directory,
    read_mark,
    read_run_id,
    refuse_others,
)

ID = "0123456789abcdef" * 2
SIDECAR = {"tokenizer": {}, "dtype": "uint16", "splits": {}, "prepared": {}, "format": 1}
MANIFEST = {"format": 2, "step": 7, "files": {}, "run": ID}
START = {"event": "start", "attempt_id": None, "time": 1.0}
FAULT = {"event": "fault", "attempt_id": "7.0", "time": 1.0}
STATUS = {"state": "failed", "attempt_id": None}

# Files of a directory by name, their content text or an object; a name that ends in / is a folder.
CASES: dict[str, tuple[Kind, dict[str, object]]] = {
    "nothing": (Kind.EMPTY, {}),
    "a run": (Kind.RUN, {"id": f"{ID}\n", "dataset.json": SIDECAR, "tokenizer.json": "{}"}),
    "an imported model": (
        Kind.RUN,
        {"id": f"{ID}\n", "hf/config.json": {"model_type": "llama"}, "config.toml": ""},
    ),
    "a run without its id": (Kind.RUN, {"attempts.jsonl": START, "config.toml": ""}),
    "a run of run.sh": (Kind.PROGRAM, {"attempts.jsonl": START, "progress": "7", "logs/": ""}),
    "a run of run.sh, marked": (Kind.PROGRAM, {MARK_FILE: {"is": "PROGRAM", "run": ""}}),
    "a job that ended early": (
        Kind.STARTED,
        {"attempts.jsonl": FAULT, "logs/": "", "lock": {"host": "a"}},
    ),
    "a request before the run": (Kind.STARTED, {"SAVE": "", "README.md": "", ".size-7": "2 4"}),
    "entries of a file system": (Kind.EMPTY, {"lost+found/": "", ".nfs0001": "", ".gitkeep": ""}),
    "output of sbatch": (Kind.STARTED, {"slurm-7.out": "", "mine.toml": "", "status.json": STATUS}),
    "notes before the run": (Kind.NOTES, {"a.toml": "", "notes.md": "", "job.sh": "", "7.out": ""}),
    "a corpus": (Kind.OTHER, {f"{number}.txt": "" for number in range(9)}),
    "a configuration that a run would replace": (Kind.OTHER, {"config.toml": ""}),
    "a status of somebody else": (Kind.OTHER, {"status.json": "[1]"}),
    "records of somebody else": (Kind.OTHER, {"attempts.jsonl": '{"try": 1}\n'}),
    "metrics of somebody else": (Kind.OTHER, {"metrics.jsonl": '{"step": 500}\n', "a.md": ""}),
    "an identity of somebody else": (Kind.OTHER, {"id": "42\n"}),
    "a sweep": (Kind.SWEEP, {"sweep/journal.jsonl": "", "0-lr1/id": f"{ID}\n"}),
    "a sweep's own files": (Kind.SWEEP, {"table.csv": "", "points/": ""}),
    "points of somebody else": (Kind.OTHER, {"points/": "", "notes.txt": ""}),
    "a data set": (Kind.DATA, {"dataset.json": SIDECAR, "tokenizer.json": "{}"}),
    "a preparation": (Kind.DATA, {"dataset.partial.json": SIDECAR}),
    "a dataset.json of another program": (Kind.OTHER, {"dataset.json": {"name": "mine"}}),
    "a model": (Kind.MODEL, {"config.json": {"model_type": "llama"}, "tokenizer.json": "{}"}),
    "an adapter": (Kind.MODEL, {"adapter_model.safetensors": ""}),
    "a model with shards in it": (Kind.MODEL, {"a.safetensors": "", "dataset.json": SIDECAR}),
    "a config.json of another program": (Kind.OTHER, {"config.json": {"colour": "blue"}}),
    "checkpoints": (Kind.CHECKPOINTS, {"step_00000007/manifest.json": MANIFEST}),
    "checkpoints, marked": (Kind.CHECKPOINTS, {MARK_FILE: {"is": "CHECKPOINTS", "run": ID}}),
    "a checkpoint": (Kind.CHECKPOINT, {"manifest.json": MANIFEST}),
    "checkpoints of another program": (
        Kind.OTHER,
        {"step_00000001/weights.pt": "", "step_00000002/manifest.json": {"step": 2}},
    ),
    "a mark that says nothing": (Kind.OTHER, {MARK_FILE: "[", "notes.txt": ""}),
    "bytes": (Kind.OTHER, {"id": b"\xff\xfe", "dataset.json": b"\x00", "attempts.jsonl": b"\xff"}),
}  # fmt: skip


def fill(directory: Path, files: dict[str, object]) -> Path:
    directory.mkdir()
    for name, content in files.items():
        path = directory / name
        if name.endswith("/"):
            path.mkdir()
            continue
        path.parent.mkdir(exist_ok=True, parents=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else f"{json.dumps(content)}\n")
    return directory


@pytest.mark.parametrize("case", CASES)
def test_a_directory_is_told_by_its_files(case: str, tmp_path: Path) -> None:
    kind, files = CASES[case]
    assert directory_kind(fill(tmp_path / "it", files)) is kind


def test_what_is_no_directory(tmp_path: Path) -> None:
    assert directory_kind(tmp_path / "none") is Kind.MISSING
    (tmp_path / "note").write_text("")
    assert directory_kind(tmp_path / "note") is Kind.FILE
    (tmp_path / "link").symlink_to("gone")
    assert directory_kind(tmp_path / "link") is Kind.DANGLING
    assert describe_directory(tmp_path / "link") == "a broken link to gone"
    (tmp_path / "to-run").symlink_to(fill(tmp_path / "run", {"id": f"{ID}\n"}))
    assert directory_kind(tmp_path / "to-run") is Kind.RUN


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listdir(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", listdir)  # root may read all
    assert directory_kind(tmp_path) is Kind.UNREADABLE


def test_marks(tmp_path: Path) -> None:
    assert read_mark(tmp_path) == (None, "") and read_run_id(tmp_path) == ""
    mark_directory(tmp_path / "x" / "y", Kind.CHECKPOINTS, ID)
    assert read_mark(tmp_path / "x" / "y") == (Kind.CHECKPOINTS, ID)


def test_a_refusal_names_the_option_the_kind_and_the_fix(tmp_path: Path) -> None:
    refuse: Callable[..., None] = refuse_others
    here = fill(tmp_path / "it", {"a.txt": "", "b.txt": "", ".c": "", "d.txt": ""})
    for fine in (tmp_path / "none", fill(tmp_path / "empty", {})):
        refuse(fine, "run.dir", (), "")
    refuse(here, "run.dir", (Kind.OTHER, *NOTHING_THERE), "")
    with pytest.raises(ConfigError) as error:
        refuse(here, "run.dir", (Kind.RUN,), "give another: --run.dir=runs/NAME")
    assert str(error.value) == (
        f"run.dir = {here} is a directory of other files (a.txt, b.txt, d.txt, ...); "
        "give another: --run.dir=runs/NAME"
    )
