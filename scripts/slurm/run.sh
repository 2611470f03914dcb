#!/usr/bin/env bash
# Run any program on whole nodes, one process per GPU (or per node: --ntasks-per-node=1, torchrun), with the care that the trainer gets: docs/start/any-program.md.
#
#   sbatch scripts/slurm/run.sh -- python my_train.py --lr 3e-4
#   sbatch --nodes=16 --time=24:00:00 scripts/slurm/run.sh --checkpoints='out/ckpt-*' -- python my_train.py
#   bash scripts/slurm/run.sh [OPTIONS] -- COMMAND    outside Slurm: the same on this machine
#   bash scripts/slurm/run.sh [OPTIONS] --dry-run [SBATCH OPTIONS] -- COMMAND    shows what sbatch would do
#
#   --run-dir=DIR          logs and records; the same directory is the same run (runs/NAME of the program)
#   --code=DIR             the program's repository: what runs is a copy of it as it is now, whatever becomes of it
#   --checkpoints=GLOB     the program's checkpoints: a new one is progress
#   --steps=REGEX          what the program prints about a step, with one group for its number: 'step (\d+)'
#   --heartbeat=SECONDS    a rank that does not touch $KEMPNER_HEARTBEAT for so long hangs
#   --signal=NAME          what asks the program to save and leave (the one it handles: TERM, else USR1)
#
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
    [[ -e $lib ]] || { echo "kempner: error: run.sh was copied out of its repository: submit" \
        "REPOSITORY/scripts/slurm/run.sh itself, or from the root of the repository" >&2 && exit 2; }
fi
# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "$lib"
# shellcheck source-path=SCRIPTDIR source=lib/program.sh
source "$KP_LIB/program.sh"

kp_take_program "$@"                # the options, and the command after "--"; --dry-run
kp_setup                            # the repository, its Python, site.env
kp_check_program                    # options and command, before any GPU works
kp_tasks                            # nodes, GPUs, one task per GPU; or one per node
kp_open_program                     # the run directory
kp_banner                           # what runs where
kp_chain                            # with KEMPNER_CHAIN=K: submits the job that continues this one
kp_preflight                        # with KEMPNER_PREFLIGHT=1: checks the nodes first
kp_run_program "${KP_ARGUMENTS[@]}" # srun; passes signals on
kp_finish                           # requeue or not; the exit code
