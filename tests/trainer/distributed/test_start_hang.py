"""A rank that hangs between the meeting of the ranks and the first step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import zygote
from tests.conftest import ROOT, clean_env

LIMIT_S = 20
WORDS = (
    "--model.vocab_size=64", "--model.dim=32", "--model.n_layers=1", "--model.n_heads=4",
    "--model.n_kv_heads=4", "--model.ffn_dim=32", "--train.seq_len=32", "--train.global_batch=2",
    "--data.dataset_path=fake:", "--eval.interval=0", f"--distributed.start_timeout={LIMIT_S}",
)  # fmt: skip


def start(
    run: Path, rank: int, fault: str, *words: str, per_node: int = 2
) -> subprocess.Popen[str]:
    """Without torchrun, which would wait for a stopped process."""
    names = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank % per_node}", "WORLD_SIZE": "2"}
    names["LOCAL_WORLD_SIZE"] = f"{per_node}"
    return zygote.Popen(
        [sys.executable, "tests/trainer/fault/faulty_train.py", *WORDS, f"--run.dir={run}", *words],
        cwd=ROOT,
        env=clean_env(**names, FAULTS=fault),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "place",
    [
        "kempner.train.parts:open_layout:before",
        pytest.param(
            "kempner.checkpoint.checkpointer:Checkpointer.__init__:before", marks=pytest.mark.soak
        ),
    ],
)
def test_a_rank_that_stops_in_the_start(tmp_path: Path, place: str, rank: int) -> None:
    """The other one names it, and ends."""
    run = tmp_path / "run"
    fault = f"kill at={place} signal=SIGSTOP rank={rank}"
    ranks = [start(run, number, fault) for number in (0, 1)]
    try:
        _, said = ranks[1 - rank].communicate(timeout=LIMIT_S + 120)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[1 - rank].returncode == 70, said
    reason = f"the start has stood still for {LIMIT_S} s; ranks that do not answer: [{rank}]"
    assert reason in said
    (fault_event,) = [
        event
        for path in (run / "attempts.jsonl", *run.glob("attempts/*.jsonl"))
        if path.exists()
        for event in map(json.loads, path.read_text().splitlines())
        if event["event"] == "fault"
    ]
    assert fault_event["kind"] == "hang" and fault_event["ranks"] == [rank]
    assert fault_event["reason"] == reason
    log = (run / f"logs/attempt-0/rank-{1 - rank}.log").read_text()
    assert f"rank {rank} does not answer" in log and "at the start in" in log


@pytest.mark.soak
def test_a_start_that_reads_on_goes_on(tmp_path: Path) -> None:
    """Here one rank alone, longer than the limit; the other one waits for it."""
    fault = f"read at=kempner.checkpoint.format.reader:read_wanted:before s={LIMIT_S + 10} rank=1"
    run = tmp_path / "run"
    for steps in (1, 2):
        ranks = [start(run, number, fault, f"--train.max_steps={steps}") for number in (0, 1)]
        said = [process.communicate(timeout=240) for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], said
    assert "continues after step 1" in said[0][0] + said[0][1]
