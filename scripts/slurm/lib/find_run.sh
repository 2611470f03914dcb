# shellcheck shell=bash
# Find the run that the user names by its directory or by a job ID. Sourced by logs.sh
# and tmux.sh, after all.sh.

kp_find_run() { # <RUN or JOBID>: sets KP_RUN_DIR or, for a job without one yet,
    # KP_BATCH_LOG, which will name it
    kp_use_run ''
    KP_BATCH_LOG=''
    if [[ $1 =~ ^[0-9]+(_[0-9]+)?$ ]]; then
        kp_find_job "$1"
        return
    fi
    [[ -d $1 || ! -e $1 ]] ||
        kp_die "'$1' is a file: give the directory of a run (ls runs), or the number of a job"
    [[ -d $1 ]] ||
        kp_die "no run directory '$1': give one (ls runs), or the number of a job (squeue --me)"
    [[ -r $1 && -x $1 ]] || kp_die "'$1' cannot be read: ls -ld '$1' shows its permissions"
    [[ -e $1/status.json || -e $1/attempts.jsonl || -d $1/logs ]] ||
        kp_die "'$1' is not a run directory, it has no logs/: give one (ls runs)," \
            "or the number of a job"
    kp_use_run "$1"
}

kp_find_job() { # <JOBID>: does the same for a job
    local file told KP_VALUES=()
    for file in runs/*/status.json runs/*/attempts.jsonl; do
        [[ -r $file ]] && kp_find_records "$file" "job=$1" -- job || KP_VALUES=()
        if ((${#KP_VALUES[@]} > 0)) &&
            [[ -z $KP_RUN_DIR || $file -nt $KP_RUN_DIR/attempts.jsonl ]]; then
            kp_use_run "${file%/*}"
        fi
    done
    for file in runs/*/logs/"batch-$1.log"; do # the job has not reached its first step
        [[ -n $KP_RUN_DIR || ! -e $file ]] || kp_use_run "${file%/logs/*}"
    done
    [[ -z $KP_RUN_DIR ]] || return 0
    told=$(scontrol show job "$1" 2>/dev/null) ||
        kp_die "no run of job $1 in $PWD/runs, and Slurm does not know the job:" \
            "give the run directory"
    KP_BATCH_LOG=$(sed -n '/^ *StdOut=/{s///;p;q}' <<<"$told")
    [[ -n $KP_BATCH_LOG ]] ||
        kp_die "no run of job $1 in $PWD/runs, and the job has no batch log: give the run directory"
    file=$(kp_named_run)
    kp_use_run "$file"
}

kp_named_run() { # prints the run directory that the batch log names, if any
    [[ ! -f $KP_BATCH_LOG ]] ||
        sed -n 's/^\[[0-9: -]*\] kempner: run directory //p' -- "$KP_BATCH_LOG" | tail -n 1
}
