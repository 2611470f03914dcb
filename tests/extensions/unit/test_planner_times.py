"""The planner's times: beside published figures, and what each part of them follows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import planner, published
from benchmarks.gpu_checks import planned_speed
from benchmarks.published import (
    CONSTANTS,
    Row,
    misfit,
    misfit_beside,
    print_verified,
    published_rows,
    spread_of,
)
from kempner.extensions.planner.cost import Time, network_bytes, step_seconds
from kempner.extensions.planner.gpus import FABRICS, GPUS, near_seconds
from kempner.extensions.planner.launches import EAGER_KERNELS
from kempner.extensions.planner.spread import ESTIMATE_SPREAD
from kempner.extensions.tune.verified import Entry, measured_by
from kempner.jobs.system.front_door import exit_code
from kempner.model.decoder import Decoder
from kempner.train.configure import load_config
from tests.conftest import ROOT

SEVEN = str(ROOT / "configs/train/7b.toml")
MOE = str(ROOT / "configs/scale/moe-30b-2nodes.toml")
H100 = GPUS["H100"]

all_rows = cache(published_rows)


def step(*words: str, file: str = SEVEN, ranks: int = 8) -> Time:
    return step_seconds(load_config([file], [*words]), ranks, 8, H100)


@pytest.mark.parametrize("fitted", [True, False], ids=["fitted", "checked"])
def test_three_quarters_of_what_others_published_are_within_15_percent(fitted: bool) -> None:
    """Also of the rows that no constant was fitted to."""
    rows = [row for row in all_rows() if row.fitted == fitted]
    assert len(rows) > 90 and sum(row.near for row in rows) >= 0.74 * len(rows)
    errors = sorted(abs(row.error) for row in rows)
    assert errors[len(rows) // 2] < 0.08


@pytest.mark.parametrize("kind", ESTIMATE_SPREAD)
def test_the_printed_range_is_that_of_the_published_figures(kind: str) -> None:
    assert spread_of(all_rows())[kind] == pytest.approx(ESTIMATE_SPREAD[kind], abs=0.03)


@pytest.mark.parametrize("name", CONSTANTS)
def test_no_constant_fits_much_better_elsewhere(name: str) -> None:
    """At 0.9 or 1.1 times its value the error of the rows that it was fitted to is not lower by
    more than a twentieth."""
    assert misfit(all_rows()) < 1.05 * min(misfit_beside(name, factor) for factor in (0.9, 1.1))


def test_the_tables_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planner.main(["--published"]) == 0
    text = capsys.readouterr().out
    assert text.count("torchtitan, 1D") == 6 and "fp8: 0.80 to 1.13 (44 rows)" in text
    marks = [line for line in text.partition("within")[0].splitlines() if " outside " in line]
    assert len(marks) == sum(not row.near for row in all_rows())
    monkeypatch.setattr(published, "CONSTANTS", ("RING", "H200 products"))
    assert planner.main(["--fit", "--verified"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:4]] == [
        ["RING", "0.8"],
        ["H200", "products"],
    ]


def median(rows: list[Row]) -> float:
    return sorted(row.error for row in rows)[len(rows) // 2]


def test_no_gpu_precision_or_axis_is_off_as_a_whole() -> None:
    """With ten rows or more: A100, H100, H200, fp8, tensor parallelism, compiled or not."""
    groups = {
        **{gpu: [row for row in all_rows() if row.gpu.name == gpu] for gpu in GPUS},
        "fp8": [row for row in all_rows() if row.kind == "fp8"],
        "tp": [row for row in all_rows() if row.cfg.distributed.tp > 1],
        "eager": [row for row in all_rows() if not row.cfg.train.compile],
        "large": [row for row in all_rows() if row.gpus >= 128],
    }
    tested = {name: median(rows) for name, rows in groups.items() if len(rows) >= 10}
    assert tested.keys() == {"A100", "H100", "H200", "fp8", "tp", "eager", "large"}
    assert {name: off for name, off in tested.items() if abs(off) > 0.08} == {}


@pytest.mark.parametrize("mib, us", [(2, 20.2), (8, 43.4), (32, 118.9), (128, 385.3)])
def test_messages_among_the_gpus_of_a_node(mib: int, us: float) -> None:
    """All-gathers among 8 H100: NVIDIA/Megatron-LM, pull request 5596."""
    found = near_seconds(H100, 7 / 8 * mib * 2**20, 1)
    assert found == pytest.approx(us * 1e-6, rel=0.15)


def test_a_node_receives_over_all_its_ranks() -> None:
    """FSDP over two nodes gathers at NVLink's rate with 400 Gb/s for each GPU; with tp 8 each of
    its groups has one GPU in a node."""
    sixteen = load_config([SEVEN], [])
    gathers = network_bytes(sixteen, 16, 8)[0]
    assert (gathers.nodes, gathers.ways, gathers.within) == (2, 8, False)
    cut = replace(sixteen, distributed=replace(sixteen.distributed, tp=8))
    gathers = network_bytes(cut, 16, 8)[0]
    assert (gathers.nodes, gathers.ways) == (2, 1)


def test_slow_networks_are_waited_for() -> None:
    cfg = load_config([SEVEN], ["--train.global_batch_tokens=262144"])
    steps = {
        name: step_seconds(cfg, 32, 8, H100._replace(fabric=name)).step
        for name in ("ib-800", "ib-400", "roce-200", "ethernet-100", "ethernet-25")
    }
    assert list(steps.values()) == sorted(steps.values()) and len(FABRICS) > len(steps)
    assert steps["ethernet-25"] > 3 * steps["ib-400"] > 2.9 * steps["ib-800"]
    near = step_seconds(cfg, 8, 8, H100._replace(fabric="ethernet-25"))
    assert near.step == step_seconds(cfg, 8, 8, H100).step, "one node has no network"


def test_small_models_wait_for_the_host() -> None:
    small = ("--data.dataset_path=fake:", "--model.dim=256", "--train.global_batch=8")
    eager, compiled, large = (
        step_seconds(load_config([], [*small, *words]), 1, 1, H100).parts
        for words in (
            ["--train.micro_batch=1"],
            ["--train.micro_batch=1", "--train.compile"],
            ["--model.dim=4096", "--model.n_heads=32"],
        )
    )
    assert eager["launches"] > 1.5 * compiled["launches"] > 0 and "launches" not in large


class Kernels(TorchDispatchMode):
    """Counts operations that launch a kernel: not views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += not (func.is_view or "detach" in str(func) or "unsafe_view" in str(func))
        return func(*args, **(kwargs or {}))


def test_the_kernels_of_a_block_are_counted() -> None:
    """A third block more than two."""
    shape, counts = load_config([], ["--data.dataset_path=fake:"]).model, []
    for layers in (2, 3):
        model = Decoder(replace(shape, n_layers=layers))
        with Kernels() as seen:
            y = model(torch.zeros(1, 8, dtype=torch.long))
            forward = seen.count
            y.float().sum().backward()
        counts.append((forward, seen.count - forward))
    (f2, b2), (f3, b3) = counts
    assert (f3 - f2, b3 - b2) == EAGER_KERNELS


def test_tensor_parallelism_is_exposed_unless_products_hide_it() -> None:
    words = ("--distributed.tp=8", "--train.micro_batch=4", "--train.global_batch=8",
             "--train.global_batch_tokens=none")  # fmt: skip
    beside, behind = step(*words), step(*words, "--train.compile", "--distributed.overlap=['tp']")
    assert 0.15 * beside.step < beside.exposed < 0.4 * beside.step
    assert behind.exposed < 0.6 * beside.exposed and behind.step < beside.step


def test_experts_with_few_rows_are_slow() -> None:
    """Tokens of one pass are shared by 128 experts; the ranks of ep bring theirs together."""
    batch = ("--train.global_batch_tokens=524288", "--distributed.nodes_per_fsdp_group=none")
    one, four = (
        step(
            f"--train.micro_batch={n}",
            "--train.seq_len=512",
            *batch,
            "--distributed.ep=1",
            file=MOE,
        )
        for n in (1, 4)
    )
    assert one.parts["products"] > 1.5 * four.parts["products"]
    spread = step("--train.micro_batch=1", "--train.seq_len=512", *batch, file=MOE)
    assert spread.parts["products"] < 0.7 * one.parts["products"]
    assert spread.exposed > one.exposed, "tokens travel"


def test_adapters_and_pipelines_take_their_time() -> None:
    cfg = load_config([SEVEN], ["--train.global_batch_tokens=262144"])
    cfg = replace(cfg, lora=replace(cfg.lora, rank=16))
    lora = step_seconds(cfg, 8, 8, H100).parts
    assert lora["adapters"] > 0.05 * lora["products"]
    bubble, stages = (
        step("--distributed.pp=4", "--train.micro_batch=1", "--train.global_batch=16",
             "--train.global_batch_tokens=none", f"--distributed.pp_stages_per_rank={n}")
        for n in (1, 2)
    )  # fmt: skip
    # Of 32 blocks the last of four stages has 8, and an output layer of 0.65 blocks besides.
    computed = bubble.compute - bubble.parts["waiting"]
    assert bubble.parts["waiting"] == pytest.approx((3 / 8 + 0.06) * computed, rel=0.02)
    assert stages.parts["waiting"] < 0.75 * bubble.parts["waiting"]


def test_what_a_gpu_check_compares_its_figure_with() -> None:
    cfg = load_config([SEVEN], ["--train.global_batch_tokens=65536"])
    found = planned_speed(cfg, 8, "NVIDIA H100 80GB HBM3")
    assert found == pytest.approx(65536 / step_seconds(cfg, 8, 8, H100).step)
    for device in ("NVIDIA H100 PCIe", "NVIDIA A40", "Tesla T4"):
        assert planned_speed(cfg, 8, device) is None


def test_cards_beside_the_estimates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "bash scripts/slurm/singlenode.sh configs/train/7b.toml --train.micro_batch=4 --bench"
    card = Entry("7b", "H100", 1, 8, words)
    print_verified(tmp_path)
    assert "no entries yet" in capsys.readouterr().out
    (tmp_path / "7b-h100.toml").write_text(card.text())
    facts = dict.fromkeys(("commit", "device", "driver", "torch", "cuda", "kempner"), "")
    measured = measured_by(facts, 6000.0, 0.3, 160.0)
    (tmp_path / "7b-twice.toml").write_text(card._replace(measured=measured).text())
    print_verified(tmp_path)
    _, nobody, twice, problem = capsys.readouterr().out.splitlines()
    assert nobody.split()[0] == "7b-h100" and nobody.count(" - ") + nobody.endswith(" -") == 4
    speed, memory = (int(word[:-1]) for word in twice.split() if word.endswith("%"))
    assert 60 < speed < 150 and -60 < memory < -40
    assert problem.startswith("7b-twice: memory_gib = 160.0: the planner says ")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--published", "extra"], "unrecognized arguments: extra"),
        (["--variants", "nonsense"], '"nonsense": unexpected argument'),
        (["--variants=--train.micro_batch=x"], "--train.micro_batch=x: must be an int"),
        (["--variants= 'half"], "No closing quotation"),
        (["one", "nothing.toml"], "nothing.toml: no such file"),
    ],
)
def test_wrong_words_of_the_benchmark(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(planner.main, words, "planner") == 2
    said = capsys.readouterr().err
    assert said.startswith("planner: error: ") and error in said and said.count("error:") == 1


def test_the_verified_figures_are_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(planner.main, ["--verified"], "planner") == 0
    assert "7b-h100" in capsys.readouterr().out
