"""Products of axes, each with the levers that large runs use: loss, every gradient, and the numbers
of several updates are those of the plain model in one process."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest

from tests import zygote
from tests.conftest import ROOT, clean_env

# Both ways of balancing, but for the auxiliary loss under cp, where it is refused; and z-losses,
# large enough to matter. Scores far apart: two that differ by a rounding error would be ranked
# otherwise on another mesh.
EXPERTS = [
    "--model.n_experts=4",
    "--model.ffn_dim=16",
    "--model.shared_experts=1",
    "--model.router_bias",
    "--model.router=sigmoid",
    "--model.init_std=0.1",
    "--model.router_z_loss=0.1",
]
AUXILIARY = "--model.aux_loss=0.1"
TP, CP, EP = "--distributed.tp=2", "--distributed.cp=2", "--distributed.ep=2"
PP = "--distributed.pp=2"
BUFFERS = ["--experts.spare=1", "--distributed.overlap=['shared']"]  # all rows find a place
COPIES = "--distributed.dp_replicate=2"
PRODUCTS = {  # on 4 ranks
    "dp2 x tp2": [TP, "--model.qk_norm", "--model.qkv_bias"],
    "dp2 x cp2": [CP],
    "dp2 x cp2 by ulysses": [CP, "--distributed.cp_method=ulysses", "--model.sliding_window=9"],
    "tp2 x cp2": [TP, CP, "--model.tie_embeddings"],
    "hsdp2 x tp2": [COPIES, TP],
    "ep2 x dp2": [EP, *EXPERTS, AUXILIARY],
    "ep2 x tp2": [EP, TP, *EXPERTS, AUXILIARY, *BUFFERS],
    "ep2 of dp1 x cp2": [EP, CP, COPIES, *EXPERTS],
    "experts, dp2 x tp2": [TP, *EXPERTS, AUXILIARY],
    "pp2 x dp2": [PP],
    "pp2 x tp2": [PP, TP],
    "pp2 x cp2": [PP, CP],
    "pp2 x ep2": [PP, EP, *EXPERTS, AUXILIARY],
    # All experts are on one rank of each pipeline, in its second stage and in its last.
    "pp2 x ep2, every second block": [
        PP,
        EP,
        "--distributed.pp_stages_per_rank=2",
        *EXPERTS,
        *BUFFERS,
        AUXILIARY,
        "--model.n_layers=4",
        "--model.moe_frequency=2",
        "--model.dense_ffn_dim=40",
    ],
}
CHUNK, COMPILE = "--train.loss_chunk=40", "--train.compile"
FULL, SELECTIVE = "--train.recompute=full", "--train.recompute=selective"
LEVERS = {
    "full": [FULL, CHUNK],
    "selective": [SELECTIVE, CHUNK],
    "compiled, full": [FULL, CHUNK, COMPILE],
    "compiled, selective": [SELECTIVE, CHUNK, COMPILE],
}
COMMON = ["--model.n_layers=2", "--train.micro_batch=4", "--train.z_loss=0.05"]
ALL = {f"{a}: {b}": [*PRODUCTS[a], *LEVERS[b]] for a, b in product(PRODUCTS, LEVERS)}
SOME = [  # soak has all
    "dp2 x tp2: compiled, selective",
    "ep2 x tp2: selective",
    "ep2 of dp1 x cp2: selective",
    "pp2 x ep2, every second block: selective",
]
FP8 = {"fp8": [TP, "--train.fp8=rowwise", "--model.ffn_dim=64", "--model.n_kv_heads=4"]}
with_fp8 = pytest.mark.skipif(not find_spec("torchao"), reason="torchao is not installed")


def world(
    cases: dict[str, list[str]], ranks: int, backend: str, updates: int = 20
) -> dict[str, Any]:
    """Of one world of so many ranks that go through all cases."""
    words = {name: [*COMMON, *case] for name, case in cases.items()}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    program = [
        "-m",
        "tests.trainer.distributed.gradients",
        json.dumps(words),
        str(updates),
        backend,
    ]
    done = zygote.run(
        [sys.executable, *launcher, *program],
        cwd=ROOT,
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def some() -> dict[str, Any]:
    """Compiled as far as the graphs of both passes, which then run as they are."""
    cases = {name: ALL[name] for name in SOME} | (FP8 if find_spec("torchao") else {})
    return world(cases, 4, "aot_eager", updates=6)


def check(found: dict[str, Any]) -> None:
    assert found["loss"] < 1e-5
    assert found["gradient"] < 1e-5, found["worst"]
    assert found["curve"] < 1e-5


@pytest.mark.parametrize("case", SOME)
def test_a_product_gives_the_numbers_of_one_process(some: dict[str, Any], case: str) -> None:
    check(some[case])


@with_fp8
def test_cut_matrices_multiply_in_fp8(some: dict[str, Any]) -> None:
    """Rounded, each part by scales of its own."""
    assert 1e-3 < some["fp8"]["gradient"] < 0.1


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("axes", PRODUCTS)
def test_a_product_with_every_lever(axes: str) -> None:
    cases = {f"{axes}: {lever}": ALL[f"{axes}: {lever}"] for lever in LEVERS}
    for found in world(cases, 4, "aot_eager").values():
        check(found)


@pytest.mark.soak
def test_what_inductor_compiles_gives_the_numbers_of_one_process() -> None:
    for found in world({name: ALL[name] for name in SOME}, 4, "inductor").values():
        check(found)


@pytest.mark.soak
def test_eight_ranks_give_the_numbers_of_one_process() -> None:
    """Copies, each of which is sharded and cut."""
    name = "hsdp2 x 2 x tp2"
    check(world({name: [COPIES, TP, *LEVERS["compiled, full"]]}, 8, "aot_eager")[name])
