"""configs/scale: each fits the machines that its first line names, in ranks, batch and memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kempner.extensions.planner.cost import network_bytes
from kempner.extensions.planner.gpus import GPUS
from kempner.extensions.planner.memory import GIB, estimate_memory
from kempner.parallel.layout import axis_sizes
from kempner.train.configure import check_world, load_config

FOLDER = Path(__file__).parents[3] / "configs/scale"
FILES = sorted(FOLDER.glob("*.toml"))
MACHINES = re.compile(r"# .* on (\d+) nodes? of (\d+) (\w+)[.:,]")
# All that have a model of their own; one shows every lever that saves memory.
SHIPPED = [
    path
    for path in sorted(FOLDER.parent.glob("[st][cr]a*/*.toml"))
    if path.stem not in ("sft", "sft-moe", "dpo", "7b-memory-tight")
]
# Replicas and shards, in the worlds that the files are for.
MESHES = {
    "7b-1node": (1, 8), "7b-2nodes": (2, 8), "7b-8nodes": (8, 8), "7b-32nodes": (32, 8),
    "13b-1node": (1, 8), "13b-2nodes": (2, 8), "13b-8nodes": (8, 8), "13b-32nodes": (32, 8),
    "7b-memory-tight": (1, 1), "7b-muon": (2, 8), "7b-32k": (1, 4), "7b-128k": (1, 1),
    "moe-30b-1node": (1, 8), "moe-30b-2nodes": (2, 8),
    "70b-2nodes": (1, 16), "70b-8nodes": (1, 64), "70b-32nodes": (4, 64),
    "70b-32nodes-pp": (8, 8),
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_configuration_fits_its_machines(path: Path) -> None:
    found = MACHINES.match(path.read_text().splitlines()[0])
    assert found, "the first line says for which machines it is"
    nodes, per_node, gpu = int(found[1]), int(found[2]), GPUS[found[3]]
    cfg = load_config([str(path)], [])
    world = nodes * per_node
    assert check_world(cfg, world, per_node) == []
    axes = axis_sizes(cfg.distributed, world, per_node)
    assert (axes.replicate, axes.shard) == MESHES[path.stem]
    needs = estimate_memory(cfg, world, per_node)
    assert needs.peak < gpu.usable, f"{needs.peak / GIB:.1f} GiB: {needs.parts}"
    # One copy of the weights spans nodes only where a node cannot hold it.
    spans = [each for each in network_bytes(cfg, world, per_node) if "FSDP" in each.what]
    assert all(each.within for each in spans) == (axes.shard <= per_node)


def test_experts_on_one_node_leave_room_for_an_uneven_router() -> None:
    """The planner counts the mean of the tokens."""
    cfg = load_config([str(FOLDER / "moe-30b-1node.toml")], [])
    assert estimate_memory(cfg, 8, 8).peak < GPUS["H100"].usable - 10 * GIB


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_nothing_is_computed_twice_that_fits(path: Path) -> None:
    """On 8 H100, or the machines that the first line names."""
    found = MACHINES.match(path.read_text().splitlines()[0]) or (None, 1, 8, "H100")
    world, per_node = int(found[1]) * int(found[2]), int(found[2])
    cfg = load_config([str(path)], [])
    if cfg.train.recompute != "none" and not cfg.train.offload_activations:
        all_kept = replace(cfg, train=replace(cfg.train, recompute="none"))
        assert estimate_memory(all_kept, world, per_node).peak > GPUS[found[3]].usable


def test_every_configuration_is_named_here() -> None:
    assert {path.stem for path in FILES} == MESHES.keys()
