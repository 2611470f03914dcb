"""Compressed files of a corpus, as streams: a compressed file cannot be read from its middle, so
each is one piece. The standard library reads gzip, bzip2 and xz; Python 3.14 or the package
zstandard reads zstd. No torch."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import importlib
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from kempner.data.source import DataError

READ = (".gz", ".bz2", ".xz", ".zst")
# Not read: archives, whose parts were not requested, and formats without a library here.
ARCHIVES = (".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar", ".lz4", ".lz", ".br", ".z")
READ_BLOCK_BYTES = 1 << 17  # bytes
WINDOW_LOG = 31  # zstd --long=31
ZSTD = "zstandard"


def kind_of_compression(path: Path) -> str:
    """Return the suffix in lower case; "" for a plain file."""
    suffix = path.suffix.lower()
    return suffix if suffix in READ + ARCHIVES else ""


def compression_problem(path: Path) -> str:
    """Return why a compressed file cannot be read, with the fix; "" if it can."""
    inner = Path(path.stem).suffix.lower()
    if path.suffix.lower() in ARCHIVES or inner == ".tar":
        return "an archive, or an unsupported compression; unpack it first"
    if inner == ".parquet":
        return "Parquet that was compressed as a file; unpack it first"
    if path.suffix.lower() == ".zst" and _zstd() is None:
        return (
            f"Python {sys.version_info.major}.{sys.version_info.minor} cannot read zstd; install "
            f"{ZSTD} with `.venv/bin/pip install -c constraints.txt -e '.[data]'`"
        )
    if path.stat().st_size == 0:
        return "has 0 bytes, as after a failed download; get it again"
    return ""


def read_lines(path: str) -> Iterator[bytes]:
    """Yield the lines without their ends. Raises DataError."""
    with _opened(path) as file:
        for line in file:
            yield line.removesuffix(b"\n")


def unpacked_texts(path: str, step: int) -> Iterator[bytes]:
    """Yield parts of about `step` bytes of a text, cut as in the unpacked file: at line ends, else
    between two characters. Raises DataError."""
    with _opened(path) as file:
        carried = b""
        while True:
            # As sources._borders() does: one byte back, then on to the end of the line.
            part = carried + file.read(step - 1 - len(carried))
            carried = b""
            if len(part) == step - 1:
                part += file.readline(step)
                if not part.endswith(b"\n"):
                    # A UTF-8 character has at most three more bytes.
                    carried = file.read(3)
                    rest = carried.lstrip(bytes(range(0x80, 0xC0)))
                    part, carried = part + carried[: len(carried) - len(rest)], rest
            if not part:
                return
            yield part


@contextlib.contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    broken: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    zstd = _zstd()
    if zstd is not None:
        broken += (zstd.ZstdError,)
    try:
        with _open(path) as file:
            yield file
    except broken as error:
        why = str(error).removeprefix("zstd decompressor error: ")
        raise DataError(
            f"{path}: cannot be unpacked ({why}); get it again, or leave it out of the inputs"
        ) from None


def _open(path: str) -> Any:
    suffix = Path(path).suffix.lower()
    # Python's gzip reads all members of a file.
    if suffix == ".gz":
        return gzip.open(path)
    new: Callable[[], Any]
    # A few bytes may unpack to gigabytes.
    limit: tuple[int, ...] = (READ_BLOCK_BYTES * 8,)
    if suffix == ".bz2":
        new = bz2.BZ2Decompressor
    elif suffix == ".xz":
        new = lzma.LZMADecompressor
    else:
        zstd = _zstd()
        assert zstd is not None, "compression_problem() was not called"
        if zstd.__name__ == ZSTD:
            one = zstd.ZstdDecompressor(max_window_size=1 << WINDOW_LOG)
            new, limit = one.decompressobj, ()
        else:
            # Otherwise files compressed with a window longer than 128 MiB are refused.
            window = {zstd.DecompressionParameter.window_log_max: WINDOW_LOG}
            new = partial(zstd.ZstdDecompressor, options=window)
    return io.BufferedReader(_Streams(path, new, limit), READ_BLOCK_BYTES * 8)


def _zstd() -> Any:
    """Return the module that reads zstd, or None."""
    for name in ("compression.zstd", ZSTD):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return None


class _Streams(io.RawIOBase):
    """All streams of a file, one after another, as multi-threaded compressors write them. The
    libraries' readers stop after the first stream (zstandard), or treat anything that is not a
    stream as the end of the file (bz2, lzma), so that the rest would be lost silently."""

    def __init__(self, path: str, new: Callable[[], Any], limit: tuple[int, ...]) -> None:
        """`new`: makes a decompressor for one stream; `limit`: bytes that one call may unpack, if
        the decompressor takes a limit."""
        self._file, self._new, self._limit = open(path, "rb"), new, limit  # noqa: SIM115
        # xz allows zeros after each stream, as padding.
        self._padded = path.lower().endswith(".xz")
        self._stream: Any = None  # not yet complete
        self._packed = self._ready = b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed, self._packed = self._packed, b""
            # With a limit, a decompressor may hold back output: then it needs no more input.
            if not packed and getattr(self._stream, "needs_input", True):
                packed = self._file.read(READ_BLOCK_BYTES)
                if not packed:
                    if self._stream is not None:
                        raise EOFError("it ends in the middle of a stream")
                    return 0
            if self._stream is None:
                if self._padded and not (packed := packed.lstrip(b"\0")):
                    continue
                self._stream = self._new()
            self._ready = self._stream.decompress(packed, *self._limit)
            # A stream is followed by the next one, or nothing.
            if self._stream.eof:
                self._packed, self._stream = self._stream.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count
