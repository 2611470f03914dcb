"""The planner's estimates beside what was measured.

    python -m benchmarks.planner                memory, lever by lever, on a CPU
    python -m benchmarks.planner --quick        the first lever alone: only shows that it works
    python -m benchmarks.planner --published    tokens per second, beside figures of others
    python -m benchmarks.planner --fit          the constants of that estimate, and what fits better
    python -m benchmarks.planner --verified     both, beside the figures of configs/verified

Memory: one process on a CPU trains two steps of fake data with the trainer's own functions. The
profiler sees every allocation of torch's CPU allocator; the largest sum of those that live is the
peak. Ranks other than this one are not run: what sharding divides by is arithmetic.
"""

from __future__ import annotations

import gc
import json
import shlex
import subprocess
import sys
from pathlib import Path

from kempner.config.command_line import argument_parser, parse_command
from kempner.config.option import ConfigError
from kempner.extensions.planner.memory import estimate_memory
from kempner.jobs.system.front_door import run_program
from kempner.train.configure import load_config
from kempner.train.sections import RunConfig

MIB = 2.0**20
SHAPE = (
    "--model.vocab_size=4096 --model.dim=192 --model.n_layers=6 --model.n_heads=8 "
    "--model.n_kv_heads=4 --model.ffn_dim=576 --model.max_seq_len=256 --train.seq_len=256 "
    "--train.global_batch=4"
)
ROOT = Path(__file__).resolve().parents[1]
BASE = [str(ROOT / "configs/train/debug.toml"), "--data.dataset_path=fake:", "--eval.interval=0"]
VARIANTS = (
    "",
    "--train.micro_batch=2",
    "--train.recompute=full",
    "--train.recompute=selective",
    "--train.micro_batch=2 --train.recompute=full",
    "--train.recompute=full --train.recompute_every=2",
    "--train.recompute=full --train.recompute_modules=\"['ffn']\"",
    "--train.recompute=selective --train.recompute_modules=\"['attention', 'ffn']\"",
    "--train.offload_activations=1",
    "--train.micro_batch=2 --train.offload_activations=2",
    "--train.dtype=bf16 --train.micro_batch=2",
    "--train.loss_chunk=256",
    "--model.n_layers=24 --train.micro_batch=1",
    "--model.n_layers=24 --train.micro_batch=1 --optimizer.moments=bf16",
    "--model.n_layers=24 --train.micro_batch=1 --optimizer.name=lion",
)


def measured(cfg: RunConfig) -> float:
    """Bytes of this process's tensors at the moment when they are most, over two steps."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    from kempner.optim.build import build_optimizer
    from kempner.parallel.build import build_model
    from kempner.parallel.layout import build_layout
    from kempner.train.objective import NextToken
    from kempner.train.parts import open_loader
    from kempner.train.progress import Progress
    from kempner.train.step import StepSums, forward_backward, reduce_step, update_weights

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.collect()  # what was there before must not be freed while we count
    device, tokens = torch.device("cpu"), cfg.train.sequences * cfg.train.seq_len
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        layout = build_layout(cfg.distributed, 1, 1, "cpu")
        model = build_model(cfg.model, layout, cfg.train, cfg.distributed, cfg.lora)
        optimizer = build_optimizer(model, cfg.optimizer)
        loader = open_loader(cfg, layout, False, Progress())
        for _ in range(2):
            sums = StepSums(loader.names, device)
            found = forward_backward(model, NextToken(), next(loader), sums, tokens, None)
            assert isinstance(found, dict)
            found["grad_norm_sq"] = layout.norm_sq(model.parameters())
            update_weights(optimizer, reduce_step(found, layout), tokens, 1e-3, cfg.train.grad_clip)
        loader.close()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    # Bytes are negative where memory is freed.
    sizes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, size in sizes:
        now += size
        most = max(most, now)
    return float(most)


def words_of(variant: str) -> list[str]:
    """Return the words of a command line. Raises ConfigError."""
    try:
        return [*BASE, *shlex.split(SHAPE), *shlex.split(variant)]
    except ValueError as error:
        raise ConfigError(f"--variants={variant}: {error}; close it") from None


def check_variant(variant: str) -> None:
    """Raise ConfigError unless these are overrides of a configuration that there may be."""
    command = parse_command(words_of(variant), {})
    load_config(command.files, command.overrides, command.problems)


def main(argv: list[str]) -> int:
    if argv[:1] == ["one"]:
        cfg = load_config([], []) if not argv[1:] else load_config(argv[1:2], argv[2:])
        needs = estimate_memory(cfg, 1, 1, gpu=False)
        print(json.dumps([needs.moment, needs.peak, measured(cfg), needs.parts]))
        return 0
    parser = argument_parser("benchmarks.planner", __doc__)
    add = parser.add_argument
    parser.add_argument("--quick", action="store_true")
    add("--variants", nargs="+", default=VARIANTS, help="overrides, ' --a.b=1 --c.d=2' each")
    parser.add_argument("--published", action="store_true", help="rows of published.toml")
    parser.add_argument("--fit", action="store_true", help="fitted constants and the misfit")
    parser.add_argument("--verified", action="store_true", help="entries of configs/verified")
    options = parser.parse_args(argv)
    for variant in options.variants:  # before the first of them takes its seconds
        check_variant(variant)
    if options.published or options.fit or options.verified:
        from benchmarks import published

        if options.published:
            published.print_published(published.published_rows())
        if options.fit:
            published.print_fit()
        if options.verified:
            published.print_verified(ROOT / "configs/verified")
        return 0
    print("planned, MiB  measured  ratio  variant (where memory is largest)", flush=True)
    for variant in options.variants[: 1 if options.quick else None]:
        command = [sys.executable, "-m", "benchmarks.planner", "one", *words_of(variant)]
        # A process for each: what one leaves in the allocator would change the next peak.
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        if done.returncode:
            raise ConfigError(f"--variants={variant}: does not run here; the reason is above")
        moment, planned, real, _ = json.loads(done.stdout.splitlines()[-1])
        name = f"{variant or 'as it is'} ({moment})"
        sizes = f"{planned / MIB:>12.1f}  {real / MIB:>8.1f}  {planned / real:>5.3f}"
        print(f"{sizes}  {name}", flush=True)
    return 0


if __name__ == "__main__":
    run_program(main, "benchmarks.planner")
