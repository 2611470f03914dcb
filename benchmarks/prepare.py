"""Preparing data beside the package `tokenizers` alone: CPU time per byte of text, on one core.

    python -m benchmarks.prepare
    python -m benchmarks.prepare --quick                 a few seconds, for the tests
    python -m benchmarks.prepare --tokenizer DIR         not a BPE of 32,000 tokens

The text is a third of the source of Python's standard library, in documents of about 3 kB. By
turns:

    alone    loads the tokenizer; encode_batch_fast of the documents, which are in memory; its
             results are thrown away
    kempner  all of prepare_data.py --workers 1: reads JSON lines, encodes, holds out, writes shards

Both run in this process, in one thread. CPU time, not wall time, so that other processes on the
machine count for little. A ratio is of two neighbouring turns; [lowest, highest] behind.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import runpy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kempner.data.prepare import sources
from kempner.data.text.tokenizer import train_bpe

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = 3000  # characters
BATCH = 1000  # documents to a call of `tokenizers`, as its own examples have it


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, or a directory with one")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    texts = [Path(file.path).read_text(errors="replace") for file in sources.standard_library()]
    pieces = [text[i : i + DOCUMENT] for text in texts for i in range(0, len(text), DOCUMENT)]
    pieces = pieces[::3]  # 4 MB
    if options.quick:
        pieces, options.rounds = pieces[:300], 2
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), pieces, options)


def measure(folder: Path, texts: list[str], options: argparse.Namespace) -> None:
    file = options.tokenizer or folder / "tokenizer.json"
    if options.tokenizer is None:
        file.write_bytes(train_bpe(texts, 1000 if options.quick else 32_000))
    # Before the import, which reads it: both sides get one thread.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    lines = folder / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    size = sum(len(text.encode()) for text in texts)
    prepare = runpy.run_path(str(ROOT / "scripts/prepare_data.py"))["main"]

    def alone() -> None:
        tokenizer = Tokenizer.from_file(str(file / "tokenizer.json" if file.is_dir() else file))
        for i in range(0, len(texts), BATCH):
            tokenizer.encode_batch_fast(texts[i : i + BATCH], add_special_tokens=False)

    def kempner() -> None:
        words = ["--out", str(folder / "out"), "--tokenizer", str(file), "--workers", "1"]
        with contextlib.redirect_stdout(io.StringIO()):
            assert prepare([str(lines), *words, "--overwrite"]) == 0

    seconds: dict[str, list[float]] = {"alone": [], "kempner": []}
    cpu_seconds(alone)  # what is loaded and allocated once
    for k in range(options.rounds):
        turns = [("alone", alone), ("kempner", kempner)]
        # Whoever comes second finds the text in the caches.
        for name, act in turns if k % 2 else reversed(turns):
            seconds[name].append(cpu_seconds(act))
    best = min(seconds["alone"]) / min(seconds["kempner"])
    ratios = [a / b for a, b in zip(seconds["alone"], seconds["kempner"], strict=True)]
    print(f"{platform.processor() or platform.machine()}, {size / 1e6:.1f} MB, one core")
    for name, times in seconds.items():
        print(f"{name:8} {spread([size / t / 1e6 for t in times])} MB/s")
    print(f"kempner is {spread(ratios)} x as fast as alone; by the fastest turns {best:.2f} x")


def cpu_seconds(act: Callable[[], None]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


if __name__ == "__main__":
    main()
