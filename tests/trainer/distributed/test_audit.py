"""A spare computes again what the ranks of a run have computed: with the same bits, or it says who
has computed others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kempner.jobs.records.event_reader import read_records
from kempner.jobs.records.faulty_host import broken_hosts
from kempner.jobs.records.run_history import load_history
from kempner.jobs.report.summary import summary_facts
from tests.conftest import ROOT, TINY, load_program, start_train
from tests.waiting import until

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


def findings(run: Path) -> list[dict[str, object]]:
    """Of audits, and faults."""
    records = read_records(run / "attempts.jsonl")
    return [each for each in records if each.get("event") in ("gpu", "fault")]


def change_record(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads((run / "audit.json").read_text())
    change(record)
    (run / "audit.json").write_text(json.dumps(record))


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
    assert not findings(run) and not (run / "REPLAY").exists()


@pytest.fixture(scope="module")
def wrong_rank(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose rank 1 is wrong between two checkpoints, which no replay sees."""
    faults = "flip of=product from=32 to=56 rank=1"
    path = tmp_path_factory.mktemp("wrong") / "run"
    return trained(path, f"--data.dataset_path={data_dir}", faults=faults)


@pytest.fixture
def wrong(wrong_rank: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(wrong_rank, tmp_path / "run", symlinks=True))


def test_a_rank_that_is_wrong_is_found(wrong: Path) -> None:
    """By hand the records of a run that has ended stay as they are."""
    before = summary_facts(load_history(wrong))
    out = audited(wrong, code=3)
    assert "step 5 of rank 0 on " in out and out.count(": equal, in ") == 1
    assert "wrong numbers in step 5 by one of rank 1 on " in out and " and the spare " in out
    assert "its own gradients of the weights had the norm " in out
    assert not (wrong / "REPLAY").exists() and not findings(wrong)
    assert summary_facts(load_history(wrong)) == before


def test_what_a_spare_finds_is_a_warning_of_the_run(wrong: Path) -> None:
    """It is no end of the attempt, no fault of a host, and no time of the run."""
    (wrong / "attempts.jsonl").write_text(
        "".join(
            line
            for line in (wrong / "attempts.jsonl").read_text().splitlines(keepends=True)
            if '"event": "end"' not in line
        )
    )
    before = load_history(wrong)
    spare = start_train(program=FAULTY_AUDITOR, KEMPNER_RUN_DIR=str(wrong))
    until(lambda: (wrong / "REPLAY").exists() or spare.poll() is not None)
    spare.kill()
    spare.communicate()
    assert (wrong / "REPLAY").read_text() == "1 0\n"
    (finding,) = findings(wrong)
    assert (finding["kind"], finding["answer"]) == ("numbers", "warn")
    after = load_history(wrong)
    assert after.attempts[0].device_warning.endswith(", twice")
    for name in ("state", "reason", "ended", "last_step"):
        assert getattr(after.attempts[0], name) == getattr(before.attempts[0], name)
    assert broken_hosts([finding]) == ((), "")


def test_a_spare_that_is_wrong_says_so(wrong: Path, tmp_path: Path) -> None:
    once = f"flip of=activation from=0 to=9999 once={tmp_path / 'once'}"
    assert "computes wrong numbers: it differs from itself: " in audited(wrong, 3, once)
    environment = {"KEMPNER_RUN_DIR": str(wrong), "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n3"}
    spare = start_train(program=FAULTY_AUDITOR, FAULTS=f"{once}2", **environment)
    out, err = spare.communicate(timeout=240)
    assert spare.returncode == 3, out + err
    assert (wrong / ".unfit-7-n3").exists() and not (wrong / "REPLAY").exists()


def test_a_spare_that_differs_from_two_hosts_doubts_itself(wrong: Path) -> None:
    """It agrees with itself."""
    change_record(wrong, lambda record: record["computed"][0].update(host="another"))
    out = audited(wrong, 3, "flip of=activation from=0 to=9999")
    assert "it differs from ranks on another, " in out and out.count("ERROR: ") == 3


def test_what_has_changed_meanwhile(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data are no fault of a device, retention deletes checkpoints, and a run that goes back
    replaces them."""
    audit = load_program("audit").main
    good = (wrong / "audit.json").read_text()

    def other_data(record: dict[str, Any]) -> None:
        for computed in record["computed"]:
            computed["batch"][0] += 1

    change_record(wrong, other_data)
    assert audited(wrong).count(": not compared: the data have changed") == 2
    manifest = wrong / "checkpoints/step_00000004/manifest.json"
    (wrong / "audit.json").write_text(good)
    manifest.write_text(manifest.read_text() + " ")
    assert "has been replaced: nothing is compared" in audited(wrong)
    shutil.rmtree(manifest.parent)
    assert "cannot read the checkpoint of step 4" in audited(wrong)
    change_record(wrong, lambda record: record.update(config="other"))
    assert audit([str(wrong)]) == 0
    assert "belongs to another configuration than" in capsys.readouterr().out
    (wrong / "audit.json").unlink()
    assert audit([str(wrong)]) == 0
    assert "a job with spares (KEMPNER_SPARES) writes it" in capsys.readouterr().out
    assert not findings(wrong)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(computed=[1]),
        lambda record: record.update(ranks=3),
        lambda record: record.update(checkpoint="four"),
        lambda record: record.update(format=99),
        lambda record: record["computed"][0].update(threads=0),
        lambda record: record["computed"][0].update(rows="AAAA"),
        lambda record: record["computed"][0].pop("batch"),
    ],
)
def test_a_damaged_record(
    wrong: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], object]
) -> None:
    change_record(wrong, change)
    assert load_program("audit").main([str(wrong)]) == 0
    (said,) = capsys.readouterr().out.splitlines()
    assert "cannot be read, or was written by another version: " in said


@pytest.mark.parametrize("text", ["[1]", "5", "null", "["])
def test_a_record_that_is_none(wrong: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (wrong / "audit.json").write_text(text)
    assert load_program("audit").main([str(wrong)]) == 0
    assert "cannot be read, or was written by another version: " in capsys.readouterr().out


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
