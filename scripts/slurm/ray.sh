#!/usr/bin/env bash
# A Ray cluster on the nodes of a job: runs a command on it, or waits for you, and leaves nothing behind.
#
#   COMMAND="python driver.py" sbatch --nodes=4 scripts/slurm/ray.sh   batch: its exit code is the job's
#   sbatch --nodes=4 scripts/slurm/ray.sh                              interactive, until touch JOBID-logs/ENDED
#   bash JOBID-attach.sh [N|HOSTNAME] [-- COMMAND...]                  both: a shell or a command on a node; 0: the head
#
# Variables, logs, exit codes: docs/guide/ray.md.
#SBATCH --job-name=ray
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
##SBATCH --time=24:00:00 # with one # less this is the time limit; unset: that of the partition
set -euo pipefail

# sbatch runs a copy of this file from its spool directory; Slurm's record of the job names the original.
lib=${0%"${0##*/}"}lib/all.sh
if [[ ! -e $lib ]]; then
    asked=${SLURM_JOB_ID:-0} # without an answer of a busy controller nothing is known
    until job=$(scontrol show job "$asked" 2>&1) || [[ $asked == 0 || $job =~ 'Invalid job id'|'not found' ]]; do sleep 5; done
    job=${job#*Command=} lib=${job%%/scripts/slurm/*}/scripts/slurm/lib/all.sh
    [[ -e $lib ]] || lib=${SLURM_SUBMIT_DIR:-}/scripts/slurm/lib/all.sh
    [[ -e $lib ]] || { echo "kempner: error: ray.sh was copied out of its repository: submit" \
        "REPOSITORY/scripts/slurm/ray.sh itself, or from the root of the repository" >&2 && exit 2; }
fi
# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "$lib"
# shellcheck source-path=SCRIPTDIR source=lib/ray_request.sh
source "$KP_LIB/ray_request.sh"
# shellcheck source-path=SCRIPTDIR source=lib/ray_cluster.sh
source "$KP_LIB/ray_cluster.sh"
# shellcheck source-path=SCRIPTDIR source=lib/ray_driver.sh
source "$KP_LIB/ray_driver.sh"

(($# == 0)) || kp_die "'$1': ray.sh takes its command from a variable: COMMAND=\"python driver.py\" sbatch" \
    "scripts/slurm/ray.sh"
for name in TERM INT HUP USR1 USR2; do
    # shellcheck disable=SC2064 # expand the name now
    trap "RAY_SIGNAL=$name" "$name"
done
RAY_BEGAN=$(date +%s.%N)
kp_begin # the repository, site.env
kp_in_job || kp_die "ray.sh runs in a job: sbatch --nodes=N scripts/slurm/ray.sh"
ray_defaults   # the variables of docs/guide/ray.md
ray_names      # under the names of the other launch scripts
kp_enter       # secrets, container, the job as Slurm sees it
ray_resources  # CPUs, GPUs, memory of a node
ray_find_nodes # names and addresses
ray_ports      # defaults and checks: kempner.ray.ports
trap ray_finish EXIT
ray_prepare # log directory, token
ray_start   # srun
ray_wait_until_ready
ray_log_dashboard
ray_write_attach # JOBID-attach.sh
if [[ -n $COMMAND ]]; then ray_run_command; else ray_wait; fi
