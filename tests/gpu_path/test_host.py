"""What the host does before and beside the GPUs: what is refused before one is asked for, which
variables reach which program, and that nobody asks for CUDA before a fork."""

from __future__ import annotations

import os

import pytest

from kempner.config.loading import load
from kempner.config.option import ConfigError
from kempner.configure import ALLOCATOR, set_allocator
from kempner.rl import vllm_engine
from kempner.run import RunConfig
from tests.conftest import ROOT

DATA = "--data.dataset_path=fake:"
RING = ["--distributed.cp=2", "--distributed.cp_method=ring"]


def problems(*words: str) -> str:
    try:
        load(RunConfig, [], [DATA, "--model.vocab_size=64", *words])
    except ConfigError as error:
        return "\n".join(error.problems)
    return ""


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        (["--train.seq_len=1008"], True),
        (["--train.seq_len=1000"], False),
        (["--train.seq_len=1000", "--train.micro_batch=2"], True),
        (["--train.seq_len=1000", "--train.micro_batch=2", "--train.batch_ramp=[2,2,9]"], False),
        (["--train.seq_len=1008", *RING], False),
        (["--train.seq_len=1024", *RING], True),
    ],
)
def test_fp8_takes_a_multiple_of_16_tokens_a_pass(words: list[str], fits: bool) -> None:
    """_scaled_mm refuses others, in the first backward pass."""
    pytest.importorskip("torchao")
    refusal = "multiple of 16 tokens a pass"
    assert (refusal in problems("--train.fp8=rowwise", *words)) is not fits
    assert refusal not in problems(*words)


def test_the_ring_takes_heads_whose_width_is_a_multiple_of_8() -> None:
    narrow = ["--model.dim=48", "--model.n_heads=4", "--model.n_kv_heads=4"]  # of width 12
    assert "model.head_dim = 12: on a GPU" in problems(*RING, *narrow)
    assert "model.head_dim" not in problems(*RING, *narrow, "--distributed.device=cpu")
    assert "model.head_dim" not in problems(*RING, "--model.head_dim=16", *narrow)
    assert "model.head_dim" not in problems(*narrow)


# --- The environment ------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, *ALLOCATOR])
def test_the_trainer_sets_its_allocator_and_nobody_elses(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """vLLM's engines with several GPUs die with segments that grow; what the user has set stays,
    there too."""
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if given:
        monkeypatch.setenv(given, "backend:cudaMallocAsync")
    asked = {name: os.environ[name] for name in ALLOCATOR if name in os.environ}
    engine = vllm_engine.environment("secret")
    assert {name: engine[name] for name in ALLOCATOR if name in engine} == asked
    set_allocator()
    found = {name: os.environ[name] for name in ALLOCATOR if name in os.environ}
    assert found == asked or (not asked and found == {ALLOCATOR[0]: "expandable_segments:True"})
    assert bool(found)


def test_no_script_sets_the_allocator() -> None:
    """It would reach the engines and any program of run.sh."""
    scripts = (ROOT / "scripts/slurm").rglob("*.sh")
    assert [path.name for path in scripts if "ALLOC_CONF" in path.read_text()] == []
