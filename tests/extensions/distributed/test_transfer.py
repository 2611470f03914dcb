"""Weights from the ranks of a trainer straight into engines: two ranks, and engines that come, go
and die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kempner.config.loading import load_config_files
from kempner.extensions.rl.exchange import RolloutExchange
from kempner.extensions.rl.trainer import transfer
from kempner.model.decoder import Decoder
from kempner.parallel.build import parameter_names
from kempner.train.sections import RunConfig
from tests.conftest import ROOT, clean_env
from tests.extensions.distributed import sender
from tests.waiting import LIMIT_S, until

# An engine in a process of its own; it stops for good in the middle of a version.
LOST = """
import json, os, signal, sys, time
from tests.extensions.distributed import sender, test_transfer
from kempner.extensions.rl.trainer import transfer
sender.limit()
buckets = transfer.buckets_of
def some(*words):
    for number, bucket in enumerate(buckets(*words)):
        if number == 2:
            os.write(1, b"in the middle\\n")  # whole: one thread for each rank writes it
            time.sleep(600)
        yield bucket
transfer.buckets_of = some
transfer.receive_weights(test_transfer.empty(), json.loads(open(sys.argv[1]).read()), "secret")
"""


def empty() -> Decoder:
    cfg = load_config_files(RunConfig, [], sender.SHAPE)
    model = Decoder(cfg.model)
    for p in model.parameters():
        p.data.fill_(torch.nan)
    return model


class Trainer:
    def __init__(self, run: Path) -> None:
        self.run, self.exchange = run, RolloutExchange(run)
        self.exchange.root.mkdir(parents=True)
        self.exchange.token.write_text("secret\n")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        self.process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "tests.extensions.distributed.sender", str(run)],
            cwd=ROOT, env=clean_env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def wait(self, path: Path) -> Path:
        until(path.exists, self.end, alive=(self.process,))
        return path

    def manifest(self, number: int, how: str = "") -> Path:
        """Of a version, which is published now."""
        whole = self.run / f"{number}.whole"  # the ranks read it as soon as it is there
        whole.write_text(how)
        whole.rename(self.run / str(number))
        return self.wait(self.exchange.version(number) / "manifest.json")

    def check(self, model: Decoder, number: int) -> None:
        expected = load_file(self.run / f"expected-{number}.safetensors")
        for name, p in parameter_names(model).items():
            assert torch.equal(p, expected[name]), name

    def end(self) -> str:
        self.process.terminate()
        return self.process.communicate(timeout=LIMIT_S)[0]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    kept = transfer.BUCKET, transfer.TIMEOUT_S
    sender.limit()
    one = Trainer(tmp_path_factory.mktemp("run"))
    (one.run / "0").touch()
    one.wait(one.run / "files-0")  # the first version of an attempt
    yield one
    one.end()
    transfer.BUCKET, transfer.TIMEOUT_S = kept


def take(manifest: Path, token: str = "secret") -> Decoder:
    model = empty()
    transfer.receive_weights(model, json.loads(manifest.read_text()), token)
    return model


def test_two_engines_get_what_the_ranks_have(trainer: Trainer) -> None:
    """Each whole, also one that comes later."""
    manifest = trainer.manifest(1)
    facts = json.loads(manifest.read_text())
    assert (facts["version"], facts["transport"], len(facts["senders"])) == (1, "direct", 2)
    parts = [transfer.pieces_of_rank(transfer.from_json(facts["table"]), rank) for rank in range(2)]
    sizes = [sum(piece.elements for piece in pieces) for pieces in parts]
    assert max(sizes) < 0.6 * sum(sizes) == 0.6 * facts["bytes"] / 4  # nobody sends all
    with ThreadPoolExecutor(2) as pool:
        for model in pool.map(take, [manifest, manifest]):
            trainer.check(model, 1)
    trainer.check(take(manifest), 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_lost_in_the_middle_harms_nobody(trainer: Trainer, number: int) -> None:
    """The other one gets this version, and the trainer makes the next one within the limit. Who
    lacks the token gets nothing meanwhile."""
    version = 2 if number == signal.SIGKILL else 4
    manifest = trainer.manifest(version)
    lost = subprocess.Popen(
        [sys.executable, "-c", LOST, str(manifest)],
        cwd=ROOT, env=clean_env(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert lost.stdout is not None and lost.stdout.readline() == "in the middle\n"
    os.kill(lost.pid, number)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(take, manifest, "wrong")
        trainer.check(take(manifest), version)
    with pytest.raises(transfer.Gone, match="has another key"):
        stranger.result()
    after = trainer.manifest(version + 1)
    assert time.monotonic() - began < 60  # not for ever: see sender.TIMEOUT_S
    trainer.check(take(after), version + 1)
    with pytest.raises(transfer.Withdrawn, match="not offered"):
        take(manifest)  # the one before
    lost.kill()
    lost.communicate()


def test_a_rank_lost_in_the_middle_is_an_error(trainer: Trainer) -> None:
    """The engine knows that its weights are of no use."""
    manifest = trainer.manifest(6, "dies")
    with pytest.raises(OSError, match="the transfer has broken off"):
        take(manifest)
    assert trainer.process.wait(timeout=LIMIT_S) != 0


def test_another_model_is_not_touched() -> None:
    facts: dict[str, Any] = {"table": {"layouts": [], "tensors": {}}, "dtype": "float32"}
    with pytest.raises(transfer.Gone, match="not those of the model here"):
        transfer.receive_weights(empty(), facts, "")
