# shellcheck shell=bash
# KEMPNER_STAGE=DIR: the data of the run on each node's own disk, for the time of the job.

kp_on_each_node() { # <name> <command>...: runs it in a step with one task on each node; fails when a task does
    local KP_TASKS=1 KP_GPUS=0 KP_SRUN_NAME=$1-$KEMPNER_ATTEMPT_ID
    kp_srun_command "${@:2}"
    KP_SRUN=("${KP_SRUN[@]/#--kill-on-bad-exit=1/--kill-on-bad-exit=0}") # a full disk concerns its own node alone
    KP_SRUN=("${KP_SRUN[@]/#--wait=300/--wait=0}")
    "${KP_SRUN[@]}" </dev/null
}

kp_stage() { # copies the data sets KP_DATA to DIR/kempner-JOB on each node; exports KEMPNER_STAGED
    local jobs='' environment=()
    [[ -n ${KEMPNER_STAGE:-} ]] && kp_in_job && ((${#KP_DATA[@]} > 0)) || return 0
    export KEMPNER_STAGED=$KEMPNER_STAGE/kempner-$SLURM_JOB_ID
    ! kp_ask squeue --me -h -o %A || jobs=$(paste -sd, <<<"$KP_ANSWER")
    # In a container Python belongs to the image.
    if [[ ${KEMPNER_STAGE_ENVIRONMENT:-0} != 0 && ${KEMPNER_CONTAINER:-none} == none ]]; then
        environment=(--environment)
        export KEMPNER_STAGED_PYTHON=$KP_PYTHON
    fi
    kp_on_each_node stage -m kempner.data.stage "${environment[@]}" --jobs "$jobs" "$KEMPNER_STAGED" "${KP_DATA[@]}" ||
        kp_log "staging has failed (exit code $?): what was not copied is read from where it is"
}

kp_unstage() { # removes these copies: the job has ended for good
    [[ -n ${KEMPNER_STAGED:-} ]] || return 0
    unset KEMPNER_STAGED_PYTHON
    kp_on_each_node unstage -c 'import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)' "$KEMPNER_STAGED" ||
        kp_log "the copies in $KEMPNER_STAGED could not be removed (exit code $?): your next job there removes them"
}
