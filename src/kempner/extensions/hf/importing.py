"""Import a model in Hugging Face format as a run with one checkpoint, of step 0.

The checkpoint is written as if by enough ranks to keep each file under TENSOR_FILE_BYTES, one file
after the other: memory for one file suffices for a model of any size.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from kempner.checkpoint import commit
from kempner.checkpoint.format import plan as layout
from kempner.checkpoint.format.dcp import dcp_metadata
from kempner.checkpoint.format.plan import TENSORS, CheckpointLayout, StoredTensor, Table
from kempner.checkpoint.format.writer import Image, plan_file, write_file
from kempner.extensions.hf.load import ReadJob, fill_tensors
from kempner.extensions.hf.source import HF_FOLDER, copy_model_files, read_hf_config
from kempner.extensions.hf.stored import Stored, check_hf_directory
from kempner.extensions.hf.tensors import tensor_names
from kempner.jobs.system.directories import (
    MARK_FILE,
    Kind,
    directory_kind,
    mark_directory,
    refuse_others,
)
from kempner.jobs.system.files import write_atomic
from kempner.model.config import ModelConfig
from kempner.model.shapes import tensor_shapes

TENSOR_FILE_BYTES = 1 << 30


def import_model(directory: Path, cfg: ModelConfig, run: Path, config_toml: str, name: str) -> Path:
    """Make the run; returns its checkpoint. `name`: the source as the user gave it.

    Raises ConfigError if the tensors do not fit the model, or the run already exists; after any
    exception nothing is left in `run`.
    """
    root = run / "checkpoints"
    refuse_others(run, "RUN", (Kind.IMPORT,), "give another directory")
    # Before anything is made, so that a refused model leaves no directory.
    check_hf_directory(directory, cfg)
    shapes = tensor_shapes(cfg)
    size = sum(torch.Size(shape).numel() * 4 for shape in shapes.values())
    files = -(-size // TENSOR_FILE_BYTES)
    table = {
        f"model.{own_name}": StoredTensor(
            torch.Size(shape), torch.float32, CheckpointLayout((files,), (0,)), 0
        )
        for own_name, shape in shapes.items()
    }
    names = tensor_names(cfg, read_hf_config(directory)["model_type"])
    if directory_kind(run) is Kind.IMPORT:
        shutil.rmtree(root, ignore_errors=True)  # remains of a killed import
    with _removed_on_error(run):
        mark_directory(run, Kind.IMPORT)  # removed when the run is complete
        run_id = uuid.uuid4().hex
        mark_directory(root, Kind.CHECKPOINTS, run_id)
        copy_model_files(directory, run / HF_FOLDER)
        partial = commit.begin_save(root, 0)
        with Stored(directory, "pt") as stored:
            for rank in range(files):
                path = partial / layout.file_of(rank)
                path.parent.mkdir(parents=True, exist_ok=True)
                _write_rank(path, table, rank, stored, names)
        texts = {
            "config.toml": config_toml.encode(),
            TENSORS: json.dumps(layout.to_json(table)).encode(),
        }
        if (metadata := dcp_metadata(table, files)) is not None:
            texts[".metadata"] = metadata
        facts = {
            "run": run_id,
            # Its presence makes checkpoint/fits.py refuse to continue this as a run.
            "imported": name,
            "world_size": files,
            "torch": torch.__version__,
            "parent": -1,
            "samples": 0,
            "tokens": 0,
            "skip": [],
            "fixed": {"model": asdict(cfg), "train": {"seq_len": cfg.max_seq_len}, "data": {}},
        }
        path = commit.commit_save(root, 0, texts, facts)
        write_atomic(run / "config.toml", config_toml)
        # Near the end, because a directory with an id is a run.
        write_atomic(run / "id", f"{run_id}\n")
        # After the id: with neither, a killed import would look like the user's files.
        (run / MARK_FILE).unlink()
    return path


@contextlib.contextmanager
def _removed_on_error(run: Path) -> Iterator[None]:
    """Remove what an import has written, and the directory itself if the import made it."""
    there = run.is_dir()
    try:
        yield
    except BaseException:
        for folder in (run / "checkpoints", run / HF_FOLDER):
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the failing file system may be this one
            # The mark last, so that the remains of a killed process are recognised as ours.
            for name in ("config.toml", "id", MARK_FILE):
                (run / name).unlink(missing_ok=True)
            if not there:
                run.rmdir()
        raise


def _write_rank(path: Path, table: Table, rank: int, stored: Stored, names: dict[str, str]) -> None:
    """Write the file of one rank; its memory is freed with the call."""
    plan = plan_file(table, rank)
    image = Image(plan, None, print)
    slots = [slot for slot in plan if slot.size]
    hf_names = [names[slot.key.removeprefix("model.")] for slot in slots]
    boxes = zip(slots, hf_names, strict=True)
    fill_tensors(stored, [ReadJob(image.targets[slot.key], name, slot.box) for slot, name in boxes])
    write_file(path, [image.bytes], {"step": 0, "rank": rank, "tensors": image.entries})
