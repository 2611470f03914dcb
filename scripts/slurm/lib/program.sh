# shellcheck shell=bash
# The parts of run.sh: the words of its command line, and the supervisors (scripts/program.py) in the trainer's place.

KP_PROGRAM_OPTIONS='run-dir|checkpoints|steps|heartbeat|signal' # for dry_run.sh: those that are not sbatch's
KP_MEASURE=progress
KP_ASKS=1 # requests go by a file, see kp_signal: where Slurm tracks processes by parent, it signals the program itself

kp_take_program() { # <arguments of the script>...: sets KP_ARGUMENTS, those of scripts/program.py; --dry-run, --submit
    local words=() word
    while (($# > 0)) && [[ $1 != -- ]]; do
        words+=("$1")
        shift
    done
    for word in "${words[@]}"; do
        case $word in
            --dry-run) KP_DRY=1 ;;
            --submit) KP_DRY=submit ;;
        esac
    done
    KP_ARGUMENTS=("${words[@]}")
    if [[ -n $KP_DRY ]]; then
        # shellcheck source-path=SCRIPTDIR source=lib/dry_run.sh
        source "$KP_LIB/dry_run.sh"
        kp_dry_take "${words[@]}"
    fi
    KP_ARGUMENTS+=("$@")
}

kp_committed_step() { # in place of requeue.sh's: the progress that the supervisors have recorded, -1 when there is none
    local count=''
    { read -r count <"$KP_RUN_DIR/progress"; } 2>/dev/null || true
    [[ $count =~ ^[0-9]+$ ]] && echo "$count" || echo -1
}

kp_check_program() { # checks KP_ARGUMENTS in one process; sets KP_TRAIN, KP_RUN_DIR, KP_DEVICE, KP_COMMITTED_BEFORE
    local code=0
    kp_check_notify
    KP_TRAIN=$KP_ROOT/scripts/program.py
    KP_RUN_DIR=$(kp_python "$KP_TRAIN" --check "${KP_ARGUMENTS[@]}") || code=$?
    if ((code != 0)); then
        kp_log "not started: the check of the command line ended with exit code $code"
        exit "$code"
    fi
    KP_DEVICE=auto KP_DATA=()
    [[ -z $KP_DRY ]] || kp_dry_tell # ends here
    mkdir -p -- "$KP_RUN_DIR/logs" || kp_die "$KP_RUN_DIR cannot be written: give another --run-dir"
    KP_COMMITTED_BEFORE=$(kp_committed_step)
}

kp_run_program() { # <program.py arguments>...: as kp_run; outside Slurm the ranks are processes of this machine
    # As torchrun and srun's command do.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${KP_CPUS:-1}}
    if kp_in_job; then
        kp_run "$@"
    else
        kp_start "${KP_INSIDE[@]}" "$KP_PYTHON" "$KP_TRAIN" --here "$KP_TASKS" "$@"
        [[ -z $KP_PENDING ]] || kp_on_signal "$KP_PENDING"
        kp_wait
    fi
    rm -f -- "$KP_RUN_DIR/.ask-${KEMPNER_ATTEMPT_ID%%.*}".* # of all attempts of this job
}
