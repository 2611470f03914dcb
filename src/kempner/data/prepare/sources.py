"""Inputs -> documents. A file is text (one document), JSON lines or Parquet (one document a row).
Chat data are rows of the latter two. Text and JSON lines may be compressed.

Work is cut into pieces that any process can read alone: a range of bytes of a text file or of JSON
lines, a compressed one as a whole, a row group of Parquet. The cuts depend only on the files, never
on the number of workers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shlex
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from kempner.config.option import ConfigError
from kempner.data.formats import compressed
from kempner.data.source import DataError
from kempner.data.text.tokenizer import import_data_package

TEXT_BYTES = 1 << 20  # a longer text is cut into documents of about this size, at line ends
JSON_BYTES = 4 << 20  # bytes of JSON lines to a piece
FILE_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}  # the rest is text
KINDS_COMPRESSED = {**FILE_KINDS, ".json": "jsonl"}  # so C4 and Dolma name them
BOM = b"\xef\xbb\xbf"  # the byte order mark
SHOWN_PROBLEMS = 10  # problems listed in an error
CORPUS_FIX = "make it readable, or leave it out of the inputs"
NO_STDLIB_TEXT = ("site-packages", "dist-packages", "test", "tests", "idle_test")


class Undecodable(Exception):
    """A file found in a directory that is not UTF-8 text; it is counted and skipped."""


@dataclass(frozen=True)
class SourceFile:
    path: str
    name: str  # relative to the input it was found under: no machine's path gets into the data
    kind: str  # text, jsonl or parquet
    named: bool  # by the user, so it must be readable; other files of a directory need not be
    compression: str = ""  # its suffix: it must be readable, too


@dataclass(frozen=True)
class SourcePiece:
    source: SourceFile
    start: int  # bytes; of Parquet the row group
    end: int
    size: int  # bytes of input, for the progress bar


@dataclass(frozen=True)
class BadLine:
    """A line of JSON that holds no document."""

    path: str
    name: str  # of the source
    piece: int  # in its unit, from 0
    number: int  # in that piece, from 0; of ShardWriter.bad_lines: in the file, from 1
    reason: str


@dataclass
class Lines:
    """Counts of the lines of a piece of JSON, known once its documents have been read."""

    count: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)  # number, from 0, and reason


def find_source_files(
    inputs: Iterable[str], exclude: Path, left_out: list[str] | None = None
) -> list[SourceFile]:
    """List the files under `inputs`, each once, in an order that depends only on the names.

    Skips hidden files, __pycache__ and everything under `exclude` (the output). Links to
    directories, and anything neither a file nor a directory, go into `left_out`. Raises
    ConfigError, which names dangling links and unreadable files.
    """
    files: dict[str, SourceFile] = {}
    problems: list[str] = []
    for path_name in inputs:
        top = Path(path_name).expanduser()
        if top.is_dir():
            paths = _walk(top, ("__pycache__",), exclude, left_out, problems)
            for path in sorted(paths):
                name = str(path.relative_to(top))
                if why := compressed.kind_of_compression(path) and compressed.compression_problem(
                    path
                ):
                    problems.append(f"{path}: {why}, or leave it out of the inputs")
                # By the real path: the target of two links would be in the data twice.
                files.setdefault(os.path.realpath(path), _source(path, name, named=False))
        elif not top.exists():
            problems.append(f"{path_name}: no such file or directory")
        elif not top.is_file():
            problems.append(f"{path_name}: not a regular file")
        elif why := compressed.kind_of_compression(top) and compressed.compression_problem(top):
            problems.append(f"{path_name}: {why}")
        elif _is_json_array(top):
            old, new = shlex.quote(path_name), shlex.quote(str(top.with_suffix(".jsonl")))
            fix = f"give a file with one object per line: jq -c '.[]' {old} >{new}"
            problems.append(f"{path_name}: is a JSON array; {fix}")
        else:
            # Also replaces the same file found in a directory: a named one must be text.
            files[os.path.realpath(top)] = _source(top, top.name, named=True)
    _raise(problems)
    return list(files.values())


def standard_library() -> list[SourceFile]:
    """List the source files of Python's standard library: text that every machine has."""
    top = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(_walk(top, skip=("__pycache__", *NO_STDLIB_TEXT), exclude=None))
    return [_source(p, str(p.relative_to(top)), named=False) for p in paths if p.suffix == ".py"]


def _raise(problems: list[str]) -> None:
    """Raise ConfigError with the first problems, if any: a tree may have thousands."""
    if len(problems) > SHOWN_PROBLEMS:
        problems = [
            *problems[:SHOWN_PROBLEMS],
            f"and {len(problems) - SHOWN_PROBLEMS:,} more of this kind",
        ]
    if problems:
        raise ConfigError(problems)


def _walk(
    top: Path,
    skip: tuple[str, ...],
    exclude: Path | None,
    left_out: list[str] | None = None,
    problems: list[str] | None = None,
) -> Iterator[Path]:
    """Yield the files; without `problems` the first problem is raised."""

    def wrong(path: str | Path, what: str, fix: str = CORPUS_FIX) -> None:
        problem = f"{path}: {what}; {fix}"
        if problems is None:
            raise DataError(problem)
        problems.append(problem)

    def closed(error: OSError) -> None:
        wrong(error.filename, error.strerror or str(error))

    for folder, folders, names in os.walk(top, onerror=closed):
        here = Path(folder)
        # In place: os.walk enters the folders left in the list.
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name not in skip and (here / name).resolve() != exclude
        ]
        links = [name for name in folders if (here / name).is_symlink()]  # not gone into
        for name in sorted([*names, *links]):
            if name.startswith("."):
                continue
            path = here / name
            link = f"a link to {os.readlink(path)}: " if path.is_symlink() else ""
            try:
                mode = path.stat().st_mode
            except OSError as error:
                wrong(
                    path, f"{link}{error.strerror}", "correct or remove it" if link else CORPUS_FIX
                )
                continue
            if stat.S_ISREG(mode):
                yield path
            elif name in links and not os.access(path, os.R_OK | os.X_OK):
                wrong(path, f"{link}Permission denied")
            elif left_out is not None:
                left_out.append(str(path.relative_to(top)))


def _unreadable(error: OSError) -> None:
    """Raise the error: os.walk and glob silently leave out a directory that they cannot read."""
    raise DataError(f"{error.filename}: {error.strerror}; {CORPUS_FIX}")


def check_readable(pattern: str) -> None:
    """Raise DataError when a directory that the pattern goes through cannot be read."""
    parts = Path(pattern).expanduser().parts
    fixed = list(itertools.takewhile(lambda part: re.search(r"[*?[]", part) is None, parts))
    rest, top = parts[len(fixed) :], Path(*fixed)
    for folder, folders, _ in os.walk(top, onerror=_unreadable) if rest and top.is_dir() else ():
        # Only where the pattern can lead: other directories may be closed to this user.
        level = len(Path(folder).relative_to(top).parts)
        if "**" not in rest:
            folders[:] = [f for f in folders if level + 1 < len(rest) and fnmatch(f, rest[level])]
        folders[:] = [f for f in folders if not f.startswith(".")]


def _source(path: Path, name: str, named: bool) -> SourceFile:
    compression = compressed.kind_of_compression(path)
    kinds, kind = FILE_KINDS, path.suffix.lower()
    if compression:
        kinds, kind = KINDS_COMPRESSED, Path(path.stem).suffix.lower()
    elif kind == ".json" and _has_json_lines(path):
        kinds = KINDS_COMPRESSED
    return SourceFile(str(path), name, kinds.get(kind, "text"), named, compression)


def _has_json_lines(path: Path) -> bool:
    """Return whether each of the first two lines is a JSON object: other .json files, such as those
    among program sources, are text."""
    try:
        with path.open("rb") as file:
            first = [json.loads(file.readline(JSON_BYTES)) for _ in range(2)]
    except (OSError, ValueError, RecursionError):  # cut_units() says what cannot be read
        return False
    return all(isinstance(value, dict) for value in first)


def _is_json_array(path: Path) -> bool:
    """Return whether a .json file is an array of objects, which as text would be its
    brackets and keys."""
    if path.suffix.lower() != ".json":
        return False
    try:
        with path.open("rb") as file:
            return re.match(rb"\s*\[\s*\{", file.read(1 << 12)) is not None
    except OSError:  # cut_units() says what cannot be read
        return False


def sources_fingerprint(sources: Iterable[SourceFile]) -> str:
    """Hash the sources; changes when a file is added, removed, renamed or written."""
    digest = hashlib.sha256()
    for source in sources:
        status = os.stat(source.path)
        # File names need not be UTF-8.
        digest.update(os.fsencode(source.name))
        digest.update(f"\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def cut_units(sources: Iterable[SourceFile], unit_bytes: int) -> list[list[SourcePiece]]:
    """Cut the input into units of about `unit_bytes`, at least one piece: each is
    a worker's task."""
    units: list[list[SourcePiece]] = []
    problems: list[str] = []
    # Full, so that the first piece opens a unit.
    filled = unit_bytes
    for source in sources:
        try:
            pieces = _pieces(source)
        except DataError as error:
            problems += error.problems
            continue
        for piece in pieces:
            if filled >= unit_bytes:
                units.append([])
                filled = 0
            units[-1].append(piece)
            filled += piece.size
    _raise(problems)
    return units


def _pieces(source: SourceFile) -> list[SourcePiece]:
    try:
        if source.kind == "parquet":
            metadata = _parquet(source).metadata
            sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
            return [SourcePiece(source, i, i + 1, size) for i, size in enumerate(sizes)]
        if source.compression:
            size = os.path.getsize(source.path)
            return [SourcePiece(source, 0, size, size)] if size else []
        step = JSON_BYTES if source.kind == "jsonl" else TEXT_BYTES
        with open(source.path, "rb") as file:
            borders = list(_borders(file, step, lines_only=source.kind == "jsonl"))
    except OSError as error:
        raise DataError(f"{source.path}: {error.strerror or error}; {CORPUS_FIX}") from None
    return [SourcePiece(source, a, b, b - a) for a, b in itertools.pairwise(borders)]


def _borders(file: BinaryIO, step: int, lines_only: bool) -> Iterator[int]:
    """Yield 0, the line ends nearest after each `step` bytes, and the size.

    Text without line ends is cut between two characters; JSON lines never are.
    """
    size = os.fstat(file.fileno()).st_size
    position = 0
    yield position
    while position + step < size:
        # One byte back: a line may end just before the border.
        file.seek(position + step - 1)
        line = file.readline(-1 if lines_only else step)
        position = file.tell()
        if not line.endswith(b"\n") and not lines_only:
            file.seek(position)
            # A UTF-8 character has at most three more bytes.
            position += _inside(file.read(3))
        if position < size:
            yield position
    if size:
        yield size


def _inside(following: bytes) -> int:
    """Count the bytes after a cut that still belong to the UTF-8 character before it."""
    return len(following) - len(following.lstrip(bytes(range(0x80, 0xC0))))


def read_documents(piece: SourcePiece, text_key: str, lines: Lines) -> Iterator[str]:
    """Yield the documents of one piece, empty ones included; those of JSON are counted in `lines`.
    Raises DataError, or Undecodable."""
    if piece.source.kind == "parquet":
        yield from _parquet_documents(piece, text_key)
        return
    if piece.source.kind == "jsonl":
        yield from _json_documents(_lines(piece, lines), text_key, lines)
    elif piece.source.compression:
        at = 0
        for data in compressed.unpacked_texts(piece.source.path, TEXT_BYTES):
            yield _decode(piece.source, data if at else data.removeprefix(BOM), at)
            at += len(data)
    else:
        yield _decode(piece.source, _read(piece), piece.start)


def read_piece_rows(piece: SourcePiece, lines: Lines) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of one piece with their numbers in it, from 0, counted in
    `lines`. Raises DataError."""
    if piece.source.kind == "parquet":
        batches = _parquet(piece.source).iter_batches(row_groups=[piece.start], batch_size=1024)
        every = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in enumerate(every):
            lines.count += 1
            yield number, _without_none(row)
        return
    if piece.source.kind == "text":
        raise DataError(
            f"{piece.source.path}: chat data are rows of .jsonl, .ndjson or .parquet; convert it"
        )
    for number, line in enumerate(_lines(piece, lines)):
        if line.strip():
            try:
                row = _row(line)
            except ValueError as error:
                lines.bad.append((number, str(error)))
                continue
            yield number, row


def _without_none(value: Any) -> Any:
    """Drop the keys with None that Arrow fills in because other objects of the column have them."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _lines(piece: SourcePiece, lines: Lines) -> Iterator[bytes]:
    """Yield the lines without their ends; counted in `lines`."""
    if not piece.source.compression:
        # An uncompressed piece is small enough to be read at once: JSON_BYTES and a line.
        data = _read(piece)
        lines.count = data.count(b"\n")
        yield from data.split(b"\n")
        return
    for line in compressed.read_lines(piece.source.path):
        yield line if lines.count else line.removeprefix(BOM)
        lines.count += 1


def _read(piece: SourcePiece) -> bytes:
    with open(piece.source.path, "rb") as file:
        file.seek(piece.start)
        data = file.read(piece.end - piece.start)
    # The cuts depend on its size: a text that shrinks would silently lose documents.
    if len(data) != piece.end - piece.start:
        raise DataError(f"{piece.source.path}: became shorter while it was read")
    return data.removeprefix(BOM) if piece.start == 0 else data


def _decode(source: SourceFile, data: bytes, at: int) -> str:
    """Decode UTF-8 text. `at`: offset in the file at which the data begin."""
    try:
        text = data.decode()
        reason = "a zero byte" if "\0" in text else ""
    except UnicodeDecodeError as error:
        reason = f"byte {at + error.start} is not UTF-8"
    if not reason:
        return text
    if source.named or source.compression:
        raise DataError(f"{source.path}: not text ({reason}); convert it to UTF-8 first")
    raise Undecodable(source.path)


def _json_documents(every: Iterable[bytes], text_key: str, lines: Lines) -> Iterator[str]:
    for number, line in enumerate(every):
        if not line.strip():
            continue
        try:
            yield _text(line, text_key)
        except ValueError as error:
            lines.bad.append((number, str(error)))


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    # RecursionError: a line may nest deeper than json's parser goes.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"not a JSON object but {type(row).__name__}")
    return row


def _text(line: bytes, text_key: str) -> str:
    """Return the document in a line of JSON. Raises ValueError with the reason if there is none."""
    row = _row(line)
    if text_key not in row:
        raise ValueError(f"no key {text_key!r} (has: {', '.join(row)}); choose one with --text-key")
    text = row[text_key]
    if not isinstance(text, str | None):
        raise ValueError(f"{text_key!r} is {type(text).__name__}, not a string")
    return text or ""


def _parquet(source: SourceFile) -> Any:
    package = import_data_package("pyarrow.parquet")
    try:
        return package.ParquetFile(source.path)
    except Exception as error:
        raise DataError(f"{source.path}: not a Parquet file ({error})") from None


def _parquet_documents(piece: SourcePiece, text_key: str) -> Iterator[str]:
    file = _parquet(piece.source)
    names = file.schema_arrow.names
    if text_key not in names:
        raise DataError(
            f"{piece.source.path}: no column {text_key!r} (has: {', '.join(names)}); "
            "choose one with --text-key"
        )
    kind = str(file.schema_arrow.field(text_key).type)
    if kind not in ("string", "large_string", "string_view"):
        raise DataError(f"{piece.source.path}: column {text_key!r} is {kind}, not string")
    # In batches: a row group may hold more text than fits in memory.
    for batch in file.iter_batches(row_groups=[piece.start], columns=[text_key], batch_size=1024):
        yield from (text or "" for text in batch.column(0).to_pylist())


def is_held_out(text: str, fraction: float) -> bool:
    """Return whether this document goes into the validation split; the same for equal texts."""
    # Lone surrogates, which JSON may hold, cannot be encoded.
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64
