"""Do the sizes make the world? And the arithmetic in the message when they do not."""

from __future__ import annotations

import pytest
from kempner.parallel.mesh import sizes

from kempner.config.option import ConfigError
from kempner.parallel.config import DistributedConfig


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "expected"),
    [
        (1, -1, 1, (1, 1)),
        (1, -1, 8, (1, 8)),  # FSDP, the default
        (2, -1, 8, (2, 4)),  # HSDP
        (2, 4, 8, (2, 4)),
        (8, 1, 8, (8, 1)),  # plain data parallel
        (8, -1, 8, (8, 1)),
    ],
)
def test_sizes_multiply_to_the_world(
    replicate: int, shard: int, world: int, expected: tuple[int, int]
) -> None:
    assert sizes(DistributedConfig(dp_replicate=replicate, dp_shard=shard), world) == expected


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "arithmetic"),
    [
        (2, 2, 8, "2 x 2 = 4"),
        (1, 4, 1, "1 x 4 = 4"),
        (3, -1, 8, "3 x 2 = 6"),
        (8, -1, 4, "8 x 1 = 8"),
    ],
)
def test_sizes_that_do_not_fit_are_shown_with_the_arithmetic(
    replicate: int, shard: int, world: int, arithmetic: str
) -> None:
    with pytest.raises(ConfigError) as error:
        sizes(DistributedConfig(dp_replicate=replicate, dp_shard=shard), world)
    (problem,) = error.value.problems
    assert arithmetic in problem and f"product is {world}" in problem and "dp_shard=-1" in problem


@pytest.mark.parametrize(
    "wrong", [{"dp_shard": 0}, {"dp_shard": -2}, {"tp": 2}, {"cp": 2}, {"ep": 4}]
)
def test_sizes_that_no_world_has_are_named(wrong: dict[str, int]) -> None:
    ((name, value),) = wrong.items()
    (problem,) = DistributedConfig(**wrong).problems()
    assert problem.startswith(f"distributed.{name} = {value}: ")


def test_the_default_has_no_problem() -> None:
    assert DistributedConfig().problems() == []
