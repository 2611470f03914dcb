"""`train.py CONFIG --bench` and `rl.py CONFIG --bench`: times the trainer itself, without engines.
Imports no torch until the table is printed.

Each variant is a run of the same program, in a child process of every rank: it has the launcher's
environment, reads fake data and leaves no checkpoint. Its figures come from the lines of its
metrics.jsonl. A variant that runs out of memory, or crashes, does not stop the others.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kempner import __version__
from kempner.config.loading import as_dict
from kempner.config.values import to_text
from kempner.data.config import FAKE
from kempner.extensions.bench.config import BenchConfig
from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.planner.memory import GIB, estimate_memory
from kempner.jobs.gpu.driver import driver_version
from kempner.jobs.ranks.placement import World
from kempner.jobs.records import event_reader, events
from kempner.jobs.report.tables import align_table
from kempner.jobs.system.files import write_atomic
from kempner.jobs.system.reading import read_jsonl
from kempner.jobs.trackers.config import TRACKER_NAMES, TrackersConfig
from kempner.train.extensions import Variant
from kempner.train.recording.metrics import short_number
from kempner.train.recording.peak import peak_flops
from kempner.train.resilience.config import ResilienceConfig
from kempner.train.sections import RunConfig

SHUTDOWN_S = 10.0  # for the other ranks of a variant after one has failed
# For a variant that is asked to leave: half a measurement is worthless, and KillWait is 30 s.
LEAVE_S = 10.0
BENCH_FIGURES = {
    "step, s": ".3f",
    "tokens/s": ",.0f",
    "tokens/s per GPU": ",.0f",
    "MFU": ".1%",
    "MFU, full attention": ".1%",
    "peak memory, GiB": ".2f",
    "publish, s": ".3f",  # of rl.py
}
# In the message of torch: Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of
# which 1.20 GiB is free.
FREED = re.compile(r"Tried to allocate ([\d.]+) (\w+).*? of which ([\d.]+) (\w+) is free", re.S)
BYTE_UNITS = {"bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


def bench_overrides(cfg: RunConfig, run_dir: str) -> list[str]:
    """Return the arguments that turn a run of `cfg` into a measurement: a fixed number of steps and
    nothing besides them; with replicas, whole rounds including their outer steps."""
    bench, rounds = (
        cfg.of(BenchConfig),
        cfg.of(LowcommConfig).interval if cfg.of(LowcommConfig).on else 1,
    )
    warmup, steps = (-(-number // rounds) * rounds for number in (bench.warmup, bench.steps))
    no_tracker = TrackersConfig()
    words = [
        f"--run.dir={run_dir}",
        f"--bench.warmup={warmup}",
        f"--bench.steps={steps}",
        f"--train.max_steps={warmup + steps}",
        "--schedule.warmup_steps=0",  # it may be longer than the measurement
        # With a ramp, the measured steps would differ in size.
        "--train.batch_ramp=none",
        "--train.seq_len_ramp=none",
        "--checkpoint.save=false",
        "--checkpoint.powers_of_two=false",
        "--run.fork=",
        "--run.fork_optimizer=keep",
        # Their window may be longer than the measurement.
        "--resilience.spike_sigma=none",
        f"--resilience.spike_window={ResilienceConfig.spike_window}",
        "--eval.interval=0",
        "--metrics.log_interval=1",
        *(f"--trackers.{name}={to_text(getattr(no_tracker, name))}" for name in TRACKER_NAMES),
    ]
    if bench.data == "fake":
        masked = str(bench.length == "variable").lower()
        words += ["--data.sources=[]", "--data.phases=[]", f"--data.dataset_path={FAKE}"]
        words += [f"--data.document_mask={masked}"]
    return words


def run_bench(
    run_dir: Path, variants: Sequence[Variant], world: World, leaves: Callable[[], float]
) -> int:
    """Run the variants one after the other; rank 0 prints the tables. Returns the exit code: 1 if
    no variant completes. `leaves()`: whether this process was asked to end."""
    codes: list[int] = []
    for number, variant in enumerate(variants):
        if leaves():
            return 1
        command = [sys.executable, sys.argv[0], *variant.words]
        codes.append(run_variant(command, Path(variant.cfg.run.dir), number, leaves))
    # The last variant, asked to leave, may have ended with code 0, half measured.
    if leaves():
        return 1
    # The lines of metrics.jsonl cover all ranks: one rank reads and prints.
    if world.rank:
        return 0
    machine = describe_machine()
    results = [
        _result(each, code, machine, world) for each, code in zip(variants, codes, strict=True)
    ]
    _report(run_dir, variants[0].cfg, results, machine)
    state = "done" if any(result["summary"] for result in results) else "failed"
    write_bench_status(run_dir, state, "a benchmark")
    return 0 if state == "done" else 1


def write_bench_status(run_dir: Path, state: str, reason: str) -> None:
    """Write the status.json of a directory of measurements, for the batch script."""
    status = {"state": state, "reason": reason, "time": time.time(), "step": 0}
    status |= {"attempt": 0, "attempt_id": os.environ.get("KEMPNER_ATTEMPT_ID"), "max_steps": 0}
    write_atomic(run_dir / "status.json", json.dumps(status) + "\n")


def run_variant(
    command: Sequence[str],
    run_dir: Path,
    number: int,
    leaves: Callable[[], float],
    seconds: float = math.inf,
    **popen: Any,
) -> int:
    """Run this rank's process of a variant to its end, and return its exit code. Ends it early when
    another rank has failed, since it may wait for that rank in a collective, or after `seconds`.
    `number`: counts the variants in this process; `popen`: more arguments of subprocess.Popen."""
    env = dict(os.environ)
    # All variants share torchrun's store, in which keys begin with this count.
    if "TORCHELASTIC_RESTART_COUNT" in env:
        env["TORCHELASTIC_RESTART_COUNT"] += f".{number}"
    # `began` is compared with the time of a file; `end` must not move when the clock is set.
    status, began, end = run_dir / "status.json", time.time(), time.monotonic() + seconds
    process = subprocess.Popen(command, env=env, **popen)
    while True:
        try:
            # Once a second: only a file shows that another rank has failed.
            return process.wait(min(1.0, max(end - time.monotonic(), 0.01)))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end:
                process.kill()
            elif leaves():
                process.terminate()
                end = min(end, time.monotonic() + LEAVE_S)
            elif _failed(status, began):
                try:
                    return process.wait(SHUTDOWN_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def _failed(status: Path, since: float) -> bool:
    try:
        return (
            # An earlier measurement in this directory may have left one.
            status.stat().st_mtime > since and json.loads(status.read_text())["state"] == "failed"
        )
    except (OSError, ValueError):
        return False


# --- What came out ---


Result = dict[str, Any]
BENCH_SIGN = '"tokens_per_step"'  # marks a file that holds such figures


def _result(variant: Variant, code: int, machine: dict[str, Any], world: World) -> Result:
    """Return a variant as JSON: its measured steps and their summary, or why there is none."""
    cfg, run_dir = variant.cfg, Path(variant.cfg.run.dir)
    lines = [line for line in read_jsonl(run_dir / "metrics.jsonl") if "loss" in line]
    # metrics.jsonl is appended to, so it may hold lines of an earlier measurement.
    newest = max((line["attempt"] for line in lines), default=0)
    mine = [line for line in lines if line["attempt"] == newest]
    step_lines = (
        [line for line in mine if line["step"] > cfg.of(BenchConfig).warmup] if code == 0 else []
    )
    ranks, gpu = world.size, machine["device"] != "CPU"
    tokens = cfg.train.sequences * cfg.train.seq_len
    peak = peak_flops(cfg.metrics, machine["device"])
    length = cfg.train.seq_len
    full = cfg.model.flops_per_token(length, cfg.lora.rank > 0, length)
    steps = [_figures(line, tokens, ranks, peak and full / peak) for line in step_lines]
    names = steps[0] if steps else {}
    summary = {name: _summary([step[name] for step in steps]) for name in names}
    result = {
        "variant": variant.name,
        "ranks": ranks,
        "tokens_per_step": tokens,
        "summary": summary,
        "steps": steps,
        "peak_tflops": peak and peak / 1e12,
        "flops_per_token_full_attention": full,
        "planned_gib": estimate_memory(cfg, ranks, world.per_node, gpu).peak / GIB,
        "config": as_dict(cfg.with_section("bench", cfg.of(BenchConfig))),
    }
    return result if code == 0 else {**result, "failed": why_failed(run_dir, code)}


def _summary(values: list[float | None]) -> dict[str, float | None]:
    numbers = [value for value in values if value is not None]
    if not numbers:  # MFU of a device whose peak is unknown
        return dict.fromkeys(("mean", "sd", "min", "max"))
    return {
        "mean": statistics.mean(numbers),
        "sd": statistics.stdev(numbers) if len(numbers) > 1 else 0.0,
        "min": min(numbers),
        "max": max(numbers),
    }


def _figures(
    line: dict[str, Any], tokens: int, ranks: int, full: float | None
) -> dict[str, float | None]:
    """Return a step's figures. `full`: seconds per token of one GPU at its peak, with full
    attention."""
    speed = tokens / line["step_time"]
    each = speed / ranks
    values = (line["step_time"], speed, each, line["mfu"], full and each * full, line["memory_gib"])
    published = [line["publish_seconds"]] if "publish_seconds" in line else []
    # Runs that publish nothing lack the last value.
    return dict(zip(BENCH_FIGURES, (*values, *published), strict=False))


def why_failed(run_dir: Path, code: int) -> str:
    """Return why a variant has no figures; if out of memory, the least that was missing."""
    faults = event_reader.read_kind(run_dir / "attempts.jsonl", events.FaultEvent)
    fault = faults[-1] if faults else None
    if fault is None or fault.kind != "oom":
        return fault.reason if fault else f"exit code {code}"
    if (found := FREED.search(fault.reason)) is None:
        return "out of memory"
    size, unit, free, free_unit = found.groups()
    over = float(size) * BYTE_UNITS[unit] - float(free) * BYTE_UNITS[free_unit]
    return f"out of memory, by {max(over, 0.0) / GIB:.2f} GiB or more"


def _report(
    run_dir: Path, cfg: RunConfig, results: Sequence[Result], machine: dict[str, Any]
) -> None:
    text = [f"\n{machine['device']}, world size {results[0]['ranks']}, torch {machine['torch']}"]
    for result in results:
        bench = result["config"]["bench"]
        text += [
            "",
            f"{result['variant'] or 'as configured'}: {result['tokens_per_step']:,} tokens",
        ]
        text[-1] += f" a step, {bench['steps']} steps after {bench['warmup']} of warm-up"
        text.append(_table(result))
    if len(results) > 1:
        text += ["", _comparison(results)]
    text.append(
        "\nMFU = tokens/s x FLOPs per token / (ranks x peak); the run's log has its numbers."
    )
    text.append(
        "FLOPs per token = 6 x (weights that multiply) + 12 x layers x heads x head width x keys: "
        "those\nthat a query sees on average (causal, window, documents), or all seq_len "
        "(full attention)."
    )
    print("\n".join(text), flush=True)
    path = Path(cfg.of(BenchConfig).output_json or run_dir / "bench.json")
    record = {"time": time.time(), "command": shlex.join(sys.argv), **machine, "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path}", flush=True)


def _table(result: Result) -> str:
    if not result["summary"]:
        return f"  {result['failed']}; the planner's estimate is {result['planned_gib']:.2f} GiB"
    rows = [["", "mean", "sd", "min", "max", ""]]
    for name, values in result["summary"].items():
        cells = ["-" if x is None else format(x, BENCH_FIGURES[name]) for x in values.values()]
        # On a CPU the peak includes the process's libraries.
        planned = f"tensors, as planned: {result['planned_gib']:.2f}" if "memory" in name else ""
        rows.append([name, *cells, planned])
    return align_table(rows, 2, range(1, 5))


def _comparison(results: Sequence[Result]) -> str:
    """Sort the results, the fastest first; failures last."""

    def speed(result: Result) -> float:
        return float(result["summary"]["tokens/s"]["mean"]) if result["summary"] else 0.0

    ranked = sorted(results, key=speed, reverse=True)
    best = speed(ranked[0])
    rows = [["tokens/s", "of the best", "GiB", "variant"]]
    for result in ranked:
        name = result["variant"] or "as configured"
        if not result["summary"]:
            rows.append(["-", "-", "-", f"{name}: {result['failed']}"])
            continue
        gib = result["summary"]["peak memory, GiB"]["max"]
        rows.append(
            [short_number(speed(result)), f"{speed(result) / best:.3f}", f"{gib:.2f}", name]
        )
    return align_table(rows, 2, range(3))


def describe_machine() -> dict[str, Any]:
    """Describe device, versions and commit, once no process uses the device."""
    # After the variants: a CUDA context of this process would take memory from them.
    import torch

    gpu = torch.cuda.is_available()
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
    )
    return {
        "device": torch.cuda.get_device_name(0) if gpu else "CPU",
        "memory_gib": torch.cuda.get_device_properties(0).total_memory / GIB if gpu else None,
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "kempner": __version__,
        "commit": commit.stdout.strip() or None,
    }
