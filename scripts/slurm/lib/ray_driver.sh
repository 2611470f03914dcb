# shellcheck shell=bash
# Runs the user's command or attached shells on the cluster, and shuts everything down.

ray_attach() { # [N or hostname] [--] [command...]: opens a shell or runs a command on a node;
    # part of JOBID-attach.sh
    local k=0 node words
    if (($# > 0)) && [[ $1 != -- ]]; then
        for ((k = 0; k < ${#RAY_NODES[@]}; k++)); do
            [[ $1 != "$k" && $1 != "${RAY_NODES[k]}" ]] || break
        done
        ((k < ${#RAY_NODES[@]})) ||
            kp_die "no node '$1' in job $RAY_JOB: give 0 to $((${#RAY_NODES[@]} - 1))," \
                "or one of ${RAY_NODES[*]}"
        shift
    fi
    [[ ${1:-} != -- ]] || shift
    # This shell may be in another job.
    for node in "${!SLURM_@}" "${!SRUN_@}"; do [[ $node == SLURM_CONF ]] || unset "$node"; done
    words=("${RAY_SRUN[@]}" --nodelist="${RAY_NODES[k]}")
    (($# > 0)) || [[ ! -t 0 ]] || words+=(--pty)
    exec "${words[@]}" "${RAY_ENTER[@]}" "${RAY_PIDS[k]}" "${RAY_INSIDE[@]}" "$@"
}

ray_write_attach() { # writes JOBID-attach.sh; sets RAY_SRUN, RAY_ENTER and RAY_INSIDE, which
    # lead into a node
    ray_srun 1
    RAY_JOB=$SLURM_JOB_ID
    RAY_ENTER=(bash "$KP_LIB/ray_enter.sh")
    RAY_INSIDE=("$RAY_JOB" "$PWD" --)
    # By its path: the attaching user may not have loaded apptainer's module.
    ((${#KP_INSIDE[@]} == 0)) ||
        RAY_INSIDE=("$RAY_JOB" "$PWD" "$(command -v "${KP_INSIDE[0]}")" "${KP_INSIDE[@]:1}" --)
    # pyxis: enter the running container. srun could join a named one, but that would
    # stay on the node.
    ((${#KP_CONTAINER_FLAGS[@]} == 0)) || RAY_INSIDE=("$RAY_JOB" "$PWD" enroot exec --)
    {
        echo "#!/usr/bin/env bash"
        echo "# Onto the Ray cluster of job $RAY_JOB: bash $RAY_JOB-attach.sh [N|HOSTNAME]" \
            "[-- COMMAND...]"
        echo "# A shell or a command on node N (0: the head), in the job's environment. Removed" \
            "when the job ends."
        echo "set -euo pipefail"
        # On a node without its own configuration this is slurmd's copy, which exists nowhere else.
        [[ -z ${SLURM_CONF:-} ]] ||
            echo "[[ -n \${SLURM_CONF:-} || ! -r ${SLURM_CONF@Q} ]] ||" \
                "export SLURM_CONF=${SLURM_CONF@Q}"
        declare -p RAY_JOB RAY_NODES RAY_PIDS RAY_SRUN RAY_ENTER RAY_INSIDE
        declare -f kp_die ray_attach
        echo "ray_attach \"\$@\""
    } >"$RAY_ATTACH"
    chmod 700 "$RAY_ATTACH"
}

ray_run_command() { # runs COMMAND on the head as in an attached shell; exits with its exit code
    local end
    kp_log "driver: $RAY_LOGS/ray-driver.log"
    # The command writes its own log: srun loses the last lines of a killed task.
    # shellcheck disable=SC2016 # that shell's own parameters
    ray_launch driver "${RAY_SRUN[@]}" --job-name="ray-driver-$KEMPNER_ATTEMPT_ID" --input=none \
        --nodelist="${RAY_NODES[0]}" "${RAY_ENTER[@]}" "${RAY_PIDS[0]}" "${RAY_INSIDE[@]}" \
        bash -c 'exec >>"$1" 2>&1; exec bash -c "$2"' - "$RAY_LOGS/ray-driver.log" "$COMMAND"
    until [[ -n ${RAY_CODE[driver]:-} ]]; do
        ray_poll || true
        [[ -n ${RAY_CODE[driver]:-} ]] || ray_exit_if_ended
    done

    # If it failed, Ray may have died or a signal reached it first: wait for that report.
    end=$((SECONDS + (RAY_CODE[driver] == 0 ? 0 : 2)))
    while ray_poll || ((SECONDS < end)); do ray_exit_if_ended; done
    [[ -z $RAY_SIGNAL ]] || ray_exit_if_ended
    kp_log "the command has ended with exit code ${RAY_CODE[driver]}"
    exit "${RAY_CODE[driver]}"
}

ray_wait() { # waits until a user ends the interactive job
    kp_log "interactive: bash $RAY_ATTACH [N|HOSTNAME] [-- COMMAND...]; to end it:" \
        "touch $RAY_LOGS/ENDED"
    while true; do
        ray_poll || true
        ray_exit_if_ended
    done
}

# --- the end --------------------------------------------------------------------------------------

ray_wait_for() { # <step> <seconds>: waits that long for a step to end; succeeds if it has ended
    # or never started
    local end=$((SECONDS + $2))
    while [[ -n ${RAY_PID[$1]:-} && -z ${RAY_CODE[$1]:-} ]]; do
        ((SECONDS < end)) || return 1
        ray_poll || true
    done
}

ray_finish() { # EXIT trap: ends the driver and Ray, removes the token and the attach script,
    # keeps the exit code
    local code=$? state='' patience=8 began end start=$SECONDS
    local KP_SRUN_NAME=ray-driver-$KEMPNER_ATTEMPT_ID
    set +e # an error, such as a full disk, must not stop the cleanup
    began=$(date +%s%N)
    trap '' TERM INT HUP USR1 USR2
    rm -f -- "$RAY_ATTACH" "$RAY_TOKEN"
    [[ -z $RAY_SIGNAL ]] || kp_log "SIG$RAY_SIGNAL: ending the cluster"
    # without Ray, the nodes need not wait for the driver
    [[ -z $RAY_FAULT ]] || : >"$RAY_LOGS/ENDED"

    if ! ray_wait_for driver 0; then
        ! kp_show_job || state=$(kp_field JobState)
        kp_set_child "${RAY_PID[driver]}"
        # In any other state Slurm has signalled the driver, and time is short. Run in the
        # background, because scancel takes 10 s if a host is down.
        [[ $state != RUNNING ]] || kp_signal TERM &
        if [[ $state != RUNNING ]] || ! ray_wait_for driver 4; then
            kill -TERM "$KP_CHILD" 2>/dev/null # srun ends its task at once
        fi
    fi

    if [[ -n ${RAY_PID[ray]:-} ]]; then
        # Neither a setup command nor a host that is down watches for ENDED: only a healthy cluster
        # gets more time.
        [[ -n $RAY_FAULT ]] || ((${#RAY_PIDS[@]} < KP_NODES)) || patience=15
        if ! : >"$RAY_LOGS/ENDED"; then
            KP_SRUN_NAME=ray-$KEMPNER_ATTEMPT_ID
            kp_set_child "${RAY_PID[ray]}"
            kp_signal TERM &
        fi
        if ! ray_wait_for ray $((start + patience - SECONDS)); then
            kp_log "some nodes do not end: killing the step"
            kill -TERM "${RAY_PID[ray]}" 2>/dev/null
            ray_wait_for ray 4
        fi
    fi

    end=$(date +%s%N)
    printf -v end '%d.%d' $(((end - began) / 1000000000)) $(((end - began) / 100000000 % 10))
    kp_log "end: exit code $code (shutdown $end s, $SECONDS s in all)"
    exit "$code"
}
