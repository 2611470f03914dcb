"""Documents -> token ids, in worker processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kempner.data.sidecar import SPLITS
from kempner.data.sources import BadLine, Piece, Undecodable, documents, is_held_out
from kempner.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, Tokens

if TYPE_CHECKING:
    from kempner.data.chat import ChatEncoding

LOG_SECONDS = 10.0
SHOWN = 5  # bad lines, and files that are skipped, that a message names


@dataclass(frozen=True)
class Encoding:
    """What a worker needs to encode a unit."""

    tokenizer_file: str  # "" for bytes
    eod: int
    dtype: str
    text_key: str
    val_fraction: float
    chat: ChatEncoding | None = None  # where the units are of chat data

    def tokenizer(self) -> Tokenizer:
        if not self.tokenizer_file:
            return ByteTokenizer()
        return FileTokenizer(Path(self.tokenizer_file), eod=self.eod)


@dataclass
class Encoded:
    """One unit of the input, encoded."""

    tokens: dict[str, Tokens]
    empty: int = 0  # documents without a character
    skipped: list[str] = field(default_factory=list)  # names of files that are not UTF-8 text
    bad: list[BadLine] = field(default_factory=list)  # the first bad lines of JSON
    bad_lines: int = 0
    size: int = 0  # bytes of input


def encode(unit: list[Piece], how: Encoding, tokenizer: Tokenizer) -> Encoded:
    if how.chat is not None:
        return how.chat.encode(unit, how, tokenizer)
    parts: dict[str, list[Tokens]] = {split: [] for split in SPLITS}
    result, bad = Encoded({}), list[BadLine]()
    for piece in unit:
        result.size += piece.size
        try:
            texts = list(documents(piece, how.text_key, bad))
        except Undecodable:
            result.skipped.append(piece.source.name.encode(errors="replace").decode())
            continue
        filled = [text for text in texts if text]
        result.empty += len(texts) - len(filled)
        for text, ids in zip(filled, tokenizer.encode_documents(filled), strict=True):
            parts["val" if is_held_out(text, how.val_fraction) else "train"].append(ids)
    result.bad, result.bad_lines = bad[:SHOWN], len(bad)
    nothing = np.empty(0, how.dtype)
    result.tokens = {
        split: np.concatenate([nothing, *arrays], dtype=how.dtype, casting="unsafe")
        for split, arrays in parts.items()
    }
    return result


def encode_all(units: Iterable[list[Piece]], how: Encoding, workers: int) -> Iterator[Encoded]:
    """Encode the units in `workers` processes; the results come in the order of the units."""
    # One thread each: the processes are the parallelism.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if workers == 1:
        tokenizer = how.tokenizer()
        yield from (encode(unit, how, tokenizer) for unit in units)
        return
    # spawn: a process forked from one with threads (tokenizers has some) may hang.
    # An executor, not a Pool: it notices when a worker is killed.
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(how,)
    )
    running: deque[Future[Encoded]] = deque()
    try:
        source = iter(units)
        running.extend(_submit(pool, unit) for unit in itertools.islice(source, 2 * workers))
        while running:
            yield running.popleft().result()
            running.extend(_submit(pool, unit) for unit in itertools.islice(source, 1))
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, unit: list[Piece]) -> Future[Encoded]:
    """May start a worker, which inherits the signal mask: Ctrl-C is for the parent to handle."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_encode, unit)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(how: Encoding) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    global _worker
    _worker = (how, how.tokenizer())


def _die_with_parent() -> None:
    """A worker whose parent was killed would wait forever for its next unit."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


_worker: tuple[Encoding, Tokenizer]


def _encode(unit: list[Piece]) -> Encoded:
    how, tokenizer = _worker
    return encode(unit, how, tokenizer)


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
