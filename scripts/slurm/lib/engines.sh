# shellcheck shell=bash
# The parts of serve.sh: one engine per task, which publishes its URL in its own file.

kp_own_steps() { # in place of restart.sh's: names this script
    echo serve.sh
}

kp_own_options() { # in place of launch.sh's: prints those of serve.py
    echo 'slots|queue|window|device'
}

kp_engines_check() { # <serve.py arguments>...: checks them in one process; sets
    # KP_RUN_DIR and srun's options
    local place
    [[ $KP_DRY != submit && -z ${KP_SCRIPT:-} ]] ||
        kp_die "serve.sh takes neither --submit nor --script: use sbatch"
    kp_need_packages
    place=runs/serve-$(kp_job_id)
    kp_use_program "$KP_ROOT/scripts/serve.py"
    kp_use_run "$PWD/$place" "$PWD/$place"
    kp_set_arguments "${KP_ARGUMENTS[@]}" --host=0.0.0.0 --port=0 --token-file="$place/token" \
        --publish="$place/urls"
    # An engine that dies does not end the others.
    KEMPNER_SRUN="--output=$place/logs/engine-%t.log ${KEMPNER_SRUN:-}"
    KEMPNER_SRUN="--kill-on-bad-exit=0 --wait=0 $KEMPNER_SRUN"
    kp_checked numpy "$KP_TRAIN" "$@" --check || {
        kp_log "not started: serve.py ended with exit code 2"
        exit 2
    }
    [[ -z $KP_DRY ]] || kp_dry_tell # exits here

    # Remove what an earlier attempt of this job has left.
    rm -f -- "$KP_RUN_DIR"/urls/engine-* "$KP_RUN_DIR/token"
    mkdir -p -- "$KP_RUN_DIR/urls" "$KP_RUN_DIR/logs" || kp_die "$KP_RUN_DIR cannot be written"
    (umask 077 && od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"$KP_RUN_DIR/token")
}

kp_on_signal() { # <signal>: in place of signals.sh's: ends the engines
    local KP_DEADLINE=$((SECONDS + KP_PATIENCE)) KP_ANSWER=''
    kp_set_pending "$1" # before they exist
    [[ -n $KP_CHILD ]] || return 0
    kp_log "SIG$1: ending the engines"
    kp_signal TERM
}

kp_engines_start() { # starts the engines as one step
    KEMPNER_PEERS=$(kp_peers | paste -sd' ')
    export KEMPNER_PEERS
    kp_log "job $(kp_job_id), restart count ${SLURM_RESTART_COUNT:-0}: $((KP_NODES * KP_TASKS))" \
        "engine(s) on" \
        "$(kp_field NodeList)"
    [[ -z $KP_PENDING ]] || exit 0
    kp_srun "$KP_TRAIN" "${KP_ARGUMENTS[@]}"
}

kp_engines_follow() { # prints each URL and updates engines.txt until all engines have ended; exits
    local url urls last=''
    while kill -0 "$KP_CHILD" 2>/dev/null; do
        urls=$(cat -- "$KP_RUN_DIR"/urls/engine-* 2>/dev/null) || true
        if [[ $urls != "$last" ]]; then
            while read -r url; do
                [[ $'\n'$last$'\n' == *$'\n'"$url"$'\n'* ]] || kp_log "engine at $url"
            done <<<"$urls"
            # Rename it into place: readers find the old list or the complete new one.
            printf '%s\n' "$urls" >"$KP_RUN_DIR/.engines.txt"
            mv -- "$KP_RUN_DIR/.engines.txt" "$KP_RUN_DIR/engines.txt"
            kp_log "$(grep -c . <<<"$urls") of $((KP_NODES * KP_TASKS)) engine(s) are up:" \
                "$KP_RUN_DIR/engines.txt"
            last=$urls
        fi
        kp_shielded sleep 0.5 &
        wait "$!" || true # a signal ends it
    done
    kp_wait
    rm -f -- "$KP_RUN_DIR"/urls/engine-* "$KP_RUN_DIR"/{token,engines.txt}
    rmdir -- "$KP_RUN_DIR/urls" || true
    kp_log "the engines have ended with exit code $KP_CODE"
    exit "$KP_CODE"
}
