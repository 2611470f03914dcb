"""Token shards as numbered samples: the shards of a split are one stream of tokens (stream.py)."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kempner.data.formats.stream import StreamTokens, TokenStream, raise_problems, stream_problems
from kempner.data.sidecar import SIDECAR, Shard, Sidecar, open_sidecar
from kempner.data.source import DataError, Int64, Shape

HEADER = re.compile(
    rb"\{'descr': '([^']+)', 'fortran_order': (?:False|True), 'shape': \(([\d, ]*)\), *\}\s*"
)
MOST_MAPS = 32_768  # Linux allows a process 65,530 mappings (vm.max_map_count)
PREPARE_AGAIN = "prepare the data again"
CHECKERS = 16  # threads: a parallel file system takes milliseconds per open, but many at once


class TokenDataset(TokenStream):
    """Samples of one split. Shards are memory-mapped when first read, and unmapped before the
    process runs out of file descriptors. Reading is safe in any thread and after a fork."""

    def __init__(self, path: Path, sidecar: Sidecar, split: str, shape: Shape, name: str) -> None:
        """Use open(), which checks the assumptions made here."""
        self.path = path
        self.sidecar = sidecar
        self._shards = sidecar.splits[split]
        self._files = [path / shard.file for shard in self._shards]
        super().__init__(name, [shard.tokens for shard in self._shards], shape)

    @classmethod
    def open(
        cls,
        path: str | Path,
        split: str,
        seq_len: int,
        vocab_size: int,
        check_shards: bool = True,
        *,
        separate: bool = False,
        name: str = "",
    ) -> TokenDataset:
        """Open the split (train, val) of a data directory for a model of `vocab_size`. `separate`:
        documents do not see each other.

        Raises ConfigError with all problems: the directory, the sidecar, a shard that differs from
        the sidecar, too few tokens, ids outside the model's vocabulary. Without `check_shards` no
        shard is opened: each is checked when it is first read.
        """
        directory = Path(path).expanduser()
        sidecar = open_sidecar(path)
        if sidecar.dtype not in ("uint16", "uint32"):
            raise DataError(
                f"{directory / SIDECAR}: dtype {sidecar.dtype}, must be uint16 or uint32; "
                f"{PREPARE_AGAIN}"
            )
        shape = Shape(seq_len, vocab_size, separate)
        problems = []
        if check_shards:

            def check(shard: Shard) -> list[str]:
                return _problems(shard, directory / shard.file, sidecar.dtype)

            with ThreadPoolExecutor(CHECKERS) as pool:
                problems = [
                    line for lines in pool.map(check, sidecar.splits[split]) for line in lines
                ]
        largest = max((shard.max_id for shard in sidecar.splits[split]), default=0)
        largest = max(sidecar.vocab_size - 1, largest)
        about = f"tokenizer {sidecar.tokenizer['name']}"
        raise_problems(
            problems
            + stream_problems(str(path), split, sidecar.tokens(split), largest, shape, about)
        )
        return cls(directory, sidecar, split, shape, name or directory.name)

    def identity(self) -> dict[str, Any]:
        """Return the shards, as in the sidecar: their tokens are the samples."""
        shards = json.dumps([asdict(shard) for shard in self._shards])
        return {"tokens": hashlib.sha256(shards.encode()).hexdigest()[:16]}

    def part(self, number: int) -> StreamTokens:
        tokens = self._shards[number].tokens
        return mapped_files()(self._files[number], tokens, self.sidecar.dtype)

    def part_name(self, number: int) -> str:
        return str(self._files[number])

    def begins(self, positions: Int64, rows: Int64) -> NDArray[np.bool_]:
        result = np.empty(rows.shape, np.bool_)
        # A document begins after the end of the previous one; the first column is never used.
        np.equal(rows[:, :-1], self.sidecar.eod, out=result[:, 1:])
        return result


def _problems(shard: Shard, path: Path, dtype: str) -> list[str]:
    try:
        map_array(path, shard.tokens, dtype)
    except DataError as error:
        return error.problems
    except OSError as error:
        return [unreadable_file(error)]
    return []


@functools.cache
def mapped_files() -> Callable[[Path, int, str], NDArray[Any]]:
    """Return map_array() with a memory of the newest files. One for all data sets: the limits are
    those of the process, and each mmap keeps a descriptor. The shuffle reads all files in turn, so
    at most half the limit of open files stay mapped."""
    # Called at the first read of a step, because starting the process group raises the limit.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_MAPS if soft == resource.RLIM_INFINITY else min(MOST_MAPS, soft // 2)
    return functools.lru_cache(most)(map_array)


def map_array(path: Path, length: int, dtype: str) -> NDArray[Any]:
    """Map a .npy file of `length` numbers. Raises DataError if it has another length or dtype, and
    OSError if it cannot be read: in a run that is a fault of the host, not of the input."""
    try:
        with path.open("rb") as file:
            header_dtype, shape = _read_header(file)
            size = os.fstat(file.fileno()).st_size - file.tell()
            if header_dtype != np.dtype(dtype):
                raise DataError(
                    f"{path}: holds {header_dtype}, the sidecar says {dtype}; {PREPARE_AGAIN}"
                )
            if shape == (length,) and size < (whole := length * header_dtype.itemsize):
                begin = file.tell()
                raise DataError(
                    f"{path}: is cut off: {begin + size:,} of {begin + whole:,} bytes; "
                    f"{PREPARE_AGAIN}"
                )
            if shape != (length,) or size != length * header_dtype.itemsize:
                raise DataError(
                    f"{path}: {size} bytes of shape {shape}, the sidecar says "
                    f"{length} tokens of {dtype}; {PREPARE_AGAIN}"
                )
            # A plain array: slicing a numpy.memmap costs several times as much.
            return np.asarray(np.memmap(file, header_dtype, "r", file.tell(), shape))
    except OSError as error:
        error.filename = error.filename or str(path)  # a read has none
        raise
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: not a .npy file ({error}); {PREPARE_AGAIN}") from None


def unreadable_file(error: OSError) -> str:
    """Format an error of map_array() as a problem of the input."""
    fix = PREPARE_AGAIN if isinstance(error, FileNotFoundError) else "check the file system"
    return f"{error.filename}: {error.strerror or error}; {fix}"


def _read_header(file: BinaryIO) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Read the dtype and shape of a .npy file. NumPy's reader evaluates the header by `ast`, which
    occasionally fails in Python 3.11 if two threads do so at once."""
    version, _ = np.lib.format.read_magic(file)
    size = int.from_bytes(file.read(2 if version == 1 else 4), "little")
    header = HEADER.fullmatch(file.read(size))
    if header is None:
        raise ValueError("its header does not describe an array of numbers")
    return np.dtype(header[1].decode()), tuple(map(int, re.findall(rb"\d+", header[2])))
