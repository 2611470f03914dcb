"""What several of the unit tests need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kempner.jobs.ranks import placement, process_group


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    import torch
    import torch.distributed as dist

    world = placement.World(0, 0, 1, "single")
    process_group.start_process_group(
        world, torch.device("cpu"), tmp_path_factory.mktemp("start"), 60
    )
    yield
    dist.destroy_process_group()
