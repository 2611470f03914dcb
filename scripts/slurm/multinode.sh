#!/usr/bin/env bash
# Train on several whole nodes, one process per GPU.
#
#   sbatch scripts/slurm/multinode.sh configs/train/7b.toml --train.max_steps=50000
#   sbatch --nodes=16 --time=24:00:00 --partition=gpu scripts/slurm/multinode.sh CONFIG [OVERRIDES]
#   bash scripts/slurm/multinode.sh CONFIG [OVERRIDES]    outside Slurm: the same on this machine
#   bash scripts/slurm/multinode.sh CONFIG [OVERRIDES] --dry-run [SBATCH OPTIONS]
#       shows what sbatch would do
#   sbatch scripts/slurm/multinode.sh CONFIG [OVERRIDES] --tune [--minutes N]
#       finds the fastest settings: docs/extensions/tuning.md
#
# sbatch's command line and SBATCH_* variables override the #SBATCH lines: docs/reference/slurm.md.
# OVERRIDES are the options of the trainer, which scripts/train.py --help lists.
#SBATCH --job-name=kempner
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=B:SIGTERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
##SBATCH --time=24:00:00 # remove one # to set this time limit; default: the partition's
set -euo pipefail

kit=${0%"${0##*/}"}../.. # the kit; for a copy of this file, as in a job, the last lines find it
[[ -e $kit/scripts/slurm/lib ]] || eval "$(sed '1,/^# --- the kit/d' "$0")"
# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "$kit/scripts/slurm/lib/all.sh"

kp_take "$@"                  # train.py's arguments; --dry-run
kp_setup                      # the repository, its Python, site.env
kp_tune                       # with --tune: finds the fastest settings instead
kp_code                       # switches to a copy of the repository, as submitted
kp_tasks                      # nodes, GPUs, one task per GPU
kp_check "${KP_ARGUMENTS[@]}" # checks the configuration once, before using any GPU
kp_banner                     # what runs where
kp_chain                      # with KEMPNER_CHAIN=K: submits the job that continues this one
kp_preflight                  # with KEMPNER_PREFLIGHT=1: checks the nodes first
kp_stage                      # with KEMPNER_STAGE=DIR: copies the data to the nodes' own disks
kp_run "${KP_ARGUMENTS[@]}"   # srun; forwards signals
kp_finish                     # requeues if needed; exits

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
