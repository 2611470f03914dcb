"""Options that affect speed alone: the values a tuner may try, and their needs. No torch."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kempner.jobs.ranks.own_device import gpu_on_the_bus

if TYPE_CHECKING:
    from kempner.train.sections import RunConfig

# Values that tune.py tries on a GPU. They change time, memory and the rounding of sums, but nothing
# else that a run learns. lever_problems() and the other checks know what each value needs.
SPEED_LEVERS: dict[str, tuple[Any, ...]] = {
    "train.attention": ("auto", "cudnn", "flash", "efficient", "fa3", "fa4"),
    "distributed.overlap": ((), ("tp",), ("reduce",), ("symm_mem",), ("tp", "reduce"), ("shared",)),
    "distributed.prefetch_blocks": (0, 1, 2),
    "experts.spare": (None, 0.25, 0.5, 1.0),
}
# With --allow fp8.
FP8_LEVERS = ("none", "tensorwise", "tensorwise_gather", "rowwise", "mxfp8")
FLASH_PACKAGES = {  # train.attention -> the package torch imports, how to install it
    "fa3": ("flash_attn_interface", "build hopper/ of github.com/Dao-AILab/flash-attention"),
    "fa4": (
        "flash_attn.cute.interface",
        "run .venv/bin/pip install -c constraints.txt -e '.[flash]'",
    ),
}
LEAST_TORCH = (2, 11)  # with torch.nn.attention.activate_flash_attention_impl


def fp8_tile(fp8: str) -> int:
    """Return the number that must divide all sizes of a product. `fp8`: train.fp8."""
    # torch._scaled_mm takes multiples of 16; an mxfp8 scale covers 32 numbers.
    return 32 if fp8 == "mxfp8" else 16


def lever_problems(cfg: RunConfig) -> list[str]:
    """List the problems of these options, one message each, with a remedy."""
    return _attention_problems(cfg) + _fp8_problems(cfg) + _overlap_problems(cfg)


def _attention_problems(cfg: RunConfig) -> list[str]:
    kernel, found = cfg.train.attention, []
    setting = f"train.attention = {kernel}"
    # On a GPU capped scores need flex_attention, which only auto may choose.
    if kernel != "auto" and cfg.model.attention_softcap is not None:
        found.append(
            f"{setting}: this kernel does not cap scores, which model.attention_softcap = "
            f"{cfg.model.attention_softcap} requires; leave it at auto"
        )
    if kernel not in ("fa3", "fa4"):
        return found
    others = {
        "distributed.device = cpu: it is for GPUs": cfg.distributed.device == "cpu",
        "train.dtype = fp32: it takes bf16": cfg.train.dtype == "fp32",
        "train.deterministic: its backward pass sums in its own order": cfg.train.deterministic,
    }
    return found + [
        f"{setting} with {why}; leave it at auto" for why, is_on in others.items() if is_on
    ]


def package_problems(cfg: RunConfig) -> list[str]:
    """List the packages that the options need and this Python lacks, with a remedy. A host that
    only plans or checks needs none: see on_a_node()."""
    found, kernel = [], cfg.train.attention
    if kernel in FLASH_PACKAGES and (why := flash_problem(kernel)):
        found.append(f"train.attention = {kernel}: {why}, or leave it at auto")
    if cfg.train.fp8 != "none" and find_spec("torchao") is None:
        found.append(
            f"train.fp8 = {cfg.train.fp8}: the package torchao is not installed; run "
            ".venv/bin/pip install -c constraints.txt -e '.[fp8]', or leave train.fp8 = none"
        )
    return found


def warn_of_packages(cfg: RunConfig) -> None:
    """Warn of packages that a job's nodes may lack; on a node, the check has already looked."""
    for text in [] if on_a_node() else package_problems(cfg):
        print(f"warning: {text}; the nodes of a job may have what this host lacks", file=sys.stderr)


def on_a_node() -> bool:
    """Return whether this host trains, and is not a login node."""
    return bool(gpu_on_the_bus()) or "SLURMD_NODENAME" in os.environ


def flash_problem(kernel: str) -> str | None:
    """Describe what `kernel`, fa3 or fa4, needs and this Python lacks, with a remedy; None:
    nothing. Imports neither the package nor torch."""
    module, fix = FLASH_PACKAGES[kernel]
    top, *below = module.split(".")
    spec = find_spec(top)
    # Step by step: find_spec() of the whole name would import the parent packages.
    for name in below:
        spec = spec and PathFinder.find_spec(name, spec.submodule_search_locations)
    if spec is None:
        return f"its package, which has {module}, is not installed; {fix}"
    if tuple(map(int, version("torch").split(".")[:2])) < LEAST_TORCH:
        return f"torch {version('torch')} has no way to it; install torch 2.11 or later"
    return None


def _fp8_problems(cfg: RunConfig) -> list[str]:
    """List problems of fp8. The tokens of a pass are the inner dimension of the product that yields
    a weight's gradient."""
    train, ranks = cfg.train, cfg.distributed.cp
    if train.fp8 == "none":
        return []
    found = _fp8_gather_problems(cfg) if train.fp8.endswith("gather") else []
    if cfg.distributed.device == "cpu":
        found.append(
            f"train.fp8 = {train.fp8}: not supported on distributed.device = cpu; give "
            "--train.fp8=none, or a GPU"
        )
    # Without train.micro_batch, or with a batch ramp, a pass's rows depend on the ranks.
    rows = 1 if train.micro_batch is None or train.batch_ramp else train.micro_batch
    tokens, tile = rows * train.seq_len // ranks, fp8_tile(train.fp8)
    if tokens % tile == 0:
        return found
    batch = f"train.micro_batch {rows} x " if rows > 1 else ""
    parts = f" / distributed.cp {ranks}" if ranks > 1 else ""
    return [
        *found,
        f"train.fp8 = {train.fp8}: its kernels take a multiple of {tile} tokens a pass, and "
        f"{batch}train.seq_len {train.seq_len}{parts} = {tokens}; give a train.seq_len that is a "
        f"multiple of {tile * ranks}, or --train.fp8=none",
    ]


def _fp8_gather_problems(cfg: RunConfig) -> list[str]:
    """List problems of gathering weights as 8-bit floats. FSDP does so only with fp32 master
    weights that it alone shards."""
    others = {
        f"distributed.tp = {cfg.distributed.tp}": cfg.distributed.tp > 1,
        "train.weights = bf16": cfg.train.weights == "bf16",
        "distributed.fsdp_cpu_offload": cfg.distributed.fsdp_cpu_offload,
        # FSDP cannot re-gather 8-bit floats from what a rank keeps between the passes.
        "distributed.reshard_island": cfg.distributed.reshard_island is not None,
        "train.compile_scope = model": cfg.train.compile_scope == "model",
    }
    return [
        f"train.fp8 = {cfg.train.fp8}: not built for {other}; leave that out, or give "
        "--train.fp8=tensorwise"
        for other, is_on in others.items()
        if is_on
    ]


def _overlap_problems(cfg: RunConfig) -> list[str]:
    axes, on_cpu = cfg.distributed, cfg.distributed.device == "cpu"
    needs = {
        "tp": {
            "distributed.tp over 1, whose messages it hides; give --distributed.tp=2": axes.tp > 1,
            "the compiler, which cuts the products; give --train.compile": cfg.train.compile,
            "a GPU, and distributed.device is cpu; give --distributed.device=cuda": not on_cpu,
        },
        "shared": {
            "distributed.ep over 1, or no token travels; give --distributed.ep=2": axes.ep > 1,
            "a shared expert; give --model.shared_experts=1": cfg.model.shared_experts > 0,
        },
        "symm_mem": {
            "a GPU, and distributed.device is cpu; give --distributed.device=cuda": not on_cpu,
            "all of symmetric memory, which tp uses, too; leave tp out": "tp" not in axes.overlap,
            "weights on the GPU; give --no-distributed.fsdp_cpu_offload": not axes.fsdp_cpu_offload,
            # torch registers memory only with the communicators of whole gathers.
            "gathers by the same ranks; leave reshard_island out": axes.reshard_island is None,
        },
    }
    for name in ("replay_every", "checksum_every"):  # also used by RUN/REPLAY
        if getattr(cfg.resilience, name):
            # False: this need is not met while the option is set.
            needs["symm_mem"][f"resilience.{name} unset, as it checks FSDP's messages"] = False
    names = dict.fromkeys(axes.overlap)
    twice = [name for name in names if axes.overlap.count(name) > 1]
    found = [f"distributed.overlap: {name} is given twice; write it once" for name in twice]
    return found + [
        f"distributed.overlap: {name} needs {what}, or leave {name} out"
        for name in names
        for what, there in needs.get(name, {}).items()
        if not there
    ]
