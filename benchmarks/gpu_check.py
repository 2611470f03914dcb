"""Checks and measures the trainer on this machine's GPUs, in up to 18 minutes.

    make gpu-check                                          with .venv, or PYTHON=... that has torch
    python -m benchmarks.gpu_check --out runs/gpu-check     the same
    python -m benchmarks.gpu_check --only "bench 7b,save"   these alone, and what they need
    python -m benchmarks.gpu_check --device cpu --quick     what can be checked without a GPU

Each check runs in a process of its own with a time limit, so that a failure does not stop the
others; what each compiles, the next ones find. Checks that measure time run alone, the others up to
six at a time. Writes report.md, report.json and the log of each check. Exit code 0: all passed or
do not apply to this machine; 1: some failed, or the time ran out before them; 2: bad input.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu_checks import CHECKS
from benchmarks.gpu_job import ROOT, Failed, Job, Skipped
from kempner.config.option import ConfigError
from kempner.jobs.system.compiler import CACHE
from kempner.jobs.system.seal import refuse_other_file

SECONDS = 1080.0  # in all: the limits of the checks add up to more, what they usually take to less
LEAST_S = 10.0  # no check starts with less than that
GRACE_S = 5.0  # for a check that is stopped to stop what it started
SIGNS = ('"checks"', "# GPU check of")  # of a report, as JSON and as Markdown
OUT_OF_TIME = "out of time"
FIRST = ("environment", "data")  # of all others


def main(argv: list[str]) -> int:
    options = parse(argv)
    if options.check:
        job = Job(options.work, options.device, options.quick, options.ranks)
        return run_here(options.check, job)
    options.ranks = gpu_count() if options.device == "cuda" else 2
    if not options.ranks:
        fix = "--device cpu --quick checks what can be checked without one"
        print(f"gpu_check: error: torch sees no GPU on this machine; {fix}", file=sys.stderr)
        return 2
    running = Running()
    signal.signal(signal.SIGTERM, running.end)
    try:
        for name in ("report.json", "report.md"):
            refuse_other_file(options.out / name, "a file of --out", SIGNS)
        options.out.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError) as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return 2
    began = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:

        def run(name: str) -> dict[str, Any]:
            check, left = CHECKS[name], options.seconds - (time.monotonic() - began)
            if check.needs_gpu and options.device == "cpu":
                return {"status": "skipped", "why": "no GPU", "seconds": 0.0}
            if left < LEAST_S or running.is_over:
                return {"status": "skipped", "why": OUT_OF_TIME, "seconds": 0.0}
            limit = left if options.quick else min(check.limit, left)  # a busy machine is slow
            return run_apart(name, limit, Path(work), options, running)

        for together, group in itertools.groupby(options.only, lambda name: CHECKS[name].together):
            names = list(group)
            with ThreadPoolExecutor(side_by_side() if together else 1) as pool:
                for name, result in zip(names, pool.map(run, names), strict=True):
                    results[name] = result
                    print(row(name, result), flush=True)
    record = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": f"python -m benchmarks.gpu_check {' '.join(argv)}".strip(),
        "seconds": round(time.monotonic() - began, 1),
        "checks": results,
    }
    (options.out / "report.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "report.md").write_text(markdown(record))
    if late := [name for name, result in results.items() if result.get("why") == OUT_OF_TIME]:
        print(f"not checked for want of time (--seconds): {', '.join(late)}")
    print(f"{record['seconds']:.0f} s; the report is {options.out / 'report.md'}")
    if command := results.get("tune", {}).get("figures", {}).get("use"):
        print(f"the fastest settings found for 125m on this machine:\n    {command}")
    bad = [r for r in results.values() if r["status"] == "FAIL" or r.get("why") == OUT_OF_TIME]
    return 1 if bad else 0


def parse(argv: list[str]) -> argparse.Namespace:
    about, _, more = (__doc__ or "").partition("\n")
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("gpu_check", None, about, more, formatter_class=as_it_is)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny models: does it run at all?")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit for everything")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu-check"), help="default: runs/gpu-check"
    )
    names = "of: " + ", ".join(name for name in CHECKS if name not in FIRST)
    parser.add_argument("--only", type=chosen, default=list(CHECKS), metavar="NAME,...", help=names)
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)  # run_apart() gives them
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def chosen(text: str) -> list[str]:
    """Return the names in a list, and the checks that they need, in the order of CHECKS."""
    names = {name.strip() for name in text.split(",")}
    if unknown := names - CHECKS.keys():
        raise argparse.ArgumentTypeError(
            f"{', '.join(sorted(unknown))}: no such check; choose from {', '.join(CHECKS)}"
        )
    needed = {name for each in names for name in CHECKS[each].needs}
    return [name for name in CHECKS if name in {*FIRST, *names, *needed}]


def side_by_side() -> int:
    """Checks at a time: each starts trainers, which import torch and compile."""
    return max(1, min(6, (os.cpu_count() or 1) // 2))


class Running:
    """The processes of checks, each a group of its own."""

    def __init__(self) -> None:
        self.processes: set[subprocess.Popen[bytes]] = set()
        self.is_over = False

    def end(self, *_: object) -> None:
        """End them all, and this program; no other check starts."""
        self.is_over = True
        for process in [*self.processes]:
            end_group(process)
        sys.exit(1)


def gpu_count() -> int:
    """Asked here once: a check that forks must not have touched CUDA."""
    import torch

    return torch.cuda.device_count()


def run_here(name: str, job: Job) -> int:
    """One check in this process; leaves its result in a file."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what it started ends with it
    try:
        result: dict[str, Any] = {"status": "pass", "figures": CHECKS[name].run(job)}
    except Skipped as skipped:
        result = {"status": "skipped", "why": str(skipped)}
    except Failed as failed:
        result = {"status": "FAIL", "why": str(failed)}
    result_file(job.work, name).write_text(json.dumps(result))
    return 0


def result_file(work: Path, name: str) -> Path:
    return work / f"{name.replace(' ', '-')}.result.json"


def run_apart(
    name: str, limit: float, work: Path, options: argparse.Namespace, running: Running
) -> dict[str, Any]:
    """One check in a process of its own; never raises."""
    log = options.out / f"{name.replace(' ', '-')}.log"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--check", name, "--work", str(work)]
    command += ["--device", options.device, "--ranks", str(options.ranks)]
    command += ["--quick"] if options.quick else []
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=clean_env(work), stdout=out, stderr=out, start_new_session=True
        )
    running.processes.add(process)
    late = False
    try:
        process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        end_group(process)
        running.processes.discard(process)
    file = result_file(work, name)
    if late:
        result: dict[str, Any] = {"status": "FAIL", "why": f"still running after {limit:.0f} s"}
    elif file.exists():
        result = json.loads(file.read_text())
    else:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        why = lines[-1] if lines else f"exit code {process.returncode}"
        result = {"status": "FAIL", "why": why}
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM lets a check end its trainer, which is in a group of its own; SIGKILL ends the
    rest."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def clean_env(work: Path) -> dict[str, str]:
    """This environment with our sources in front, and without what a launcher left in it; compiled
    kernels are kept for the next check."""
    ours = ("SLURM", "TORCHELASTIC", "KEMPNER", "MASTER_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        kept.pop(name, None)
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), kept.get("PYTHONPATH"))))
    return kept | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", CACHE: str(work / "compiled")}


# --- the report -------------------------------------------------------------------------------


def row(name: str, result: dict[str, Any]) -> str:
    status, seconds = result["status"], result["seconds"]
    return f"{name:<16} {status:<8} {seconds:>6.1f} s  {said(result)}"


def said(result: dict[str, Any]) -> str:
    """The figures of a check, or why there are none."""
    figures = result.get("figures", {})
    return str(result.get("why", "")) or ", ".join(
        f"{key} {show(value)}" for key, value in figures.items() if value is not None
    )


def show(value: Any) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def markdown(record: dict[str, Any]) -> str:
    about = record["checks"]["environment"].get("figures", {})
    lines = [
        f"# GPU check of {record['date']}",
        "",
        f"    {record['command']}",
        "",
        f"{record['seconds']:.0f} s on " + ", ".join(f"{k} {v}" for k, v in about.items()) + ".",
        "",
        "MFU counts causal attention, half of the full one, and the output layer, without what is "
        "computed again; `mfu_full_attention` is the figure by the formula of most other tables.",
        "",
        "| check | result | seconds | figures |",
        "|---|---|---|---|",
    ]
    for name, result in record["checks"].items():
        text = said(result).replace("|", "\\|")
        lines.append(f"| {name} | {result['status']} | {result['seconds']:.1f} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
