"""Unsupported combinations of options across sections, reported before a GPU is requested."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kempner.jobs.system.front_door import how_to_run
from kempner.optim.config import CONSTANT
from kempner.train import lookup
from kempner.train.resilience.config import ResilienceConfig

if TYPE_CHECKING:
    from kempner.train.sections import RunConfig


def combination_problems(cfg: RunConfig) -> list[str]:
    """List the problems, one message each, with a remedy."""
    problems = _data_problems(cfg)
    if cfg.train.seq_len > cfg.model.max_seq_len:
        problems.append(
            f"train.seq_len = {cfg.train.seq_len}: at most model.max_seq_len = "
            f"{cfg.model.max_seq_len}; raise that, or shorten the sequences"
        )
    if cfg.optimizer.name == "schedule_free" and cfg.schedule.name not in CONSTANT:
        problems.append(
            f"schedule.name = {cfg.schedule.name}: optimizer.name = schedule_free averages "
            "weights in place of a decay; give --schedule.name=constant"
        )
    if cfg.lora.rank and cfg.model.init_from is None:
        problems.append(
            f"lora.rank = {cfg.lora.rank}: adapters need weights to adapt; name them, "
            "--model.init_from=DIR, or train all weights, --lora.rank=0"
        )
    if not cfg.checkpoint.save and cfg.run.fork:
        problems.append(
            "checkpoint.save = false: a run with run.fork saves its own checkpoint as it "
            "begins; leave one of the two out"
        )
    if cfg.lora.rank and (lever := _trains_weights(cfg)):
        problems.append(
            f"lora.rank = {cfg.lora.rank}: adapters are fp32 on a frozen model in bf16, and "
            f"not built for {lever}; leave that out"
        )
    if cfg.train.fp8 != "none" or cfg.distributed.overlap or cfg.train.attention != "auto":
        from kempner.train import levers

        problems += levers.lever_problems(cfg)
    if cfg.profile.layers_interval:
        from kempner.train import axis_checks

        problems += axis_checks.layers_problems(cfg)
    problems += _freeze_problems(cfg) + _group_problems(cfg)
    problems += _block_problems(cfg) + _spike_problems(cfg)
    axes = cfg.distributed
    if (
        max(axes.tp, axes.pp, axes.ep, axes.cp) > 1
        or cfg.model.n_experts
        or cfg.experts.spare is not None
    ):
        from kempner.train import axis_checks

        problems += axis_checks.axis_problems(cfg)
    for extension in lookup.used(cfg):
        problems += extension.problems(cfg)
        if cfg.train.recompute == "auto" and extension.fills_memory(cfg):
            problems.append(
                "train.recompute = auto: tries a next-token step, and "
                f"[{next(iter(extension.sections))}] needs more memory than that; give none, "
                "selective or full"
            )
    return problems


def _data_problems(cfg: RunConfig) -> list[str]:
    if cfg.data.mixed or lookup.bringer(cfg):
        return []
    return [
        'data.dataset_path = "": must name a directory of token shards; make one with '
        f"`{how_to_run('prepare_data.py')} TEXT... --out data/NAME` and give "
        "--data.dataset_path=data/NAME"
    ]


def _freeze_problems(cfg: RunConfig) -> list[str]:
    if not cfg.freeze.stages:
        return []
    others = {
        "optimizer.name = schedule_free, which averages all weights alike": (
            cfg.optimizer.name == "schedule_free"
        ),
        f"lora.rank = {cfg.lora.rank}, which trains adapters alone": cfg.lora.rank > 0,
    }
    problems = [
        f"freeze.stages: not built for {other}; leave one of the two out"
        for other, is_on in others.items()
        if is_on
    ]
    from kempner.model.shapes import tensor_shapes

    return problems + cfg.freeze.unused(list(tensor_shapes(cfg.model)))


def _group_problems(cfg: RunConfig) -> list[str]:
    if not cfg.optimizer.groups or cfg.lora.rank:  # adapters have other names
        return []
    from kempner.model.shapes import ROUTER_BIAS, tensor_shapes

    names = [name for name in tensor_shapes(cfg.model) if not name.endswith(ROUTER_BIAS)]
    return cfg.optimizer.unused_groups(names)


def _spike_problems(cfg: RunConfig) -> list[str]:
    sigma, window = cfg.resilience.spike_sigma, cfg.resilience.spike_window
    if sigma is None:
        is_set = window != ResilienceConfig.spike_window
        why = "has no effect without resilience.spike_sigma; give that, such as 6, or leave it out"
        return [f"resilience.spike_window = {window}: {why}"] if is_set else []
    if window < cfg.train.max_steps:
        return []
    return [
        f"resilience.spike_window = {window}: would not be full before train.max_steps = "
        f"{cfg.train.max_steps}; give a shorter one, or leave resilience.spike_sigma out"
    ]


def _block_problems(cfg: RunConfig) -> list[str]:
    """List options that only have an effect when FSDP gathers each block by itself."""
    if cfg.train.compile_scope == "block":
        return []
    options = cfg.distributed
    levers = {"reshard_island": options.reshard_island, "prefetch_blocks": options.prefetch_blocks}
    return [
        f"distributed.{name} = {value}: with train.compile_scope = model all weights are "
        "gathered at once, not block by block; leave one of the two out"
        for name, value in levers.items()
        if value
    ]


def _trains_weights(cfg: RunConfig) -> str:
    """Return the option that changes how all weights are trained, if any."""
    if cfg.train.weights != "fp32":
        return f"train.weights = {cfg.train.weights}"
    return f"train.fp8 = {cfg.train.fp8}" if cfg.train.fp8 != "none" else ""
