# shellcheck shell=bash
# The parts of run.sh: its command line, and the supervisors (scripts/program.py) that run instead
# of the trainer.

# One task may drive all GPUs of a node: JAX, vLLM, torchrun, ...
KP_DRIVES_ALL=1
KP_INTERRUPTED=interrupted # the program may have saved nothing
# Requests go through a file, see kp_signal: if Slurm tracks processes by parent, it would signal
# the program itself.
KP_ASKS=1

kp_own_options() { # in place of launch.sh's: prints those of run.sh
    echo 'run-dir|code|checkpoints|steps|heartbeat|signal'
}

kp_take_program() { # <arguments of the script>...: sets KP_ARGUMENTS (those of scripts/program.py);
    # handles --dry-run, --submit
    local words=()
    while (($# > 0)) && [[ $1 != -- ]]; do
        words+=("$1")
        shift
    done
    kp_set_arguments "${words[@]}"
    kp_take_dry "${words[@]}"
    kp_set_arguments "${KP_ARGUMENTS[@]}" "$@"
}

kp_committed_step() { # in place of requeue.sh's: prints the progress that the supervisors
    # recorded, or -1
    local count=''
    { read -r count _ <"$KP_RUN_DIR/progress"; } 2>/dev/null || true
    [[ $count =~ ^[0-9]+$ ]] && echo "$count" || echo -1
}

kp_step() { # in place of requeue.sh's: prints the step of the newest checkpoint, or null if unknown
    local step=''
    { read -r _ step <"$KP_RUN_DIR/progress"; } 2>/dev/null || true
    [[ $step =~ ^[0-9]+$ ]] && echo "$step" || echo null
}

kp_reached() { # in place of requeue.sh's: prints the progress in words
    local step
    step=$(kp_step)
    echo "progress ${step/null/$KP_COMMITTED}"
}

kp_program_directory() { # prints the value of --code, if given, as an absolute path
    local word found=''
    for word in "${KP_ARGUMENTS[@]}"; do
        [[ $word != -- ]] || break
        [[ $word != --code=* ]] || found=${word#*=}
    done
    [[ -z $found ]] || realpath -ms -- "$found"
}

kp_program_code() { # with --code=DIR: exports KEMPNER_COPY, a copy of DIR, also used by later
    # starts of the job
    local KP_ROOT # kp_code_keep takes KP_ROOT
    KP_ROOT=$(kp_program_directory)
    [[ -n $KP_ROOT ]] || return 0
    kp_tell_code "the program's code"
    [[ ${KEMPNER_CODE:-1} == 1 ]] || return 0
    kp_tell_code "the program's code" copied
    [[ -z $KP_DRY ]] && kp_is_batch || return 0
    if [[ -z ${KEMPNER_COPY:-} ]]; then
        kp_code_keep "$KP_RUN_DIR/code" '' || return 0
        export KEMPNER_COPY=$KP_COPY
    fi
    kp_log "the program's code: $KEMPNER_COPY"
}

kp_check_program() { # checks KP_ARGUMENTS in one process; sets KP_TRAIN, KP_RUN_DIR and KP_LAUNCHER
    # ("torchrun" if that is the command)
    local code=0 copy node_count=1
    kp_check_notify
    kp_use_program "$KP_ROOT/scripts/program.py"
    unset KEMPNER_COPY
    if [[ ${KEMPNER_CODE:-1} == 1 && -n $(kp_program_directory) ]]; then
        # from an earlier start or submit.sh: the repository may be gone by now
        copy=$(kp_code_of_job)
        kp_code_is_there "$copy"
        if [[ -e $copy/.kempner-origin &&
            $(<"$copy/.kempner-origin") == "$(kp_program_directory)" ]]; then
            export KEMPNER_COPY=$copy
        fi
    fi
    ! kp_in_job || node_count=$(($(kp_field NumNodes) - ${KEMPNER_SPARES:-0}))
    kp_checked kempner.config.toml "$KP_TRAIN" --check "$node_count" "${KP_ARGUMENTS[@]}" || code=$?
    if ((code != 0)); then
        kp_log "not started: the check of the command line ended with exit code $code"
        exit "$code"
    fi
    kp_use_run "${KP_VALUES[0]}"
    kp_set_launcher "${KP_VALUES[1]}"
    export KEMPNER_COMMAND=${KP_VALUES[4]} # identifies the run; see StartEvent in events.py
    if [[ -n ${KP_VALUES[3]} ]] && kp_is_batch; then
        kp_log "$KP_RUN_DIR: this command completed at an earlier start of the job: nothing runs;" \
            "submit it anew to run it again"
        exit 0
    fi
    kp_mount_run "$KP_RUN_DIR" ${KP_VALUES[2]:+"${KP_VALUES[2]}"}
}

kp_open_program() { # makes the code copy and the run directory; sets KP_COMMITTED_BEFORE;
    # --dry-run exits here
    kp_program_code
    [[ -z $KP_DRY ]] || kp_dry_tell
    mkdir -p -- "$KP_RUN_DIR/logs" || kp_die "$KP_RUN_DIR cannot be written: give another --run-dir"
    kp_run_note
    kp_note_progress
}

kp_run_program() { # <program.py arguments>...: like kp_run; outside Slurm, ranks are processes
    # of this machine
    local blocked threads=${KP_CPUS:-1}
    if [[ -n $KP_LAUNCHER ]]; then # torchrun starts a process for each GPU
        ((KP_GPUS == 0)) || export PET_NPROC_PER_NODE=${PET_NPROC_PER_NODE:-$KP_GPUS}
        threads=$((KP_GPUS > 0 ? ${KP_CPUS:-1} / KP_GPUS : 1))
    fi
    # As torchrun and kp_srun_command do.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
    if kp_in_job; then
        kp_run "$@"
    else
        read -ra blocked < <(kp_blocked) || true
        kp_start "${blocked[@]}" "${KP_INSIDE[@]}" "$KP_PYTHON" "$KP_TRAIN" --here "$KP_TASKS" "$@"
        kp_pass_pending
        kp_wait
    fi
    rm -f -- "$KP_RUN_DIR/.ask-${KEMPNER_ATTEMPT_ID%%.*}".* # from all attempts of this job
}
