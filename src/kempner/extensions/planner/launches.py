"""Time that the host needs to launch the kernels of a step: small models wait for it. No torch."""

from __future__ import annotations

from typing import NamedTuple

from kempner.extensions.planner.memory import forward_rows
from kempner.parallel.layout import Axes
from kempner.train.sections import RunConfig


class BlockKernels(NamedTuple):
    """Kernels of one block in its forward and its backward pass."""

    forward: int
    backward: int


# Counted by torch's dispatcher for a block on a CPU; a test compares them.
EAGER_KERNELS = BlockKernels(34, 61)
# Seven products, attention, and the compiler's fused kernels.
COMPILED_KERNELS = BlockKernels(14, 28)
LAUNCH_S = 6e-6  # host seconds per kernel, including autograd and Python
GAP = 1.2e-6  # seconds between two kernels that are queued on the GPU
FSDP_HOOKS = 3e-4  # host seconds for a block's gathers, copies and reduction, per pass


def kernels_of_step(cfg: RunConfig, axes: Axes) -> float:
    """Count the kernels of a rank's blocks in a step, including those that run again."""
    passes = cfg.train.sequences / (forward_rows(cfg, axes.data_ranks) * axes.data_ranks)
    block = COMPILED_KERNELS if cfg.train.compile else EAGER_KERNELS
    again = 0.0 if cfg.train.recompute == "none" else block.forward / cfg.train.recompute_every
    return passes * cfg.model.n_layers / axes.pp * (block.forward + block.backward + again)


def host_seconds(cfg: RunConfig, axes: Axes) -> float:
    """Seconds that a rank's host needs for a step."""
    passes = cfg.train.sequences / (forward_rows(cfg, axes.data_ranks) * axes.data_ranks)
    hooks = FSDP_HOOKS if axes.data_ranks * axes.cp > 1 else 0.0
    return LAUNCH_S * kernels_of_step(cfg, axes) + hooks * passes * cfg.model.n_layers / axes.pp
