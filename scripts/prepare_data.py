"""Text -> token shards, ready for training.

    python scripts/prepare_data.py corpus/ more.jsonl --out data/corpus --train-bpe 32000
    python scripts/prepare_data.py --source stdlib --out data/quickstart

Inputs: text files of any kind, JSON lines (.jsonl), Parquet (.parquet), directories of these.
Killed or stopped, the same command goes on after the last whole shard; run at the end, it says so.
Exit code 0 done, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kempner.config.option import ConfigError
from kempner.data import encode, sources
from kempner.data.shards import Writer, earlier
from kempner.data.sidecar import (
    PROGRESS,
    SIDECAR,
    SPLITS,
    TOKENIZER,
    DataError,
    Sidecar,
)
from kempner.data.tokenizer import (
    BPE_EOD,
    BPE_MINIMUM,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    tokenizer_of,
    train_bpe,
)
from kempner.files import write_atomic

UNIT_BYTES = 4 << 20  # of input to one task of a worker
BPE_SAMPLE = 256 << 20  # bytes of text that a vocabulary is trained on; more hardly changes it
LOG_SECONDS = 10.0


def main(argv: list[str]) -> int:
    options = parse(argv)
    out = Path(options.out).expanduser()
    again = f"run the same command again: it goes on after the last whole shard in {out}"
    try:
        prepare_data(options, out)
        return 0
    except ConfigError as error:
        problem, code = str(error), 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        problem, code = f"{where}{error.strerror or error}; put that right and {again}", 2
    except BrokenProcessPool:
        problem, code = f"a worker was killed (out of memory? give fewer --workers); {again}", 1
    except KeyboardInterrupt:
        problem, code = f"interrupted; {again}", 130
    print(f"prepare_data: error: {problem}", file=sys.stderr)
    return code


def parse(argv: list[str]) -> argparse.Namespace:
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description=about,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help="file or directory")
    parser.add_argument("--out", required=True, help="directory for the shards")
    parser.add_argument(
        "--source",
        choices=["stdlib"],
        help="instead of inputs: the source of Python's standard library",
    )
    parser.add_argument(
        "--tokenizer", default="bytes", metavar="FILE", help="a tokenizer.json; without it, bytes"
    )
    parser.add_argument(
        "--eod", metavar="TOKEN", help="of the tokenizer.json: what ends a document"
    )
    parser.add_argument(
        "--train-bpe",
        type=int,
        metavar="N",
        help="train a byte-level BPE vocabulary of N tokens first",
    )
    parser.add_argument(
        "--text-key", default="text", help="key or column of the text (default: text)"
    )
    parser.add_argument(
        "--val-fraction", type=float, default=0.01, help="held out for validation (default: 0.01)"
    )
    parser.add_argument(
        "--shard-tokens", type=int, default=100_000_000, help="size of a shard (default: 100000000)"
    )
    parser.add_argument("--workers", type=int, help="processes (default: the cores of this job)")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace what other settings or inputs left in --out",
    )
    options = parser.parse_args(argv)
    if bool(options.inputs) == bool(options.source):
        parser.error("give input files or directories, or --source stdlib")
    if options.train_bpe is not None and options.tokenizer != "bytes":
        parser.error("--train-bpe makes a tokenizer, --tokenizer names one: give one of them")
    if options.train_bpe is not None and options.train_bpe < BPE_MINIMUM:
        parser.error(
            f"--train-bpe {options.train_bpe}: at least {BPE_MINIMUM} (the bytes and {BPE_EOD})"
        )
    if options.eod is not None and options.tokenizer == "bytes":
        parser.error(
            "--eod belongs to --tokenizer FILE: bytes and --train-bpe have one of their own"
        )
    if not 0 <= options.val_fraction <= 0.5:
        parser.error(f"--val-fraction {options.val_fraction}: must be in 0..0.5")
    if options.shard_tokens < 1:
        parser.error(f"--shard-tokens {options.shard_tokens}: at least 1")
    if options.workers is not None and options.workers < 1:
        parser.error(f"--workers {options.workers}: at least 1")
    return options


def prepare_data(options: argparse.Namespace, out: Path) -> None:
    units = find_units(options, out)
    settings = {
        **tokenizer_settings(options),
        "inputs": sources.fingerprint(dict.fromkeys(p.source for unit in units for p in unit)),
        "text_key": options.text_key,
        "val_fraction": options.val_fraction,
        "shard_tokens": options.shard_tokens,
    }
    progress = {"units": 0, "empty": 0, "skipped": 0}
    prepared = {"settings": settings, "progress": progress}
    new = Sidecar({}, settings["dtype"], 0, 0, {split: [] for split in SPLITS}, prepared)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        sidecar = earlier(out, new, options.overwrite)
        if (out / SIDECAR).is_file():
            (out / PROGRESS).unlink(missing_ok=True)  # killed between the last two operations
            print(f"{out}: complete, nothing to do")
        else:
            sidecar = write_shards(options, out, units, sidecar)
        report(out, sidecar)


def find_units(options: argparse.Namespace, out: Path) -> list[list[sources.Piece]]:
    if any(Path(given).expanduser().resolve() == out.resolve() for given in options.inputs):
        raise DataError(f"{out}: is an input too; choose another --out")
    if options.source:
        files = sources.standard_library()
    else:
        files = sources.find(options.inputs, exclude=out.resolve())
    units = sources.cut(files, min(UNIT_BYTES, options.shard_tokens))
    if not units:
        given = " ".join(options.inputs) or options.source
        raise DataError(f"{given}: there is no text in it ({len(files)} files, all empty)")
    return units


def tokenizer_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What identifies the tokenizer before it is made."""
    if options.train_bpe:
        name, size = f"bpe of {options.train_bpe} tokens", options.train_bpe
    elif options.tokenizer == "bytes":
        name, size = "bytes", ByteTokenizer.vocab_size
    else:
        tokenizer = given_tokenizer(options)
        name, size = " ".join(tokenizer.describe().values()), tokenizer.vocab_size
    dtype = "uint16" if size <= 1 << 16 else "uint32"
    return {"tokenizer": name, "eod": options.eod, "dtype": dtype}


def given_tokenizer(options: argparse.Namespace) -> FileTokenizer:
    path = Path(options.tokenizer).expanduser()
    if not path.is_file():
        raise DataError(
            f"--tokenizer {options.tokenizer}: no such file; give `bytes` or a tokenizer.json"
        )
    copy = Path(options.out).expanduser() / TOKENIZER
    if copy.exists() and copy.samefile(path):
        raise DataError(
            f"--tokenizer {path}: belongs to the data in --out; copy it elsewhere first"
        )
    return FileTokenizer(path, eod=options.eod)


def make_tokenizer(
    options: argparse.Namespace, out: Path, pieces: list[sources.Piece]
) -> Tokenizer:
    """The tokenizer of this run; what it needs is put into the data directory."""
    if options.train_bpe:
        sample = pieces[:: math.ceil(sum(piece.size for piece in pieces) / BPE_SAMPLE)]
        print(
            f"training a vocabulary of {options.train_bpe} tokens on {megabytes(sample)}",
            flush=True,
        )
        content = train_bpe(training_texts(options, sample), options.train_bpe)
        write_atomic(out / TOKENIZER, content)
        return FileTokenizer(
            out / TOKENIZER, eod=BPE_EOD, name=f"bpe of {options.train_bpe} tokens"
        )
    if options.tokenizer == "bytes":
        return ByteTokenizer()
    tokenizer = given_tokenizer(options)
    content = Path(options.tokenizer).expanduser().read_bytes()
    write_atomic(out / TOKENIZER, content)
    return tokenizer


def training_texts(options: argparse.Namespace, pieces: Iterable[sources.Piece]) -> Iterator[str]:
    """The documents that a vocabulary is trained on: none that is held out."""
    for piece in pieces:
        try:
            for text in sources.documents(piece, options.text_key):
                if not sources.is_held_out(text, options.val_fraction):
                    yield text
        except sources.Undecodable:
            continue


def write_shards(
    options: argparse.Namespace, out: Path, units: list[list[sources.Piece]], sidecar: Sidecar
) -> Sidecar:
    if sidecar.tokenizer:
        tokenizer = tokenizer_of(sidecar, out)
    else:
        tokenizer = make_tokenizer(options, out, [piece for unit in units for piece in unit])
        sidecar = replace(
            sidecar,
            tokenizer=tokenizer.describe(),
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
        )
        sidecar.save(out / PROGRESS)
    writer = Writer(out, sidecar)
    done, left = units[: writer.units_done], units[writer.units_done :]
    if done:
        shards = sum(map(len, sidecar.splits.values()))
        print(f"{out}: going on after {shards} shards ({len(done)} of {len(units)} units of input)")
    how = encode.Encoding(
        tokenizer_file="" if isinstance(tokenizer, ByteTokenizer) else str(out / TOKENIZER),
        eod=tokenizer.eod,
        dtype=sidecar.dtype,
        text_key=options.text_key,
        val_fraction=options.val_fraction,
    )
    workers = min(options.workers or len(os.sched_getaffinity(0)), max(1, len(left)))
    size = [sum(piece.size for piece in unit) for unit in units]
    with progress(sum(size), start=sum(size[: len(done)])) as advance:
        for encoded in encode.encode_all(left, how, workers):
            writer.add(encoded)
            advance(encoded.size)
    return writer.finish()


def report(out: Path, sidecar: Sidecar) -> None:
    for split, shards in sidecar.splits.items():
        documents = sum(shard.documents for shard in shards)
        tokens = sidecar.tokens(split)
        print(
            f"  {split:5} {tokens:>15,} tokens  {documents:>11,} documents  {len(shards):>5} shards"
        )
    count = sidecar.prepared["progress"]
    if count["skipped"]:
        print(f"  warning: {count['skipped']} files, or parts of them, skipped: not UTF-8 text")
    if count["empty"]:
        print(f"  {count['empty']} empty documents left out")
    print(
        f"  tokenizer {sidecar.tokenizer['name']}, vocabulary {sidecar.vocab_size}, {sidecar.dtype}"
    )
    print(f"train on it: --data.dataset_path={out} --model.vocab_size={sidecar.vocab_size}")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """One writer at a time."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise DataError(
            f"{directory}: another prepare_data.py is writing it; wait for it"
        ) from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def progress(total: int, start: int) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal, lines in a log; yields a function that takes the bytes just done."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=total, initial=start, unit="B", unit_scale=True) as bar:
            yield bar.update
        return
    began = printed = time.monotonic()
    done = start

    def advance(size: int) -> None:
        nonlocal done, printed
        done += size
        if (now := time.monotonic()) - printed >= LOG_SECONDS:
            printed = now
            speed = (done - start) / (now - began) / 1e6
            print(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {speed:.1f} MB/s", flush=True)

    yield advance


def megabytes(pieces: Iterable[sources.Piece]) -> str:
    return f"{sum(piece.size for piece in pieces) / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
