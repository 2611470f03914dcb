"""The engine of scripts/serve.py: texts side by side, beside transformers' batched `generate`, and
what continuous batching loses to texts of different length.

    python -m benchmarks.serve                         # 16 texts, three sizes of model
    python -m benchmarks.serve --size 19M --rounds 5

Both programs run in one process, by turns, on one thread, with the same weights and prompts, and
must give the same tokens. What counts is the CPU time of the process: other work on the machine
hardly changes it. The requests go over HTTP: the client's and the server's own work counts, too.

Stragglers: 16 times as many texts as there are slots, once all of equal length, once of lengths
that vary by 8 with the same sum, in a random order. What is lost is 1 - (tokens/s varied) /
(tokens/s equal): of all texts; and until the last text has joined, which leaves out the end, when
fewer texts than slots are left. In waves is the same without continuous batching: each batch waits
for its longest text.
"""

from __future__ import annotations

import argparse
import http.client
import json
import operator
import os
import random
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.async_save import processor
from benchmarks.generate import LENGTH, SIZES, VOCAB, models
from kempner.data.text.tokenizer import ByteTokenizer
from kempner.extensions.generate.load import Loaded, Words
from kempner.extensions.serve.http import Server
from kempner.extensions.serve.worker import Worker
from kempner.model.decoder import Decoder

Lengths = list[int]


class Numbers(ByteTokenizer):
    """Any token is a letter: what a text says does not matter here."""

    vocab_size = VOCAB


class Watched(Worker):
    """CPU seconds per token until no text waited any more."""

    def start(self) -> None:
        self.steady, self._began, self._before = 0.0, time.process_time(), self.generated

    def _tell(self, *news: Any) -> None:
        if self.texts.waiting:
            seconds = time.process_time() - self._began
            self.steady = seconds / (self.generated + 1 - self._before)
        super()._tell(*news)


@contextmanager
def serving(model: Decoder, slots: int) -> Iterator[tuple[int, Watched]]:
    """A server in this process; its port."""
    words = Words(Numbers(), [], set(), Path())
    worker = Watched(Loaded(model, words, LENGTH, ""), slots, LENGTH, 4096)
    worker.start()
    server = Server("127.0.0.1", 0, "model", "")
    server.worker = worker
    for run in (worker.run, server.serve_forever):
        threading.Thread(target=run, daemon=True).start()
    yield server.port, worker
    worker.end("done")
    server.shutdown()
    server.server_close()


def complete(port: int, **body: Any) -> list[list[int]]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps({"temperature": 0, **body}))
    answer = json.loads(connection.getresponse().read())
    return [choice["token_ids"] for choice in answer["choices"]]


def make_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(1, VOCAB, (32 + 7 * i % 32,), generator=generator).tolist()
        for i in range(count)
    ]


def by_turns(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each round, the first left out: it allocates."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items():
            began = time.process_time()
            run()
            if number:
                seconds[name].append(time.process_time() - began)
    return seconds


def beside_transformers(
    ours: Decoder, theirs: transformers.LlamaForCausalLM, batch: int, new: int, rounds: int
) -> str:
    prompts = make_prompts(batch)
    longest = max(map(len, prompts))  # transformers wants the padding in front
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    found: dict[str, list[list[int]]] = {}

    def run_theirs() -> None:
        tokens = theirs.generate(
            padded, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0
        )
        found["transformers"] = tokens[:, longest:].tolist()

    with serving(ours, batch) as (port, _):

        def run_ours() -> None:
            found["kempner"] = complete(port, prompt=prompts, max_tokens=new)

        seconds = by_turns({"kempner": run_ours, "transformers": run_theirs}, rounds)
    assert found["kempner"] == found["transformers"], "the two sides generate different tokens"
    a, b = (batch * new / statistics.median(seconds[name]) for name in seconds)
    ratios = sorted(y / x for x, y in zip(*seconds.values(), strict=True))
    middle = statistics.median(ratios)
    return f"{a:9.0f} {b:13.0f} {middle:7.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def stragglers(model: Decoder, slots: int, mean: int, rounds: int) -> str:
    count = 16 * slots
    prompts = make_prompts(count)
    low, high = round(2 * mean / 9), round(16 * mean / 9)  # a factor of 8 around the mean
    varied = [low + (high - low) * i // (count - 1) for i in range(count)]
    # What rounding has changed: the sums must be equal.
    varied[0] += mean * count - sum(varied)
    random.Random(0).shuffle(varied)

    steady: list[float] = []
    with serving(model, slots) as (port, worker):

        def run(lengths: Lengths) -> None:
            with ThreadPoolExecutor(len(lengths)) as pool:
                jobs = zip(prompts, lengths, strict=False)
                list(pool.map(lambda job: complete(port, prompt=job[0], max_tokens=job[1]), jobs))

        def waves() -> None:
            for start in range(0, count, slots):
                run(varied[start : start + slots])

        def fed() -> None:
            worker.start()
            run(varied)
            steady.append(worker.steady * sum(varied))

        sides = {"equal": lambda: run([mean] * count), "varied": fed, "wave": waves}
        seconds = by_turns(sides, rounds)
    # by_turns() leaves out the first round, too.
    seconds["steady"] = steady[1:]
    lost = (
        100 * (1 - statistics.median(map(operator.truediv, seconds["equal"], seconds[name])))
        for name in ("varied", "steady", "wave")
    )
    return "    ".join(f"{percent:7.1f} %" for percent in lost)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16, help="texts at a time")
    parser.add_argument("--size", default=",".join(SIZES), help="models, comma-separated")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate for each prompt")
    parser.add_argument("--no-stragglers", action="store_true", help="beside transformers alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"$ python -m benchmarks.serve {shlex.join(sys.argv[1:])}".rstrip())
    print(
        f"{time.strftime('%Y-%m-%d')}, {processor()}, 1 thread, fp32, load "
        f"{os.getloadavg()[0]:.1f}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; {options.batch} texts, prompts of 32 to 63 tokens, "
        f"{options.new} new ones each; tokens per CPU second"
    )
    print(f"{'':46}tokens/s lost to different lengths")
    print("model   kempner  transformers   ratio (spread)         in all   texts wait     in waves")
    for size in options.size.split(","):
        ours, theirs = models(size)
        beside = beside_transformers(ours, theirs, options.batch, options.new, options.rounds)
        lost = ""
        if not options.no_stragglers:
            lost = stragglers(ours, options.batch, options.new // 2, options.rounds)
        print(f"{size:5} {beside}    {lost}", flush=True)


if __name__ == "__main__":
    main()
