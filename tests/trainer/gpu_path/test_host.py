"""What the host does before and beside the GPUs: what is refused before one is asked for, which
variables reach which program, and that nobody asks for CUDA before a fork."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kempner.config.option import ConfigError
from kempner.extensions.rl.engines import vllm_engine
from kempner.train.configure import ALLOCATOR, load_config, set_allocator
from tests.conftest import ROOT, clean_env

DATA = "--data.dataset_path=fake:"
RING = ["--distributed.cp=2", "--distributed.cp_method=ring"]


def problems(*words: str) -> str:
    try:
        load_config([], [DATA, "--model.vocab_size=64", *words])
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
    engine = vllm_engine.vllm_environment("secret")
    assert {name: engine[name] for name in ALLOCATOR if name in engine} == asked
    set_allocator()
    found = {name: os.environ[name] for name in ALLOCATOR if name in os.environ}
    assert found == asked or (not asked and found == {ALLOCATOR[0]: "expandable_segments:True"})
    assert bool(found)


def test_no_script_sets_the_allocator() -> None:
    """It would reach the engines and any program of run.sh."""
    scripts = (ROOT / "scripts/slurm").rglob("*.sh")
    assert [path.name for path in scripts if "ALLOC_CONF" in path.read_text()] == []


# --- Forks ----------------------------------------------------------------------------------------

# What forks, and why it may: a process that has asked for CUDA has no child that can use it.
FORKS = {
    "jobs/preflight/allreduce.py": "asks for CUDA in the child alone, see below",
    "jobs/program/start.py": "imports no torch",
    "extensions/rl/environments/sandbox/worker.py": "imports no torch",
    "jobs/report/page/write.py": "imports no torch",
}


def test_what_forks_is_named_here() -> None:
    words = ("os.fork(", 'get_context("fork")')
    source = ROOT / "src/kempner"
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if any(word in path.read_text() for word in words)
    }
    assert found == FORKS.keys()


def python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean_env(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_what_forks_without_torch() -> None:
    names = [
        f"kempner.{path.removesuffix('.py').replace('/', '.')}"
        for path, why in FORKS.items()
        if why == "imports no torch"
    ]
    # The orchestrator starts the workers of rewards.
    names += [
        "kempner.extensions.rl.orchestrate.orchestrator",
        "kempner.extensions.rl.environments.sandbox.scorer",
    ]
    python(f"import sys, {', '.join(names)}\nassert 'torch' not in sys.modules")


def test_preflight_does_not_ask_for_cuda_before_it_forks() -> None:
    """torch then refuses CUDA in every measurement, and each node is called faulty."""
    python("""if True:
        import os, torch
        from kempner.jobs.preflight import allreduce, task
        asked = []
        def count():
            asked.append(os.getpid())
            return 0
        for name in ("_cuda_getDeviceCount", "_cuda_init"):
            setattr(torch._C, name, count)
        assert torch.cuda._is_compiled()
        def measure(connected):
            connected()
            torch.cuda.is_available()
            return {"asked": len(asked), "bad": torch.cuda._is_in_bad_fork()}
        task.describe_node(0)
        assert os.getpid() not in asked, "CUDA was asked before the fork"
        assert allreduce.run_in_child(measure, 60.0, 60.0) == {"asked": 1, "bad": False}
        torch.cuda.is_available()
        assert os.getpid() in asked  # that this test sees it
    """)
