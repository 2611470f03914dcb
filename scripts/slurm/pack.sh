#!/usr/bin/env bash
# Train several runs side by side on one whole node, each with an equal part of it: for sites that share no nodes.
#
#   sbatch --gpus-per-node=8 scripts/slurm/pack.sh 4 A.toml B.toml C.toml D.toml    four runs of two GPUs each
#   sbatch --gpus-per-node=8 --array=0-9 scripts/slurm/pack.sh 4 @FILE    four lines of FILE in each job
#   bash scripts/slurm/pack.sh 2 A.toml B.toml --dry-run [SBATCH OPTIONS]    shows what sbatch would do
#
# Each is a run as singlenode.sh makes it, and has its batch log in its own logs/. Sweeps use it: docs/extensions/sweeps.md.
# sbatch's command line and SBATCH_* variables override the #SBATCH lines: docs/reference/slurm.md.
#SBATCH --job-name=kempner
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=B:SIGTERM@120
#SBATCH --requeue
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
    # An earlier start has found it: this host does not see the shared directory, and the job goes on without it.
    unseen=$lib unseen=${unseen%/scripts/slurm/*} unseen=${unseen%/code/????????????}
    [[ ${SLURM_RESTART_COUNT:-0} != 0 && $unseen == /* && ! -e $unseen ]] || unseen=''
    if [[ -n $unseen && ! -e $lib ]]; then
        echo "kempner: $SLURMD_NODENAME does not see $unseen: the job starts again in 10 minutes" >&2
        trap '' TERM && without=() job=$(scontrol show job "$asked") && n=${job#*NumNodes=} n=${n%%[!0-9]*}
        # Without this host, as long as enough others are left: else the job could never start.
        out=${job#*ExcNodeList=} out=${out%%[[:space:]]*} out=${out#(null)}
        [[ $job =~ [[:space:]]Partition=([^[:space:]]+) && ${KEMPNER_EXCLUDE:-2} != 0 ]] &&
            [[ $(scontrol show partition "${BASH_REMATCH[1]}") =~ TotalNodes=([0-9]+) ]] &&
            ((BASH_REMATCH[1] - $(scontrol show hostnames "$out" 2>/dev/null | wc -l) > n)) &&
            without=(ExcNodeList="${out:+$out,}$SLURMD_NODENAME")
        for _ in {1..60}; do # Slurm takes the list once the job is pending, and then refuses to requeue it
            scontrol requeue "$asked" || ! scontrol update JobId="$asked" StartTime=now+10minutes "${without[@]}" || exit 0
            sleep 1
        done
    fi
    [[ -e $lib ]] || lib=${SLURM_SUBMIT_DIR:-}/scripts/slurm/lib/all.sh
    [[ -e $lib ]] || { echo "kempner: error: pack.sh was copied out of its repository: submit" \
        "REPOSITORY/scripts/slurm/pack.sh itself, or from the root of the repository" >&2 && exit 2; }
fi
# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "$lib"
# shellcheck source-path=SCRIPTDIR source=lib/pack.sh
source "$KP_LIB/pack.sh"

kp_pack_take "$@" # the runs; --dry-run
kp_setup          # the repository, its Python, site.env
kp_tasks          # GPUs of the node, one task per GPU
kp_pack_share     # the part of one run
kp_pack_run       # each run with its own checks, step and records
kp_pack_finish    # requeue when one has to go on
