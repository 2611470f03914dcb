"""The checks of benchmarks/gpu_check.py, each of which runs in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import mmap
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_job import (
    ROOT,
    SAME,
    Failed,
    Figures,
    Job,
    Skipped,
    compare,
    failure,
    losses,
    metrics,
    train,
    trainer,
)
from benchmarks.gpu_parts import (
    axes,
    decoding,
    exchange,
    experts,
    flash,
    fp8_gathers,
    generation,
    loss,
    meshes,
    muon,
    offload,
    overlap,
    ring,
    update,
    waves,
)
from kempner.jobs.ranks import peers
from kempner.train.sections import RunConfig

WARM_UP, LONG_S = 3, 2.0  # steps of a benchmark that do not count; of so long steps only the first
PASS_OPTIONS = ("--train.micro", "--train.global", "--train.recompute")  # what a pass holds
OVER = 1.15  # of the planner's estimate that a benchmark may need
BENCH_S, BENCH_STEPS = 10.0, 4  # a benchmark measures at least this long, and as many steps


def environment(job: Job) -> Figures:
    import torch

    found: Figures = {"python": sys.version.split()[0], "torch": torch.__version__}
    if job.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError):
            done = subprocess.run(query, capture_output=True, text=True, timeout=30)
            found["driver"] = done.stdout.split("\n")[0].strip()
        found |= {
            "gpu": torch.cuda.get_device_name(0),
            "gpus": torch.cuda.device_count(),
            "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
        torch.ones(8, device="cuda").sum().item()  # the driver really works
    return found


def data(job: Job) -> Figures:
    source = ["src"] if job.quick else ["--source", "stdlib"]
    command = ["scripts/prepare_data.py", *source, "--out", str(job.work / "data")]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    sidecar = json.loads((job.work / "data/dataset.json").read_text())
    return {"tokens": sum(shard["tokens"] for shard in sidecar["splits"]["train"])}


def save(job: Job) -> Figures:
    """A run that saves from pinned memory. It is also what the other runs are compared with."""
    rate = pinned_rate() if job.device == "cuda" else None
    train(job, job.words("unbroken", *kill_words(job)))
    lines = {line["step"]: line for line in metrics(job.work / "unbroken")}
    if not lines[max(lines)]["loss"] < lines[1]["loss"] - 0.3:
        raise Failed(f"the loss fell only from {lines[1]['loss']} to {lines[max(lines)]['loss']}")
    later = range(save_interval(job) + 2, len(lines) + 1)  # the first save also makes the buffer
    times = [line["step_time"] for line in lines.values()]
    usual = statistics.median(times)
    if job.device == "cuda" and min(times) < 0.2 * usual:  # it was timed before it was over
        raise Failed(f"a step of {min(times):.4f} s, where half of them take {usual:.4f}")
    return {
        "loss": f"{lines[1]['loss']:.3f} -> {lines[max(lines)]['loss']:.3f}",
        "step_ms": 1e3 * usual,
        "longest_save_stall_ms": 1e3 * max(lines[n]["checkpoint_time"] for n in later),
        "pinned_copy_gb_per_s": rate,
    }


def pinned_rate() -> float:
    """GB/s from the GPU into memory that is pinned as the checkpoint's buffer is."""
    import torch

    size = 1 << 28
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    cuda = torch.cuda.cudart()
    # The checkpoint's buffer is pinned like this: memory of mmap(), not of pin_memory().
    torch.cuda.check_error(int(cuda.cudaHostRegister(memory.data_ptr(), size, 0)))
    source = torch.ones(size, dtype=torch.uint8, device="cuda")
    # The first copy also pays for what the driver sets up.
    memory.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(4):
        memory.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return 4 * size / (time.perf_counter() - began) / 1e9


def kill_words(job: Job) -> list[str]:
    """Arguments of the run that is killed, and of the unbroken one: it lasts long enough."""
    steps = 10 * save_interval(job)
    interval = f"--checkpoint.interval={save_interval(job)}"
    return [f"--train.max_steps={steps}", interval, "--train.deterministic"]


def save_interval(job: Job) -> int:
    return 4 if job.quick else 50


def resume(job: Job) -> Figures:
    """Killed after its first checkpoint and started again, a run has the unbroken one's losses."""
    words = job.words("killed", *kill_words(job))
    with trainer(words, job.work / "killed.out") as process:
        latest = job.work / "killed/checkpoints/latest"
        while process.poll() is None and not latest.exists():
            time.sleep(0.01)
        if process.poll() is not None:
            raise Failed("the run ended before it could be killed")
    killed_at = max(losses(job.work / "killed"), default=0)
    out = train(job, words)
    if "continues after step" not in out:
        raise Failed("the second start did not resume from the checkpoint")
    found, unbroken = losses(job.work / "killed"), losses(job.work / "unbroken")
    differ = [step for step in unbroken if found.get(step) != unbroken[step]]
    if differ:
        first = differ[0]
        raise Failed(
            f"{len(differ)} of {len(unbroken)} losses differ, the first at step {first}: "
            f"{found.get(first)} after the resume, {unbroken[first]} unbroken"
        )
    return {"killed_at_step": killed_at, "equal_losses": len(unbroken)}


def compiled(job: Job) -> Figures:
    steps = ["--train.max_steps=20", "--checkpoint.interval=0"]
    began = time.perf_counter()
    train(job, job.words("compiled", "--train.compile", *steps))
    worst = compare("compiled", losses(job.work / "compiled"), losses(job.work / "unbroken"))
    return {"seconds_in_all": time.perf_counter() - began, "loss_difference": worst}


def recompute(job: Job) -> Figures:
    """By need: with all of the memory, and with nine tenths of what a step takes then."""
    steps = ["--train.max_steps=20", "--checkpoint.interval=0", "--train.recompute=auto"]
    train(job, job.words("recompute", *steps))
    log = (job.work / "recompute/logs/latest/rank-0.log").read_text()
    found = re.search(r"trial of recomputation none: ([\d.]+) GiB", log)
    if found is None:
        raise Failed(f"no peak was measured: {log[-500:]}")
    train(job, job.words("room", *steps), KEMPNER_MEMORY_GIB=f"{0.9 * float(found[1])}")
    values = json.loads((job.work / "room/recompute.json").read_text())["values"]
    if values["recompute"] == "none":
        raise Failed("nine tenths of the memory changed nothing")
    unbroken = losses(job.work / "unbroken")
    worst = [compare(name, losses(job.work / name), unbroken) for name in ("recompute", "room")]
    return {"peak_gib": float(found[1]), "less": values, "loss_difference": max(worst)}


def distributed(job: Job) -> Figures:
    """All GPUs train together; a single one still starts NCCL and sends its all-reduces there."""
    from kempner.jobs.ranks.nccl_transport import LOG_SETTINGS, transport_of

    steps = ["--train.max_steps=20", "--checkpoint.interval=0"]
    log = job.work / "nccl.log"
    env = {**LOG_SETTINGS, "NCCL_DEBUG_FILE": f"{log}.%p"} if job.device == "cuda" else {}
    ranks = 1 << (job.ranks.bit_length() - 1)  # the batch divides by powers of two
    train(job, job.words("distributed", *steps), ranks, **env)
    name = f"{ranks} ranks"
    worst = compare(name, losses(job.work / "distributed"), losses(job.work / "unbroken"))
    text = "".join(path.read_text() for path in sorted(job.work.glob("nccl.log.*")))
    if job.device == "cuda" and "NCCL INFO" not in text:
        raise Failed("NCCL did not start: its log is empty")
    return {"ranks": ranks, "loss_difference": worst, "transport": transport_of(text) or None}


def preflight(job: Job) -> Figures:
    """kempner.jobs.preflight and its tasks as lib.sh starts them, on this one host."""
    meet, report = job.work / "meet", job.work / "preflight.json"
    meet.mkdir()
    gpus = job.ranks if job.device == "cuda" else 0
    env = os.environ | {peers.PEER_KEY_VARIABLE: peers.new_key()}
    driver = subprocess.Popen([
        sys.executable, "-m", "kempner.jobs.preflight", f"--nodes={socket.gethostname()}",
        f"--tasks={job.ranks}", f"--gpus={gpus}", f"--device={job.device}",
        f"--dir={job.work}", f"--json={report}", f"--meet={meet}",
    ], env=env)  # fmt: skip
    while not (meet / "port").exists() and driver.poll() is None:
        time.sleep(0.05)
    port, _, directory = (meet / "port").read_text().strip().partition(" ")
    env |= {"KEMPNER_PREFLIGHT_PORT": port, "KEMPNER_PREFLIGHT_DIR": directory}
    tasks = []
    for rank in range(job.ranks):
        world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.ranks)}
        command = [sys.executable, "-m", "kempner.jobs.preflight.task"]
        tasks.append(subprocess.Popen(command, env=env | world))
    code = driver.wait()
    for task in tasks:
        task.wait()
    (node,) = json.loads(report.read_text())["nodes"].values()
    if code:
        raise Failed("; ".join(node["faults"]) or f"exit code {code}")
    if job.device == "cuda" and node["gpus"] != gpus:
        raise Failed(f"preflight sees {node['gpus']} GPU(s), torch {gpus}")
    figures = node["inside"] or one_rank_allreduce(job)
    devices = node["devices"].values()
    if not all(each.get("steady") for each in devices):
        raise Failed(f"preflight has not measured all devices: {node['devices']}")
    return {
        "product_tflop_per_s": min(each["flops_per_s"] for each in devices) / 1e12,
        "copy_gb_per_s": min(each["copy_bytes_per_s"] for each in devices) / 1e9,
        "gpus_seen": node["gpus"],
        "gpu_faults": len(node["gpu_faults"]),
        "allreduce_ranks": job.ranks,
        "latency_us": 1e6 * figures["latency_s"],
        "bus_gb_per_s": figures["bus_bytes_per_s"] / 1e9 if job.ranks > 1 else None,
    }


def gpu_faults(job: Job) -> Figures:
    """What a sampler sees of this machine's GPUs, through each way there is; and a whole one."""
    import shutil

    from kempner.jobs.gpu.findings import ReadingComparison
    from kempner.jobs.gpu.kernel_log import KernelLog
    from kempner.jobs.gpu.reading import NoAnswer, NvidiaSmi, open_reader
    from kempner.jobs.gpu.watch import start_watch

    program = shutil.which("nvidia-smi")
    ways = [way for way in (open_reader(), NvidiaSmi(program) if program else None) if way]
    if not ways:
        raise Failed("neither pynvml nor nvidia-smi is available")
    found: Figures = {}
    for way in {way.name: way for way in ways}.values():
        watch, findings = ReadingComparison(), {}
        try:
            for _ in range(2):
                began = time.perf_counter()
                gpus = way.read()
                findings |= {each.key: each for each in watch.look(gpus)}
        except NoAnswer as error:
            raise Failed(str(error)) from None
        unknown = sorted(name for name in gpus[0].numbers if gpus[0].number(name) is None)
        found |= {
            f"{way.name} GPUs": len(gpus),
            f"{way.name} ms": 1e3 * (time.perf_counter() - began),
            f"{way.name} lacks": " ".join(unknown) or None,
            f"{way.name} finds": "; ".join(each.what for each in findings.values()) or "nothing",
        }
        print(way.name, *gpus, sep="\n")
    log = KernelLog()
    time.sleep(0.5)
    found["kernel log"] = log.source or "not readable"
    log.close()
    run_dir = job.work / "watched"
    run_dir.mkdir()
    sampler = start_watch(run_dir, 0, 1.0)
    end = time.monotonic() + 30
    while sampler and not list(run_dir.glob("gpu/*.jsonl")) and time.monotonic() < end:
        time.sleep(0.1)
    if not sampler or not (lines := list(run_dir.glob("gpu/*.jsonl"))):
        raise Failed("the sampler has written nothing")
    sampler.end()
    first = json.loads(lines[0].read_text().splitlines()[0])["gpus"][0]
    return found | {name: first[name] for name in ("temperature_c", "power_w", "uncorrected")}


def one_rank_allreduce(job: Job) -> Figures:
    """With one GPU preflight measures nothing: this shows that its forked process starts NCCL."""
    import torch.distributed as dist

    from kempner.jobs.preflight.allreduce import measure_allreduce, run_in_child

    def run(connected: Callable[[], None]) -> Figures:
        log = job.work / "preflight-nccl.log"
        return measure_allreduce(dist.HashStore(), [0], 0, 0, job.device, log, connected)

    figures = run_in_child(run, 60.0, 20.0)
    if "error" in figures:
        raise Failed(f"all-reduce of one rank: {figures['error']}")
    return figures


def synchronization(job: Job) -> Figures:
    """The real training loop with torch.cuda.set_sync_debug_mode around some of its steps."""
    import torch

    from kempner.data.loader import TrainLoader
    from kempner.train.configure import configure
    from kempner.train.resilience import requests
    from scripts import train as program

    first, last = 5, 10
    real, calls = TrainLoader.__next__, 0
    stacks: dict[str, None] = {}

    def watched(loader: TrainLoader) -> Any:
        nonlocal calls
        calls += 1
        if calls in (first, last) and job.device == "cuda":
            torch.cuda.set_sync_debug_mode("warn" if calls == first else "default")
        return real(loader)

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if "called a synchronizing" in str(message):
            frames = [f for f in traceback.extract_stack() if str(ROOT) in f.filename][-4:-1]
            stacks[" > ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames)] = None

    TrainLoader.__next__ = watched  # type: ignore[method-assign]
    # A warning is otherwise shown once for each line of torch, whoever called it.
    warnings.simplefilter("always")
    warnings.showwarning = note
    stop = requests.StopRequests()
    spikes = ("--resilience.spike_sigma=6", "--resilience.spike_window=8")
    steps = ("--train.max_steps=12", "--checkpoint.interval=0")
    words = job.words("synchronization", *steps, *spikes)
    code = program.main(configure(words, stop), stop)
    if code or calls < last:
        raise Failed(f"exit code {code} after {calls} steps")
    if stacks:
        raise Failed(f"the host waits for the GPU in the step, at {'; '.join(stacks)}")
    if job.device != "cuda":
        raise Skipped("no GPU: the loop ran, its synchronization could not be checked")
    return {"steps_without_synchronization": last - first}


def attention(job: Job) -> Figures:
    """Which kernel scaled_dot_product_attention chooses for the shipped shapes, and its speed."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend

    found: Figures = {}
    shapes = {"125m": (12, 12, 64, 2048), "1b": (32, 8, 64, 4096), "7b": (32, 32, 128, 4096)}
    for name, (heads, kv_heads, width, length) in shapes.items():
        q, k, v = (
            torch.randn(
                2, n, 64 if job.quick else length, width,
                device=job.device, dtype=torch.bfloat16, requires_grad=True,
            )
            for n in (heads, kv_heads, kv_heads)
        )  # fmt: skip
        gqa = heads != kv_heads
        # The choice itself: a slow kernel would only show as a low figure.
        choice = torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=gqa)
        backend = SDPBackend(choice).name
        if backend == "MATH":
            raise Failed(f"{name}: no fused kernel is chosen (MATH)")
        found[name] = backend.removesuffix("_ATTENTION").lower()
        if job.device == "cuda":
            seconds = []
            for _ in range(10):
                torch.cuda.synchronize()
                began = time.perf_counter()
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
                torch.autograd.grad(y.sum(), (q, k, v))
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
            flops = 3.5 * 2 * 2 * heads * length**2 * width  # causal; backward is 2.5 forwards
            found[f"{name}_tflops"] = flops / statistics.median(seconds) / 1e12
    return found


def patterns(job: Job) -> Figures:
    """Documents, windows and capped scores: the kernels that a GPU takes for them against a dense
    mask, output and gradients."""
    import torch

    from kempner.model.attention import Documents, attend, attention_pattern

    length = 2048
    q, k, v = (
        torch.randn(2, n, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (8, 2, 2)
    )
    tokens = torch.zeros(2, length, dtype=torch.int64, device="cuda")
    packed = Documents.of((torch.arange(length) * 5 // length).expand(2, -1), True)
    packed = packed.map(lambda x: x.cuda())
    found: Figures = {}
    for name, what in {
        "window": (300, None, None),
        "documents": (None, packed, None),
        "capped": (None, None, 5.0),
        "all": (300, packed, 5.0),
    }.items():
        results = []
        for kernel in ("auto", "math"):
            seen = attention_pattern(tokens, what[0], what[1], q.dtype, what[2], kernel)
            y = attend(q, k, v, seen)
            results.append((y.detach(), *torch.autograd.grad(y.float().square().sum(), (q, k, v))))
        pairs = zip(*results, strict=True)
        found[name] = max(float((a - b).float().norm() / b.float().norm()) for a, b in pairs)
        if not found[name] < SAME:
            raise Failed(f"{name}: differs by {found[name]:.1%} from attention by a dense mask")
    return found


def fp8(job: Job) -> Figures:
    """Losses with fp8 products beside those of bf16."""
    import torch

    if importlib.util.find_spec("torchao") is None:
        raise Skipped("torchao is not installed: pip install -e '.[fp8]'")
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        raise Skipped(f"{torch.cuda.get_device_name()} has no fp8 products")
    steps = ["--train.max_steps=20", "--checkpoint.interval=0"]
    worst: Figures = {}
    for recipe in ("rowwise", "mxfp8") if capability >= (10, 0) else ("rowwise",):
        train(job, job.words(recipe, f"--train.fp8={recipe}", "--train.compile", *steps))
        found = compare(recipe, losses(job.work / recipe), losses(job.work / "unbroken"))
        worst[f"{recipe} loss_difference"] = found
    return worst


def planned_speed(cfg: RunConfig, ranks: int, device: str) -> float | None:
    """Return the planner's estimate in tokens per second; None for a card that it does not know."""
    from kempner.extensions.planner.cost import step_seconds
    from kempner.extensions.planner.gpus import gpu_of_device

    if (gpu := gpu_of_device(device)) is None:
        return None
    return cfg.train.sequences * cfg.train.seq_len / step_seconds(cfg, ranks, ranks, gpu).step


def bench(job: Job, shape: str, accumulate: int) -> Figures:
    """Tokens/s of a shipped configuration, compiled as it is shipped, on all GPUs: 7b on eight
    as configs/scale/7b-1node.toml has it, else with one sequence a pass."""
    from kempner.extensions.planner.memory import GIB, estimate_memory
    from kempner.train.configure import load_config

    run_dir = job.work / f"bench-{shape}"
    words = [
        f"configs/train/{shape}.toml", job.data, f"--run.dir={run_dir}",
        "--train.max_steps=100000", "--checkpoint.interval=0", "--eval.interval=0",
        "--metrics.log_interval=1",
    ]  # fmt: skip
    if shape == "7b" and job.ranks == 8:
        words += ["--train.micro_batch=4", "--train.recompute=selective"]
    elif shape == "7b":
        words.append("--train.micro_batch=1")
    cfg = load_config([str(ROOT / words[0])], words[1:])
    sequences = (cfg.train.micro_batch or 1) * accumulate * job.ranks
    words.append(f"--train.global_batch_tokens={sequences * cfg.train.seq_len}")
    cfg = load_config([str(ROOT / words[0])], words[1:])
    # Read from a file: a CUDA context of this process would take memory from the trainer's.
    environment = json.loads((job.work / "environment.result.json").read_text())
    there = environment["figures"]["memory_gib"]
    planned = estimate_memory(cfg, job.ranks, job.ranks).peak / GIB
    if planned > 0.95 * there:
        raise Skipped(f"does not fit: the planner says {planned:.0f} GiB of {there:.0f} per GPU")
    log = job.work / f"bench-{shape}.out"
    lines: list[dict[str, Any]] = []
    with trainer(words, log, job.ranks) as process:
        while process.poll() is None:
            lines = after_warm_up(metrics(run_dir))
            if len(lines) >= BENCH_STEPS and sum(x["step_time"] for x in lines) >= BENCH_S:
                break  # it is killed: its last save would write all of its state
            time.sleep(0.2)
    # Any other end came before there were enough steps.
    if process.returncode != -signal.SIGKILL:
        raise failure(log)
    used = max(x["memory_gib"] for x in lines)
    if used > OVER * planned:
        raise Failed(f"needs {used:.1f} GiB, where the planner says {planned:.1f}")
    mfu = statistics.median(x["mfu"] or 0.0 for x in lines)
    model, length = cfg.model, cfg.train.seq_len
    full = model.flops_per_token(length, keys=length) / model.flops_per_token(length)
    speed = statistics.median(x["tokens_per_s"] for x in lines)
    batch = [word for word in words if word.startswith(PASS_OPTIONS)]
    verify(job, words[0], batch, speed / job.ranks, mfu, used)
    return {
        "tokens_per_s": speed,
        "mfu_causal": mfu or None,
        "mfu_full_attention": mfu * full or None,
        "memory_gib": used,
        "planned_gib": planned,
        "planned_tokens_per_s": planned_speed(cfg, job.ranks, environment["figures"]["gpu"]),
        "step_s": statistics.median(x["step_time"] for x in lines),
        "tokens_per_step": sequences * length,
        "ranks": job.ranks,
    }


def verify(job: Job, file: str, batch: list[str], speed: float, mfu: float, used: float) -> None:
    """Add a figure to configs/verified. `speed`: tokens/s of one GPU; `used`: GiB."""
    from kempner.extensions.bench.measure import describe_machine
    from kempner.extensions.tune import verified
    from kempner.extensions.tune.space import RankDevice

    facts = describe_machine()
    if spec := RankDevice(facts["device"], facts["memory_gib"]).spec:
        entry = verified.new_entry([str(ROOT / file)], batch, spec.name, 1, job.ranks)
        figures = verified.measured_by(facts, speed, mfu, used)
        verified.add_entry(entry._replace(measured=figures))


def tuned(job: Job) -> Figures:
    """tune.py for three minutes on all GPUs; its figure goes to configs/verified, too."""
    gpu = job.device == "cuda" and not job.quick
    words = ["configs/train/125m.toml", "--minutes=3", "--record"]
    run_dir = ROOT / "runs/tune-125m"  # where the command that it prints finds the file
    if not gpu:
        words, run_dir = [*job.words("tune"), "--minutes=0.01"], job.work / "tune"
    log = job.work / "tune.out"
    ranks = 1 << (job.ranks.bit_length() - 1) if gpu else 1  # the batch divides by powers of two
    with trainer(words, log, ranks, "tune.py") as process:
        process.wait()
    if process.returncode:
        raise failure(log)
    record = json.loads((run_dir / "tune/record.json").read_text())
    best, itself = record["trials"][0], next(x for x in record["trials"] if not x["overrides"])
    return {
        "tokens_per_s": best["tokens_per_s"],
        "as_configured": itself["tokens_per_s"],
        "candidates": len(record["trials"]),
        "use": log.read_text().splitlines()[-1].strip(),
    }


def hang(job: Job) -> Figures:
    """A stopped rank and another collective over NCCL: by its flight recorder and its RAS."""
    from benchmarks.hangs import FAULTS, measure

    if job.ranks < 2:
        raise Skipped("needs two GPUs")
    figures: Figures = {}
    for name, agree in (("stopped", "answers and kernel"), ("collective", "flight recorders")):
        named, ended, _, reason = measure(FAULTS[name], 2, 1, f"--distributed.device={job.device}")
        if agree not in reason or ended > 60:
            raise Failed(f"{name}: ended after {ended:.0f} s: {reason}")
        figures |= {f"{name}_named_s": named, f"{name}_ended_s": ended, f"{name}_reason": reason}
    return figures


def after_warm_up(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    long = len(lines) > 1 and lines[1]["step_time"] > LONG_S
    return lines[1 if long else WARM_UP :]


class Check(NamedTuple):
    """`limit`: seconds after which it has failed. `together`: it measures no time, and may run
    beside others. `needs`: checks whose runs it makes use of."""

    run: Callable[[Job], Figures]
    limit: float
    needs_gpu: bool = False
    together: bool = False
    needs: tuple[str, ...] = ()


# The figures that are asked for come first; then what measures no time, side by side; then what
# needs two GPUs, and the tune.
CHECKS = {
    "environment": Check(environment, 60),
    "data": Check(data, 60),
    "bench 7b": Check(lambda job: bench(job, "7b", 8), 240, needs_gpu=True),
    "bench 1b": Check(lambda job: bench(job, "1b", 8), 150, needs_gpu=True),
    "bench 125m": Check(lambda job: bench(job, "125m", 16), 120, needs_gpu=True),
    "save": Check(save, 90),
    "generate": Check(generation, 60, needs=("save",)),
    "decode": Check(decoding, 150),
    "preflight": Check(preflight, 120),
    "attention": Check(attention, 45),
    "loss": Check(loss, 60, needs_gpu=True),
    "gpu faults": Check(gpu_faults, 90, needs_gpu=True),
    "compile": Check(compiled, 120, needs_gpu=True, needs=("save",)),
    "resume": Check(resume, 120, together=True, needs=("save",)),
    "meshes": Check(meshes, 90, together=True),
    "synchronization": Check(synchronization, 60, together=True),
    "ring": Check(ring, 60, together=True),
    "waves": Check(waves, 60, together=True),
    "experts": Check(experts, 60, together=True),
    "muon": Check(muon, 60, together=True),
    "update": Check(update, 90, needs_gpu=True, together=True),
    "offload": Check(offload, 120, together=True, needs=("save",)),
    "recompute": Check(recompute, 120, needs_gpu=True, together=True, needs=("save",)),
    "patterns": Check(patterns, 120, needs_gpu=True, together=True),
    "fp8": Check(fp8, 150, needs_gpu=True, together=True, needs=("save",)),
    "distributed": Check(distributed, 90, needs=("save",)),
    "flash": Check(flash, 240, needs_gpu=True),
    "fp8 gathers": Check(fp8_gathers, 180, needs_gpu=True),
    "overlap": Check(overlap, 300, needs_gpu=True),
    "exchange": Check(exchange, 120, needs_gpu=True),
    "axes": Check(axes, 300, needs=("save",)),
    "hang": Check(hang, 240, needs_gpu=True),
    "tune": Check(tuned, 360),
}
