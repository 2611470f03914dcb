# shellcheck shell=bash
# Who is told of a run that has ended or stands still, and the page that is written while it goes
# on: src/kempner/jobs/{report/notify,records/watch}.py, docs/start/monitoring.md.

KP_WATCH='' # the process beside the ranks

kp_check_notify() { # stops at a KEMPNER_NOTIFY, KEMPNER_WEBHOOK or KEMPNER_PAGE that cannot work
    local command=${KEMPNER_NOTIFY:-} words=()
    if [[ -n $command ]]; then
        bash -n -c "$command" 2>/dev/null ||
            kp_die "KEMPNER_NOTIFY=$command: bash cannot read this command: correct it"
        read -ra words <<<"$command" || true
        # Of a plain word alone: what quotes, variables and brackets stand for, only bash knows.
        [[ ${words[0]:-} == *[!A-Za-z0-9_./+:@%-]* ]] || command -v -- "${words[0]:-}" >/dev/null ||
            kp_die "KEMPNER_NOTIFY=$command: there is no command '${words[0]:-}'" \
                "here: give its path"
    fi

    # The value is a secret: whoever has it can post.
    [[ -z ${KEMPNER_WEBHOOK:-} || $KEMPNER_WEBHOOK =~ ^https?://[^[:space:]/]+[^[:space:]]*$ ]] ||
        kp_die "KEMPNER_WEBHOOK must be a URL that begins with https:// or http:// (its" \
            "value is not shown)"
    [[ -z ${KEMPNER_PAGE:-} || $KEMPNER_PAGE =~ ^([5-9]|[1-9][0-9]{1,4})$ ]] ||
        kp_die "KEMPNER_PAGE=$KEMPNER_PAGE: must be the seconds between two pages, from 5 to 99999"
}

kp_is_told() { # true when somebody is to be told of this run
    [[ -n ${KEMPNER_MAIL:-}${KEMPNER_NOTIFY:-}${KEMPNER_WEBHOOK:-} ]]
}

kp_history() { # sets KP_HISTORY, the words that start a module of kempner.jobs.records: outside the
    # container, where the commands of the host are; its python3 is enough, as these need no
    # packages
    KP_HISTORY=("${KP_INSIDE[@]}" "$KP_PYTHON")
    ((${#KP_INSIDE[@]} == 0)) && type -P -- "$KP_PYTHON" >/dev/null ||
        ! kp_host_can kempner.jobs.records ||
        KP_HISTORY=("$KP_HOST_PYTHON")
}

kp_watch() { # with KEMPNER_PAGE, or somebody to tell: starts the process that looks at the run
    # while it goes on
    [[ -n ${KEMPNER_PAGE:-} ]] || kp_is_told || return 0
    kp_history
    setsid nice -n 19 "${KP_HISTORY[@]}" "$KP_MODULE" kempner.jobs.records.watch "$KP_RUN_DIR" \
        ${KEMPNER_PAGE:+"$KEMPNER_PAGE"} </dev/null &
    KP_WATCH=$!
}

kp_watch_end() { # ends that process; outside Slurm nothing follows, so that this is the time for
    # the last page
    [[ -n $KP_WATCH ]] || return 0
    kill "$KP_WATCH" 2>/dev/null || true
    KP_WATCH=''
    kp_in_job || kp_page
}

kp_page() { # with KEMPNER_PAGE: writes the page of the run
    [[ -n ${KEMPNER_PAGE:-} ]] || return 0
    kp_ask "${KP_HISTORY[@]}" "$KP_ROOT/scripts/report.py" "$KP_RUN_DIR" --html \
        --refresh "$KEMPNER_PAGE" ||
        kp_log "the page $KP_RUN_DIR/report.html could not be written"
}

kp_notify_early() { # <exit code>: tells of a job that has ended before it became a run, in whose
    # directory nothing is written
    local KP_DEADLINE=$((SECONDS + 45)) KP_ANSWER='' line why
    (($1 != 0 && $1 != 130)) && kp_is_told || return 0
    why="exit code $1 before the run began: the reason is the first 'error:' in $(kp_field StdOut)"
    kp_history
    kp_ask "${KP_HISTORY[@]}" "$KP_MODULE" kempner.jobs.report.notify \
        "job $(kp_job_id) ($(kp_job_name))" ended "$why" ||
        KP_ANSWER="nobody was told that the job has ended: kempner.jobs.report.notify has failed"
    [[ -z $KP_ANSWER ]] || while read -r line; do kp_log "$line"; done <<<"$KP_ANSWER"
}

kp_notify() { # <decision> <why>: the last page of this attempt; and after an end, tells all that
    # are to be told
    local KP_DEADLINE=$((SECONDS + 45)) KP_ANSWER='' event=ended
    kp_watch_end
    [[ $1 != restart ]] || return 0 # at once, with a watch of its own
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
