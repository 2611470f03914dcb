"""The tests that are too slow for every day, one part after the other, and a table at the end:

    python -m tests.soak [--only NAME ...] [-- WORDS OF PYTEST]

A part that fails does not keep the next ones from running; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-m", "pytest")
# Most of the time these tests wait: for time limits, requeues and hangs. A file is not one
# worker's, because that of the pages alone takes an hour.
WORKERS = ("-n", "4", "--dist", "worksteal")


def find_tests(*kinds: str) -> list[str]:
    """Return the directories of these kinds in all three parts."""
    found = [path for kind in kinds for path in sorted(ROOT.glob(f"tests/*/{kind}"))]
    return [str(path.relative_to(ROOT)) for path in found]


FAULTS = (sys.executable, "-m", "benchmarks.soak")
PARTS: dict[str, tuple[str, ...]] = {
    "tests": (*PYTEST, "-m", "soak", *WORKERS),
    "vllm": ("make", "test-vllm"),
    "as-user": (*PYTEST, *find_tests("slurm", "fault", "ray"), "--as-user", *WORKERS),
    "other-python": (*PYTEST, *find_tests("distributed"), "--trainer-python=/usr/bin/python3",
                     *WORKERS),
    "faults": (*FAULTS, "--faults", "30", "--seed", "1", "--pattern", "kit", "spares"),
    "site": (*FAULTS, "--site", "hostile", "--faults", "40", "--seed", "1"),
    "replicas": (*FAULTS[:2], "benchmarks.soak_replicas", "--faults", "30", "--seed", "1"),
    "rl": (*FAULTS[:2], "benchmarks.soak_rl", "--faults", "20", "--seed", "1"),
}  # fmt: skip


class Result(NamedTuple):
    name: str
    seconds: float
    code: int


def run_parts(
    parts: Mapping[str, Sequence[str]], words: Sequence[str], say: Callable[[str], None] = print
) -> list[Result]:
    """Run the parts in turn; `words` go to those that are pytest's. Ctrl-C ends the part that runs
    and leaves out the rest."""
    results = []
    for name, command in parts.items():
        more = words if command[1:3] == PYTEST[1:] else ()
        say(f"\n== {name}: {shlex.join([*command, *more])}")
        begin = time.monotonic()
        try:
            code = subprocess.run([*command, *more], cwd=ROOT).returncode
        except KeyboardInterrupt:
            code = 130
        results.append(Result(name, time.monotonic() - begin, code))
        if code == 130:
            break
    return results


def table(results: Sequence[Result], left_out: Sequence[str]) -> str:
    lines = [f"{'part':<14}{'seconds':>9}  result"]
    for name, seconds, code in results:
        lines.append(f"{name:<14}{seconds:>9.0f}  {f'exit code {code}' if code else 'passed'}")
    lines += [f"{name:<14}{'':>9}  not run" for name in left_out]
    lines.append(f"{'together':<14}{sum(result.seconds for result in results):>9.0f}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=PARTS, default=list(PARTS))
    parser.add_argument("words", nargs="*", metavar="WORD", help="after --: given to pytest")
    args = parser.parse_args(argv)
    chosen = {name: PARTS[name] for name in PARTS if name in args.only}
    results = run_parts(chosen, args.words, lambda text: print(text, flush=True))
    print("\n" + table(results, [name for name in PARTS if name not in {r.name for r in results}]))
    return int(any(result.code for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
