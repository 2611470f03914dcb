#!/usr/bin/env bash
# Reinforcement learning: a trainer, engines that sample, and an orchestrator between them, in one job: docs/extensions/rl.md.
#
#   sbatch --nodes=3 scripts/slurm/rl.sh configs/rl/arithmetic.toml --rl.deployment.num_infer_nodes=2
#   bash scripts/slurm/rl.sh CONFIG [OVERRIDES]    outside Slurm: the same on this machine
#   bash scripts/slurm/rl.sh CONFIG [OVERRIDES] --check    the configuration, and what would run where
#   bash scripts/slurm/rl.sh CONFIG [OVERRIDES] --bench    the same for 20 steps, and where the time of each part went
#   bash scripts/slurm/rl.sh CONFIG [OVERRIDES] --dry-run [SBATCH OPTIONS]    shows what sbatch would do
#
# sbatch's command line and SBATCH_* variables override the #SBATCH lines: docs/reference/slurm.md.
# OVERRIDES are the options that scripts/rl.py --help lists.
#SBATCH --job-name=kempner
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=B:SIGTERM@120
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
##SBATCH --time=24:00:00 # with one # less this is the time limit; unset: that of the partition
set -euo pipefail

# sbatch runs a copy of this file from its spool directory; Slurm's record of the job names the original, and the copy
# of the code that an earlier start has made: lib/code.sh.
lib=${0%"${0##*/}"}lib/all.sh
if [[ ! -e $lib ]]; then
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}} job=${job:-${SLURM_JOB_ID:-0}}
    asked=$job # without an answer of a busy controller nothing is known
    until job=$(scontrol show job "$asked" 2>&1) || [[ $asked == 0 || $job =~ 'Invalid job id'|'not found' ]]; do sleep 5; done
    # Typed in a task of an array, sbatch hands on the number of that one.
    [[ $job == *"JobId=${SLURM_JOB_ID:-0} "* ]] || job=$(scontrol show job "${SLURM_JOB_ID:-0}" 2>/dev/null) || true
    own=${job#*Command=*/scripts/slurm/} own=${own%%[[:space:]]*} # rl.sh, or a copy with changes beside it
    code=${job##*kempner-code=} code=${code%%$'\n'*} code=${code% } code=${code%'"}'}/scripts/slurm/$own
    [[ $job != *kempner-code=* || ! -e $code ]] || exec bash "$code" "$@"
    [[ $job == *kempner-code=* ]] || code=''
    job=${job#*Command=} lib=${job%%/scripts/slurm/*}/scripts/slurm/lib/all.sh
    [[ -e $lib || $lib != */code/????????????/scripts/* ]] || code=${code:-$lib}
    # An earlier start has found it: this host does not see the shared directory, and the job goes on without it.
    unseen=${code:-$lib} unseen=${unseen%/scripts/slurm/*} unseen=${unseen%/code/????????????}
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
    [[ -z $code || -n $unseen || -e $lib ]] || { echo "kempner: error: the copy of the code that this job runs is gone:" \
        "${code%/scripts/slurm/*}: put it back, or submit the run again: it goes on from its last checkpoint" >&2 && exit 2; }
    [[ -e $lib ]] || lib=${SLURM_SUBMIT_DIR:-}/scripts/slurm/lib/all.sh
    [[ -e $lib ]] || { echo "kempner: error: rl.sh was copied out of its repository: submit" \
        "REPOSITORY/scripts/slurm/rl.sh itself, or from the root of the repository" >&2 && exit 2; }
fi
# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "$lib"
# shellcheck source-path=SCRIPTDIR source=lib/rl.sh
source "$KP_LIB/rl.sh"
# shellcheck source-path=SCRIPTDIR source=lib/rl_watch.sh
source "$KP_LIB/rl_watch.sh"

kp_take "$@"                     # rl.py's arguments; --dry-run
kp_rl_bench                      # with --bench: a run of its own
kp_setup                         # the repository, its Python, site.env
kp_code rl.sh rl.py              # the code of the submission: from here on a copy of the repository
kp_tasks                         # nodes, GPUs, one task per GPU
kp_rl_place "${KP_ARGUMENTS[@]}" # who trains and who samples; from here on nodes and tasks are the trainer's
kp_check "${KP_ARGUMENTS[@]}"    # the configuration, once, before any GPU works
kp_rl_tell "${KP_ARGUMENTS[@]}"  # with --check: what would run where, and no more
kp_banner                        # what runs where
kp_chain                         # with KEMPNER_CHAIN=K: submits the job that continues this one
kp_rl_preflight                  # with KEMPNER_PREFLIGHT=1: checks the nodes first
kp_run_rl "${KP_ARGUMENTS[@]}"   # srun for each part; starts lost engines again; passes signals on
kp_rl_bench_tell                 # with --bench: a table
kp_finish                        # requeue or not; the exit code
