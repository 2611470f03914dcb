#!/usr/bin/env bash
# Check nodes before they train: GPUs, memory, clock, shared directory, versions, network. A table, and a JSON file.
#
#   sbatch --nodes=4 scripts/slurm/preflight.sh                 the shared directory is runs/
#   sbatch --nodes=4 scripts/slurm/preflight.sh --dir /scratch/me --device cpu
#   bash scripts/slurm/preflight.sh                             in a shell of salloc
#
# Exit code 0: all nodes pass; 1: some do not, and the last lines name them. KEMPNER_PREFLIGHT=1 does the same at the
# start of each training job: docs/guide/preflight.md.
#SBATCH --job-name=preflight
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=10
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

# sbatch runs a copy of this file from its spool directory; Slurm's record of the job names the original.
lib=${0%"${0##*/}"}lib/all.sh
if [[ ! -e $lib ]]; then
    asked=${SLURM_JOB_ID:-0} # without an answer of a busy controller nothing is known
    until job=$(scontrol show job "$asked" 2>&1) || [[ $asked == 0 || $job =~ 'Invalid job id'|'not found' ]]; do sleep 5; done
    job=${job#*Command=} lib=${job%%/scripts/slurm/*}/scripts/slurm/lib/all.sh
    [[ -e $lib ]] || lib=${SLURM_SUBMIT_DIR:-}/scripts/slurm/lib/all.sh
    [[ -e $lib ]] || { echo "kempner: error: preflight.sh was copied out of its repository: submit" \
        "REPOSITORY/scripts/slurm/preflight.sh itself, or from the root of the repository" >&2 && exit 2; }
fi
# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "$lib"

kp_setup
kp_in_job || kp_die "preflight.sh looks at the nodes of a job: sbatch --nodes=N scripts/slurm/preflight.sh"
kp_need_packages
KP_OWN_STEPS=preflight.sh
kp_tasks
KEMPNER_PEERS=$(kp_peers | paste -sd' ')
export KEMPNER_PEERS
kp_log "preflight of $(kp_field NodeList): $KP_NODES x $KP_TASKS tasks"
kp_prove_nodes "runs/preflight-$(kp_job_id).json" --dir "$PWD/runs" "$@"
exit "$KP_CODE"
