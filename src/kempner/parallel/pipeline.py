"""Pipeline parallelism: each rank of an axis has some of the layers, and activations travel from
one to the next (GPipe, arXiv:1811.06965). The schedules are torch's own: 1F1B (PipeDream-Flush,
arXiv:2006.09503), and, with several stages a rank, interleaved 1F1B (arXiv:2104.04473).

    stage 0: embedding, blocks -> x [B, t, D] -> stage 1: blocks -> ... -> blocks, norm, loss

A rank's stages are one Decoder without the others' modules, whose forward runs one of them; the
names of the parameters stay. FSDP wraps it like a whole model.

Shapes: B rows, t tokens of this rank (of the row with cp, between the products with tp), D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from kempner.data.batch import MicroBatch
from kempner.model.attention import Documents
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder, apply_blocks
from kempner.model.moe import with_loss
from kempner.parallel.config import DistributedConfig
from kempner.parallel.context import own_tokens
from kempner.parallel.layout import Layout
from kempner.parallel.passes import LossOf


def split_blocks(cfg: ModelConfig, stages: int) -> list[range]:
    """Return the blocks of each stage, at least one. The output layer costs as much time as some
    blocks, so the last stage has fewer. The remainder goes to late stages: 1F1B keeps the
    activations of fewer passes there."""
    # By the weights that multiply a token: the output layer's over those of all blocks.
    output = cfg.vocab_size * cfg.dim / (cfg.count_active() - 2 * cfg.vocab_size * cfg.dim)
    share = cfg.n_layers * (1 + output) / stages
    last = round(share - cfg.n_layers * output)
    last = min(max(1, last), cfg.n_layers - (stages - 1)) if stages > 1 else cfg.n_layers
    parts, at = [], 0
    for stage in range(stages - 1):
        count = (cfg.n_layers - last - at) // (stages - 1 - stage)
        parts.append(range(at, at + count))
        at += count
    return [*parts, range(at, cfg.n_layers)]


class Blocks(nn.ModuleList):
    """Some of a model's blocks, under their names in the whole model: 5, 6, 7."""

    def __init__(self, blocks: nn.ModuleList, numbers: Sequence[int]) -> None:
        super().__init__()
        for i in numbers:
            self.add_module(str(i), blocks[i])

    def _get_abs_string_index(self, index: int) -> str:
        # By position: blocks[0] is the first block here, whatever its number.
        return [*self._modules][index]


class StageBlocks(NamedTuple):
    number: int
    blocks: range
    first: bool
    last: bool


def keep_own_stages(
    model: Decoder, layout: Layout, cfg: DistributedConfig, dtype: torch.dtype
) -> None:
    """Keep only this rank's stages of the model, which is on the meta device: of n ranks, rank r
    has the stages r, r + n, and so on. `dtype`: dtype of the activations."""
    count, rank = layout.sizes.pp * cfg.pp_stages_per_rank, layout.at.pp
    parts = split_blocks(model.cfg, count)
    stages = [
        StageBlocks(i, parts[i], i == 0, i == count - 1)
        for i in range(rank, count, layout.sizes.pp)
    ]
    everything = [name for name, p in model.named_parameters() if p.requires_grad]
    own_blocks = [i for stage in stages for i in stage.blocks]
    model.blocks = Blocks(model.blocks, own_blocks)
    if not stages[0].first:
        model.embed = nn.Identity()  # type: ignore[assignment]
    if not stages[-1].last:
        model.norm, model.output = nn.Identity(), nn.Identity()  # type: ignore[assignment]
    here = dict(model.named_parameters())
    model.elsewhere = [name for name in everything if name not in here]
    model.pipeline = Pipeline(model, stages, count, layout, cfg, dtype)
    model.forward = partial(_forward, model)  # type: ignore[method-assign]


def _forward(
    model: Decoder,
    stage: StageBlocks,
    activations: Tensor | None,
    tokens: Tensor,
    targets: Tensor,
    documents: Documents | None = None,
    token_losses: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run Decoder.forward for one of its stages on the previous stage's output, [B, t, D]; all but
    the last stage return x for the next. `tokens`, `targets`, `documents`: as for the whole model.
    """
    x: Tensor = model.embed(tokens) if activations is None else activations
    rope, visible = model.place(tokens, documents, None, x.dtype)
    blocks = [model.blocks.get_submodule(str(i)) for i in stage.blocks]
    x, routings = apply_blocks(blocks, x, rope, visible)
    change: Tensor | float = 0.0
    if routings and torch.is_grad_enabled():
        change = model.routings.add(routings, targets, stage.blocks.start)
    if not stage.last:
        return with_loss(x, change, model.routings.scale) if routings else x
    assert token_losses
    loss, terms = model.predict(x, targets)
    return loss + change, terms


class Pipeline:
    """Runs the passes of this rank's stages."""

    def __init__(
        self,
        model: Decoder,
        stages: list[StageBlocks],
        count: int,
        layout: Layout,
        cfg: DistributedConfig,
        dtype: torch.dtype,
    ) -> None:
        """`count`: number of stages over all ranks."""
        assert layout.pp is not None
        self._model, self._stages, self._count = model, stages, count
        self._group, self.ranks = layout.pp.get_group(), layout.sizes.pp
        self._own_tokens = None if layout.cp is None else own_tokens(layout.cp, cfg.cp_method)
        self._tokens_over = layout.sizes.cp * layout.sizes.tp
        self.mean_blocks = model.cfg.n_layers / self.ranks
        self._dtype = dtype
        self._schedules: dict[Any, Schedule1F1B | ScheduleInterleaved1F1B] = {}
        self._loss_of: LossOf
        self._micro_batches: list[MicroBatch]

    def backward_passes(self, loss_of: LossOf, micro_batches: list[MicroBatch]) -> None:
        self._loss_of, self._micro_batches = loss_of, micro_batches
        key = len(micro_batches), micro_batches[0].inputs.shape
        # torch's schedule is built for one number and one shape of micro-batches.
        if key not in self._schedules:
            # The one before would keep its buffers, one for each of its micro-batches.
            self._schedules.clear()
            self._schedules[key] = self._schedule(micro_batches)
        # The schedule can only cut tensors into micro-batches, but ours also have documents. So it
        # cuts a tensor of numbers, by which each stage looks up its micro-batch.
        numbers = torch.arange(len(micro_batches))
        try:
            self._schedules[key].step(number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:  # torch's, wrapping that of a forward pass
            raise error.__cause__ or error from None
        del self._loss_of, self._micro_batches

    def forward_passes(self, loss_of: LossOf, micro_batches: list[MicroBatch]) -> None:
        """Pass activations from rank to rank; each starts the next micro-batch after sending."""
        for batch in micro_batches:
            # In rising order: the input of this rank's next stage comes round through
            # the other ranks.
            for stage in self._stages:
                activations = None
                if not stage.first:
                    activations = self._activations(batch)
                    of = (stage.number - 1) % self.ranks
                    dist.recv(activations, group=self._group, group_src=of)
                x = self._run(stage, activations, batch, loss_of)
                if not stage.last:
                    to = (stage.number + 1) % self.ranks
                    dist.send(x.contiguous(), group=self._group, group_dst=to)

    def _run(
        self, stage: StageBlocks, activations: Tensor | None, batch: MicroBatch, loss_of: LossOf
    ) -> Tensor:
        """Return the stage's output for the next stage; from the last one, the loss."""
        if stage.last:
            return loss_of(partial(self._model, stage, activations), batch)
        if self._own_tokens is not None:
            batch = self._own_tokens(batch)
        x: Tensor = self._model(stage, activations, batch.inputs, batch.targets, batch.documents)
        return x

    def _schedule(self, micro_batches: list[MicroBatch]) -> Schedule1F1B | ScheduleInterleaved1F1B:
        """Make the schedule for micro-batches of this number and shape. All shapes are given: to
        infer them, torch would run the model and change its counters."""
        # torch makes buffers for gradients if the given example requires one.
        passing = self._activations(micro_batches[0]).requires_grad_()
        stages = [
            _TorchStage(
                self._model,
                _Runs(self, stage),
                stage.number,
                self._count,
                passing.device,
                input_args=() if stage.first else passing,
                output_args=passing.new_empty((), dtype=torch.float32) if stage.last else passing,
                group=self._group,
            )
            for stage in self._stages
        ]
        # The last stage returns the loss itself, a sum over tokens: torch must not
        # scale its gradients.
        settings: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        if len(stages) > 1:
            return ScheduleInterleaved1F1B(list(stages), len(micro_batches), **settings)
        return Schedule1F1B(stages[0], len(micro_batches), **settings)

    def _activations(self, batch: MicroBatch) -> Tensor:
        rows, tokens = batch.inputs.shape
        shape = rows, tokens // self._tokens_over, self._model.cfg.dim
        return torch.empty(shape, dtype=self._dtype, device=batch.inputs.device)


class _Runs(nn.Module):
    """A stage as a module, for torch's schedule."""

    def __init__(self, pipeline: Pipeline, stage: StageBlocks) -> None:
        super().__init__()
        self._pipeline, self._stage = pipeline, stage

    def forward(self, activations: Tensor | None = None, *, number: Tensor) -> Tensor:
        """Run micro-batch `number` [1], which is on the CPU."""
        pipeline = self._pipeline
        batch = pipeline._micro_batches[int(number)]
        return pipeline._run(self._stage, activations, batch, pipeline._loss_of)


class _TorchStage(PipelineStage):
    """A stage in which FSDP works as without a pipeline: torch's stage would keep all weights and
    gradients whole through the step, which is distributed.sync_once here."""

    def __init__(self, model: Decoder, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._decoder = model

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        # Before each backward pass: in 1F1B forward passes of other micro-batches come in between.
        self._decoder.begin_micro_batch(last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
