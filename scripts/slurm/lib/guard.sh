#!/usr/bin/env bash
# Requeues a job of replicas that has lost the host of its batch script; on other hosts of the job.
#
#   srun ... guard.sh JOB
#
# With --no-kill Slurm takes a lost host out of the job and lets the job go on, even when its batch script ran there:
# until the time limit nobody would be in it.
set -euo pipefail

field() { # <name>: that field of JOB, or nothing
    [[ ! $JOB =~ [[:space:]]"$1"=([^[:space:]]*) ]] || echo "${BASH_REMATCH[1]}"
}

while sleep 10; do
    JOB=$(scontrol show job "$1" 2>/dev/null) || continue
    [[ $(field JobState) == RUNNING && -n $(field BatchHost) ]] || continue
    hosts=" $(scontrol show hostnames "$(field NodeList)" | paste -sd' ') "
    [[ $hosts != *" $(field BatchHost) "* ]] || continue
    scontrol requeue "$1" 2>/dev/null || scancel "$1" # of --no-requeue
done
