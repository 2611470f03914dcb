#!/usr/bin/env bash
# Serve a model: one engine per GPU on all nodes of a job, each with a URL of its own.
#
#   sbatch --nodes=2 --gpus-per-node=8 scripts/slurm/serve.sh runs/7b --slots 64
#   sbatch --nodes=2 --ntasks-per-node=1 scripts/slurm/serve.sh models/llama --device cpu
#   bash scripts/slurm/serve.sh runs/7b --dry-run --nodes=2    shows what sbatch would do
#
# The options are those of scripts/serve.py. In runs/serve-JOBID: engines.txt, the URLs, one a line; token, which
# requests must have; logs. docs/extensions/serve.md
#SBATCH --job-name=serve
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
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
    [[ -e $lib ]] || { echo "kempner: error: serve.sh was copied out of its repository: submit" \
        "REPOSITORY/scripts/slurm/serve.sh itself, or from the root of the repository" >&2 && exit 2; }
fi
# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "$lib"
# shellcheck source-path=SCRIPTDIR source=lib/engines.sh
source "$KP_LIB/engines.sh"

KP_NOTHING_GIVEN="no model given: sbatch scripts/slurm/serve.sh MODEL"
KP_PROGRAM_OPTIONS='slots|queue|window|device' # serve.py's, for --dry-run: the others are sbatch's
kp_take "$@"
kp_setup # the repository, its Python, site.env
[[ -n $KP_DRY ]] || kp_in_job ||
    kp_die "serve.sh runs in a job: sbatch scripts/slurm/serve.sh MODEL; here it is scripts/serve.py"
kp_tasks                              # nodes, GPUs, one engine per GPU
kp_engines_check "${KP_ARGUMENTS[@]}" # the command line, once
kp_engines_start                      # srun
kp_engines_follow                     # their URLs, until all have ended
