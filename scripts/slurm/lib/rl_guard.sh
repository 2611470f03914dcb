#!/usr/bin/env bash
# With --no-kill Slurm keeps a job whose batch script has gone down with its host, until the time limit: nobody is left
# to requeue it. This runs on nodes of engines, and does it for the batch script.
#
#   rl_guard.sh JOB NODE      NODE: that of the batch script
set -euo pipefail

while sleep 20; do
    # scontrol says State=DOWN* while a node does not respond.
    [[ ! $(scontrol show node -o "$2" 2>/dev/null) =~ State=DOWN ]] || scontrol requeue "$1" || true
done
