"""Combinations across the sections of a configuration that are not supported: reported before a GPU
is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kempner.jobs.system.front_door import how_to_run
from kempner.model.shapes import tensor_shapes
from kempner.optim.config import CONSTANT
from kempner.train import extensions
from kempner.train.resilience.config import ResilienceConfig

if TYPE_CHECKING:
    from kempner.train.sections import RunConfig

FP8_TILE = 16  # of every size of a product
RING_HEAD = 8  # the ring calls the flash kernel itself; elsewhere torch pads the heads for it


def combination_problems(cfg: RunConfig) -> list[str]:
    """List the problems, one message each, with the way out."""
    found = _data_problems(cfg)
    if cfg.train.seq_len > cfg.model.max_seq_len:
        found.append(
            f"train.seq_len = {cfg.train.seq_len}: at most model.max_seq_len = "
            f"{cfg.model.max_seq_len}; raise that, or shorten the sequences"
        )
    if cfg.optimizer.name == "schedule_free" and cfg.schedule.name not in CONSTANT:
        found.append(
            f"schedule.name = {cfg.schedule.name}: optimizer.name = schedule_free averages "
            "weights in place of a decay; give --schedule.name=constant"
        )
    if cfg.lora.rank and cfg.model.init_from is None:
        found.append(
            f"lora.rank = {cfg.lora.rank}: adapters need weights to adapt; name them, "
            "--model.init_from=DIR, or train all weights, --lora.rank=0"
        )
    if not cfg.checkpoint.save and cfg.run.fork:
        found.append(
            "checkpoint.save = false: a run with run.fork begins from a checkpoint, and with a "
            "checkpoint of its own; leave one of the two out"
        )
    if cfg.lora.rank and (lever := _trains_weights(cfg)):
        found.append(
            f"lora.rank = {cfg.lora.rank}: adapters are fp32 on a frozen model in bf16, and "
            f"not built for {lever}; leave that out"
        )
    if cfg.train.attention != "auto" and cfg.model.attention_softcap is not None:
        found.append(
            f"train.attention = {cfg.train.attention}: this kernel does not cap scores, as "
            f"model.attention_softcap = {cfg.model.attention_softcap} asks; leave it at auto"
        )
    if cfg.distributed.device == "cpu" and cfg.train.fp8 != "none":
        found.append(
            f"train.fp8 = {cfg.train.fp8}: not on distributed.device = cpu; give --train.fp8="
            "none, or a GPU"
        )
    found += _fp8_problems(cfg) + _freeze_problems(cfg)
    found += _block_problems(cfg) + _spike_problems(cfg)
    if cfg.distributed.tp > 1:
        found += _tensor_problems(cfg)
    found += _pipeline_problems(cfg) + _expert_problems(cfg) + _context_problems(cfg)
    for extension in extensions.used(cfg):
        found += extension.problems(cfg)
    return found


def _data_problems(cfg: RunConfig) -> list[str]:
    if cfg.data.mixed or extensions.bringer(cfg):
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
    found = [
        f"freeze.stages: not built for {other}; leave one of the two out"
        for other, asked in others.items()
        if asked
    ]
    return found + cfg.freeze.unused(list(tensor_shapes(cfg.model)))


def _spike_problems(cfg: RunConfig) -> list[str]:
    sigma, window = cfg.resilience.spike_sigma, cfg.resilience.spike_window
    if sigma is None:
        given = window != ResilienceConfig.spike_window
        why = "has no effect without resilience.spike_sigma; give that, such as 6, or leave it out"
        return [f"resilience.spike_window = {window}: {why}"] if given else []
    if window < cfg.train.max_steps:
        return []
    return [
        f"resilience.spike_window = {window}: would not be full before train.max_steps = "
        f"{cfg.train.max_steps}; give a shorter one, or leave resilience.spike_sigma out"
    ]


def _fp8_problems(cfg: RunConfig) -> list[str]:
    """List problems of fp8. The tokens of a pass are the inner size of the product that makes a
    weight's gradient."""
    train, ranks = cfg.train, cfg.distributed.cp
    if train.fp8 == "none":
        return []
    # Without train.micro_batch, or while the batch grows, the rows of a pass depend on the ranks.
    rows = 1 if train.micro_batch is None or train.batch_ramp else train.micro_batch
    tokens = rows * train.seq_len // ranks
    if tokens % FP8_TILE == 0:
        return []
    given = f"train.micro_batch {rows} x " if rows > 1 else ""
    parts = f" / distributed.cp {ranks}" if ranks > 1 else ""
    return [
        f"train.fp8 = {train.fp8}: its kernels take a multiple of {FP8_TILE} tokens a pass, and "
        f"{given}train.seq_len {train.seq_len}{parts} = {tokens}; give a train.seq_len that is a "
        f"multiple of {FP8_TILE * ranks}, or --train.fp8=none"
    ]


def _block_problems(cfg: RunConfig) -> list[str]:
    """List options that only have an effect when FSDP gathers each block by itself."""
    if cfg.train.compile_scope == "block":
        return []
    given = cfg.distributed
    levers = {"reshard_island": given.reshard_island, "prefetch_blocks": given.prefetch_blocks}
    return [
        f"distributed.{name} = {value}: with train.compile_scope = model all weights are "
        "gathered at once, not block by block; leave one of the two out"
        for name, value in levers.items()
        if value
    ]


def _tensor_problems(cfg: RunConfig) -> list[str]:
    """List problems of distributed.tp: each rank has whole heads, as many as the others, and
    between the products the same number of tokens."""
    axes, model, given = cfg.distributed, cfg.model, f"distributed.tp = {cfg.distributed.tp}"
    sizes = {
        "model.n_heads": model.n_heads,
        "model.n_kv_heads": model.kv_heads,
        "model.ffn_dim": model.ffn_dim,
        "model.dense_ffn_dim": model.dense_width,
        "train.seq_len": cfg.train.seq_len,
        "train.seq_len_ramp[0]": (cfg.train.seq_len_ramp or (0, 0))[0],
    }
    found = [
        f"{given}: must divide {key} = {size}; give another size, or 1"
        for key, size in sizes.items()
        if size % axes.tp
    ]
    if cfg.train.compile_scope == "model":
        found.append(
            f"{given}: each block begins with what is not compiled, and train.compile_scope = "
            "model leaves no place for it; give --train.compile_scope=block"
        )
    return found


def _pipeline_problems(cfg: RunConfig) -> list[str]:
    """List problems of distributed.pp: each stage has whole blocks, and its ranks know nothing
    else."""
    axes, model, given = cfg.distributed, cfg.model, f"distributed.pp = {cfg.distributed.pp}"
    if axes.pp == 1:
        return []
    found, stages = [], axes.pp * axes.pp_stages_per_rank
    if model.n_layers < stages:
        found.append(
            f"{given}: {axes.pp} x pp_stages_per_rank {axes.pp_stages_per_rank} = {stages} stages, "
            f"and model.n_layers = {model.n_layers} blocks; give at most one stage a block"
        )
    others = {
        "model.tie_embeddings: its weight would be on two stages": model.tie_embeddings,
        "train.compile_scope = model: a stage is not the whole model": (
            cfg.train.compile_scope == "model"
        ),
        f"train.fp8 = {cfg.train.fp8}": cfg.train.fp8 != "none",
    }
    return found + [
        f"{given}: not built for {other}; leave that out, or give --distributed.pp=1"
        for other, asked in others.items()
        if asked
    ]


def _expert_problems(cfg: RunConfig) -> list[str]:
    found, ep = [], cfg.distributed.ep
    if ep > 1 and (cfg.model.n_experts or 1) % ep:
        found.append(
            f"distributed.ep = {ep}: must divide model.n_experts = {cfg.model.n_experts}, "
            "which it shares out"
        )
    if ep > 1 and cfg.train.compile_scope == "model":
        found.append(
            f"distributed.ep = {ep}: the exchange of tokens is not compiled, and train."
            "compile_scope = model leaves no place for it; give --train.compile_scope=block"
        )
    if not cfg.lora.rank or not cfg.model.n_experts:
        return found
    if wrong := [name for name in cfg.lora.targets if name in ("w1", "w2", "w3")]:
        found.append(
            f"lora.targets: adapters of experts are not built, and {', '.join(wrong)} are "
            "matrices of experts; give those of the attention, "
            """--lora.targets="['wq', 'wk', 'wv', 'wo']\""""
        )
    if cfg.model.router_bias:
        found.append(
            "model.router_bias: the biases move while the weights are trained, which lora.rank "
            f"= {cfg.lora.rank} keeps as they are; train all weights, --lora.rank=0"
        )
    return found


def _trains_weights(cfg: RunConfig) -> str:
    """Return the option that changes how all weights are trained, if there is one."""
    if cfg.train.weights != "fp32":
        return f"train.weights = {cfg.train.weights}"
    return f"train.fp8 = {cfg.train.fp8}" if cfg.train.fp8 != "none" else ""


def _context_problems(cfg: RunConfig) -> list[str]:
    """List problems of rows whose tokens several ranks share (context.py)."""
    ranks, method = cfg.distributed.cp, cfg.distributed.cp_method
    if ranks == 1:
        return []
    found = []
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
            f"model.aux_loss = {cfg.model.aux_loss}: is that of whole sequences, of which a rank "
            f"has a part with distributed.cp = {ranks}; give --model.aux_loss=0, such as with "
            "--model.router_bias, or --distributed.cp=1"
        )
    if cfg.train.compile_scope == "model":
        found.append(
            f"train.compile_scope = model: attention over distributed.cp = {ranks} ranks is not "
            "compiled, and leaves no whole graph; give --train.compile_scope=block"
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
        found.append(f"data.document_mask: the ring has no mask of documents; {instead}")
    if window is not None and window < cfg.train.seq_len:
        found.append(f"model.sliding_window = {window}: the ring has no windows; {instead}")
    if cap is not None:
        found.append(f"model.attention_softcap = {cap}: the ring does not cap scores; {instead}")
    if width % RING_HEAD and cfg.distributed.device != "cpu":
        found.append(
            f"model.head_dim = {width}: on a GPU the ring's kernel takes multiples of {RING_HEAD}; "
            f"{instead}"
        )
    if kernel not in ("auto", "flash"):
        found.append(f"train.attention = {kernel}: the ring's kernel is flash; {instead}")
    return found
