#!/usr/bin/env bash
# Train inside a running job, beside its other steps: on its nodes, GPUs and network.
#
#   bash scripts/slurm/interactive.sh JOBID configs/train/debug.toml --train.max_steps=50
#
# Ctrl-C asks the ranks to save and stop; a second one kills them. The job itself keeps running.
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "${0%"${0##*/}"}lib/all.sh"

(($# >= 2)) || kp_die "usage: bash scripts/slurm/interactive.sh JOBID CONFIG [OVERRIDES]"
kp_use_job "$1" # as if this shell were in it
shift

kp_take "$@"                  # train.py's arguments; --dry-run
kp_setup                      # the repository, its Python, site.env
kp_tune                       # with --tune: finds the fastest settings instead
kp_tasks                      # nodes, GPUs, one task per GPU: the job's own
kp_check "${KP_ARGUMENTS[@]}" # checks the configuration once, before using any GPU
kp_banner                     # what runs where
kp_preflight                  # with KEMPNER_PREFLIGHT=1: checks the nodes first
kp_stage                      # with KEMPNER_STAGE=DIR: copies the data to the nodes' own disks
kp_run "${KP_ARGUMENTS[@]}"   # srun beside the other steps; forwards Ctrl-C
kp_finish                     # exits
