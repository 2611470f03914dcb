# shellcheck shell=bash
# The preflight checks, before a run and for scripts/slurm/preflight.sh.

KP_PREFLIGHT='' KP_BAD='' # "failed", and the nodes that failed

kp_preflight() { # with KEMPNER_PREFLIGHT=1: checks the nodes; if some are faulty,
    # requeues without them or exits
    local code=0
    [[ ${KEMPNER_PREFLIGHT:-0} != 0 ]] && kp_in_job || return 0
    kp_prove_nodes "$KP_RUN_DIR/logs/preflight-$KEMPNER_ATTEMPT_ID.json" --dir "$KP_RUN_DIR" \
        --device "$KP_DEVICE" --history "${KP_RUN_DIR%/*}/node-speeds"
    kp_mark preflight
    ((code != 0)) || return 0
    if ((code != 1)); then
        kp_log "preflight itself has failed (exit code $code): the run starts nevertheless"
        return 0
    fi
    kp_drop_bad_spares || return 0
    kp_set_code 1
    KP_PREFLIGHT=failed
    kp_decide "preflight: ${KP_BAD:-the network} failed" || true
    [[ $KP_DECIDED == restart ]] || kp_finish
    kp_next_attempt
    KP_PREFLIGHT='' KP_BAD=''
}

kp_drop_bad_spares() { # removes failed spares from KP_SPARES and KP_BAD; fails
    # if none is left in KP_BAD
    local host bad=",$KP_BAD," count=${#KP_SPARES[@]} words
    for host in "${KP_SPARES[@]}"; do bad=${bad/",$host,"/,}; done
    IFS=, read -ra words <<<"$KP_BAD"
    kp_drop_spares "failed the preflight" "${words[@]}"
    ((${#KP_SPARES[@]} < count)) || return 0
    bad=${bad#,}
    KP_BAD=${bad%,}
    [[ -n $KP_BAD ]]
}

kp_prove_nodes() { # <JSON file> <options of kempner.jobs.preflight>...: sets KP_BAD, and the
    # caller's code to 0 if all pass
    local json=$1 meet=${1%.json}.meet driver step='' tries
    local driver_port directory
    # including spares
    local KP_NODES=$((KP_NODES + ${#KP_SPARES[@]})) KP_PLACES=("${KP_PLACES[@]}" "${KP_SPARES[@]}")
    local KP_SRUN_NAME=preflight-$KEMPNER_ATTEMPT_ID
    code=0
    # If one task ends, the others must still report.
    kp_srun_command --kill-on-bad-exit=0 -- "$KP_MODULE" kempner.jobs.preflight.task

    mkdir -p -- "$meet" || {
        kp_log "$meet cannot be created: submit from a writable directory," \
            "or make room there"
        code=3
        return
    }
    kp_python "$KP_MODULE" kempner.jobs.preflight --meet "$meet" --json "$json" \
        --nodes "$(scontrol show hostnames "$(kp_field NodeList)" | paste -sd,)" \
        --tasks "$KP_TASKS" --gpus "$KP_GPUS" \
        ${KEMPNER_PREFLIGHT_LEAST:+--least "$KEMPNER_PREFLIGHT_LEAST"} \
        ${KEMPNER_PREFLIGHT_SECONDS:+--seconds "$KEMPNER_PREFLIGHT_SECONDS"} \
        ${KEMPNER_PREFLIGHT_SLOW:+--slow "$KEMPNER_PREFLIGHT_SLOW"} "${@:2}" &
    driver=$!

    # The driver may be in a container without srun: it publishes its port here, and learns from a
    # file that srun has ended.
    while kill -0 "$driver" 2>/dev/null; do
        if [[ -z $step && -s $meet/port ]]; then
            IFS=' ' read -r driver_port directory <"$meet/port"
            KEMPNER_PREFLIGHT_PORT=$driver_port KEMPNER_PREFLIGHT_DIR=$directory \
                "${KP_SRUN[@]}" </dev/null &
            step=$!
        elif [[ -n $step ]] && ! kill -0 "$step" 2>/dev/null; then
            : >"$meet/ended"
        fi
        kp_shielded sleep 0.1
    done
    wait "$driver" || code=$?

    if [[ -n $step ]]; then
        # A stuck task must not hold the job; on a busy host, torch takes seconds to exit.
        for ((tries = 0; tries < 250; tries++)); do
            kill -0 "$step" 2>/dev/null || break
            ((tries != 200)) || kill -TERM "$step" || true # srun then kills its tasks
            kp_shielded sleep 0.1
        done
        kill -KILL "$step" 2>/dev/null || true
        wait "$step" || true
    fi

    rm -rf -- "$meet"
    ((code != 2)) || exit 2
    local KP_VALUES=()
    ! kp_values kp_records values "$json" bad || KP_BAD=${KP_VALUES[0]:-}
}
