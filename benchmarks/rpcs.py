"""How often a run asks Slurm's controller: calls of its commands by start, minute and crash.

    python -m benchmarks.rpcs                    at 2 and at 1,000 nodes, 5 minutes

Needs no Slurm: scripts/slurm/multinode.sh runs on this machine, in a job of stand-ins for Slurm's
commands that write down each call. The step is one process, the first rank, whatever the number of
nodes: no other rank asks. `scontrol show hostnames`, which asks nobody, does not count, and of
srun each step is a call.

A crash is a kill -9 of that process: the first one is answered in place, the second one, at once
and without progress, by a requeue.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from kempner.jobs.system.reading import read_jsonl
from tests.cluster import ROOT, make_data
from tests.conftest import clean_env

COMMANDS = ("scontrol", "squeue", "sinfo", "srun", "sbatch", "scancel", "sacct")
JOB = """JobId=7 JobName=kempner
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:01 TimeLimit=1-00:00:00 TimeMin=N/A
   SubmitTime=2026-11-23T08:00:00 EligibleTime=2026-11-23T08:00:00
   StartTime=2026-11-23T08:00:00 EndTime=2099-11-24T08:00:00 Deadline=N/A
   Partition=gpu AllocNode:Sid=x:1
   NodeList=node[1-{nodes}]
   BatchHost=node1
   NumNodes={nodes} NumCPUs={nodes} NumTasks={nodes} CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=*
   ReqNodeList=(null) ExcNodeList=(null)
   Command={root}/scripts/slurm/multinode.sh
   WorkDir={root}
"""
STAND_IN = """#!/bin/bash
name=${{0##*/}}
echo "$name $*" >>{folder}/calls
hosts() {{ # <list>
    if [[ $1 == 'node[1-{nodes}]' ]]; then seq -f node%g {nodes}; else tr , '\\n' <<<"$1"; fi
}}
case "$name ${{1:-}} ${{2:-}}" in
    'scontrol show job') cat {folder}/job ;;
    'scontrol show hostnames') hosts "${{3:-$(cat)}}" ;;
    'scontrol show config') printf '%s\\n' 'SlurmdPort = 1' 'KillWait = 30 sec' ;;
    'scontrol show partition') echo PreemptMode=OFF ;;
    'scontrol show node') hosts "$3" | sed 's/.*/NodeName=& NodeAddr=127.0.0.1 Port={port}/' ;;
    'scontrol requeue'*) sed -i s/JobState=RUNNING/JobState=COMPLETING/ {folder}/job ;;
    'sinfo '*) seq -f 'node%g|idle||' {nodes} ;;
    squeue*--steps*) printf '7.%s\\n' batch 0 1 2 ;;
    squeue*) echo RUNNING ;;
    srun*)
        while [[ $1 == -* ]]; do shift; done
        export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=1 SLURM_STEP_ID=0
        export SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURMD_NODENAME=node1
        export SLURM_LAUNCH_NODE_IPADDR=127.0.0.1
        "$@" &
        echo $! >{folder}/rank
        wait $! || {{
            code=$?
            echo "srun: error: node1: task 0: Killed" >&2
            exit $code
        }}
        ;;
esac
"""
Counts = dict[str, Counter[str]]


class Job:
    """One job of stand-ins."""

    def __init__(self, nodes: int, folder: Path, data: Path, port: int) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        (folder / "bin").mkdir(parents=True)
        (folder / "job").write_text(JOB.format(nodes=nodes, root=ROOT))
        for name in COMMANDS:
            file = folder / "bin" / name
            file.write_text(STAND_IN.format(folder=folder, nodes=nodes, port=port))
            file.chmod(0o755)
        words = [
            ROOT / "configs/train/debug.toml", f"--data.dataset_path={data}",
            f"--run.dir={self.run_dir}", "--distributed.device=cpu", "--model.dim=16",
            "--model.n_layers=1", "--model.ffn_dim=32", "--train.seq_len=32",
            "--train.micro_batch=1", f"--train.global_batch={nodes}", "--train.max_steps=1000000",
            "--eval.interval=0", "--checkpoint.interval=1000000", "--metrics.log_interval=1",
        ]  # fmt: skip
        env = clean_env(
            PATH=f"{folder / 'bin'}:{os.environ['PATH']}", SLURM_JOB_ID="7",
            SLURM_NNODES=str(nodes), SLURM_JOB_NODELIST=f"node[1-{nodes}]",
            SLURM_SUBMIT_DIR=str(ROOT), KEMPNER_PYTHON=sys.executable, KEMPNER_SITE=os.devnull,
        )  # fmt: skip
        with open(folder / "log", "w") as log:
            self.script = subprocess.Popen(
                ["bash", ROOT / "scripts/slurm/multinode.sh", *map(str, words)],
                cwd=folder, env=env, stdout=log, stderr=log,
            )  # fmt: skip

    def calls(self) -> Counter[str]:
        """How often each command was called so far."""
        lines = (self.folder / "calls").read_text().splitlines()
        return Counter(x.split()[0] for x in lines if not x.startswith("scontrol show host"))

    def wait_for_step(self, attempt: int) -> None:
        end = time.monotonic() + 300
        path = self.run_dir / "metrics.jsonl"
        while not path.exists() or not any(
            "loss" in line and line["attempt"] == attempt for line in read_jsonl(path)
        ):
            if time.monotonic() > end or self.script.poll() is not None:
                sys.exit(
                    f"error: no step of attempt {attempt}:\n{(self.folder / 'log').read_text()}"
                )
            time.sleep(0.2)
        time.sleep(3)  # what belongs to a start and comes after its first step

    def kill_rank(self) -> None:
        os.kill(int((self.folder / "rank").read_text()), signal.SIGKILL)


def measure(nodes: int, folder: Path, data: Path, port: int, minute: float) -> Counts:
    job = Job(nodes, folder, data, port)
    counts: Counts = {}

    def since(before: Counter[str], what: str) -> Counter[str]:
        now = job.calls()
        counts[what] = now - before
        return now

    try:
        job.wait_for_step(0)
        now = since(Counter(), "a start, to its first step")
        time.sleep(minute)
        now = since(now, "a minute of training")
        job.kill_rank()
        job.wait_for_step(1)
        now = since(now, "a crash, restart in place")
        job.kill_rank()
        job.script.wait(timeout=300)
        since(now, "a crash, requeue")
    finally:
        # To kill the script alone would leave the rank behind.
        if job.script.poll() is None:
            job.kill_rank()
            job.script.kill()
            job.script.wait()
    return counts


def table(found: dict[int, Counts]) -> str:
    first = next(iter(found.values()))
    rows = [["", *(f"{nodes:,} nodes" for nodes in found)]]
    for what in first:
        cells = []
        for counts in found.values():
            parts = ", ".join(f"{n} {name}" for name, n in counts[what].most_common())
            total = sum(counts[what].values())
            cells.append(f"{total}: {parts}" if total else "0")
        rows.append([what, *cells])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 1000])
    parser.add_argument("--minute", type=float, default=60.0, help="seconds of training")
    args = parser.parse_args()
    if min(args.nodes) < 2:
        parser.error(f"--nodes {min(args.nodes)}: at least 2")
    found = {}
    with tempfile.TemporaryDirectory(prefix="rpcs-") as name:
        data = make_data(Path(name))
        with socket.create_server(("127.0.0.1", 0), backlog=4096) as server:  # every host's slurmd
            for nodes in args.nodes:
                port = server.getsockname()[1]
                found[nodes] = measure(nodes, Path(name) / str(nodes), data, port, args.minute)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
