#!/usr/bin/env bash
# Evaluate a run beside its training: each checkpoint that becomes the newest one, until the run has ended.
#
#   sbatch scripts/slurm/eval.sh runs/7b --tasks hellaswag,arc_easy --limit 500
#   sbatch --gpus-per-node=0 scripts/slurm/eval.sh runs/debug --tasks mine --include-path tasks --device cpu
#
# The options are those of scripts/eval.py; the figures appear in the run's metrics.jsonl and in the picture of
# scripts/report.py. The job is requeued at its time limit, and goes on with the next checkpoint.
#SBATCH --job-name=eval
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --signal=B:SIGTERM@60
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
    [[ -e $lib ]] || { echo "kempner: error: eval.sh was copied out of its repository: submit" \
        "REPOSITORY/scripts/slurm/eval.sh itself, or from the root of the repository" >&2 && exit 2; }
fi
# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "$lib"
# shellcheck source-path=SCRIPTDIR source=lib/alone.sh
source "$KP_LIB/alone.sh"

kp_committed_step() { # in place of requeue.sh's: checkpoints that are evaluated
    find "$KP_RUN_DIR" -name 'step_*.json' | wc -l
}

kp_setup # the repository, its Python, site.env
kp_in_job || kp_die "eval.sh runs in a job: sbatch scripts/slurm/eval.sh RUN --tasks ...; here it is scripts/eval.py"
[[ -n ${1:-} ]] || kp_die "no run is given: give its directory first, then the options of scripts/eval.py"
[[ -d $1 ]] || kp_die "no run '$1' yet: submit eval.sh when it has begun, or with --dependency=after:JOB+5, 5 minutes" \
    "after the start of the training's job"
kp_python "$KP_ROOT/scripts/eval.py" "$@" --follow --check || exit # before anything is made in it
mkdir -p -- "$1/eval" || kp_die "$1/eval cannot be written"
KP_RUN_DIR=$(realpath -- "$1/eval") KP_NODES=1 KP_TASKS=1 KP_MEASURE="checkpoints evaluated:"
KP_COMMITTED_BEFORE=$(kp_committed_step)
kp_mount "$1"
kp_alone "$KP_ROOT/scripts/eval.py" "$@" --follow
kp_finish # requeue or not; the exit code
