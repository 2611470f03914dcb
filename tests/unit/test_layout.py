"""Do the sizes make the world? And the arithmetic in the message when they do not."""

from __future__ import annotations

import pytest

from kempner.config.option import ConfigError
from kempner.parallel.config import DistributedConfig
from kempner.parallel.layout import sizes


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
    assert sizes(cfg, world, 4) == expected
    assert sizes(cfg, world, 4).data_ranks == world


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
        sizes(DistributedConfig(dp_replicate=replicate, dp_shard=shard), world, 4)
    (problem,) = error.value.problems
    assert arithmetic in problem and f"product is {world}" in problem and "dp_shard=-1" in problem


@pytest.mark.parametrize(
    "wrong",
    [{"dp_shard": 0}, {"dp_shard": -2}, {"dp_replicate": 0}, {"tp": 2}, {"cp": 2}, {"ep": 4}],
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
    assert sizes(DistributedConfig(nodes_per_fsdp_group=nodes), 32, 8) == expected


def test_nodes_that_do_not_divide_are_named() -> None:
    with pytest.raises(ConfigError) as error:
        sizes(DistributedConfig(nodes_per_fsdp_group=3), 32, 8)
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
