"""Do the sizes make the world, and who is whose neighbour in it? And the arithmetic in the message
when they do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from kempner.config.loading import load_config_files
from kempner.config.option import ConfigError
from kempner.model.loss import LOSS_TILE, cross_entropy
from kempner.parallel.build import plan_model
from kempner.parallel.config import DistributedConfig
from kempner.parallel.layout import Axes, Layout, axis_sizes, build_layout
from kempner.parallel.tensor import VocabularyLoss
from kempner.train.sections import RunConfig


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "expected"),
    [
        (1, -1, 1, (1, 1)),
        (1, -1, 8, (1, 8)),  # FSDP, the default
        (2, -1, 8, (2, 4)),  # HSDP
        (2, 4, 8, (2, 4)),
        (8, 1, 8, (8, 1)),  # plain data parallel
        (8, -1, 8, (8, 1)),
        (-1, 4, 8, (2, 4)),  # HSDP on any number of hosts
        (-1, 1, 8, (8, 1)),
    ],
)
def test_sizes_multiply_to_the_world(
    replicate: int, shard: int, world: int, expected: tuple[int, int]
) -> None:
    cfg = DistributedConfig(dp_replicate=replicate, dp_shard=shard)
    assert axis_sizes(cfg, world, 4) == Axes(1, *expected)
    assert axis_sizes(cfg, world, 4).data_ranks == world


@pytest.mark.parametrize(
    ("cfg", "world", "expected"),
    [
        ({"tp": 4}, 8, Axes(shard=2, tp=4)),
        ({"tp": 8}, 8, Axes(tp=8)),
        ({"cp": 2, "tp": 2, "dp_replicate": 2}, 16, Axes(replicate=2, shard=2, cp=2, tp=2)),
        ({"pp": 2, "cp": 2, "tp": 2}, 16, Axes(2, 1, 2, 2, 2)),
        ({"tp": 2, "dp_shard": 2, "dp_replicate": -1}, 16, Axes(replicate=4, shard=2, tp=2)),
        ({"tp": 2, "nodes_per_fsdp_group": 2}, 32, Axes(replicate=4, shard=4, tp=2)),
        ({"ep": 4, "cp": 2}, 8, Axes(shard=4, cp=2)),
    ],
)
def test_data_parallelism_takes_the_ranks_that_the_other_axes_leave(
    cfg: dict[str, int], world: int, expected: Axes
) -> None:
    assert axis_sizes(DistributedConfig(**cfg), world, 4) == expected


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        ({"tp": 3}, "dp_replicate 1 x dp_shard rest x tp 3 does not make the world of 8 ranks (1 x "
                    "2 x 3 = 6)"),
        ({"tp": 16}, "(1 x 1 x 16 = 16); choose sizes whose product is 8"),
        ({"pp": 2, "dp_shard": 8}, "(2 x 1 x 8 = 16)"),
        ({"ep": 3}, "distributed.ep = 3: must divide dp_shard 8 x cp 1 = 8"),
        ({"tp": 3, "nodes_per_fsdp_group": 1}, "= 4 ranks are not divisible by cp 1 x tp 3 = 3"),
    ],
)  # fmt: skip
def test_axes_that_do_not_fit_are_shown_with_the_arithmetic(
    cfg: dict[str, int], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        axis_sizes(DistributedConfig(**cfg), 8, 4)
    (problem,) = error.value.problems
    assert words in problem


@contextmanager
def rank_of(world: int, rank: int) -> Iterator[None]:
    """A process group in which nothing is ever sent."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def ranks(mesh: DeviceMesh | None) -> Any:
    assert mesh is not None
    return mesh.mesh.tolist()


def test_who_is_whose_neighbour() -> None:
    """32 ranks, 2 along each axis: rank 22 is at (1, 0, 1, 1, 0)."""
    cfg = DistributedConfig(pp=2, dp_replicate=2, cp=2, tp=2, ep=2)
    with rank_of(32, 22):
        layout = build_layout(cfg, 32, 8, "cpu")
        assert layout.at == Axes(1, 0, 1, 1, 0)
        assert ranks(layout.tp) == [22, 23]
        assert ranks(layout.cp) == [20, 22]
        assert ranks(layout.pp) == [6, 22]
        assert ranks(layout.parameter_mesh) == [[16, 18, 20, 22], [24, 26, 28, 30]]
        assert ranks(layout.ep) == [20, 22]
        assert ranks(layout.expert_parameter_mesh) == [[18, 22], [26, 30]]
        assert len(layout.groups) == 4 + 3 + 5
    places = [Layout(Axes(2, 2, 2, 2, 2), rank, layout.mesh) for rank in range(32)]
    assert [place.data_rank for place in places] == [rank % 16 // 4 for rank in range(32)]
    assert {place.data_ranks for place in places} == {4}


def test_an_axis_of_one_rank_is_none() -> None:
    with rank_of(4, 3):
        layout = build_layout(DistributedConfig(), 4, 8, "cpu")
        assert (layout.pp, layout.cp, layout.tp, layout.ep) == (None,) * 4
        assert layout.expert_parameter_mesh == layout.parameter_mesh == layout.mesh
        assert ranks(layout.mesh) == [0, 1, 2, 3]


def test_what_tensor_parallel_ranks_all_hold_counts_once() -> None:
    loss = {"loss": torch.tensor(3.0), "bad": torch.tensor(torch.inf)}
    held = [Layout(Axes(shard=2, tp=3), rank, None).once(loss) for rank in range(6)]  # type: ignore[arg-type]
    assert sum(each["loss"] for each in held) == 6.0  # of the two data ranks
    assert not any(each["bad"].isfinite() for each in held)


@pytest.mark.parametrize(
    ("axes", "placements", "copies"),
    [
        ({}, [Shard(0), Replicate()], 2),  # a norm: each of the two tp ranks has it
        ({}, [Shard(0), Shard(1)], 1),
        ({"dp_replicate": 2}, [Replicate(), Shard(0), Shard(1)], 2),
        ({"pp": 2}, [Shard(0), Replicate()], 2),  # the other stage has other parameters
    ],
)
def test_how_many_ranks_hold_the_same_part(
    axes: dict[str, int], placements: list[Any], copies: int
) -> None:
    with rank_of(8, 5):
        layout = build_layout(DistributedConfig(tp=2, **axes), 8, 8, "cpu")
        names = layout.mesh.mesh_dim_names or ()
        mesh = layout.mesh[tuple(name for name in names if name != "pp")]
        tensor = DTensor.from_local(torch.zeros(4, 4), mesh, placements, run_check=False)
        assert layout.copies(tensor) == copies
        assert layout.copies(torch.zeros(4)) == 8 // axes.get("pp", 1)


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "arithmetic"),
    [
        (2, 2, 8, "2 x 2 = 4"),
        (1, 4, 1, "1 x 4 = 4"),
        (3, -1, 8, "3 x 2 = 6"),
        (8, -1, 4, "8 x 1 = 8"),
        (-1, 3, 8, "2 x 3 = 6"),
    ],
)
def test_sizes_that_do_not_fit_are_shown_with_the_arithmetic(
    replicate: int, shard: int, world: int, arithmetic: str
) -> None:
    with pytest.raises(ConfigError) as error:
        axis_sizes(DistributedConfig(dp_replicate=replicate, dp_shard=shard), world, 4)
    (problem,) = error.value.problems
    assert arithmetic in problem and f"product is {world}" in problem and "dp_shard=-1" in problem


@pytest.mark.parametrize(
    "wrong",
    [
        {"dp_shard": 0},
        {"dp_shard": -2},
        {"dp_replicate": 0},
    ],
)
def test_sizes_that_no_world_has_are_named(wrong: dict[str, int]) -> None:
    ((name, value),) = wrong.items()
    (problem,) = DistributedConfig(**wrong).problems()
    assert problem.startswith(f"distributed.{name} = {value}: ")


def test_the_default_has_no_problem() -> None:
    assert DistributedConfig().problems() == []


@pytest.mark.parametrize(("nodes", "expected"), [(1, (4, 8)), (2, (2, 16)), (4, (1, 32))])
def test_a_copy_of_the_weights_on_so_many_nodes(nodes: int, expected: tuple[int, int]) -> None:
    """32 ranks on nodes of 8: the configuration names no number of hosts."""
    assert axis_sizes(DistributedConfig(nodes_per_fsdp_group=nodes), 32, 8) == Axes(1, *expected)


def test_nodes_that_do_not_divide_are_named() -> None:
    with pytest.raises(ConfigError) as error:
        axis_sizes(DistributedConfig(nodes_per_fsdp_group=3), 32, 8)
    (problem,) = error.value.problems
    assert "nodes_per_fsdp_group 3 x 8 ranks a node" in problem and "1 x 24 = 24" in problem


@pytest.mark.parametrize(
    "wrong",
    [
        {"dp_shard": -1, "dp_replicate": -1},
        {"nodes_per_fsdp_group": 2, "dp_shard": 4},
        {"nodes_per_fsdp_group": 2, "dp_replicate": 4},
    ],
)
def test_sizes_that_contradict_each_other(wrong: dict[str, int]) -> None:
    (problem,) = DistributedConfig(**wrong).problems()
    assert "distributed." in problem and ("only one" in problem or "leave both out" in problem)


def test_ranks_cut_the_loss_into_the_same_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is a message between ranks that have 4 and 3 rows of a vocabulary of 7."""
    monkeypatch.setattr("kempner.model.loss.CHUNK_LOGITS", 3 * 4 * LOSS_TILE)
    sizes: dict[int, list[int]] = {0: [], 1: []}
    for rank, seen in sizes.items():

        def over_all(_: Any, total: Tensor, known: Tensor, seen: Any = seen) -> tuple[Tensor, ...]:
            seen.append(len(total))
            return total, known

        monkeypatch.setattr(VocabularyLoss, "_over_all_ranks", over_all)
        with rank_of(2, rank):
            layout = build_layout(DistributedConfig(tp=2), 2, 2, "cpu")
            assert layout.tp is not None
            weight = distribute_tensor(torch.randn(7, 8), layout.tp, [Shard(0)], src_data_rank=None)
            loss, targets = VocabularyLoss(cross_entropy, layout.tp), torch.zeros(1000).long()
            loss(torch.randn(1000, 8), weight, targets)
    assert sizes == {0: [768, 232], 1: [768, 232]}


def test_all_blocks_have_the_groups_of_one_island() -> None:
    """Its own, and those of the ranks with the same part in other islands; the watchdog sets their
    timeout, too."""
    words = ["--distributed.reshard_island=2", "--model.n_layers=5", "--data.dataset_path=fake:"]
    cfg = load_config_files(RunConfig, [], words)
    with rank_of(8, 5):
        layout = build_layout(cfg.distributed, 8, 8, "cpu")
        before = layout.groups
        plan_model(cfg.model, layout, cfg.train, cfg.distributed)
        new = {*layout.groups} - {*before}
        assert new == {*dist.distributed_c10d._world.pg_map} - {*before}
        assert sorted(map(dist.get_process_group_ranks, new)) == [[1, 3, 5, 7], [4, 5]]
