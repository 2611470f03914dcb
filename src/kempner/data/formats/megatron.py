"""Megatron-LM's indexed data sets: PREFIX.bin holds tokens, PREFIX.idx where each sequence lies.

The .idx is, without padding and in little-endian order: "MMIDIDX" and two zero bytes; uint64
version 1; uint8 code of the dtype; uint64 S sequences; uint64 D, one more than the documents;
int32 [S] the tokens of each sequence; int64 [S] the byte in the .bin where each begins; int64 [D]
the first sequence of each document, then S.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kempner.data.formats.stream import (
    StreamTokens,
    TokenStream,
    begins_at,
    raise_problems,
    stream_problems,
)
from kempner.data.source import DataError, Int64, Shape

INDEX_MAGIC = b"MMIDIDX\0\0"
INDEX_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
CHECKED = 1 << 26  # tokens checked at once for the largest id


class MegatronDataset(TokenStream):
    """All documents of one PREFIX, as one stream of tokens."""

    def __init__(self, prefix: Path, shape: Shape, name: str) -> None:
        """Raises DataError if the files are missing or not such a data set."""
        self.prefix = prefix
        # Not with_suffix(): the prefix may contain a dot.
        lengths, pointers, documents, dtype = _read_index(prefix.with_name(prefix.name + ".idx"))
        self._lengths, self._documents, self._dtype = lengths, documents, np.dtype(dtype)
        self._bin = prefix.with_name(prefix.name + ".bin")
        tokens = int(lengths.sum(dtype=np.int64))
        try:
            size = os.stat(self._bin).st_size
        except OSError as error:
            raise DataError(f"{self._bin}: {error.strerror}") from None
        # A stream only if the sequences are contiguous, as Megatron writes them.
        last = int(pointers[-1]) + int(lengths[-1]) * self._dtype.itemsize if len(lengths) else 0
        if not size == last == tokens * self._dtype.itemsize:
            raise DataError(
                f"{self._bin}: {size} bytes, the .idx beside it has {tokens} tokens of "
                f"{self._dtype} in {last} bytes; copy both files again"
            )
        super().__init__(name, [tokens], shape)

    @classmethod
    def open(cls, path: str, shape: Shape, name: str, check: bool) -> MegatronDataset:
        """Open by `path`: the prefix, or either of the two files. `check`: look at
        all token ids."""
        prefix = Path(path).expanduser()
        prefix = prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix
        result = cls(prefix, shape, name)
        largest = result.largest() if check else 0
        tokens = int(result._starts[-1])
        raise_problems(
            stream_problems(path, "train", tokens, largest, shape, "the largest id in it")
        )
        return result

    def largest(self) -> int:
        """Return the largest id; one pass over the file."""
        tokens = self.part(0)
        parts = (tokens[i : i + CHECKED] for i in range(0, len(tokens), CHECKED))
        return max((int(part.max()) for part in parts), default=0)

    def identity(self) -> dict[str, Any]:
        """Return the lengths of the sequences, which identify them without a pass
        over the tokens."""
        digest = hashlib.sha256(self._lengths.tobytes()).hexdigest()[:16]
        return {"sequences": digest, "dtype": str(self._dtype)}

    def part(self, number: int) -> StreamTokens:
        return self._mapped

    def part_name(self, number: int) -> str:
        return str(self._bin)

    @functools.cached_property
    def _mapped(self) -> StreamTokens:
        # A plain array: slicing a numpy.memmap costs several times as much.
        return np.asarray(np.memmap(self._bin, self._dtype, "r"))

    @functools.cached_property
    def _first_tokens(self) -> Int64:
        """Return the offset of each document in the stream."""
        ends = np.cumsum(self._lengths, dtype=np.int64)
        starts: Int64 = np.append(0, ends)[self._documents[:-1]]
        return starts

    def begins(self, positions: Int64, rows: Int64) -> NDArray[np.bool_]:
        return begins_at(self._first_tokens, positions, rows.shape[1])


def is_megatron(path: str) -> bool:
    prefix = str(Path(path).expanduser())
    return prefix.endswith((".bin", ".idx")) or os.path.isfile(prefix + ".idx")


def _read_index(path: Path) -> tuple[NDArray[np.int32], Int64, Int64, str]:
    """Read lengths, pointers, documents and dtype."""
    try:
        with path.open("rb") as file:
            magic, version, code, sequences, documents = INDEX_HEADER.unpack(
                file.read(INDEX_HEADER.size)
            )
            if magic != INDEX_MAGIC or version != 1 or code not in MEGATRON_DTYPES:
                raise ValueError(f"begins with {magic!r}, version {version}, dtype code {code}")
            lengths = np.fromfile(file, "<i4", sequences)
            pointers = np.fromfile(file, "<i8", sequences)
            starts = np.fromfile(file, "<i8", documents)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; name the files without .bin and .idx") from None
    except (struct.error, ValueError) as error:
        raise DataError(f"{path}: not a Megatron index ({error})") from None
    if (len(lengths), len(pointers), len(starts)) != (sequences, sequences, documents):
        raise DataError(f"{path}: cut off; copy it again")
    if len(starts) and not (starts[0] == 0 and starts[-1] == sequences):
        raise DataError(f"{path}: its table of documents does not end with its sequences")
    return lengths, pointers, starts, MEGATRON_DTYPES[code]
