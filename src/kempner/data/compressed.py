"""Compressed files of a corpus, as streams: a file cannot be read from its middle, so each is one
piece. gzip, bzip2 and xz are read by the standard library, zstd by Python 3.14 or the package
zstandard. No torch."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import importlib
import io
import lzma
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from kempner.data.sidecar import DataError

READ = (".gz", ".bz2", ".xz", ".zst")
# Not read: a file of which nobody has asked for the parts, or in a form without a library here.
ARCHIVES = (".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar", ".lz4", ".lz", ".br", ".z")
BLOCK = 1 << 17  # bytes
WINDOW_LOG = 31  # zstd --long=31
ZSTD = "zstandard"


def kind_of_compression(path: Path) -> str:
    """The suffix, in small letters; "" for a plain file."""
    suffix = path.suffix.lower()
    return suffix if suffix in READ + ARCHIVES else ""


def unreadable(path: Path) -> str:
    """What keeps a compressed file from being read, with the fix; "" for nothing."""
    inner = Path(path.stem).suffix.lower()
    if path.suffix.lower() in ARCHIVES or inner == ".tar":
        return "an archive, or a compression that is not read; unpack it first"
    if inner == ".parquet":
        return "Parquet that was compressed as a file; unpack it first"
    if path.suffix.lower() == ".zst" and _zstd() is None:
        return (
            f"Python {sys.version_info.major}.{sys.version_info.minor} reads no zstd; install "
            f"{ZSTD} with `.venv/bin/pip install -c constraints.txt -e '.[data]'`"
        )
    return ""


def read_lines(path: str) -> Iterator[bytes]:
    """Without their ends. Raises DataError."""
    with _opened(path) as file:
        for line in file:
            yield line.removesuffix(b"\n")


def texts(path: str, step: int) -> Iterator[bytes]:
    """Parts of a text of about `step` bytes, cut where those of the unpacked file are: at line
    ends, else between two characters. Raises DataError."""
    with _opened(path) as file:
        carried = b""
        while True:
            part = carried + file.read(step - 1 - len(carried))
            carried = b""
            if len(part) == step - 1:
                part += file.readline(step)
                if not part.endswith(b"\n"):
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
        raise DataError(
            f"{path}: cannot be unpacked ({error}); get it again, or name the inputs without it"
        ) from None


def _open(path: str) -> Any:
    suffix = Path(path).suffix.lower()
    if suffix == ".gz":
        return gzip.open(path)
    if suffix == ".bz2":
        return bz2.open(path)
    if suffix == ".xz":
        return lzma.open(path)
    zstd = _zstd()
    assert zstd is not None, "unreadable() was not asked"
    if zstd.__name__ == ZSTD:
        return io.BufferedReader(_Frames(path, zstd), BLOCK * 8)
    return zstd.open(path, options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG})


def _zstd() -> Any:
    """The module that reads zstd, or None."""
    for name in ("compression.zstd", ZSTD):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return None


class _Frames(io.RawIOBase):
    """All frames of a .zst. zstandard's own reader ends with the first one, as pzstd writes many,
    and takes a file that was cut off for a whole one."""

    def __init__(self, path: str, zstd: Any) -> None:
        self._file, self._zstd = open(path, "rb"), zstd  # noqa: SIM115
        self._frame: Any = None  # that is not whole yet
        self._packed = self._ready = b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._packed or self._file.read(BLOCK)
            self._packed = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            if self._frame is None:
                reader = self._zstd.ZstdDecompressor(max_window_size=1 << WINDOW_LOG)
                self._frame = reader.decompressobj()
            self._ready = self._frame.decompress(packed)
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count
