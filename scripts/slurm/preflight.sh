#!/usr/bin/env bash
# Check nodes before they train: GPUs, memory, clock, shared directory, versions, network. Prints a
# table and writes a JSON file.
#
#   sbatch --nodes=4 scripts/slurm/preflight.sh                 the shared directory is runs/
#   sbatch --nodes=4 scripts/slurm/preflight.sh --dir /scratch/me --device cpu
#   bash scripts/slurm/preflight.sh                             in a shell of salloc
#
# Exit code 0: all nodes pass; 1: some fail, and the last lines name them. KEMPNER_PREFLIGHT=1 runs
# the same checks at the start of each training job: docs/guide/preflight.md. The measurements of
# each node are kept in runs/node-speeds: python scripts/report.py --nodes runs.
#SBATCH --job-name=preflight
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=10
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

kit=${0%"${0##*/}"}../.. # the kit; for a copy of this file, as in a job, the last lines find it
[[ -e $kit/scripts/slurm/lib ]] || eval "$(sed '1,/^# --- the kit/d' "$0")"
# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "$kit/scripts/slurm/lib/all.sh"

kp_setup
kp_in_job ||
    kp_die "preflight.sh checks the nodes of a job: sbatch --nodes=N" \
        "scripts/slurm/preflight.sh, or call it in a shell of salloc"
kp_need_packages
kp_own_steps() { # in place of restart.sh's: names this script
    echo preflight.sh
}
kp_tasks
KEMPNER_PEERS=$(kp_peers | paste -sd' ')
export KEMPNER_PEERS
kp_log "preflight of $(kp_field NodeList): $KP_NODES x $KP_TASKS tasks"
kp_prove_nodes "runs/preflight-$(kp_job_id).json" --dir "$PWD/runs" \
    --history "$PWD/runs/node-speeds" "$@"
exit "$code"

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
