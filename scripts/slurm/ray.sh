#!/usr/bin/env bash
# Start a Ray cluster on the nodes of a job, run a command on it or wait for you, and clean up.
#
#   COMMAND="python driver.py" sbatch --nodes=4 scripts/slurm/ray.sh   batch: the job gets the
#                                                                      command's exit code
#   sbatch --nodes=4 scripts/slurm/ray.sh                              interactive, until you touch
#                                                                      JOBID-logs/ENDED
#   bash JOBID-attach.sh [N|HOSTNAME] [-- COMMAND...]                  in both: a shell or a command
#                                                                      on a node (0: the head)
#
# Variables, logs, exit codes: docs/guide/ray.md.
#SBATCH --job-name=ray
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
##SBATCH --time=24:00:00 # remove one # to set this time limit; default: the partition's
set -euo pipefail

kit=${0%"${0##*/}"}../.. # the kit; for a copy of this file, as in a job, the last lines find it
[[ -e $kit/scripts/slurm/lib ]] || eval "$(sed '1,/^# --- the kit/d' "$0")"
# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "$kit/scripts/slurm/lib/all.sh"
# shellcheck source-path=SCRIPTDIR source=lib/ray_request.sh
source "$KP_LIB/ray_request.sh"
# shellcheck source-path=SCRIPTDIR source=lib/ray_cluster.sh
source "$KP_LIB/ray_cluster.sh"
# shellcheck source-path=SCRIPTDIR source=lib/ray_driver.sh
source "$KP_LIB/ray_driver.sh"

(($# == 0)) ||
    kp_die "'$1': ray.sh takes its command from a variable: COMMAND=\"python driver.py\" sbatch" \
        "scripts/slurm/ray.sh"
for name in TERM INT HUP USR1 USR2; do
    # shellcheck disable=SC2064 # expand the name now
    trap "RAY_SIGNAL=$name" "$name"
done
RAY_BEGAN=$(date +%s.%N)
kp_begin # the repository, site.env
kp_in_job || kp_die "ray.sh runs in a job: sbatch --nodes=N scripts/slurm/ray.sh"
ray_defaults   # the variables of docs/guide/ray.md
ray_names      # their names in the other launch scripts
kp_enter       # secrets, container, the job as Slurm sees it
ray_resources  # CPUs, GPUs and memory per node
ray_find_nodes # names and addresses
ray_ports      # defaults and checks: kempner.jobs.ray.ports
trap ray_finish EXIT
ray_prepare # log directory, token
ray_start   # srun
ray_wait_until_ready
ray_log_dashboard
ray_write_attach # JOBID-attach.sh
if [[ -n $COMMAND ]]; then ray_run_command; else ray_wait; fi

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
