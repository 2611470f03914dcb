"""An orchestrator for the tests of the trainer: batches that follow from the number of the step
alone, of samples that no engine has drawn."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from kempner.extensions.rl.exchange import Batch, RolloutExchange

VOCAB = 257
Sample = tuple[list[int], list[float], float]  # tokens, log-probabilities of the answer, advantage


def samples(step: int, count: int) -> list[Sample]:
    random = np.random.default_rng(step)
    found = []
    for number in range(count):
        tokens = random.integers(VOCAB, size=int(random.integers(6, 14))).tolist()
        answer = int(random.integers(3, len(tokens) - 1))
        logprobs = (-5.55 + 0.3 * random.standard_normal(answer)).tolist()
        found.append((tokens, logprobs, 1.0 if number % 2 else -0.7))
    return found


def arrays(
    rows: list[list[Sample]], seq_len: int, versions: Sequence[int] = ()
) -> dict[str, np.ndarray]:
    """Rows of packed samples, [R, T] each; `versions`: of each row, 0 where none is given."""
    shape = (len(rows), seq_len)
    made = {
        "inputs": np.zeros(shape, np.int32),
        "targets": np.full(shape, -100, np.int32),
        "documents": np.zeros(shape, np.int32),
        "logprobs": np.zeros(shape, np.float32),
        "advantages": np.zeros(shape, np.float32),
        "versions": np.zeros(shape, np.int32),
    }
    for row, version in enumerate(versions):
        made["versions"][row] = version
    for row, packed in enumerate(rows):
        at = 0
        for number, (tokens, logprobs, advantage) in enumerate(packed):
            size, answer = len(tokens) - 1, len(logprobs)
            made["inputs"][row, at : at + size] = tokens[:-1]
            made["documents"][row, at : at + size] = number
            there = slice(at + size - answer, at + size)
            made["targets"][row, there] = tokens[-answer:]
            made["logprobs"][row, there] = logprobs
            made["advantages"][row, there] = advantage
            at += size
        made["documents"][row, at:] = len(packed)
    return made


def hand_over(
    exchange: RolloutExchange, step: int, ranks: int, seq_len: int, count: int = 8
) -> None:
    """Two samples a row. Those of step 2 are partly of older weights, those of step 3 all, and so
    on; they are less likely than others."""
    drawn = samples(step, count)
    rows = [drawn[i : i + 2] for i in range(0, count, 2)]
    old = (0, len(rows) // 2, len(rows))[(step - 1) % 3]
    for row in rows[:old]:
        row[:] = [(tokens, [x - 1 for x in logprobs], a) for tokens, logprobs, a in row]
    versions = [step - 1 - (row < old) for row in range(len(rows))]
    folder = exchange.rollouts(step)
    folder.mkdir(parents=True)
    for rank in range(ranks):
        share = len(rows) // ranks
        there = slice(rank * share, (rank + 1) * share)
        mine = arrays(rows[there], seq_len, versions[there])
        save_file(mine, folder / f"rank_{rank}.safetensors")
    tokens = sum(len(logprobs) for _, logprobs, _ in drawn)
    metrics = {"reward": step / 100, "samples": count}
    state = {"position": step}
    exchange.hand_over(Batch(step, tokens, metrics, state, scored=old == len(rows)))


@contextmanager
def orchestrator(run: Path, steps: int, seq_len: int = 32, last: int = 0) -> Iterator[list[object]]:
    """Beside a trainer, until `last` batches (0: all) are handed over; yields what the trainer
    has said at its start."""
    exchange, end, heard = RolloutExchange(run), threading.Event(), list[object]()

    def work() -> None:
        while (start := exchange.started()) is None and not end.wait(0.05):
            pass
        if start is None:
            return
        heard.append(start)
        for step in range(start.step + 1, (last or steps) + 1):
            while exchange.newest() != step - 1:
                if end.wait(0.05):
                    return
            hand_over(exchange, step, start.data_ranks, seq_len)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield heard
    finally:
        end.set()
        thread.join()


def lines(run: Path) -> list[dict[str, float]]:
    """Of the steps, the newest of each."""
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return list({line["step"]: line for line in found if "loss" in line}.values())
