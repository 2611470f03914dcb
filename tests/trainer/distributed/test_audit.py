"""A spare computes again what the ranks of a run have computed: with the same bits, or it says who
has computed others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kempner.jobs.records.event_reader import read_records
from tests.conftest import ROOT, TINY, load_program, start_train, status

FAULTY_TRAINER = "tests/trainer/fault/faulty_train.py"
FAULTY_AUDITOR = "tests/trainer/fault/faulty_audit.py"
SETTINGS = (
    "--train.micro_batch=2",
    "--checkpoint.interval=4",
    "--resilience.replay_every=1000",
)
SOAK = pytest.mark.soak
EXPERTS = ("--model.n_experts=4", "--model.ffn_dim=16", "--model.router_bias")
BF16 = ("--train.dtype=bf16", "--train.weights=bf16")
AVERAGED = ("--optimizer.name=schedule_free", "--schedule.name=constant")


def trained(run: Path, *words: str, nproc: int = 2, faults: str = "") -> Path:
    """A run that has ended, of a job with a spare."""
    words = (*TINY, *SETTINGS, f"--run.dir={run}", *words)
    process = start_train(
        *words, nproc=nproc, program=FAULTY_TRAINER, FAULTS=faults, KEMPNER_IDLE="spare"
    )
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    return run


def audited(run: Path, code: int = 0, faults: str = "") -> str:
    process = start_train(str(run), program=FAULTY_AUDITOR, FAULTS=faults)
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, out + err
    return out


def corruption(run: Path) -> list[dict[str, object]]:
    records = read_records(run / "attempts.jsonl")
    return [each for each in records if each.get("kind") == "corruption"]


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of some 36 samples: the fifth step, of samples 32 to 39, is of two epochs."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "text.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(66)))
    program = [sys.executable, "scripts/prepare_data.py", folder, "--out", folder / "shards"]
    subprocess.run([*program, "--val-fraction", "0"], cwd=ROOT, check=True, capture_output=True)
    return folder / "shards"


@pytest.mark.parametrize(
    ("nproc", "words"),
    [
        (2, ("--data.document_mask",)),
        pytest.param(2, ("--data.document_mask", "--train.dtype=bf16"), marks=SOAK),
        pytest.param(1, ("--train.dtype=bf16",), marks=SOAK),
        pytest.param(2, ("--distributed.dp_replicate=2", *EXPERTS), marks=SOAK),
        pytest.param(4, ("--distributed.dp_replicate=2", *BF16), marks=SOAK),
        pytest.param(2, ("--distributed.sync_once", "--model.tie_embeddings", *BF16), marks=SOAK),
        pytest.param(2, ("--train.compile", "--train.dtype=bf16"), marks=SOAK),
        pytest.param(2, (*AVERAGED, "--train.recompute=full"), marks=SOAK),
    ],
)
def test_a_sound_run(small_data: Path, tmp_path: Path, nproc: int, words: tuple[str, ...]) -> None:
    """Each rank of the step after the last checkpoint but one, over the end of an epoch."""
    run = trained(tmp_path / "run", f"--data.dataset_path={small_data}", *words, nproc=nproc)
    out = audited(run)
    for rank in range(nproc):
        assert f"step 5 of rank {rank} on " in out
    assert out.count(": equal, in ") == nproc
    assert not corruption(run) and not (run / "REPLAY").exists()


@pytest.fixture(scope="module")
def wrong_rank(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose rank 1 is wrong between two checkpoints, which no replay sees."""
    faults = "flip of=product from=32 to=56 rank=1"
    path = tmp_path_factory.mktemp("wrong") / "run"
    return trained(path, f"--data.dataset_path={data_dir}", faults=faults)


@pytest.fixture
def wrong(wrong_rank: Path, tmp_path: Path) -> Path:
    assert not corruption(wrong_rank)
    return Path(shutil.copytree(wrong_rank, tmp_path / "run", symlinks=True))


def test_a_rank_that_is_wrong_is_found(wrong: Path) -> None:
    out = audited(wrong)
    assert "step 5 of rank 0 on " in out and out.count(": equal, in ") == 1
    (fault,) = corruption(wrong)
    assert (fault["ranks"], fault["hosts"], fault["step"], fault["attempt"]) == ([1], [], 4, 0)
    reason = str(fault["reason"])
    assert "by one of rank 1 on " in reason and "and the spare " in reason
    assert "its own gradients of the weights had the norm " in reason and reason in out
    assert not (wrong / "REPLAY").exists(), "the run has ended"
    assert status(wrong)["state"] == "done"


def test_a_spare_that_is_wrong_says_so(wrong: Path, tmp_path: Path) -> None:
    once = f"flip of=activation from=0 to=9999 once={tmp_path / 'once'}"
    assert "wrong numbers by the spare " in audited(wrong, code=1, faults=once)
    (fault,) = corruption(wrong)
    assert fault["ranks"] == fault["hosts"] == []


def test_a_spare_that_differs_from_two_hosts_doubts_itself(wrong: Path) -> None:
    """It agrees with itself."""
    records = json.loads((wrong / "audit.json").read_text())
    for record in records:
        record["computed"][0]["host"] = "another"
    (wrong / "audit.json").write_text(json.dumps(records))
    out = audited(wrong, code=1, faults="flip of=activation from=0 to=9999")
    assert "this device differs from ranks on another, " in out
    assert len(corruption(wrong)) == 2


def test_what_has_changed_meanwhile(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data are no fault of a device, and retention deletes checkpoints."""
    audit = load_program("audit").main
    records = json.loads((wrong / "audit.json").read_text())
    for computed in records[-1]["computed"]:
        computed["batch"][0] += 1
    (wrong / "audit.json").write_text(json.dumps(records))
    assert audited(wrong).count(": not compared: the data have changed") == 2
    shutil.rmtree(wrong / "checkpoints/step_00000004")
    assert audit([str(wrong)]) == 0
    (wrong / "audit.json").write_text("[")
    assert audit([str(wrong)]) == 0
    assert capsys.readouterr().out == "" and not corruption(wrong)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("distributed.tp = 1", "2"),
        ("lora.rank = 0", "4"),
        ('train.fp8 = "none"', '"tensorwise"'),
        ("resilience.replay_every = 1000", ""),
    ],
)
def test_a_run_that_one_device_cannot_compute(
    wrong: Path, capsys: pytest.CaptureFixture[str], key: str, value: str
) -> None:
    section, _, line = key.partition(".")
    name, _, _ = line.partition(" = ")
    text = (wrong / "config.toml").read_text()
    head, tail = text.split(f"[{section}]\n")
    assert line in tail
    there = f"{name} = {value}" if value else ""
    (wrong / "config.toml").write_text(f"{head}[{section}]\n{tail.replace(line, there, 1)}")
    assert load_program("audit").main([str(wrong)]) == 0
    (said,) = capsys.readouterr().out.splitlines()
    is_set = "set" if value else "unset"
    assert said.endswith(f"cannot do what a rank of this run does: {section}.{name} is {is_set}")


def test_a_directory_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit = load_program("audit").main
    for words, text in (([], "name a run"), ([str(tmp_path)], "it has no config.toml")):
        assert audit(words) == 2 and text in capsys.readouterr().err
