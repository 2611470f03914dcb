"""The planner: its count of memory beside measured peaks, what it proposes, and a rank of a large
world that is built here."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.planner import measured
from kempner.extensions.planner.cost import (
    host_offload_bytes,
    model_flops_utilisation,
    network_bytes,
    step_seconds,
)
from kempner.extensions.planner.gpus import GPUS
from kempner.extensions.planner.memory import (
    FP32,
    GIB,
    block_activation_bytes,
    estimate_memory,
    memory_peaks,
    optimizer_state,
)
from kempner.extensions.planner.out_of_memory import memory_advice
from kempner.extensions.planner.search import best_candidates, changed_by, lever_changes, why_none
from kempner.model.attention import Visible
from kempner.model.decoder import Decoder
from kempner.optim.build import build_optimizer
from kempner.optim.config import STATE
from kempner.parallel import context
from kempner.parallel.layout import axis_sizes
from kempner.train.configure import check_world, load_config
from kempner.train.sections import BUDGETS, RunConfig
from tests import zygote
from tests.conftest import ROOT

SMALL = (
    "--data.dataset_path=fake:", "--model.vocab_size=2048", "--model.n_layers=6",
    "--model.dim=128", "--model.n_heads=4", "--model.n_kv_heads=2", "--model.ffn_dim=384",
    "--model.max_seq_len=128", "--train.seq_len=128", "--train.global_batch=8",
)  # fmt: skip
SEVEN = str(ROOT / "configs/train/7b.toml")


def small(*words: str) -> RunConfig:
    return load_config([], [*SMALL, *words])


def test_sharding_divides_the_state_and_replicas_do_not() -> None:
    sharded, copied = (
        estimate_memory(load_config([SEVEN], [f"--distributed.dp_replicate={n}"]), 16, 8).parts
        for n in (1, 2)
    )
    parameters = load_config([SEVEN], []).model.count_parameters()
    assert sharded["weights"] == 4 * parameters / 16 and copied["weights"] == 4 * parameters / 8
    assert sharded["optimizer"] == 2 * sharded["weights"]


def test_traffic_of_fsdp_and_of_replicas() -> None:
    """Of 7 B on two nodes, 1024 sequences a step, two a pass of each rank."""
    cfg = load_config([SEVEN], ["--distributed.nodes_per_fsdp_group=1"])
    count, passes = cfg.model.count_parameters(), 1024 / (2 * 16)
    gathers, again, reduces, replicas = network_bytes(cfg, 16, 8)
    assert gathers.size == pytest.approx(passes * 2 * count * 7 / 8) and gathers.within
    assert again.size == gathers.size
    assert reduces.size == pytest.approx(passes * 4 * count * 7 / 8) and reduces.within
    assert replicas.size == pytest.approx(2 * 4 * count / 8 / 2) and not replicas.within


def test_experts_that_stay_where_they_are_are_not_gathered() -> None:
    cfg = load_config([str(ROOT / "configs/scale/moe-30b-2nodes.toml")], [])
    experts = 48 * 3 * 128 * 2048 * 768
    others = cfg.model.count_parameters() - experts
    gathers, _, _, replicas, tokens = network_bytes(cfg, 16, 8)
    assert gathers.size == pytest.approx(1024 / (2 * 16) * 2 * others * 7 / 8)
    assert replicas.size == pytest.approx(2 * 4 * (others + experts) / 8 / 2)
    assert tokens.what.startswith("expert parallel") and tokens.within
    spare = replace(cfg, experts=replace(cfg.experts, spare=0.25))
    assert network_bytes(spare, 16, 8)[-1].size == pytest.approx(1.25 * tokens.size)
    more, plain = (estimate_memory(each, 16, 8).peak for each in (spare, cfg))
    assert plain < more < 1.25 * plain


PASSES = 1024 / (2 * 16)
LEVERS = {
    "distributed.sync_once=true": {"gathered": 1, "scattered": 2},
    "distributed.reshard_after_forward=false": {"gathered": PASSES, "scattered": 2 * PASSES},
    "distributed.reduce_dtype=bf16": {"gathered": 2 * PASSES, "scattered": PASSES},
    "optimizer.cpu_offload=true": {"gathered": 2 * PASSES, "update": 8 * 16 / 15},
    "distributed.fsdp_cpu_offload=true": {
        "weights and": 6 * PASSES * 16 / 15,
        "update": 8 * 16 / 15,
    },
}


@pytest.mark.parametrize("lever", LEVERS)
def test_what_a_lever_sends(lever: str) -> None:
    """In gathers of all weights in bf16, of 16 ranks; what is copied to the host is a rank's share
    of them."""
    cfg = load_config([SEVEN], [f"--{lever}"])
    one = 2 * cfg.model.count_parameters() * 15 / 16
    for what, often in LEVERS[lever].items():
        sent = [each for each in network_bytes(cfg, 16, 8) if what in each.what]
        share = 1 / 16 if sent[0].bus else 1
        assert sum(each.size for each in sent) == pytest.approx(often * one * share), what


ROUNDS = ("--lowcomm.replicas=2", "--lowcomm.interval=50", "--train.max_steps=500",
          "--checkpoint.interval=500", "--eval.interval=0")  # fmt: skip


def test_a_replica_has_its_share_and_copies_for_the_outer_step() -> None:
    """Of 7 B in two replicas of a node each: what one of them needs alone, and what it sends to the
    other once in 50 steps."""
    one = load_config([SEVEN], ["--train.global_batch=512", "--train.global_batch_tokens=none"])
    two = load_config([SEVEN], [*ROUNDS])
    count = two.model.count_parameters()
    parts, alone = estimate_memory(two, 16, 8).parts, estimate_memory(one, 8, 8).parts
    assert parts.pop("anchors, outer momentum") == 8 * count / 8 and parts == alone
    *within, between = network_bytes(two, 16, 8)
    assert within == network_bytes(one, 8, 8)
    assert between.size == pytest.approx(4 * count / 8 / 50)
    assert not between.within and not between.hidden
    codes = ["--lowcomm.compress=linear", "--lowcomm.raw=[]", "--lowcomm.feedback=0.9"]
    coded = load_config([SEVEN], [*ROUNDS, *codes, "--lowcomm.fragments=2", "--lowcomm.tau=5"])
    assert estimate_memory(coded, 16, 8).parts["anchors, outer momentum"] == 12 * count / 8
    sent = network_bytes(coded, 16, 8)[-1]
    assert sent.size == pytest.approx(between.size / 8) and sent.hidden
    # Changes in flight are there while a step has its activations: fp32, or with codes of 4 bits
    # those of this replica, and of both as they arrive.
    late = load_config([SEVEN], [*ROUNDS, "--lowcomm.tau=5"])
    peaks = [estimate_memory(cfg, 16, 8) for cfg in (two, late, coded)]
    assert peaks[1].peak - peaks[0].peak == pytest.approx(4 * count / 8)
    assert peaks[2].parts["changes in flight"] == pytest.approx(3 * count / 8 / 2 / 2)
    found = best_candidates(two, 16, 8, GPUS["H100"], check_world, 1)[0]
    assert not check_world(load_config([SEVEN], [*ROUNDS, *found.words.split()]), 16, 8)


def test_islands_gather_among_themselves() -> None:
    cfg = load_config([SEVEN], ["--distributed.reshard_island=8"])
    first, again = (each for each in network_bytes(cfg, 16, 8) if "gathered" in each.what)
    assert not first.within and again.within
    assert again.size == pytest.approx(first.size * (7 / 8) / (15 / 16))


def test_what_is_offloaded_is_not_on_the_gpu() -> None:
    plain, state, everything, activations = (
        estimate_memory(load_config([SEVEN], ["--train.recompute=none", *words]), 8, 8).parts
        for words in (
            [],
            ["--optimizer.cpu_offload"],
            ["--distributed.fsdp_cpu_offload"],
            ["--train.offload_activations=3"],
        )
    )
    assert state["optimizer"] == 0 < plain["optimizer"] and state["weights"] == plain["weights"]
    assert everything["optimizer"] == everything["weights"] == 0
    assert activations["activations"] == pytest.approx(plain["activations"] * 4 / 32, rel=0.2)


def test_the_size_of_ep_is_a_proposal_of_its_own() -> None:
    """It is no axis of the mesh: with the same mesh it is another combination all the same."""
    cfg = load_config([str(ROOT / "configs/scale/moe-30b-2nodes.toml")], [])
    found = lever_changes(cfg, {"distributed.ep": 2, "distributed.dp_shard": -1}, 16, 8)
    assert found == {"distributed.ep": 2}


def test_every_axis_divides_what_it_cuts() -> None:
    cfg = load_config([SEVEN], ["--train.recompute=full"])
    plain = estimate_memory(cfg, 1, 1).parts
    for axis in ("tp", "cp", "pp", "dp_shard"):
        two = replace(cfg, distributed=replace(cfg.distributed, **{axis: 2}))
        assert estimate_memory(two, 2, 2).parts["weights"] == plain["weights"] / 2, axis
        activations = estimate_memory(two, 2, 2).parts["activations"] / plain["activations"]
        assert activations == pytest.approx(0.5 if axis in ("tp", "cp") else 1.0, rel=0.01), axis
    both = replace(cfg, distributed=replace(cfg.distributed, tp=2, cp=2, pp=2))
    sent = {each.what.partition(":")[0]: each for each in network_bytes(both, 16, 8)}
    assert sent.keys() == {"FSDP", "tensor parallel", "context parallel", "pipeline"}
    layers, tokens, often = 32 / 2, 4_194_304 / 2, 3  # with recomputation
    stream = tokens / 2 * 4096 * 2
    assert sent["tensor parallel"].size == 4 * often * layers * stream / 2


def test_a_pipeline_has_two_buffers_for_each_micro_batch_and_stage() -> None:
    """Of 70 B in four stages on each of four ranks; the first and last rank need fewer."""

    def buffers(*words: str) -> float:
        cfg = load_config([str(ROOT / "configs/scale/70b-32nodes-pp.toml")], [*words])
        return estimate_memory(cfg, 256, 8).parts.get("pipeline buffers", 0.0)

    one = 8192 * 8192 * 2  # bytes of the activations of a micro-batch between two stages
    tokens = "--train.global_batch_tokens"
    assert buffers() == 2 * 4 * 8 * one
    assert buffers(f"{tokens}={4 * 4 * 1024 * 1024}") == 2 * 4 * 32 * one
    # One stage on each of two ranks: one kind of buffer, and outputs of the two under way.
    two = ("--distributed.pp=2", "--distributed.pp_stages_per_rank=1")
    assert buffers(*two) == (4 + 2) * one
    none = ("--distributed.pp=1", "--distributed.pp_stages_per_rank=1")
    assert buffers(*none) == 0.0


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 4), (1, 8)])
def test_an_exchange_for_heads_sends_what_is_counted(
    tp: int, cp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four key-value heads: with eight ranks two have the same."""
    words = [f"--distributed.{axis}" for axis in (f"tp={tp}", f"cp={cp}", "cp_method=ulysses")]
    words += ["--model.n_kv_heads=4", "--train.micro_batch=1", "--train.seq_len=64"]
    cfg = load_config([SEVEN], [*words, "--train.global_batch_tokens=64"])
    sent: list[int] = []

    def exchange(output: torch.Tensor, x: torch.Tensor, group: object) -> None:
        sent.append(x.numel())
        output.copy_(x)

    monkeypatch.setattr(context.dist, "all_to_all_single", exchange)
    group: Any = SimpleNamespace(size=lambda: cp)
    heads, kv_heads, width = 32 // tp, 4 // tp, 128
    q, k, v = (torch.zeros(1, n, 64 // cp, width) for n in (heads, kv_heads, kv_heads))
    q.requires_grad_()
    context.ulysses_attention(q, k, v, Visible(None), group).sum().backward()
    traffic = {each.what: each for each in network_bytes(cfg, tp * cp, 8)}
    counted = traffic["context parallel: heads"]
    assert counted.size == 32 * 2 * sum(sent) * (cp - 1) / cp  # blocks, bytes of bf16
    assert counted.messages == 32 * len(sent) and not counted.hidden


def test_the_way_to_share_a_sequence_is_a_proposal_of_its_own() -> None:
    """The exchange has a faster kernel than the ring, and within a node its wait is short."""
    words = ["--distributed.cp_method=ring"]
    cfg = load_config([str(ROOT / "configs/scale/7b-128k.toml")], words)
    best = best_candidates(cfg, 8, 8, GPUS["H100"], check_world)[0]
    assert best.overrides == {"distributed.cp_method": "ulysses"}


def test_a_configuration_that_allows_no_change_is_a_proposal() -> None:
    cfg = small("--train.micro_batch=1", "--distributed.dp_replicate=1", "--distributed.dp_shard=1")

    def check(other: RunConfig, world_size: int, per_node: int) -> list[str]:
        return [] if other == cfg else ["refused"]

    assert [each.overrides for each in best_candidates(cfg, 1, 1, GPUS["H100"], check)] == [{}]
    assert why_none(cfg, 1, 1, check) == "use more GPUs, or a smaller model"


def test_nobody_is_promised_60_percent() -> None:
    """Of the peak, by products alone; copies, norms, loss and update move bytes."""
    node, gpu = load_config([str(ROOT / "configs/scale/7b-1node.toml")], []), GPUS["H100"]
    time = step_seconds(node, 8, 8, gpu)
    least, most = (
        model_flops_utilisation(node, 8, step, gpu) for step in (time.slowest, time.fastest)
    )
    assert least < 0.43 < most < 0.6  # by hand, from the rates of single kernels
    cfg = load_config([SEVEN], [])
    for each in best_candidates(cfg, 16, 8, gpu, check_world):
        assert model_flops_utilisation(cfg, 16, each.time.step, gpu) < 0.6


def test_what_moves_bytes_takes_time() -> None:
    """On one GPU a step costs 2 bytes a parameter in copies, and each of its passes 10; FSDP, which
    offloading needs, 46 a pass. An update costs 32 and less."""
    gpu, count = GPUS["H200"], load_config([SEVEN], []).model.count_parameters()

    def seconds(part: str, *words: str) -> float:
        cfg = load_config([SEVEN], ["--train.global_batch_tokens=65536", *words])
        return step_seconds(cfg, 1, 1, gpu).parts[part]

    one = count / (0.73 * gpu.memory)
    assert seconds("copies") == pytest.approx((2 + 8 * 10) * one, rel=0.01)
    halves = seconds("copies", "--train.micro_batch=1")
    assert halves == pytest.approx((2 + 16 * 10) * one, rel=0.01)
    sharded = seconds("copies", "--distributed.fsdp_cpu_offload")
    assert sharded == pytest.approx(8 * 46 * one, rel=0.01)
    assert seconds("update") == pytest.approx(32 * one)
    small = ("--train.weights=bf16", "--optimizer.moments=bf16")
    assert seconds("update", *small) == pytest.approx(16 * one)
    assert seconds("attention", "--data.document_mask") > 1.5 * seconds("attention")
    assert seconds("products", "--train.recompute=full") > 1.3 * seconds("products")


def test_what_fp8_saves() -> None:
    """Twice the peak for the matrices of the blocks that have a multiple of 16 on both sides; and
    10 bytes for each number that goes into them or comes back. The output layer stays."""
    gpu = GPUS["H100"]

    def parts(*words: str) -> dict[str, float]:
        cfg = load_config([SEVEN], ["--train.global_batch_tokens=65536", *words])
        return step_seconds(cfg, 1, 1, gpu).parts

    fp8, layer = "--train.fp8=tensorwise", 4 * 2 * 4096 + 3 * (4096 + 11008)
    plain, eight, rows = parts(), parts(fp8), parts("--train.fp8=rowwise")
    assert eight.keys() - plain.keys() == {"fp8's casts"}
    assert 0.5 * plain["products"] < eight["products"] < 0.6 * plain["products"]
    assert eight["products"] < rows["products"] < 0.8 * plain["products"]
    casts = 10 * 65536 * 32 * layer / (0.73 * gpu.memory)
    assert eight["fp8's casts"] == pytest.approx(casts)
    assert sum(plain.values()) / 1.6 < sum(eight.values()) < sum(plain.values()) / 1.1
    odd = "--model.ffn_dim=11001"  # two thirds of the block
    assert parts(fp8, odd)["products"] > 0.8 * parts(odd)["products"]
    experts = ("--model.n_experts=4", "--model.experts_per_token=2")
    assert parts(fp8, *experts)["products"] > 0.8 * parts(*experts)["products"]


IN_BF16 = "--train.weights=bf16 --optimizer.moments=bf16"


@pytest.mark.parametrize(
    ("words", "gib"),
    [
        ("--train.micro_batch=1", 130.18),
        (f"{IN_BF16} --train.micro_batch=2", 96.39),
        (f"{IN_BF16} --train.micro_batch=4", 129.22),
        ("--train.micro_batch=1 --train.fp8=tensorwise", 125.49),
        (f"{IN_BF16} --train.micro_batch=2 --train.fp8=tensorwise", 87.02),
        (f"{IN_BF16} --train.micro_batch=4 --train.fp8=tensorwise", 110.48),
    ],
)
def test_peaks_of_an_h200(words: str, gib: float) -> None:
    """As measured with torch 2.11; docs/reference/benchmarks.md has the runs."""
    cfg = load_config([SEVEN], ["--train.global_batch_tokens=32768", *words.split()])
    assert estimate_memory(cfg, 1, 1).peak / 2**30 == pytest.approx(gib, rel=0.003)


def test_gathers_in_8_bits_are_half_the_bytes() -> None:
    """Of the matrices that are multiplied so; embedding, output and norms are not."""

    def planned(fp8: str) -> tuple[float, float, float, float]:
        cfg = load_config([SEVEN], [f"--train.fp8={fp8}"])
        gathers = network_bytes(cfg, 16, 8)
        memory = {each.moment: each for each in memory_peaks(cfg, 16, 8, True)}
        kept = memory["backward pass of the last block"].parts["gathered weights"]
        time = step_seconds(cfg, 16, 8, GPUS["H100"])
        return gathers[0].size, gathers[1].size, kept, time.parts["copies"]

    first, again, kept, copies = planned("tensorwise")
    eight_first, eight_again, eight_kept, eight_copies = planned("tensorwise_gather")
    tables = 2 * 32000 * 4096 / 6_738_415_616
    expected = pytest.approx(0.5 + 0.5 * tables, rel=1e-3)
    assert eight_first / first == expected == eight_again / again
    assert eight_kept / kept == pytest.approx(0.5, rel=1e-3)
    assert eight_copies < copies
    alone = load_config([SEVEN], ["--train.fp8=tensorwise_gather"])
    same = load_config([SEVEN], ["--train.fp8=tensorwise"])
    assert estimate_memory(alone, 1, 1) == estimate_memory(same, 1, 1)


def test_what_it_proposes_fits_is_accepted_and_is_faster() -> None:
    cfg = load_config([SEVEN], [])
    found = best_candidates(cfg, 16, 8, GPUS["H100"], check_world)
    assert len(found) == 3
    for each in found:
        other = load_config([SEVEN], each.words.split())
        assert other == changed_by(cfg, each.overrides) and not check_world(other, 16, 8)
        assert estimate_memory(other, 16, 8).peak == each.memory.peak < GPUS["H100"].usable
    steps = [each.time.step for each in found]
    assert steps == sorted(steps) and steps[0] < step_seconds(cfg, 16, 8, GPUS["H100"]).step
    # Nothing fits 7 B on one GPU of 44 GiB: 16 bytes a parameter are 100 GiB.
    assert not best_candidates(cfg, 1, 1, GPUS["L40S"], check_world)


def test_offloading_must_fit_the_host_and_a_search_does_not_depend_on_where_it_begins() -> None:
    """A million tokens on 16 GPUs: what the blocks keep is terabytes of a node."""
    long = ("--train.seq_len=1048576", "--model.max_seq_len=1048576",
            "--train.global_batch_tokens=16777216", "--train.micro_batch=1")  # fmt: skip
    cfg = load_config([SEVEN], long)
    all_kept = load_config([SEVEN], [*long, "--train.offload_activations=2", "--distributed.cp=4"])
    assert host_offload_bytes(cfg, 16, 8) == 0.0
    numbers = 2 * 16.0625 * 4096 * (1048576 / 4) * 32  # of a rank
    assert host_offload_bytes(all_kept, 16, 8) == pytest.approx(8 * numbers, rel=0.02)
    found = best_candidates(cfg, 16, 8, GPUS["H200"], check_world)
    for each in found:
        assert host_offload_bytes(changed_by(cfg, each.overrides), 16, 8) <= 900 * GIB
    again = best_candidates(changed_by(cfg, found[0].overrides), 16, 8, GPUS["H200"], check_world)
    assert [each.time.step for each in again] == [each.time.step for each in found]
    without = best_candidates(cfg, 16, 8, GPUS["H200"], check_world, host=0.0)
    assert not any("train.offload_activations" in each.overrides for each in without)


def test_proposals_differ() -> None:
    found = best_candidates(load_config([SEVEN], []), 16, 8, GPUS["H100"], check_world)
    assert len({(round(each.time.step, 2), round(each.memory.peak / GIB)) for each in found}) == 3


@pytest.mark.parametrize(
    "words",
    ["", "--train.micro_batch=4", "--train.global_batch=64",
     "--train.global_batch=96 --train.micro_batch=48"],
)  # fmt: skip
def test_no_step_that_is_shorter_than_the_proposals_is_left_out(words: str) -> None:
    """Steps of a small model take milliseconds. The configuration's own micro-batch is a choice,
    also if it is unset, or no power of two."""
    files = [str(ROOT / "configs/train/quickstart.toml")]
    cfg = load_config(files, ["--data.dataset_path=fake:", *words.split()])
    found = best_candidates(cfg, 1, 1, GPUS["H100"], check_world)
    own = step_seconds(cfg, 1, 1, GPUS["H100"]).step
    assert len(found) == 3
    assert any(not each.overrides for each in found) or found[-1].time.step < own


def test_the_word_at_out_of_memory_needs_a_tenth_less() -> None:
    cfg = load_config([SEVEN], ["--train.recompute=none", "--train.micro_batch=4"])
    told = memory_advice(cfg, 8, 8, check_world)
    found = re.search(r"estimates ([\d.]+) GiB.*; try (.*) \(([\d.]+) GiB\)", told)
    assert found, told
    other = load_config([SEVEN], ["--train.recompute=none", *found[2].split()])
    assert float(found[3]) < 0.9 * float(found[1]) + 0.1
    assert estimate_memory(other, 8, 8).peak < 0.9 * estimate_memory(cfg, 8, 8).peak


def test_the_word_at_out_of_memory_does_not_try_all_meshes_of_a_large_world() -> None:
    checks = []

    def check(*args: Any) -> list[str]:
        checks.append(args)
        return check_world(*args)

    cfg = load_config([SEVEN], ["--train.recompute=none", "--train.micro_batch=4"])
    assert "; try --" in memory_advice(cfg, 128, 8, check)
    assert len(checks) < 500


def command(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return zygote.run(
        [sys.executable, program, *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_plan_prints_the_parts_and_the_overrides() -> None:
    done = command("scripts/plan.py", SEVEN, "--nodes", "2", "--gpu=H200", "--fabric=roce-200")
    assert done.returncode == 0, done.stderr
    assert "6,738,415,616 parameters on 2 nodes x 8 H200" in done.stdout
    assert "optimizer" in done.stdout and "FSDP: gradients, scattered" in done.stdout
    assert "  copies" in done.stdout and "; roce-200 between nodes)" in done.stdout
    line = r"estimated step: ([\d.]+) to ([\d.]+) s, MFU \d\d% to \d\d% \(dense, several nodes: "
    found = re.search(line + r"published figures are\n  ([\d.]+) to ([\d.]+) times", done.stdout)
    assert found, done.stdout
    fastest, slowest, least, most = map(float, found.groups())
    assert fastest / least == pytest.approx(slowest / most, rel=0.01)
    assert "--distributed.sync_once=true" in done.stdout  # there is room for it
    assert "for saves in the memory of a node: 37.7 GiB; 862.3 are free" in done.stdout
    narrow = command("scripts/plan.py", SEVEN, "--nodes=2", "--gpu=H200", "--host-memory=30")
    assert "37.7 GiB; over by 7.7: each save goes in waves" in narrow.stdout
    fp8 = command("scripts/plan.py", SEVEN, "--train.fp8=rowwise", "--gpu=A100")
    assert fp8.returncode == 2 and "A100 does not multiply 8-bit floats" in fp8.stderr
    huge = command("scripts/plan.py", SEVEN, "--nodes=99999999999999999999", "--gpus-per-node=1025")
    assert huge.returncode == 2 and huge.stderr.count("a whole number from 1 to 1") == 2
    # There is room, but 24 ranks.
    three = command("scripts/plan.py", SEVEN, "--nodes=3", "--train.global_batch=48")
    assert "warning: train.global_batch = 48 has no effect: " in three.stderr
    why = "do not divide by 24 ranks x micro_batch 1 = 24; give a multiple of 24 sequences"
    assert three.returncode == 1 and why in three.stdout.splitlines()[-1], three
    small = command("scripts/plan.py", SEVEN, "--gpus-per-node=1", "--gpu=L40S")
    assert small.returncode == 1 and "none: use more GPUs, or a smaller model" in small.stdout
    tiny = command("scripts/plan.py", "--model.dim=64", "--gpus-per-node=1", "--gpu=h100")
    assert tiny.returncode == 0 and " 0.00 " not in tiny.stdout, tiny.stdout
    wrong = command(
        "scripts/plan.py", SEVEN, "--gpu=H1000", "--fabric=ib-900", "--train.max_step=5"
    )
    assert wrong.returncode == 2 and "--fabric=ib-900: is not known; give one of" in wrong.stderr
    assert "give one of A100, " in wrong.stderr and "--train.max_steps?" in wrong.stderr


def test_planning_needs_neither_data_nor_packages_nor_a_file() -> None:
    packages = ("--train.attention=fa3", "--train.fp8=tensorwise_gather")
    done = command("scripts/plan.py", "--model.dim=256", "--gpus-per-node=1", *packages)
    assert done.returncode == 0 and "parameters on 1 node x 1 H100" in done.stdout, done.stderr
    fabric = command("scripts/plan.py", SEVEN, "--fabric=ib-400", "--data.dataset_path=")
    assert fabric.returncode == 2 and fabric.stderr.count("error:") == 1
    assert "--fabric=ib-400: is the network between nodes, and --nodes is 1" in fabric.stderr
    (few,) = check_world(load_config([SEVEN], ["--distributed.tp=2"]), 1, 1)
    assert "the world of 1 rank (" in few


def test_70b_is_built_as_one_of_1024_ranks() -> None:
    words = ("--data.dataset_path=fake:", "--eval.interval=0", "--check", "--build")
    batch = "--train.global_batch_tokens=8388608"
    size = ("--nodes", "128", "--gpus-per-node", "8")
    done = command("scripts/train.py", "configs/train/70b.toml", batch, *words, *size)
    assert done.returncode == 0, done.stderr
    assert "built as rank 0 of 1,024: " in done.stderr
    held = int(re.search(r"; ([\d,]+) of 70,553,706,496", done.stderr)[1].replace(",", ""))  # type: ignore[index]
    assert held == pytest.approx(70_553_706_496 / 1024, rel=0.01)
    assert "[model]" in done.stdout, "--check prints the configuration"


def test_a_model_that_cannot_be_built_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kempner.config.option import ConfigError
    from kempner.extensions.planner.build import build_without_memory
    from kempner.parallel import shard

    def fails(*given: object, **named: object) -> None:
        raise ValueError("4 heads do not divide by 3")

    monkeypatch.setattr(shard, "shard_model", fails)
    with pytest.raises(ConfigError, match=r"cannot be built for 4 ranks: .* 4 heads"):
        build_without_memory(small("--train.global_batch=8"), 4, 4)


MEASURED = [
    (),
    ("--train.recompute=full", "--train.micro_batch=2"),
    ("--distributed.sync_once", "--train.micro_batch=2"),
    ("--model.post_norms",),
]


@pytest.mark.parametrize("words", MEASURED)
def test_the_estimate_is_within_a_tenth_of_the_peak(
    one_process: None, words: tuple[str, ...]
) -> None:
    cfg = small(*words)
    assert estimate_memory(cfg, 1, 1, gpu=False).peak == pytest.approx(measured(cfg), rel=0.1)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("name", STATE)
def test_the_state_of_every_rule_is_what_the_optimizer_keeps(
    one_process: None, name: str, moments: str
) -> None:
    words = (f"--optimizer.name={name}", f"--optimizer.moments={moments}")
    cfg = small(*words, "--schedule.name=constant")
    model = Decoder(cfg.model)
    optimizer = build_optimizer(model, cfg.optimizer)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    kept = [x for p in model.parameters() for x in optimizer.state[p].values() if x.ndim]
    norms = 4 * 4 * cfg.model.dim * 6  # which Muon leaves to AdamW, and the planner does not count
    found = sum(x.nbytes for x in kept)
    assert optimizer_state(cfg) == pytest.approx(found, abs=norms if name == "muon" else 0)


def test_recomputation_by_need_on_a_gpu() -> None:
    """Of what auto can become, the fastest that fits; a budget lies between none and full."""
    from kempner.extensions.planner.recompute import planned_choices, with_choice

    cfg = load_config([SEVEN], ["--train.recompute=auto"])
    found = planned_choices(cfg, 8, 8)
    assert [values["recompute"] for values, _ in found] == ["none", *BUDGETS, "full"]
    needs = [size for _, size in found]
    assert needs == sorted(needs, reverse=True)
    for values, size in found:
        assert with_choice(cfg, 8, 8, size).train.recompute == values["recompute"]
    assert with_choice(cfg, 8, 8, needs[-1] / 2).train.recompute == "full"
    eager = planned_choices(load_config([SEVEN], ["--train.compile=false"]), 8, 8)
    assert [values["recompute_every"] for values, _ in eager] == [1, 1, 4, 2, 1]
    times = [
        step_seconds(load_config([SEVEN], [f"--train.recompute={values['recompute']}"]), 8, 8,
                     GPUS["H100"]).step for values, _ in found
    ]  # fmt: skip
    assert times == sorted(times)


def test_a_compiled_block_keeps_what_is_counted() -> None:
    """As torch's partitioner divides it, on a CPU as on a GPU: 4 D, q, k, v, the output of
    attention, and three of SwiGLU's inner width."""
    words = ["--model.dim=64", "--model.n_layers=1", "--model.n_heads=4", "--model.n_kv_heads=2",
             "--model.ffn_dim=176", "--train.seq_len=256", "--model.max_seq_len=256",
             "--train.global_batch=1", "--train.compile"]  # fmt: skip
    cfg = load_config([], [*words, "--data.dataset_path=fake:"])
    model, kept = Decoder(cfg.model), dict[int, int]()
    known = {p.data_ptr() for p in (*model.parameters(), *model.buffers())}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x.nbytes
        return x

    block = torch.compile(model.blocks[0], backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        block(torch.randn(1, 256, 64, requires_grad=True), model.rope[:, :256], Visible(None))
    axes = axis_sizes(cfg.distributed, 1, 1)
    planned, _ = block_activation_bytes(cfg, axes, 256, FP32, gpu=True)
    assert sum(kept.values()) == pytest.approx(planned, rel=0.03)
