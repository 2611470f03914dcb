#!/usr/bin/env bash
# Evaluate a run while it trains: always its newest checkpoint, until the run has ended.
#
#   sbatch scripts/slurm/eval.sh runs/7b --tasks hellaswag,arc_easy --limit 500
#   sbatch --gpus-per-node=0 scripts/slurm/eval.sh runs/debug --tasks mine \
#       --include-path tasks --device cpu
#
# It takes the options of scripts/eval.py; the results appear in the run's metrics.jsonl and in the
# plot of scripts/report.py. At its time limit the job is requeued, and continues with the next
# checkpoint.
#SBATCH --job-name=eval
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --signal=B:SIGTERM@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
##SBATCH --time=24:00:00 # remove one # to set this time limit; default: the partition's
set -euo pipefail

kit=${0%"${0##*/}"}../.. # the kit; for a copy of this file, as in a job, the last lines find it
[[ -e $kit/scripts/slurm/lib ]] || eval "$(sed '1,/^# --- the kit/d' "$0")"
# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "$kit/scripts/slurm/lib/all.sh"
# shellcheck source-path=SCRIPTDIR source=lib/alone.sh
source "$KP_LIB/alone.sh"

kp_committed_step() { # in place of requeue.sh's: prints the number of evaluated checkpoints
    find "$KP_RUN_DIR" -name 'step_*.json' | wc -l
}

kp_measure() { # in place of requeue.sh's: prints what is counted
    echo "checkpoints evaluated:"
}

kp_setup # the repository, its Python, site.env
kp_in_job || kp_die "eval.sh runs in a job: sbatch scripts/slurm/eval.sh RUN --tasks ...;" \
    "here it is scripts/eval.py"
[[ -n ${1:-} ]] ||
    kp_die "no run is given: give its directory first, then the options of scripts/eval.py"
[[ -d $1 ]] || kp_die "no run '$1' yet: submit eval.sh when it has begun, or with" \
    "--dependency=after:JOB+5, 5 minutes after the start of the training's job"
kp_python "$KP_ROOT/scripts/eval.py" "$@" --follow --check || exit # before writing to the run
mkdir -p -- "$1/eval" || kp_die "$1/eval cannot be written"
directory=$(realpath -- "$1/eval")
kp_use_run "$directory"
kp_run_note
kp_set_size 1 1 0
kp_note_progress
kp_mount "$1"
kp_alone "$KP_ROOT/scripts/eval.py" "$@" --follow
kp_finish # requeues if needed; exits

# --- the kit, where it is not beside this file: docs/reference/slurm.md ---------------------------
if [[ ! -e $kit/scripts/slurm/lib ]]; then
    job=${SLURM_JOB_ID:-} record='' named='' spec='/^JobId='$job' /,/^$/p; /Invalid\|not found/p'
    until [[ -z $job || -n $record ]]; do # a busy controller may not answer
        record=$(scontrol show job "$job" 2>&1 | sed -n "$spec") && continue
        echo "kempner: waiting for Slurm to say where job $job comes from" >&2
        [[ $0 == */slurm_script ]] || break # not spooled: the job may also be over
        sleep 5
    done
    spec='Command=\K.*?(?=/scripts/slurm/)|kempner-code=\K.*/code/\w{12}'
    while [[ ! -e $kit/scripts/slurm/lib ]] && read -r kit; do # the run's copy, then the kit
        named=${kit:-$named}
    done < <(grep -oP "$spec" <<<"$record" | tac)
    seen=${named%/code/????????????} # the run that holds the copy
    later=${SLURM_RESTART_COUNT:-0}${KEMPNER_CHAIN_LINK:-}
    if [[ -z $kit && -n $named && ! -e $seen && $later != 0 ]]; then
        # An earlier start saw it: the job continues without this host if enough others remain.
        echo "kempner: $SLURMD_NODENAME does not see $seen: the job starts again in 10 minutes" >&2
        trap '' TERM && put_off=(StartTime=now+10minutes) out=$SLURMD_NODENAME
        spec='ArrayJobId=([0-9]+) ArrayTaskId=([0-9]+)'
        [[ ! $record =~ $spec ]] || job=${BASH_REMATCH[1]}_${BASH_REMATCH[2]}
        [[ ! $record =~ ExcNodeList=([^[:space:]\(]+) ]] || out=${BASH_REMATCH[1]},$out
        [[ $(scontrol show partition "$SLURM_JOB_PARTITION") =~ TotalNodes=([0-9]+) ]] &&
            ((${KEMPNER_EXCLUDE:-2} > 0)) && enough=$((BASH_REMATCH[1] - SLURM_JOB_NUM_NODES)) &&
            (($(scontrol show hostnames "$out" | wc -l) <= enough)) && put_off+=("ExcNodeList=$out")
        # Slurm takes the list only for a pending job, which cannot be requeued
        for _ in {1..60}; do
            scontrol requeue "$job" || ! scontrol update JobId="$job" "${put_off[@]}" || exit 0
            sleep 1
        done
    fi
    if [[ -z $kit && $named == */code/* ]]; then
        echo "kempner: error: the copy of the code that this job runs is gone: $named:" \
            "put it back, or submit the run again: it goes on from its last checkpoint" >&2
        exit 2
    fi
    kit=${kit:-${KEMPNER_ROOT:-${SLURM_SUBMIT_DIR:-}}}
    [[ -e $kit/scripts/slurm/lib ]] || {
        echo "kempner: error: no kit beside this script, nor" \
            "in '$kit': export KEMPNER_ROOT=/path/to/the/kit, or write such a line into it" >&2
        exit 2
    }
fi
