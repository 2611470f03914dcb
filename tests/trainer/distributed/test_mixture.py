"""The real trainer on several data sources: what it reads, what it records, and what it resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kempner.data.sidecar import SIDECAR, Shard, Sidecar
from tests.conftest import TINY, Train, losses, start_train

FIRST = {"web": 10, "code": 100, "talk": 200}  # the tokens of each source are from here on


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three data sets, one of them streamed, and a configuration: two phases, and a limit that is
    reached in the first."""
    pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("mix")
    random = np.random.default_rng(0)
    for name, first in FIRST.items():
        tokens = random.integers(first, first + 50, 32 * 12 + 1).astype(np.uint16)
        tokens[::40] = 256
        if name == "talk":
            documents = np.split(tokens, range(1, len(tokens), 40))
            lines = [json.dumps({"input_ids": part.tolist()}) for part in documents]
            (folder / "talk.jsonl").write_text("\n".join(lines))
            continue
        (folder / name).mkdir()
        np.save(folder / name / "0.npy", tokens)
        shards = [Shard("0.npy", len(tokens), 0, 256)]
        about = {"name": "bytes", "kind": "bytes", "hash": ""}
        splits = {"train": shards, "val": shards if name == "web" else []}
        Sidecar(about, "uint16", 257, 256, splits, {}).save(folder / name / SIDECAR)
    tables = "".join(
        f'[[data.sources]]\npath = "{folder / name}"\nweight = {weight}\n{more}'
        for name, weight, more in (
            ("web", 5, ""), ("code", 3, "max_epochs = 1\n"), ("talk.jsonl", 2, 'name = "talk"\n')
        )
    )  # fmt: skip
    phase = "[[data.phases]]\nstart_step = 6\nweights = [0, 0, 1]\nlr_scale = 0.5\n"
    (folder / "mix.toml").write_text('[data]\ndataset_path = ""\n' + tables + phase)
    return folder


def run(mix: Path, run_dir: Path, *more: str, nproc: int = 1, code: int = 0) -> str:
    words = [*TINY, str(mix / "mix.toml"), f"--run.dir={run_dir}", *more]
    words += ["--data.document_mask", "--schedule.name=constant", "--schedule.warmup_steps=3"]
    process = start_train(*words, nproc=nproc)
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, out + err
    return out + err


def lines(run_dir: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "loss" in record]


@pytest.fixture(scope="module")
def unbroken(mix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    run(mix, run_dir, "--eval.interval=8")
    return run_dir


def test_each_source_has_its_share_and_its_loss(unbroken: Path) -> None:
    found = lines(unbroken)
    for line in found:
        sources = line["sources"]
        total = sum(each["tokens"] for each in sources.values())
        mean = sum(each["tokens"] * (each["loss"] or 0) for each in sources.values()) / total
        assert mean == pytest.approx(line["loss"], rel=1e-5)
        # The first token of each document is no target.
        assert 8 * 32 * 38 / 40 - 8 < total < 8 * 32
    epochs = {x: [line["sources"][x]["epochs"] * 12 for line in found] for x in ("web", "code")}
    assert epochs["code"][4:] == [12.0] * 4  # once, at 3 in 10
    assert epochs["web"][1] == pytest.approx(8, abs=1) and len(set(epochs["web"][5:])) == 1
    assert found[7]["sources"]["talk"]["tokens"] > 8 * 32 * 38 / 40 - 8
    assert found[5]["sources"]["talk"]["loss"] and found[6]["sources"]["web"]["loss"] is None
    rates = [2e-3 * share for share in (1 / 3, 2 / 3, 1, 1, 1, 1, 0.5, 0.5)]
    assert [line["lr"] for line in found] == pytest.approx(rates)


def test_a_mixture_resumes_at_another_world_size(mix: Path, unbroken: Path, tmp_path: Path) -> None:
    """The same samples in the same steps, over phases and limits, whoever reads them."""
    for steps, nproc in ((3, 4), (8, 2)):
        run(mix, tmp_path, f"--train.max_steps={steps}", nproc=nproc)
    assert losses(tmp_path) == pytest.approx(losses(unbroken), rel=1e-5)
    ours, theirs = ([line["sources"] for line in lines(x)] for x in (tmp_path, unbroken))
    tokens = [[{k: v["tokens"] for k, v in each.items()} for each in x] for x in (ours, theirs)]
    assert tokens[0] == tokens[1]
    manifest = json.loads((tmp_path / "checkpoints/latest/manifest.json").read_text())
    assert manifest["phases"] == [48]


def test_a_phase_that_has_begun_stays_whatever_the_batch_is(train: Train, tmp_path: Path) -> None:
    """Counted from the start of the run with the new batch, the second would begin first."""
    phases = "--data.phases=[{start_token = 1000}, {start_step = 6}]"
    train(tmp_path / "run", phases)
    done = train(tmp_path / "run", phases, "--train.global_batch=4", "--train.max_steps=9")
    assert "continues after step 8" in done.stdout


def test_the_past_may_not_change_and_a_phase_may_be_added(mix: Path, unbroken: Path) -> None:
    """Another batch: the phase that has begun stays where it began, and the new one is counted from
    here."""
    more = ("--train.max_steps=10", "--train.global_batch=4")
    weights = "--data.phases=[{start_step = 6, weights = [1, 0, 1]}]"
    assert "append a [[data.phases]]" in run(mix, unbroken, *more, weights, code=2)
    added = "--data.phases=[{start_step = 6, weights = [0, 0, 1]}, {start_token = 2150}]"
    assert "continues after step 8" in run(mix, unbroken, *more, added)
    manifest = json.loads((unbroken / "checkpoints/latest/manifest.json").read_text())
    assert manifest["phases"] == [48, 68] and manifest["samples"] == 72
    assert [line["sources"]["web"]["tokens"] > 0 for line in lines(unbroken)[8:]] == [False, True]
