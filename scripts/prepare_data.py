"""Turn text into token shards, ready for training.

    python scripts/prepare_data.py corpus/ more.jsonl --out data/corpus --train-bpe 32000
    python scripts/prepare_data.py --source stdlib --out data/quickstart
    python scripts/prepare_data.py chats.jsonl --out data/chat --kind chat --tokenizer MODEL
    python scripts/prepare_data.py inspect data/corpus         # or a configuration: see there

Inputs: text files of any kind, JSON lines (.jsonl), Parquet (.parquet), or directories of these.
After a kill or an interrupt, run the same command again: it resumes after the last whole shard.
On many nodes of a cluster: sbatch --nodes=N scripts/slurm/prepare.sh with the same arguments.
Exit code 0 done, 2 bad input, 130 interrupted.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

import argparse
import contextlib
import fcntl
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

from kempner.config.command_line import argument_parser
from kempner.config.option import ConfigError
from kempner.data.formats import chat_dataset
from kempner.data.formats.shards import (
    SHOWN_SKIPPED,
    begun_preparation,
    earlier_preparation,
    forget_preparation,
    shard_lock,
    skipped_remarks,
)
from kempner.data.prepare import sources
from kempner.data.prepare.shares import Work, encode_task_share, write_shards
from kempner.data.prepare.units import number_units, remove_units
from kempner.data.sidecar import (
    BAD_LINES,
    DATA_SPLITS,
    PROGRESS,
    SIDECAR,
    SIDECAR_TOKENIZER,
    UNITS_FOLDER,
    Shard,
    Sidecar,
)
from kempner.data.source import DataError
from kempner.data.text import chat, encode
from kempner.data.text.tokenizer import (
    BPE_EOD,
    BPE_MINIMUM,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    tokenizer_of,
    train_bpe,
)
from kempner.jobs.ranks.placement import discover_world
from kempner.jobs.system import hub
from kempner.jobs.system.directories import Kind, mark_directory, refuse_others
from kempner.jobs.system.files import write_atomic
from kempner.jobs.system.front_door import explain_os_error, interruptible, run_program

UNIT_BYTES = 4 << 20  # of input to one task of a worker
BPE_SAMPLE = 256 << 20  # bytes of text to train a vocabulary on; more hardly changes it


def main(argv: list[str]) -> int:
    if argv[:1] == ["inspect"]:
        from kempner.extensions.inspection import inspect_data

        inspect_data(argv[1:])
        return 0
    options = parse(argv)
    out = Path(options.out).expanduser()
    interruptible()
    try:
        prepare_data(options, out)
        return 0
    except BrokenPipeError:  # the reader of our output has left
        raise
    except OSError as error:
        raise ConfigError(f"{explain_os_error(error)}; then {continue_hint(out)}") from None
    except BrokenProcessPool:
        why = "a worker was killed (out of memory? give fewer --workers)"
        problem, code = f"{why}; {continue_hint(out)}", 1
    except KeyboardInterrupt:
        problem, code = f"interrupted; {continue_hint(out)}", 130
    print(f"prepare_data: error: {problem}", file=sys.stderr)
    return code


def continue_hint(out: Path) -> str:
    """Return the hint to print after a stop."""
    fix = "run the same command again"
    has_record = any((out / name).is_file() for name in (PROGRESS, SIDECAR))
    return f"{fix}: it resumes after the last whole shard in {out}" if has_record else fix


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argument_parser("prepare_data.py", __doc__)
    add = parser.add_argument
    add("inputs", nargs="*", metavar="INPUT", help="file or directory")
    add("--out", required=True, help="directory for the shards")
    stdlib = "use the source code of Python's standard library in place of inputs"
    add("--source", choices=["stdlib"], help=stdlib)
    tokenizer_help = "bytes (default), a tokenizer.json, a directory with one, or OWNER/NAME (hub)"
    add("--tokenizer", default="bytes", metavar="FILE", help=tokenizer_help)
    add("--eod", metavar="TOKEN", help="the tokenizer.json's end-of-document token")
    add("--bos", metavar="TOKEN", help="put this token before each document (default: none)")
    add("--train-bpe", type=int, metavar="N", help="first train a byte-level BPE of N tokens")
    add("--text-key", default="text", help="key or column that holds the text (default: text)")
    skip = f"skip bad lines of JSON and list them in {BAD_LINES} (default: list them and stop)"
    add("--skip-bad-lines", action="store_true", help=skip)
    held_out = "fraction of documents held out for validation (default: 0.01)"
    add("--val-fraction", type=float, default=0.01, help=held_out)
    chat.add_options(parser)
    tokens = "tokens per shard (default: 100000000)"
    add("--shard-tokens", type=int, default=100_000_000, help=tokens)
    add("--workers", type=int, help="processes (default: the cores of this job)")
    add("--overwrite", action="store_true", help="replace existing data in --out that differ")
    only = "one part of the work, as prepare.sh does it: begin, then the units in every task"
    add("--only", choices=["begin", "units"], help=only)
    options = parser.parse_args(argv)
    problems = wrong_options(options)
    if problems:
        parser.error("\n  ".join(problems))
    return options


def wrong_options(options: argparse.Namespace) -> list[str]:
    bpe, file = options.train_bpe, options.tokenizer != "bytes"
    checks = {
        "give input files or directories, or --source stdlib": (
            not options.inputs and not options.source
        ),
        "give input files or directories, or --source stdlib, but not both": (
            bool(options.inputs and options.source)
        ),
        "--train-bpe makes a tokenizer and --tokenizer names one: give only one of them": (
            bpe is not None and file
        ),
        f"--train-bpe {bpe}: must be at least {BPE_MINIMUM} (the bytes and {BPE_EOD})": (
            bpe is not None and bpe < BPE_MINIMUM
        ),
        "--eod requires --tokenizer FILE: bytes and --train-bpe have their own token": (
            options.eod is not None and not file
        ),
        "--bos requires --tokenizer FILE and plain text: chat templates have their own": (
            options.bos is not None and not (file and options.kind == "text")
        ),
        f"--val-fraction {options.val_fraction}: must be from 0 to 0.5": (
            not 0 <= options.val_fraction <= 0.5
        ),
        f"--shard-tokens {options.shard_tokens}: must be at least 1": options.shard_tokens < 1,
        f"--workers {options.workers}: must be at least 1": (
            options.workers is not None and options.workers < 1
        ),
    }
    return [problem for problem, wrong in checks.items() if wrong] + chat.chat_option_problems(
        options
    )


def prepare_data(options: argparse.Namespace, out: Path) -> None:
    left_out: list[str] = []
    options.tokenizer, options.tokenizer_name = find_tokenizer(options.tokenizer, options.only)
    pieces, tokenizer, _ = all_or_errors(
        lambda: find_units(options, out, left_out),
        lambda: tokenizer_settings(options),
        lambda: refuse_others(out, "--out", (Kind.DATA,), "choose another --out"),
    )
    settings = {
        **tokenizer,
        "inputs": sources.sources_fingerprint(
            dict.fromkeys(p.source for unit in pieces for p in unit)
        ),
        **(
            {"text_key": options.text_key}
            if options.kind == "text"
            else chat.chat_settings(options)
        ),
        "val_fraction": options.val_fraction,
        "shard_tokens": options.shard_tokens,
    }
    chat.keep_date(options, out, settings)
    nothing = {"units": 0, "empty": 0, "skipped": 0, "skipped_names": []}
    nothing |= {"left_out": len(left_out), "left_out_names": left_out[:SHOWN_SKIPPED]}
    progress = {**nothing, "bad_lines": 0, "lines": 0}
    prepared = {"settings": settings, "progress": progress}
    splits: dict[str, list[Shard]] = {split: [] for split in DATA_SPLITS}
    new = Sidecar({}, settings["dtype"], 0, 0, splits, prepared, options.kind)
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    if options.only == "units":
        # Shared: all tasks of prepare.sh do this at the same time.
        with shard_lock(out, fcntl.LOCK_SH):
            encode_task_share(
                preparation_work(options, out, pieces, begun_preparation(out, new)),
                discover_world(),
            )
        return
    with shard_lock(out):
        sidecar = earlier_preparation(out, new, options.overwrite)
        if (out / SIDECAR).is_file():  # perhaps killed before cleaning up
            (out / PROGRESS).unlink(missing_ok=True)
            remove_units(out)
            print(f"{out}: complete, nothing to do")
        else:
            sidecar = begin_preparation(options, out, pieces, sidecar)
            if options.only == "begin":
                return
            try:
                sidecar = write_shards(preparation_work(options, out, pieces, sidecar))
            except ConfigError:
                if not options.train_bpe:  # a vocabulary takes long: keep it for the next start
                    forget_preparation(out, is_new)
                raise
        print_report(out, sidecar)


def all_or_errors(*acts: Callable[[], Any]) -> list[Any]:
    """Return the results of all functions, or raise one ConfigError with the problems of all."""
    results, problems = [], []
    for act in acts:
        try:
            results.append(act())
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return results


def find_units(
    options: argparse.Namespace, out: Path, left_out: list[str]
) -> list[list[sources.SourcePiece]]:
    if any(Path(name).expanduser().resolve() == out.resolve() for name in options.inputs):
        raise DataError(f"{out}: is also an input; choose another --out")
    if options.source:
        files = sources.standard_library()
    else:
        files = sources.find_source_files(options.inputs, out.resolve(), left_out)
    units = sources.cut_units(files, min(UNIT_BYTES, options.shard_tokens))
    if not units:
        name = " ".join(options.inputs) or options.source
        raise DataError(f"{name}: contains no text ({len(files)} files, all empty)")
    return units


def tokenizer_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that identify the tokenizer before it exists."""
    if options.train_bpe:
        name, size = f"bpe of {options.train_bpe} tokens", options.train_bpe
    elif options.tokenizer == "bytes":
        name, size = "bytes", ByteTokenizer.vocab_size
    else:
        tokenizer = given_tokenizer(options)
        name, size = " ".join(tokenizer.describe().values()), tokenizer.vocab_size
    dtype = "uint16" if size <= 1 << 16 else "uint32"
    return {"tokenizer": name, "eod": options.eod, "bos": options.bos, "dtype": dtype}


def find_tokenizer(name: str, only: str | None) -> tuple[str, str]:
    """Return a path, and a name if it differs from the path's. A tokenizer on the hub is downloaded
    unless it is in the cache, but not by each task of prepare.sh."""
    is_repo = hub.REPO.fullmatch(name) and not name.endswith(".json")
    if not is_repo or Path(name).expanduser().exists():
        return name, ""
    path = None
    with contextlib.suppress(ConfigError):
        path = hub.hub_snapshot(name, download=False, weights=False)
    if path is None or not (path / SIDECAR_TOKENIZER).is_file():
        path = hub.hub_snapshot(name, download=only != "units", weights=False)
    return str(path), name


def given_tokenizer(options: argparse.Namespace) -> FileTokenizer:
    path = tokenizer_file(options)
    if not path.is_file():
        what = "no such file"
        if path.parent.is_dir() and path.name == SIDECAR_TOKENIZER:
            what = (
                f"no {SIDECAR_TOKENIZER} in it, which "
                "AutoTokenizer.from_pretrained(...).save_pretrained"
            )
            what += " writes"
        raise DataError(
            f"--tokenizer {options.tokenizer}: {what}; give `bytes`, a tokenizer.json or a "
            "directory with one"
        )
    copy = Path(options.out).expanduser() / SIDECAR_TOKENIZER
    if copy.exists() and copy.samefile(path):
        raise DataError(
            f"--tokenizer {path}: belongs to the data in --out; copy it elsewhere first"
        )
    eod = chat.end_of_turn(options) or options.eod
    return FileTokenizer(path, eod=eod, bos=options.bos, name=options.tokenizer_name)


def tokenizer_file(options: argparse.Namespace) -> Path:
    path = Path(options.tokenizer).expanduser()
    return path / SIDECAR_TOKENIZER if path.is_dir() else path


def make_tokenizer(
    options: argparse.Namespace, out: Path, pieces: list[sources.SourcePiece]
) -> Tokenizer:
    """Return the tokenizer to encode with; its file is stored in the data directory."""
    if options.train_bpe:
        # Evenly from all inputs: the first ones may be of another kind.
        sample = pieces[:: math.ceil(sum(piece.size for piece in pieces) / BPE_SAMPLE)]
        print(
            f"training a vocabulary of {options.train_bpe} tokens on {megabytes(sample)}",
            flush=True,
        )
        content = train_bpe(training_texts(options, sample), options.train_bpe)
        write_atomic(out / SIDECAR_TOKENIZER, content)
        vocab_size = FileTokenizer(out / SIDECAR_TOKENIZER, eod=BPE_EOD).vocab_size
        if vocab_size < options.train_bpe:
            print(
                f"warning: the text yields only {vocab_size} of {options.train_bpe} tokens; "
                f"add text, or give --train-bpe {vocab_size}"
            )
        return FileTokenizer(
            out / SIDECAR_TOKENIZER, eod=BPE_EOD, name=f"bpe of {vocab_size} tokens"
        )
    if options.tokenizer == "bytes":
        return ByteTokenizer()
    tokenizer = given_tokenizer(options)
    write_atomic(out / SIDECAR_TOKENIZER, tokenizer_file(options).read_bytes())
    if options.kind != "text":
        chat.write_template(options, out)
    return tokenizer


def training_texts(
    options: argparse.Namespace, pieces: Sequence[sources.SourcePiece]
) -> Iterator[str]:
    """Yield the documents to train a vocabulary on, except held-out ones; a compressed file, which
    is one piece of any size, yields only its beginning."""
    share = BPE_SAMPLE // len(pieces)  # characters
    for piece in pieces:
        remaining = share if piece.source.compression else math.inf
        try:
            for text in sources.read_documents(piece, options.text_key, sources.Lines()):
                if remaining <= 0:
                    break
                remaining -= len(text)
                if not sources.is_held_out(text, options.val_fraction):
                    yield text
        except sources.Undecodable:
            continue


def begin_preparation(
    options: argparse.Namespace,
    out: Path,
    pieces: list[list[sources.SourcePiece]],
    sidecar: Sidecar,
) -> Sidecar:
    """Create the tokenizer and the progress record, unless an earlier start has."""
    if options.only:
        mark_directory(out / UNITS_FOLDER, Kind.DATA)
    if sidecar.tokenizer:
        return sidecar
    mark_directory(out, Kind.DATA)
    tokenizer = make_tokenizer(options, out, [piece for unit in pieces for piece in unit])
    sidecar = replace(
        sidecar,
        tokenizer=tokenizer.describe(),
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        bos=tokenizer.bos,
    )
    sidecar.save(out / PROGRESS)
    return sidecar


def preparation_work(
    options: argparse.Namespace,
    out: Path,
    pieces: list[list[sources.SourcePiece]],
    sidecar: Sidecar,
) -> Work:
    tokenizer = tokenizer_of(sidecar, out)
    how = encode.Encoding(
        tokenizer_file="" if isinstance(tokenizer, ByteTokenizer) else str(out / SIDECAR_TOKENIZER),
        eod=tokenizer.eod,
        bos=tokenizer.bos,
        dtype=sidecar.dtype,
        text_key=options.text_key,
        val_fraction=options.val_fraction,
        chat=None if options.kind == "text" else chat.chat_encoding(options, out),
    )
    workers = options.workers or len(os.sched_getaffinity(0))
    return Work(out, sidecar, number_units(out, pieces), how, workers, options.skip_bad_lines)


def print_report(out: Path, sidecar: Sidecar) -> None:
    for split, shards in sidecar.splits.items():
        documents = sum(shard.documents for shard in shards)
        tokens = sidecar.tokens(split)
        print(
            f"  {split:5} {tokens:>15,} tokens  {documents:>11,} documents  {len(shards):>5} shards"
        )
    packing = [] if sidecar.kind == "text" else chat_dataset.packing_table(out, sidecar)
    for remark in [*packing, *skipped_remarks(sidecar.prepared["progress"])]:
        print(f"  {remark}")
    print(
        f"  tokenizer {sidecar.tokenizer['name']}, vocabulary {sidecar.vocab_size}, {sidecar.dtype}"
    )
    path = shlex.quote(f"--data.dataset_path={out}")
    print(f"train on it: {path} --model.vocab_size={sidecar.vocab_size}")


def megabytes(pieces: Iterable[sources.SourcePiece]) -> str:
    return f"{sum(piece.size for piece in pieces) / 1e6:.1f} MB"


if __name__ == "__main__":
    run_program(main)
