"""Hugging Face data sets (the extra `data`), mapped or streamed.

A data set written by save_to_disk is Arrow: its column of token ids lies in a few long arrays,
which are the parts of a stream of tokens, and opening it copies nothing. Text, and the rows of
Parquet or JSON lines, can only be read in sequence: see streamed.py.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kempner.data.config import SourceConfig
from kempner.data.formats.stream import (
    StreamTokens,
    TokenStream,
    begins_at,
    raise_problems,
    stream_problems,
)
from kempner.data.formats.streamed import StreamedDocuments, pick_column
from kempner.data.prepare.sources import check_readable
from kempner.data.source import DataError, Int64, Shape
from kempner.data.text.tokenizer import import_data_package
from kempner.jobs.system import hub

BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json"}
HUB_SPLITS = {"train": ("train",), "val": ("validation", "valid", "val", "test")}


def is_hugging_face(path: str) -> bool:
    folder = Path(path).expanduser()
    saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    return saved or folder.suffix in BUILDERS


def open_hugging_face(
    cfg: SourceConfig, split: str, shape: Shape, check: bool, bookmarks: Path
) -> MappedTokens | StreamedDocuments:
    """Open a Hugging Face data set. Raises DataError or ConfigError. `bookmarks`: a directory,
    written to with `check`."""
    folder = Path(cfg.path).expanduser()
    file = bookmarks / f"{cfg.label}.jsonl"
    if not folder.is_dir():
        if split != "train":
            raise DataError(f"{cfg.path}: streamed files have no validation split")
        if "://" not in cfg.path:
            check_readable(cfg.path)
        # Found only once: the stream opens them again at its end, where a missing file is no longer
        # bad input.
        load = functools.partial(_load_files, cfg, _files(cfg))
        try:
            return StreamedDocuments(cfg, shape, load, file, check)
        except FileNotFoundError:
            raise DataError(f"{cfg.path}: no such files") from None
    data = _saved(cfg, folder, split)
    name = pick_column(cfg, data.column_names)
    if _is_mapped(data.data.column(name).type):
        return MappedTokens.of(cfg, split, data, name, shape, check)
    if split != "train":  # its samples are not counted
        raise DataError(
            f"{cfg.path}: its column {name} is text, which is streamed and has no validation "
            "split; prepare it with prepare_data.py"
        )
    return StreamedDocuments(cfg, shape, data.to_iterable_dataset, file, check)


def _is_mapped(kind: Any) -> bool:
    """Return whether a column holds lists of whole numbers."""
    types = import_data_package("pyarrow.types")
    lists = types.is_list, types.is_large_list, types.is_fixed_size_list
    return any(is_one(kind) for is_one in lists) and types.is_integer(kind.value_type)


def _saved(cfg: SourceConfig, folder: Path, split: str) -> Any:
    """Load a data set written by save_to_disk; of several splits, the requested one."""
    try:
        data = import_data_package("datasets").load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise DataError(f"{cfg.path}: not a saved data set ({error})") from None
    names = HUB_SPLITS[split]
    splits = {"train": data} if not isinstance(data, dict) else data
    whole = next((splits[name] for name in names if name in splits), None)
    if whole is None or not len(whole):
        raise DataError(f"{cfg.path}: has no rows of split {' or '.join(names)}")
    return whole


def _files(cfg: SourceConfig) -> str:
    """Return the name or pattern of the files. Raises ConfigError."""
    import_data_package("datasets")
    if cfg.path.startswith(hub.HF_DATA):
        return hub.data_files(cfg.path, download=False)
    return cfg.path if "://" in cfg.path else str(Path(cfg.path).expanduser())


def _load_files(cfg: SourceConfig, files: str) -> Any:
    """Open files as an iterable data set. Raises FileNotFoundError."""
    package, builder = import_data_package("datasets"), BUILDERS[Path(cfg.path).suffix]
    # "train" is its name for files given without a split.
    return package.load_dataset(builder, data_files=files, split="train", streaming=True)


class MappedTokens(TokenStream):
    """A column of lists of token ids, each a document."""

    def __init__(self, name: str, chunks: list[Any], shape: Shape, path: str, key: str) -> None:
        self._path, self._key, self._chunks = path, key, chunks
        # Not .values, which ignores that a chunk may be a slice of an array.
        self._values = [chunk.flatten() for chunk in chunks]
        super().__init__(name, [len(values) for values in self._values], shape)

    @classmethod
    def of(
        cls, cfg: SourceConfig, split: str, data: Any, name: str, shape: Shape, check: bool
    ) -> MappedTokens:
        if data._indices is not None:
            raise DataError(
                f"{cfg.path}: is a selection or shuffle of other rows; save it after "
                "flatten_indices()"
            )
        chunks = data.data.column(name).chunks
        key = str(data._fingerprint)
        result = cls(cfg.label, chunks, shape, cfg.path, key)
        if any(values.null_count for values in result._values):
            raise DataError(f"{cfg.path}: column {name} has null token ids")
        parts = (result.part(i) for i in range(len(chunks))) if check else ()
        largest = max((int(part.max()) for part in parts if len(part)), default=0)
        tokens = int(result._starts[-1])
        raise_problems(
            stream_problems(cfg.path, split, tokens, largest, shape, "the largest id in it")
        )
        return result

    def identity(self) -> dict[str, Any]:
        return {"fingerprint": self._key}

    def part(self, number: int) -> StreamTokens:
        # Raises if it would have to copy: the arrays are the mapped files themselves.
        values: StreamTokens = self._values[number].to_numpy(zero_copy_only=True)
        return values

    def part_name(self, number: int) -> str:
        return f"{self._path} (part {number})"

    @functools.cached_property
    def _first_tokens(self) -> Int64:
        """Return the offset of each document in the stream: 8 bytes per document."""
        # Lists of any kind, of fixed length too.
        length_of = import_data_package("pyarrow.compute").list_value_length
        starts = []
        # strict=False: _starts has the end of the stream, too.
        for begin, chunk in zip(self._starts, self._chunks, strict=False):
            # flatten() leaves null lists out, as if they were empty.
            lengths = length_of(chunk).fill_null(0).to_numpy().astype(np.int64)
            starts.append(begin + lengths.cumsum() - lengths)
        return np.concatenate(starts)

    def begins(self, positions: Int64, rows: Int64) -> NDArray[np.bool_]:
        return begins_at(self._first_tokens, positions, rows.shape[1])
