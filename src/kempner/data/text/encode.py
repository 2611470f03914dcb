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
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from kempner.data.prepare.sources import (
    BadLine,
    Lines,
    SourcePiece,
    Undecodable,
    is_held_out,
    read_documents,
)
from kempner.data.sidecar import DATA_SPLITS
from kempner.data.text.tokenizer import ByteTokenizer, FileTokenizer, TokenArray, Tokenizer

LOG_SECONDS = 10.0
# Signals for the parent, which ends its workers. Not SIGTERM: the executor sends that to the
# remaining workers after one is killed, and waits for them.
FOR_THE_PARENT = {signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}

_T = TypeVar("_T")
_R = TypeVar("_R")


class UnitEncoding(Protocol):
    """The encoding of units that are not plain text: chat.ChatEncoding."""

    def encode(self, unit: list[SourcePiece], how: Encoding, tokenizer: Tokenizer) -> Encoded: ...


@dataclass(frozen=True)
class Encoding:
    """Settings that a worker needs to encode a unit."""

    tokenizer_file: str  # "" for bytes
    eod: int
    dtype: str
    text_key: str
    val_fraction: float
    bos: int | None = None  # before each document
    chat: UnitEncoding | None = None  # for units of chat data

    def tokenizer(self) -> Tokenizer:
        if not self.tokenizer_file:
            return ByteTokenizer()
        return FileTokenizer(Path(self.tokenizer_file), eod=self.eod, bos=self.bos)


@dataclass
class Encoded:
    """One unit of the input, encoded."""

    tokens: dict[str, TokenArray]
    documents: int = 0  # including empty ones
    empty: int = 0  # documents without a character
    skipped: list[str] = field(default_factory=list)  # names of files that are not UTF-8 text
    bad: list[BadLine] = field(default_factory=list)  # of JSON
    lines: list[tuple[bool, int]] = field(default_factory=list)  # per piece: a file begins, \n
    size: int = 0  # bytes of input


def encode_pieces(unit: list[SourcePiece], how: Encoding, tokenizer: Tokenizer) -> Encoded:
    if how.chat is not None:
        return how.chat.encode(unit, how, tokenizer)
    parts: dict[str, list[TokenArray]] = {split: [] for split in DATA_SPLITS}
    result = Encoded({})
    for number, piece in enumerate(unit):
        result.size += piece.size
        lines = Lines()
        try:
            texts = list(read_documents(piece, how.text_key, lines))
        except Undecodable:
            result.skipped.append(piece.source.name.encode(errors="replace").decode())
            continue
        finally:
            path, name = piece.source.path, piece.source.name
            result.lines.append((piece.start == 0, lines.count))
            result.bad += [BadLine(path, name, number, *bad) for bad in lines.bad]
        filled = [text for text in texts if text]
        result.documents += len(texts)
        result.empty += len(texts) - len(filled)
        for text, ids in zip(filled, tokenizer.encode_documents(filled), strict=True):
            parts["val" if is_held_out(text, how.val_fraction) else "train"].append(ids)
    nothing = np.empty(0, how.dtype)
    result.tokens = {
        # "unsafe": the narrower dtype was chosen to hold every id of the vocabulary.
        split: np.concatenate([nothing, *arrays], dtype=how.dtype, casting="unsafe")
        for split, arrays in parts.items()
    }
    return result


def in_workers(
    act: Callable[[_T, Encoding, Tokenizer], _R], items: Iterable[_T], how: Encoding, workers: int
) -> Iterator[_R]:
    """Run act(item, how, tokenizer) for each item in `workers` processes; yields results in the
    order of the items, each taken when a worker is free."""
    # One thread each: the processes are the parallelism.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if workers == 1:
        tokenizer = how.tokenizer()
        yield from (act(item, how, tokenizer) for item in items)
        return
    # spawn: a process forked from one with threads (tokenizers has some) may hang.
    # An executor, not a Pool: it notices when a worker is killed.
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(how,)
    )
    running: deque[Future[_R]] = deque()
    try:
        source = iter(items)
        # Two units per worker, so that none waits for its next one.
        running.extend(_submit(pool, act, item) for item in itertools.islice(source, 2 * workers))
        while running:
            yield _result(pool, running.popleft())
            running.extend(_submit(pool, act, item) for item in itertools.islice(source, 1))
    finally:
        pool.shutdown(cancel_futures=True)


def _result(pool: ProcessPoolExecutor, future: Future[_R]) -> _R:
    """Wait for a result. Raises BrokenProcessPool if a worker was killed.

    The executor notices that by itself, unless the worker died while sending a result: then the
    executor's thread waits forever for the rest, and so would this process at exit. Once no sender
    is left, closing the pipe shows the thread its end.
    """
    while True:
        try:
            return future.result(timeout=1.0)
        except futures.TimeoutError:
            workers = list(pool._processes.values())
            if all(worker.exitcode is None for worker in workers):
                continue
            for worker in workers:
                worker.kill()
            pool._result_queue._writer.close()  # type: ignore[attr-defined]


def _submit(
    pool: ProcessPoolExecutor, act: Callable[[_T, Encoding, Tokenizer], _R], item: _T
) -> Future[_R]:
    """Submit an item. May start a worker, which inherits the signal mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_PARENT)
    try:
        return pool.submit(_act, act, item)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(how: Encoding) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    global _worker
    _worker = (how, how.tokenizer())


def _die_with_parent() -> None:
    """End this worker with its parent; it would wait forever for its next unit."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


_worker: tuple[Encoding, Tokenizer]


def _act(act: Callable[[_T, Encoding, Tokenizer], _R], item: _T) -> _R:
    return act(item, *_worker)


@contextmanager
def progress_bar(total: int, start: int, quiet: bool = False) -> Iterator[Callable[[int], object]]:
    """Show a bar on a terminal, lines in a log; yields a function that takes the
    bytes just processed."""
    if quiet:
        yield lambda size: None
        return
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=total, initial=start, unit="B", unit_scale=True) as bar:
            yield bar.update
        return
    start_time = printed = time.monotonic()
    total_done = start

    def advance(size: int) -> None:
        nonlocal total_done, printed
        total_done += size
        if (now := time.monotonic()) - printed >= LOG_SECONDS:
            printed = now
            speed = (total_done - start) / (now - start_time) / 1e6
            print(f"{total_done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {speed:.1f} MB/s", flush=True)

    yield advance
