"""An idle spare's audit: it recomputes, from a checkpoint, what a rank of the run computed in the
first step after it. Loaded by scripts/audit.py alone.

The model is built as on rank 0 of the run, in a fake process group; whole weights replace what FSDP
would gather. So the kernels, shapes and order of the fingerprints are those of the run; only the
sums over ranks are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.testing._internal.distributed.fake_pg import FakeStore

from kempner.checkpoint.format.plan import local_part
from kempner.checkpoint.format.reader import read_into, stored_tensors
from kempner.data.batch import MicroBatch
from kempner.data.loader import TrainLoader
from kempner.jobs.ranks import own_device
from kempner.jobs.ranks.placement import World
from kempner.parallel.build import buffer_names, build_model, compute_dtype, parameter_names
from kempner.parallel.layout import build_layout
from kempner.train.integrity.fingerprint import Trace, Witness
from kempner.train.integrity.first_steps import kind_of_device
from kempner.train.parts import (
    expect_batches,
    open_data,
    open_mixture,
    open_objective,
    prepare_torch,
)
from kempner.train.progress import Progress
from kempner.train.sections import RunConfig, micro_batch
from kempner.train.step import StepSums, forward_backward


class _Place(NamedTuple):
    """The attributes of a run that the parts of a training read."""

    dir: Path
    world: World
    announce: Callable[[str], None]


class Share(NamedTuple):
    """A rank's part of a step."""

    batches: list[MicroBatch]
    step_tokens: int  # of all ranks
    names: Sequence[str]  # of the sources of data


class _FromWhole(DefaultAllGather):
    """FSDP2's all-gather of a parameter group, without other ranks."""

    def __init__(self, parts: list[Tensor]) -> None:
        self._parts = parts

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        ranks = group.size()
        # Row r is what rank r would send: its chunk of each parameter, with FSDP's padding.
        torch._chunk_cat(self._parts, 0, ranks, out=output_tensor.view(ranks, -1))


class Auditor:
    """A run's model on this device."""

    def __init__(
        self, cfg: RunConfig, record: dict[str, Any], announce: Callable[[str], None]
    ) -> None:
        """`record`: a first step of the run. One auditor per process."""
        # No memory trial is needed: recomputation yields the same bits.
        if cfg.train.recompute == "auto":
            cfg = replace(cfg, train=replace(cfg.train, recompute="full"))
        cfg = replace(
            cfg,
            # `overlap` only affects when messages are sent, and here there are none; the two below
            # are not part of a step.
            distributed=replace(cfg.distributed, overlap=()),
            eval=replace(cfg.eval, interval=0),
            profile=replace(cfg.profile, layers_interval=0),
        )
        self._cfg, self._ranks = cfg, record["ranks"]
        self._device = own_device.pick_device(cfg.distributed.device, 0)
        self.kind = kind_of_device(self._device)
        # The run's size, by which FSDP cuts the weights and the gradients.
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self._ranks)
        # Not as rank 0, which would write files into the run's directory.
        world = World(1, 0, self._ranks, "audit", record["per_node"])
        run: Any = _Place(Path(cfg.run.dir), world, announce)
        prepare_torch(cfg, run, self._device)
        self._layout = build_layout(
            cfg.distributed, self._ranks, record["per_node"], self._device.type
        )
        self._model = build_model(
            cfg.model, self._layout, cfg.train, cfg.distributed, experts=cfg.experts
        )
        self._objective = open_objective(cfg, self._layout, self._model, run, self._device)
        self._witness = Witness(self._model, cfg.model.n_layers)
        self.places = self._witness.places
        self._targets = self._gather_from_whole()

    def _gather_from_whole(self) -> dict[str, Tensor]:
        """Let FSDP gather from whole weights; returns the tensors to be read, by name."""
        parameters = parameter_names(self._model)
        names = {p: name for name, p in parameters.items()}
        targets = {name: local_part(p.detach()) for name, p in parameters.items()}
        dtype = compute_dtype(self._cfg.train.dtype, self._device.type)
        modules: list[Any] = [m for m in self._model.modules() if isinstance(m, FSDPModule)]
        for module in modules if self._layout.sizes.shard > 1 else ():
            part = module._get_fsdp_state()._fsdp_param_group
            if part is None:  # its parameters are all in submodules
                continue
            whole = {
                names[each.sharded_param]: torch.empty(
                    each.sharded_param.shape, dtype=dtype, device=self._device
                )
                for each in part.fsdp_params
            }
            targets |= whole
            module.set_custom_all_gather(_FromWhole(list(whole.values())))
        return targets | buffer_names(self._model)

    def load(self, checkpoint: Path) -> None:
        """Read the weights that the step is computed with. Raises Damaged or OSError."""
        # The weights under model. may be averages; the optimizer then has those of the steps.
        trained = {*stored_tensors(checkpoint)}
        read_into(
            checkpoint,
            {
                own if (own := f"optim.{name}.weight") in trained else f"model.{name}": target
                for name, target in self._targets.items()
            },
        )

    def share(self, manifest: dict[str, Any], rank: int) -> Share:
        """Return what a rank computes in the step after a checkpoint."""
        cfg, ranks = self._cfg, self._ranks
        progress = Progress.of(manifest).plan(cfg)
        sources, _ = open_data(cfg, False)
        loader = TrainLoader(
            sources,
            open_mixture(cfg, sources, progress),
            stages=cfg.train.stages,
            rank=rank,
            world=ranks,
            micro=micro_batch(cfg.train, ranks, cfg.train.sequences),
            position=progress.samples,
            step=progress.step,
            prefetch=0,
            reset_positions=cfg.data.reset_positions,
            skip=progress.skip,
        )
        expect_batches(cfg, self._layout, self._model, progress.step)
        return Share(next(loader), loader.tokens, loader.names)

    def compute(self, share: Share) -> Tensor:
        """Return the fingerprints of such a step, without the sums over ranks."""
        # Shares of several ranks are computed in turn: their gradients must not add up.
        for parameter in self._model.parameters():
            parameter.grad = None
        trace, sums = Trace(), StepSums(share.names, self._device)
        with self._witness.into(trace):
            numbers = forward_backward(
                self._model, self._objective, share.batches, sums, share.step_tokens, None
            )
        assert isinstance(numbers, dict)
        parts = [numbers[name] for name in ("loss_sum", "tokens")]
        self._witness.finish(trace, [part for part in parts if isinstance(part, Tensor)])
        return self.comparable(trace.rows())

    def comparable(self, rows: Tensor) -> Tensor:
        """Return the rows that a rank computes alone."""
        return rows[rows[:, 0] != self.places.summed_gradient]
