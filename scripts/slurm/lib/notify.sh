# shellcheck shell=bash
# Notifications of runs that have ended or stalled, and the page that is written during a
# run: src/kempner/jobs/{report/notify,records/watch}.py, docs/start/monitoring.md.

KP_WATCH='' # the watch process

kp_check_notify() { # exits if KEMPNER_NOTIFY, KEMPNER_WEBHOOK or KEMPNER_PAGE cannot work
    local command=${KEMPNER_NOTIFY:-} words=()
    if [[ -n $command ]]; then
        bash -n -c "$command" 2>/dev/null ||
            kp_die "KEMPNER_NOTIFY=$command: bash cannot read this command: correct it"
        read -ra words <<<"$command" || true
        # Check only a plain word: quotes, variables and brackets need bash's expansion.
        [[ ${words[0]:-} == *[!A-Za-z0-9_./+:@%-]* ]] || command -v -- "${words[0]:-}" >/dev/null ||
            kp_die "KEMPNER_NOTIFY=$command: there is no command '${words[0]:-}'" \
                "here: give its path"
    fi

    # The value is a secret: anybody who has it can post.
    [[ -z ${KEMPNER_WEBHOOK:-} || $KEMPNER_WEBHOOK =~ ^https?://[^[:space:]/]+[^[:space:]]*$ ]] ||
        kp_die "KEMPNER_WEBHOOK must be a URL that begins with https:// or http:// (its" \
            "value is not shown)"
    [[ -z ${KEMPNER_PAGE:-} || $KEMPNER_PAGE =~ ^([5-9]|[1-9][0-9]{1,4})$ ]] ||
        kp_die "KEMPNER_PAGE=$KEMPNER_PAGE: must be the seconds between two pages, from 5 to 99999"
}

kp_is_told() { # succeeds if this run sends notifications
    [[ -n ${KEMPNER_MAIL:-}${KEMPNER_NOTIFY:-}${KEMPNER_WEBHOOK:-} ]]
}

kp_history() { # sets KP_HISTORY, a prefix that runs modules of kempner.jobs.records outside the
    # container, with the host's commands; these need no packages, so the host's python3 is enough
    KP_HISTORY=("${KP_INSIDE[@]}" "$KP_PYTHON")
    ((${#KP_INSIDE[@]} == 0)) && type -P -- "$KP_PYTHON" >/dev/null ||
        ! kp_host_can kempner.jobs.records ||
        KP_HISTORY=("$KP_HOST_PYTHON")
}

kp_watch() { # with KEMPNER_PAGE or notifications: starts the process that watches the run
    [[ -n ${KEMPNER_PAGE:-} ]] || kp_is_told || return 0
    kp_history
    setsid nice -n 19 "${KP_HISTORY[@]}" "$KP_MODULE" kempner.jobs.records.watch "$KP_RUN_DIR" \
        ${KEMPNER_PAGE:+"$KEMPNER_PAGE"} </dev/null &
    KP_WATCH=$!
}

kp_watch_end() { # ends the watch process; outside Slurm nothing follows, so writes the last page
    [[ -n $KP_WATCH ]] || return 0
    kill "$KP_WATCH" 2>/dev/null || true
    KP_WATCH=''
    kp_in_job || kp_page
}

kp_page() { # with KEMPNER_PAGE: writes the run's page
    [[ -n ${KEMPNER_PAGE:-} ]] || return 0
    kp_ask "${KP_HISTORY[@]}" "$KP_ROOT/scripts/report.py" "$KP_RUN_DIR" --html \
        --refresh "$KEMPNER_PAGE" ||
        kp_log "the page $KP_RUN_DIR/report.html could not be written"
}

kp_notify_early() { # <exit code>: notifies of a job that ended before its run began; writes nothing
    # to a run directory
    local KP_DEADLINE=$((SECONDS + 45)) KP_ANSWER='' line why
    (($1 != 0 && $1 != 130)) && kp_is_told || return 0
    why="exit code $1 before the run began: the reason is the first 'error:' in $(kp_field StdOut)"
    kp_history
    kp_ask "${KP_HISTORY[@]}" "$KP_MODULE" kempner.jobs.report.notify \
        "job $(kp_job_id) ($(kp_job_name))" ended "$why" ||
        KP_ANSWER="nobody was told that the job has ended: kempner.jobs.report.notify has failed"
    [[ -z $KP_ANSWER ]] || while read -r line; do kp_log "$line"; done <<<"$KP_ANSWER"
}

kp_notify() { # <decision> <why>: writes the last page of this attempt; after an
    # end, sends notifications
    local KP_DEADLINE=$((SECONDS + 45)) KP_ANSWER='' event=ended
    kp_watch_end
    [[ $1 != restart ]] || return 0 # the next attempt starts at once, with its own watch
    kp_history
    kp_page
    [[ $1 == end ]] && kp_is_told || return 0
    if [[ $KP_STATE =~ ^(done|stopped|failed)$ ]]; then
        event=$KP_STATE
    elif ((${KP_DECISION[no_progress]:-0} >= ${KEMPNER_MAX_CRASHES:-3})); then
        event=crash_loop
    fi
    kp_ask "${KP_HISTORY[@]}" "$KP_MODULE" kempner.jobs.report.notify "$KP_RUN_DIR" "$event" "$2" ||
        KP_ANSWER="nobody was told that the run has ended: kempner.jobs.report.notify has failed"
    [[ -z $KP_ANSWER ]] || while read -r event; do kp_log "$event"; done <<<"$KP_ANSWER"
}
