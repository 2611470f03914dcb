"""Unsupported combinations: tensor, pipeline, expert and context parallelism; experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kempner.config.option import ConfigError
from kempner.train import lookup
from kempner.train.sections import micro_batch

if TYPE_CHECKING:
    from kempner.parallel.config import DistributedConfig
    from kempner.parallel.layout import Axes
    from kempner.train.sections import RunConfig, TrainConfig

RING_HEAD = 8  # the ring calls the flash kernel itself; elsewhere torch pads the heads for it


def axis_problems(cfg: RunConfig) -> list[str]:
    """List the problems, one message each, with a remedy."""
    found = _tensor_problems(cfg) if cfg.distributed.tp > 1 else []
    found += _pipeline_problems(cfg) + _expert_problems(cfg) + _adapter_problems(cfg)
    return found + _context_problems(cfg)


def _tensor_problems(cfg: RunConfig) -> list[str]:
    """List problems of distributed.tp: ranks need equally many whole heads and, between the matrix
    products, equally many tokens."""
    axes, model, setting = cfg.distributed, cfg.model, f"distributed.tp = {cfg.distributed.tp}"
    # A ramp doubles its length: a divisor of the first length divides all of them.
    sizes = {
        "model.n_heads": model.n_heads,
        "model.n_kv_heads": model.kv_heads,
        "model.ffn_dim": model.ffn_dim,
        "model.dense_ffn_dim": model.dense_width,
        "train.seq_len": cfg.train.seq_len,
        "train.seq_len_ramp[0]": (cfg.train.seq_len_ramp or (0, 0))[0],
    }
    found = [
        f"{setting}: must divide {key} = {size}; give another size, or 1"
        for key, size in sizes.items()
        if size % axes.tp
    ]
    if cfg.train.compile_scope == "model":
        found.append(
            f"{setting}: each block begins with code that is not compiled, which "
            "train.compile_scope = model does not allow; give --train.compile_scope=block"
        )
    return found


def _pipeline_problems(cfg: RunConfig) -> list[str]:
    """List problems of distributed.pp: a stage holds whole blocks and nothing else."""
    axes, model, setting = cfg.distributed, cfg.model, f"distributed.pp = {cfg.distributed.pp}"
    if axes.pp == 1:
        return []
    found, stages = [], axes.pp * axes.pp_stages_per_rank
    if model.n_layers < stages:
        found.append(
            f"{setting}: {axes.pp} x pp_stages_per_rank {axes.pp_stages_per_rank} = {stages} "
            f"stages, and model.n_layers = {model.n_layers} blocks; give at most one stage a block"
        )
    others = {
        "model.tie_embeddings: its weight would be on two stages": model.tie_embeddings,
        "train.compile_scope = model: a stage is not the whole model": (
            cfg.train.compile_scope == "model"
        ),
        f"train.fp8 = {cfg.train.fp8}": cfg.train.fp8 != "none",
    }
    return found + [
        f"{setting}: not built for {other}; leave that out, or give --distributed.pp=1"
        for other, is_on in others.items()
        if is_on
    ]


def _expert_problems(cfg: RunConfig) -> list[str]:
    found, ep = [], cfg.distributed.ep
    if ep > 1 and (cfg.model.n_experts or 1) % ep:
        found.append(
            f"distributed.ep = {ep}: must divide model.n_experts = {cfg.model.n_experts}, "
            "which it distributes"
        )
    if ep > 1 and cfg.train.compile_scope == "model":
        found.append(
            f"distributed.ep = {ep}: the exchange of tokens is not compiled, which "
            "train.compile_scope = model does not allow; give --train.compile_scope=block"
        )
    if cfg.experts.spare is None:
        return found
    others = {  # a step cannot be repeated there
        "[lowcomm]: its rounds would be sent twice": any(name == "lowcomm" for name, _ in cfg.more),
        "batches from an extension": lookup.bringer(cfg) is not None,
        "distributed.ep = 1: no tokens travel": ep == 1,
    }
    return found + [
        f"experts.spare = {cfg.experts.spare:g}: not built for {other}; leave one of the two out"
        for other, is_on in others.items()
        if is_on
    ]


def _adapter_problems(cfg: RunConfig) -> list[str]:
    """List problems of lora.rank with experts."""
    if not cfg.lora.rank or not cfg.model.n_experts:
        return []
    problems = []
    if wrong := [name for name in cfg.lora.targets if name in ("w1", "w2", "w3")]:
        problems.append(
            f"lora.targets: adapters for experts are not built, and {', '.join(wrong)} are "
            "matrices of experts; give those of attention, "
            """--lora.targets="['wq', 'wk', 'wv', 'wo']\""""
        )
    if cfg.model.router_bias:
        problems.append(
            "model.router_bias: the biases move while the weights are trained, which lora.rank "
            f"= {cfg.lora.rank} keeps frozen; train all weights, --lora.rank=0"
        )
    return problems


def _context_problems(cfg: RunConfig) -> list[str]:
    """List problems of splitting the tokens of a row among ranks (context.py)."""
    ranks, method = cfg.distributed.cp, cfg.distributed.cp_method
    if ranks == 1:
        return []
    found = []
    # Zigzag: each rank has a chunk from the front and one from the back (context.py).
    parts = 2 * ranks if method == "ring" else ranks
    option, shortest = "train.seq_len", cfg.train.seq_len
    if cfg.train.seq_len_ramp is not None:
        option, shortest = "train.seq_len_ramp, at first", cfg.train.seq_len_ramp[0]
    if shortest % parts:
        near = max(parts, shortest // parts * parts)
        found.append(
            f"{option} = {shortest}: distributed.cp = {ranks} with cp_method = {method} cuts a "
            f"sequence into {parts} parts; give a multiple, such as {near}"
        )
    elif cfg.distributed.tp > 1 and shortest // ranks % cfg.distributed.tp:
        found.append(
            f"{option} = {shortest}: distributed.tp = {cfg.distributed.tp} must divide the "
            f"{shortest // ranks} tokens that each of distributed.cp = {ranks} ranks has; give "
            "another length, or other sizes"
        )
    if cfg.model.aux_loss:
        found.append(
            f"model.aux_loss = {cfg.model.aux_loss}: is computed over whole sequences, and with "
            f"distributed.cp = {ranks} a rank has only a part; give --model.aux_loss=0, such as "
            "with --model.router_bias, or --distributed.cp=1"
        )
    if cfg.train.compile_scope == "model":
        found.append(
            f"train.compile_scope = model: attention over distributed.cp = {ranks} ranks is not "
            "compiled, which breaks the whole graph; give --train.compile_scope=block"
        )
    return found + (_ring_problems(cfg) if method == "ring" else _ulysses_problems(cfg))


def _ulysses_problems(cfg: RunConfig) -> list[str]:
    ranks, heads = cfg.distributed.cp, cfg.model.n_heads // cfg.distributed.tp
    if heads % ranks == 0:
        return []
    return [
        f"distributed.cp = {ranks} with cp_method = ulysses: must divide the {heads} query heads "
        "of a tensor-parallel rank; give another --distributed.cp, or --distributed.cp_method=ring"
    ]


def _ring_problems(cfg: RunConfig) -> list[str]:
    model, instead = cfg.model, "give --distributed.cp_method=ulysses, or --distributed.cp=1"
    width = model.resolved_head_dim
    window, cap, kernel = model.sliding_window, model.attention_softcap, cfg.train.attention
    found = []
    if cfg.data.document_mask:
        found.append(f"data.document_mask: the ring does not support document masks; {instead}")
    if window is not None and window < cfg.train.seq_len:
        found.append(f"model.sliding_window = {window}: the ring has no windows; {instead}")
    if cap is not None:
        found.append(f"model.attention_softcap = {cap}: the ring does not cap scores; {instead}")
    if width % RING_HEAD and cfg.distributed.device != "cpu":
        found.append(
            f"model.head_dim = {width}: on a GPU the ring's kernel takes multiples of {RING_HEAD}; "
            f"{instead}"
        )
    if kernel not in ("auto", "flash", "fa3", "fa4"):
        found.append(f"train.attention = {kernel}: the ring's kernel is flash; {instead}")
    return found


def check_pipeline(cfg: TrainConfig, axes: DistributedConfig, data_ranks: int) -> None:
    """Raise ConfigError, with the arithmetic, if a step has too few micro-batches to keep the
    stages busy, or a number that the interleaved schedule cannot order."""
    if axes.pp == 1:
        return
    for batch in sorted({stage.batch for stage in cfg.stages}):
        micro = micro_batch(cfg, data_ranks, batch)
        passes = batch // (micro * data_ranks)
        # torch's interleaved schedule runs in rounds of one micro-batch per rank.
        if passes >= axes.pp and (axes.pp_stages_per_rank == 1 or passes % axes.pp == 0):
            continue
        needs = "at least as many" if axes.pp_stages_per_rank == 1 else "a multiple of them"
        raise ConfigError(
            f"distributed.pp = {axes.pp}: {batch} sequences / ({data_ranks} data ranks x "
            f"micro_batch {micro}) = {passes} micro-batches a step, and the {axes.pp} ranks of a "
            f"pipeline need {needs}; give a smaller --train.micro_batch, or a larger batch"
        )


def check_experts(cfg: RunConfig, axes: Axes) -> list[str]:
    """List problems of sharding the experts: FSDP cuts them along their width, after tensor
    parallelism, and needs even parts."""
    ranks = axes.shard * axes.cp // cfg.distributed.ep
    if cfg.distributed.ep == 1 or not cfg.model.n_experts:
        return []
    parts = {"dim": ranks, "ffn_dim": ranks * axes.tp}
    tp = f" x tp {axes.tp}" if axes.tp > 1 else ""
    return [
        f"model.{name} = {size}: with distributed.ep = {cfg.distributed.ep} it must be divisible "
        f"by the {n} ranks that share one expert, dp_shard {axes.shard} x cp {axes.cp} / ep{tp}; "
        "choose another ep or dp_shard"
        for name, n in parts.items()
        if (size := getattr(cfg.model, name)) % n
    ]


def layers_problems(cfg: RunConfig) -> list[str]:
    """List problems of a profile.layers_interval other than 0."""
    interval, lines = cfg.profile.layers_interval, cfg.metrics.log_interval
    if interval % lines:
        return [
            f"profile.layers_interval = {interval}: must be a multiple of metrics.log_interval = "
            f"{lines}, whose lines report the numbers; give {-(-interval // lines) * lines}"
        ]
    if cfg.distributed.pp > 1:
        return [
            f"profile.layers_interval = {interval}: is not built for a pipeline, distributed.pp = "
            f"{cfg.distributed.pp}; leave it out"
        ]
    return []
