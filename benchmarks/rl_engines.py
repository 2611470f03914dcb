"""What many engines of rl.sh cost its first host: a srun for each, and their supervision.

    python -m benchmarks.rl_engines --engines 16 128

Boots the test bed (root), and starts so many steps in one job there: the requests that reach the
controller and the time that it works on them (sdiag), the memory of the sruns, and how long it
takes until all steps run. Then the loop of rl_watch.sh looks after as many engines, which all
answer at once: its share of a core, with the processes that it starts.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.ray_start import TESTBED, ask

LIB = TESTBED.parent / "lib/all.sh"
SECONDS = 30
STEPS = """#!/bin/bash
sdiag >before
began=$(date +%s%N)
for ((i = 0; i < {count}; i++)); do
    srun --overlap --mem=0 --ntasks=1 --nodes=1 --nodelist="$(uname -n)" sleep {pause} &
done 2>/dev/null
until (($(pgrep -cx sleep) >= {count})); do read -rt 0.2 <> <(:); done
echo $((($(date +%s%N) - began) / 1000000)) >there
for pid in $(pgrep -x srun); do sed -n 's/^Pss: *//p' "/proc/$pid/smaps_rollup"; done >pss
wait
sdiag >after
"""
LOOP = """set -euo pipefail
source {lib}
source "$KP_LIB/rl.sh"
source "$KP_LIB/rl_watch.sh"
kp_log() {{ :; }}
KP_RL=([engines]={count} [exchange]=$PWD) KP_SIGNAL='' KP_DECIDED=''
# as in kp_run_rl
orchestrator=1 leaving='' ever_served=''
engine_pids=() engine_tries=() engine_next=() engine_seen=() engine_there=() probes=()
for ((i = 0; i < {count}; i++)); do engine_pids[i]=$$; done
while ((SECONDS < {seconds})); do
    kp_look_at_engines
    sleep 0.2
done
"""
REQUEST = re.compile(r"^\s+(REQUEST_\w*STEP\w*|REQUEST_HET_JOB_ALLOC_INFO) .*count:(\d+)"
                     r" .*total_time:(\d+)$", re.MULTILINE)  # fmt: skip


class Engine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Engines(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True


def requests(report: Path) -> tuple[int, int]:
    """How many, and microseconds of the controller."""
    found = REQUEST.findall(report.read_text().partition("by message type")[2].split("\n\n")[0])
    return sum(int(count) for _, count, _ in found), sum(int(spent) for *_, spent in found)


def steps(count: int, env: dict[str, str], folder: Path) -> str:
    job = folder / "job.sh"
    job.write_text(STEPS.format(count=count, pause=20 + count // 8))
    ask("sbatch", "--exclusive", "--mem=0", "--wait", "--output=log", job, cwd=folder, env=env)
    before, after = (requests(folder / name) for name in ("before", "after"))
    pss = [int(line.split()[0]) for line in (folder / "pss").read_text().splitlines()]
    return (
        f"{after[0] - before[0]} | {(after[1] - before[1]) / 1e6:.2f} s | "
        f"{int((folder / 'there').read_text()) / 1000:.1f} s | {sum(pss) / 1024:.0f} MiB"
    )


def supervision(count: int, folder: Path) -> float:
    """Share of a core."""
    (folder / "engines").mkdir()
    with Engines(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for number in range(count):
            url = f"http://127.0.0.1:{server.server_port}\n"
            (folder / f"engines/engine-{number}").write_text(url)
        script = LOOP.format(lib=LIB, count=count, seconds=SECONDS)
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(["bash", "-c", script], cwd=folder, check=True)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        server.shutdown()
    spent = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return spent / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.rl_engines", description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[16, 128])
    given = parser.parse_args()
    env = {**os.environ, "KEMPNER_TESTBED": str(os.getpid() % 249 + 1)}
    env["KEMPNER_TESTBED_OWNER"] = str(os.getpid())
    env["SLURM_CONF"] = ask("bash", TESTBED, "up", 2, 0, env=env).split("SLURM_CONF=")[1]
    print("| engines | requests | controller | all run after | memory | supervision |")
    print("|---|---|---|---|---|---|")
    try:
        for count in given.engines:
            with tempfile.TemporaryDirectory() as name:
                cells = steps(count, env, Path(name))
                share = supervision(count, Path(name))
            print(f"| {count} | {cells} | {share:.1%} of a core |", flush=True)
    finally:
        subprocess.run(["bash", TESTBED, "down"], env=env, check=True)


if __name__ == "__main__":
    main()
