"""Build one rank of any world on this machine: `train.py CONFIG --check --build`.

A fake process group stands for the other ranks, and the meta device for memory: an impossible plan
fails here, instead of after hours in a queue.
"""

from __future__ import annotations

from dataclasses import replace

from kempner.config.option import ConfigError
from kempner.extensions.planner.memory import GIB, estimate_memory, one_replica
from kempner.parallel.layout import build_layout
from kempner.train.sections import RunConfig


def build_without_memory(cfg: RunConfig, world_size: int, per_node: int) -> str:
    """Build model and optimizer of rank 0, without values; returns a description of its contents.
    Raises ConfigError if they cannot be built."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from kempner.optim.build import build_optimizer
    from kempner.parallel.build import plan_model

    _, ranks, near = one_replica(cfg, world_size, per_node)
    # Its collectives return at once; on the meta device they have no data to bring.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        layout = build_layout(cfg.distributed, ranks, near, "cpu")
        # None of these affects sharding: fp8 and overlap need the GPU, compiling takes seconds.
        train = replace(cfg.train, fp8="none", compile=False)
        distributed = replace(cfg.distributed, overlap=())
        model = plan_model(cfg.model, layout, train, distributed, cfg.lora)
        build_optimizer(model, cfg.optimizer)
    except (ValueError, RuntimeError, AssertionError, NotImplementedError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"the model cannot be built for {world_size} rank{'s' * (world_size > 1)}: {what}"
        ) from error
    finally:
        dist.destroy_process_group()
    parameters = sum(
        (p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters()
    )
    needs = estimate_memory(cfg, world_size, per_node)
    axes = " x ".join(f"{name} {n}" for name, n in layout.sizes._asdict().items() if n > 1)
    return (
        f"built as rank 0 of {world_size:,}: {axes}; {parameters:,} of "
        f"{cfg.model.count_parameters():,} parameters; the planner estimates "
        f"{needs.peak / GIB:.1f} GiB"
    )
