"""Levers of speed: on two ranks, each beside a run without it; and what is refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from kempner.config.loading import load_config_files
from kempner.config.option import ConfigError, config_schema
from kempner.parallel.build import plan_model
from kempner.parallel.config import DistributedConfig
from kempner.parallel.layout import build_layout
from kempner.parallel.overlap import FSDP_SWITCHES
from kempner.train import levers
from kempner.train.configure import check_config, check_world, count_replicas, load_config
from kempner.train.levers import SPEED_LEVERS, flash_problem
from kempner.train.resilience.save_notes import warn_of_job
from kempner.train.sections import RunConfig
from tests import zygote
from tests.conftest import ROOT, clean_env

SOAK = pytest.mark.soak


def two_ranks(folder: Path, case: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.trainer.gpu_path.two_ranks", str(folder), case]
    done = zygote.run(command, cwd=ROOT, env=clean_env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # gloo may speak first
    return found


@pytest.mark.parametrize(
    "case", ["one row", pytest.param("two rows", marks=SOAK), pytest.param("recompute", marks=SOAK)]
)
def test_each_message_of_tensor_parallelism_has_its_product(tmp_path: Path, case: str) -> None:
    found = two_ranks(tmp_path, case)
    both = {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2}
    again = {"fused_all_gather_matmul": 4, "fused_matmul_reduce_scatter": 3}  # but the last one
    assert found["forward"] == both
    assert found["backward"] == (again if case == "recompute" else both)
    assert found["worst"] < 1e-6


def test_gathers_in_fp8_are_the_same_products(tmp_path: Path) -> None:
    """In fp32 a master is rounded to 8 bits once, before the gather or after it; and never in a
    stream that has not waited for the scales."""
    pytest.importorskip("torchao")
    found = two_ranks(tmp_path, "fp8")
    assert found["worst"] == 0 and found["in_fp8"] > 0.6 and not found["unsafe"]


@pytest.mark.skipif(
    not hasattr(FSDPModule, FSDP_SWITCHES["reduce"]), reason="this torch has no switch"
)
def test_reductions_by_a_group_of_their_own(tmp_path: Path) -> None:
    assert two_ranks(tmp_path, "reduce") == {"worst": 0.0, "apart": True}


@pytest.fixture
def with_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone, too, trains with it."""
    monkeypatch.setattr("kempner.parallel.build.is_alone", lambda *_: False)


@pytest.mark.skipif(
    not hasattr(FSDPModule, FSDP_SWITCHES["reduce"]), reason="this torch has no switch"
)
def test_the_watchdog_knows_the_new_group(one_process: None, with_fsdp: None) -> None:
    cfg = load_config_files(RunConfig, [], ["--distributed.overlap=['reduce']", *WORDS])
    layout = build_layout(cfg.distributed, 1, 1, "cpu")
    before = len(layout.groups)
    plan_model(cfg.model, layout, cfg.train, cfg.distributed)
    assert len(layout.groups) == before + 1


WORDS = ("--data.dataset_path=fake:", "--model.dim=32", "--model.n_layers=1", "--model.n_heads=2")


@pytest.mark.parametrize("name", ["symm_mem", "reduce", "tp"])
def test_what_this_torch_or_device_lacks(
    monkeypatch: pytest.MonkeyPatch, one_process: None, with_fsdp: None, name: str
) -> None:
    if name == "reduce" and hasattr(FSDPModule, FSDP_SWITCHES[name]):
        monkeypatch.delattr(FSDPModule, FSDP_SWITCHES[name])
    cfg = load_config_files(RunConfig, [], WORDS)
    layout = build_layout(cfg.distributed, 1, 1, "cpu")
    with pytest.raises(ConfigError, match=f"overlap: torch .* {name} on a cpu device; leave"):
        if name == "tp":
            from kempner.parallel.overlap import overlap_collectives

            overlap_collectives(layout.mesh)
        plan_model(cfg.model, layout, cfg.train, replace(cfg.distributed, overlap=(name,)))


REFUSED = {
    "attention=fa3 deterministic": "with train.deterministic: its backward pass sums in its own",
    "attention=fa3 dtype=fp32": "with train.dtype = fp32: it takes bf16; leave it at auto",
    "attention=fa3 device=cpu": "with distributed.device = cpu: it is for GPUs; leave it at auto",
    "overlap=['tp'] tp=2": "overlap: tp needs the compiler, which cuts the products; give --t",
    "overlap=['tp'] compile": "overlap: tp needs distributed.tp over 1, whose messages it hides; g",
    "overlap=['tp'] tp=2 compile device=cpu": "tp needs a GPU, and distributed.device is cpu; give",
    "overlap=['reduce','reduce']": "distributed.overlap: reduce is given twice; write it once",
    "overlap=['symm_mem'] device=cpu": "symm_mem needs a GPU, and distributed.device is cpu",
    "overlap=['tp','symm_mem'] tp=2 compile": "symm_mem needs all of symmetric memory, w",
    "overlap=['symm_mem'] reshard_island=2": "symm_mem needs gathers by the same ranks; lea",
    "overlap=['shared']": "overlap: shared needs distributed.ep over 1",
    "fp8=tensorwise_gather tp=2": "tensorwise_gather: not built for distributed.tp = 2; leave that",
    "fp8=tensorwise_gather reshard_island=2": "not built for distributed.reshard_island; le",
    "fp8=tensorwise_gather weights=bf16 dtype=bf16": "not built for train.weights = bf16; leave",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused_before_a_gpu_is_used(words: str) -> None:
    axes = {field.name for field in fields(DistributedConfig)}
    given = [
        f"--{'distributed' if word.partition('=')[0] in axes else 'train'}.{word}"
        for word in words.split()
    ]
    with pytest.raises(ConfigError) as error:
        load_config([], [*WORDS, *given])
    assert any(REFUSED[words] in problem for problem in error.value.problems), str(error.value)


@pytest.mark.parametrize("name", ["replay_every", "checksum_every"])
def test_messages_that_a_replay_looks_at(name: str) -> None:
    """It takes the place of FSDP's reduction from symmetric memory."""
    words = ["--distributed.overlap=['symm_mem']", f"--resilience.{name}=10"]
    with pytest.raises(ConfigError, match=f"symm_mem needs resilience.{name} unset, as it"):
        load_config([], [*WORDS, *words])


def test_messages_of_one_rank_alone_are_refused() -> None:
    cfg = load_config([], [*WORDS, "--distributed.overlap=['symm_mem']"])
    (problem,) = check_world(cfg, 1, 1)
    assert problem.startswith("distributed.overlap: symm_mem needs more than one rank")
    assert not check_world(cfg, 2, 2)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("fa3", "train.attention = fa3: its package, which has flash_attn_interface, is not"),
        ("fa4", "is not installed; run .venv/bin/pip install -c constraints.txt -e '.[flash]'"),
    ],
)
def test_a_package_is_needed_where_the_run_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str, text: str
) -> None:
    """Not on a login node, where --check warns; in a job the batch script's --check refuses."""
    words = ["--data.dataset_path=fake:", f"--train.attention={word}"]
    check = {"check": True, "build": False, "nodes": None, "gpus-per-node": None}
    monkeypatch.setattr(levers, "find_spec", lambda _: None)
    monkeypatch.setattr(levers, "gpu_on_the_bus", lambda: False)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    cfg = load_config([], words)
    assert not check_config(cfg, check)
    warn_of_job(cfg, None, count_replicas)
    assert (
        "; the nodes of a job may have what this host lacks" in (said := capsys.readouterr().err)
        and text in said
    )
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    (problem,) = check_config(cfg, check)
    assert text in problem
    monkeypatch.delenv("SLURMD_NODENAME")
    assert any(text in each for each in check_config(cfg, {**check, "check": False}))


def test_a_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention 4 is in a namespace that FlashAttention 2 may have, too."""
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    (tmp_path / "flash_attn/__init__.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.setattr(levers, "version", lambda _: "2.13.0+cu130")
    assert "flash_attn.cute.interface, is not installed" in str(flash_problem("fa4"))
    (tmp_path / "flash_attn/cute/interface.py").write_text("raise AssertionError")
    (tmp_path / "flash_attn_interface.py").write_text("raise AssertionError")
    importlib.invalidate_caches()
    assert flash_problem("fa4") is None and flash_problem("fa3") is None
    monkeypatch.setattr(levers, "version", lambda _: "2.9.0")
    assert flash_problem("fa3") == ("torch 2.9.0 has no way to it; install torch 2.11 or later")


def test_a_tuner_finds_options_with_their_values() -> None:
    options = {o.name: o for each in config_schema(RunConfig).values() for o in each.values()}
    for name, values in SPEED_LEVERS.items():
        assert options[name].default == values[0], name
        for value in values:
            options[name].convert(list(value) if isinstance(value, tuple) else value)
