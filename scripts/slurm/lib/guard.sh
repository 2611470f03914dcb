#!/usr/bin/env bash
# Requeue a job that has lost the host of its batch script. Runs on other hosts of the job.
#
#   srun ... guard.sh JOB RESTARTS [JOURNAL CHAIN LINK PYTHON]
#
# With --no-kill, Slurm removes a lost host from the job and lets the job continue even if its batch
# script ran there: the job would idle until its time limit. RESTARTS: a host that was cut off may
# still run the guard of an earlier start, which must not touch this one. JOURNAL: chain.jsonl,
# which tells the next job of the chain that no user has cancelled this one.
set -euo pipefail

field() { # <name>: prints that field of JOB, if any
    [[ ! $JOB =~ [[:space:]]"$1"=([^[:space:]]*) ]] || echo "${BASH_REMATCH[1]}"
}

while sleep 10; do
    JOB=$(scontrol show job "$1" 2>/dev/null) || continue
    [[ $(field Restarts) == "$2" ]] || exit 0
    [[ $(field JobState) == RUNNING && -n $(field BatchHost) ]] || continue
    hosts=$(scontrol show hostnames "$(field NodeList)" 2>/dev/null | paste -sd' ') || continue
    hosts=" $hosts "
    [[ $hosts != *" $(field BatchHost) "* ]] || continue

    # Two guards may act at once: if one is refused because the other was first, it
    # must not cancel the job.
    if [[ $(field Requeue) != 0 ]]; then
        scontrol requeue "$1" 2>/dev/null || true
    else
        if [[ -n ${3:-} ]]; then
            lost=("${0%/*}/records.py" append "$3" event=lost "chain=$4" "link:=$5" "job=$1")
            "${6:-python3}" -I -S "${lost[@]}" || python3 -I -S "${lost[@]}" || true
        fi
        scancel "$1"
    fi
done
