#!/usr/bin/env bash
# Run a drill on this cluster: kill, freeze, requeue and preempt tiny jobs of yours, let them reach
# their time limit, lose a node, fill a disk. A table says which promises of the kit hold here.
#
#   bash scripts/slurm/drill.sh --partition=gpu --account=lab
#   bash scripts/slurm/drill.sh [--minutes 20] [--only CASE,CASE] [SBATCH OPTIONS]
#   bash scripts/slurm/drill.sh [SBATCH OPTIONS] -- python my_train.py --lr 3e-4
#       also tests your own program: runs it under run.sh and kills it once
#
#   --minutes N       stop after N minutes and report what is known by then (20)
#   --only CASES      run only these of unbroken,kill,freeze,node,disk,requeue,limit,preempt,own
#
# It first prints what it will cost, and stops at 10 GPU hours. It only touches its own jobs; Ctrl-C
# cancels them and prints the table so far. Exit code 0: no promise is broken here; 1: some are, or
# nothing could be tried; 2: bad options, or no Slurm; 130: Ctrl-C.
# docs/guide/drill.md
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "${0%"${0##*/}"}lib/all.sh"

kp_need_slurm
! kp_in_job || kp_die "already inside job $(kp_job_id): start the drill from a login node"
# in a subshell: sbatch must not pass on what the kit exports
python=$(kp_begin >&2 && kp_enter >&2 && kp_need_packages >&2 && printf '%s' "$KP_PYTHON") || exit
kp_find_root
kp_read_site
trap - INT # Python cancels its jobs
exec "$python" "$KP_MODULE" kempner.jobs.drill "$@"
