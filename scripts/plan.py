"""Estimate what a configuration needs on some GPUs, and which combinations of levers fit them.

    python scripts/plan.py configs/train/7b.toml --nodes 2 --gpus-per-node 8 --gpu H100
    python scripts/plan.py configs/train/70b.toml --nodes 16 --gpu H200 --train.seq_len=8192

Prints the peak memory of one GPU by part, the bytes that each rank sends per step, and the three
combinations with the shortest estimated step, as overrides for scripts/train.py. Times are ranges:
the spread of published figures for similar runs around the estimate. `train.py --bench` measures.
--fabric names the network between nodes, with the rate of a GPU's share of it in Gb/s. Offloaded
tensors must fit into --host-memory GiB of a node (900), and so should the copies for saves.
Reads no data and needs no GPU. docs/extensions/scaling.md says what is estimated, and how well.
Exit code 1: nothing fits; 2: bad input.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

from kempner.config.command_line import parse_command
from kempner.config.option import ConfigError
from kempner.data.config import FAKE
from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.planner.cost import (
    HOST_BYTES,
    host_offload_bytes,
    host_save_bytes,
    model_flops_utilisation,
    network_bytes,
    step_seconds,
)
from kempner.extensions.planner.engine import engine_memory
from kempner.extensions.planner.gpus import FABRICS, GPUS, RESERVE_GIB, GpuSpec
from kempner.extensions.planner.memory import GIB, estimate_memory
from kempner.extensions.planner.recompute import with_choice
from kempner.extensions.planner.search import best_candidates, why_none
from kempner.extensions.planner.spread import kind_of_run
from kempner.extensions.rl.config import InferenceConfig, RlConfig
from kempner.jobs.report.tables import align_table
from kempner.jobs.system.front_door import run_program
from kempner.train.configure import check_world, load_config, print_warnings
from kempner.train.sections import RunConfig

PLAN_FLAGS = {
    "help": bool, "nodes": int, "gpus-per-node": int, "gpu": str, "fabric": str, "host-memory": int,
}  # fmt: skip
DEFAULT = "H100"


def main(argv: list[str]) -> int:
    command = parse_command(argv, PLAN_FLAGS)
    if command.flags["help"] or not argv:
        print(f"{__doc__}\n--gpu: {', '.join(GPUS)} (default: {DEFAULT})")
        print(f"--fabric: {', '.join(FABRICS)} (default: that of the GPU)")
        return 0 if argv else 2
    nodes, per_node = command.flags["nodes"] or 1, command.flags["gpus-per-node"] or 8
    name = (command.flags["gpu"] or DEFAULT).upper()
    problems = list(command.problems)
    if name not in GPUS:
        problems.append(f"--gpu={name}: is not known; give one of {', '.join(GPUS)}")
    fabric = (command.flags["fabric"] or "").lower()
    if fabric and fabric not in FABRICS:
        problems.append(f"--fabric={fabric}: is not known; give one of {', '.join(FABRICS)}")
    if fabric and nodes == 1:
        problems.append(
            f"--fabric={fabric}: is the network between nodes, and --nodes is 1; give more, or "
            "leave it out"
        )
    host = (command.flags["host-memory"] or HOST_BYTES / GIB) * GIB
    cfg = load_without_data(command.files, command.overrides, problems)
    if cfg.train.fp8 != "none" and not GPUS[name].fp8:
        raise ConfigError(
            f"train.fp8 = {cfg.train.fp8}: {name} does not multiply 8-bit floats; give another "
            "--gpu, or --train.fp8=none"
        )
    cfg.of(LowcommConfig).count(nodes * per_node, per_node)
    print_warnings(cfg)
    gpu = GPUS[name]._replace(fabric=fabric or GPUS[name].fabric)
    count = f"{nodes} node{'s' * (nodes > 1)} x {per_node}"
    where = f"{count} {gpu.name} ({gpu.gib:.0f} GiB, {RESERVE_GIB:.0f} of it reserved)"
    print(f"{cfg.model.count_parameters():,} parameters on {where}")
    if cfg.of(RlConfig).on and not cfg.of(InferenceConfig).urls:
        window = cfg.train.seq_len
        engine = engine_memory(cfg.model, cfg.of(InferenceConfig), window, cfg.train.dtype)
        free = (gpu.usable - engine.peak) / GIB
        print(engine.describe(window))
        print(f"  over by {-free:.2f} GiB" if free < 0 else f"  {free:.2f} GiB are free")
    problems = check_world(cfg, nodes * per_node, per_node)
    if problems:
        print("the configuration is refused", *problems, sep="\n  - ")
    else:
        print_plan(cfg, nodes * per_node, per_node, gpu, host)
    candidates = best_candidates(cfg, nodes * per_node, per_node, gpu, check_world, host=host)
    print(
        "\nbest combinations that fit, by estimated step time; each is a range that published\n"
        "figures give, and --bench measures it"
    )
    rows = [["step, s", "tokens/s per GPU", "GiB", "overrides"]]
    for each in candidates:
        tokens = cfg.train.sequences * cfg.train.seq_len / (nodes * per_node)
        slow, fast = each.time.slowest, each.time.fastest
        gib = f"{each.memory.peak / GIB:.1f}"
        words = each.words or "(as configured)"
        rate = f"{tokens / slow:,.0f} to {tokens / fast:,.0f}"
        rows.append([f"{seconds(fast)} to {seconds(slow)}", rate, gib, words])
    if candidates:
        print(align_table(rows, 2, range(3)))
        return 0
    print(f"none: {why_none(cfg, nodes * per_node, per_node, check_world)}")
    return 1


def load_without_data(files: list[str], overrides: list[str], problems: list[str]) -> RunConfig:
    """Load a configuration that need not name data. Raises ConfigError."""
    try:
        return load_config(files, overrides, problems)
    except ConfigError as error:
        if not any(text.startswith('data.dataset_path = "":') for text in error.problems):
            raise
    return load_config(files, [*overrides, f"--data.dataset_path={FAKE}"], problems)


def print_plan(cfg: RunConfig, world_size: int, per_node: int, gpu: GpuSpec, host: float) -> None:
    """Print what the configuration needs as it is."""
    if cfg.train.recompute == "auto":
        cfg = with_choice(cfg, world_size, per_node, gpu.usable)
        every = f", one block in {cfg.train.recompute_every}" * (cfg.train.recompute_every > 1)
        print(f"train.recompute = auto: {cfg.train.recompute}{every}")
    needs = estimate_memory(cfg, world_size, per_node)
    parts = sorted(needs.parts.items(), key=lambda part: -part[1])
    rows = [[f"memory of one GPU, {needs.moment}", "GiB"]]
    rows += [[f"  {name}", f"{size / GIB:.2f}"] for name, size in parts if size]
    print(align_table([*rows, ["  total", f"{needs.peak / GIB:.2f}"]], 2, (1,)))
    over = (needs.peak - gpu.usable) / GIB
    print(f"  over by {over:.2f} GiB" if over > 0 else f"  {-over:.2f} GiB are free")
    offloaded = host_offload_bytes(cfg, world_size, per_node)
    if offloaded:
        over = (offloaded - host) / GIB
        room = f"over by {over:.1f}" if over > 0 else f"{-over:.1f} are free"
        print(f"offloaded to the memory of a node: {offloaded / GIB:.1f} GiB; {room}")
    saved = host_save_bytes(cfg, world_size, per_node) if cfg.checkpoint.save else 0.0
    if saved:
        over = (offloaded + saved - host) / GIB
        room = (
            f"{-over:.1f} are free"
            if over <= 0
            else (f"over by {over:.1f}: each save goes in waves, and the steps wait for all of it")
        )
        print(f"for saves in the memory of a node: {saved / GIB:.1f} GiB; {room}")
    rows = [["sent by one rank in a step", "GB", ""]]
    for each in network_bytes(cfg, world_size, per_node):
        link = "to the host" if each.bus else "inside a node" if each.within else "between nodes"
        rows.append([f"  {each.what}", f"{each.size / 1e9:.2f}", link])
    print(align_table(rows, 2, (1,)))
    times = step_seconds(cfg, world_size, per_node, gpu)
    parts = sorted(times.parts.items(), key=lambda part: -part[1])
    rows = [["computation of a step", "s"], *([f"  {name}", seconds(t)] for name, t in parts)]
    print(align_table(rows, 2, (1,)))
    low, high = (
        model_flops_utilisation(cfg, world_size, t, gpu) for t in (times.slowest, times.fastest)
    )
    kind, (least, most) = kind_of_run(cfg, world_size, per_node), times.spread
    network = f"; {gpu.fabric} between nodes" if world_size > per_node else ""
    print(
        f"estimated step: {seconds(times.fastest)} to {seconds(times.slowest)} s, MFU {low:.0%} to "
        f"{high:.0%} ({kind}: published figures are\n  {least:.2f} to {most:.2f} times the "
        f"estimate, {seconds(times.step)} s: computation {seconds(times.compute)}, communication "
        f"behind it {seconds(times.hidden)},\n  beside it {seconds(times.exposed)}{network})"
    )


def seconds(value: float) -> str:
    """Format seconds to the hundredth; below 0.1 to two significant digits."""
    return f"{value:.2f}" if value >= 0.1 or not value else f"{value:.2g}"


if __name__ == "__main__":
    run_program(main)
