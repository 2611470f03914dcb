# shellcheck shell=bash
# The end of an attempt: what has happened, whether the job is requeued, and without which hosts.
# The table of decisions is in docs/slurm.md.

KP_JUDGE_S=${KP_JUDGE_S:-20} # seconds that the question whose fault it was may take; tests shorten it

kp_newest_step() { # <directory of checkpoints>: the step of the newest complete one, -1 when there is none
    local link pattern='step_0*([0-9]+)/*$'
    link=$(kp_shielded readlink "$1/latest") || true
    [[ $link =~ $pattern ]] && echo "${BASH_REMATCH[1]}" || echo -1
}

kp_committed_step() { # the step that the run would go on from
    kp_newest_step "$KP_CHECKPOINTS"
}

kp_reached() { # the same in words
    if ((KP_COMMITTED < 0)); then
        echo "no checkpoint yet"
    else
        echo "${KP_MEASURE:-newest checkpoint: step} $KP_COMMITTED"
    fi
}

kp_step() { # the same as the records have it
    echo "$KP_COMMITTED"
}

kp_refusal() { # what a program has said of its bad input: the first problem in srun's log
    sed -nE 's/^  - (.*)/\1/p; s/^.*rank [0-9]+ on [^ :]+: (.*)/\1/p' "$KP_SRUN_LOG" 2>/dev/null | head -n 1 || true
}

kp_verdict() { # sets KP_STATE to what status.json says of this attempt, or to nothing
    local text='' pattern='"state": *"([a-z]+)"'
    { read -r -d '' text <"$KP_RUN_DIR/status.json"; } 2>/dev/null || true
    [[ $text == *"\"$KEMPNER_ATTEMPT_ID\""* && $text =~ $pattern ]] && KP_STATE=${BASH_REMATCH[1]} || KP_STATE=''
}

# --- the record --------------------------------------------------------------------------------------------

kp_json() { # <text>: as a JSON string
    local text=${1//\\/\\\\}
    text=${text//\"/\\\"}
    printf '"%s"' "${text//[[:cntrl:]]/ }"
}

kp_record() { # <restart, requeue, chain, end or leave> <why>: a line in the log and in attempts.jsonl (events.py)
    local file=$KP_RUN_DIR/attempts.jsonl line
    KP_DECIDED=$1
    kp_log "$1: $2"
    printf -v line '{"event": "decision", "decision": "%s", "why": %s, "job": "%s", "restart": %d, "attempt_id": %s, ' \
        "$1" "$(kp_json "$2")" "$(kp_job_id)" "${SLURM_RESTART_COUNT:-0}" "$(kp_json "$KEMPNER_ATTEMPT_ID")"
    printf -v line '%s"step": %s, "no_progress": %s, "blamed": %s, "excluded": %s, "batch_began": %d, "time": %(%s)T}' \
        "$line" "$(kp_step)" "${KP_NO_PROGRESS:-null}" "$(kp_json "$KP_BLAMED")" "$(kp_json "$KP_EXCLUDED")" \
        "${KEMPNER_BATCH_BEGAN:-0}" -1

    # A rank that was killed may have left half a line: it must not swallow this one.
    [[ -z $(tail -c 1 -- "$file" 2>/dev/null) ]] || line=$'\n'$line
    printf '%s\n' "$line" >>"$file"
    [[ ! $1 =~ ^(end|leave)$ ]] || kp_chain_cancel "$1: $2"
    kp_notify "$@"
}

# --- whose fault it was ------------------------------------------------------------------------------------

kp_count_crashes() { # prints how many attempts of the job in a row, before this one, made no progress, by the decisions
    # As faulty_host.py counts: a decision says null where nobody had the time to count.
    local line count=0 jobs pattern='"no_progress": ([0-9]+)'
    jobs=$(kp_chain_jobs)
    while IFS= read -r line; do
        if [[ $line =~ $pattern ]]; then count=${BASH_REMATCH[1]}; else count=$((count + 1)); fi
    done < <(kp_shielded grep -sE "\"event\": \"decision\".*\"job\": \"(${jobs//,/|})\"" "$KP_RUN_DIR/attempts.jsonl")
    echo "$count"
}

kp_was_cut_short() { # true when this attempt was asked to leave before its training began, and not by its time limit
    local end now
    [[ ${KP_SIGNAL:-USR2} != USR2 ]] || return 1
    if [[ $(kp_field PreemptTime) =~ ^(None)?$ ]] && end=$(date -d "$(kp_field EndTime)" +%s 2>/dev/null); then
        printf -v now '%(%s)T' -1
        ((end - now > ${KEMPNER_SIGNAL_LEAD:-120} + 60)) || return 1 # the next start would have no more time
    fi
    ! kp_shielded grep -qsE "\"event\": \"start\".*\"attempt_id\": $(kp_json "$KEMPNER_ATTEMPT_ID")" \
        "$KP_RUN_DIR/attempts.jsonl"
}

kp_judge() { # reads the records, once: sets KP_NO_PROGRESS, KP_FINAL, KP_BLAMED, KP_START_S (seconds until the first
    # step), and KP_EXCLUDED if the host is left out, KP_REPLACED if a spare takes its place
    local KP_DEADLINE=$((SECONDS + KP_JUDGE_S)) KP_ANSWER='' host='' again='' excluded='' before='' broken='' nodes
    [[ -z $KP_JUDGED ]] || return 0
    KP_JUDGED=1
    # After an orderly end with a new checkpoint there is nothing to find out, and KillWait may be short.
    ((KP_COMMITTED <= KP_COMMITTED_BEFORE)) || [[ $KP_STATE != interrupted ]] || return 0
    mapfile -t nodes < <(kp_shielded scontrol show hostnames "$(kp_field NodeList)")
    ((${#KP_PLACES[@]} == 0)) || nodes=("${KP_PLACES[@]}")
    kp_history # a container may take longer to start than there is time
    if kp_ask "${KP_HISTORY[@]}" -m kempner.history.faulty_host \
        "$KP_RUN_DIR" "$(kp_chain_jobs)" "$KEMPNER_ATTEMPT_ID" "$KP_SRUN_LOG" "${KP_TASKS:-1}" "${nodes[@]}"; then
        # The last seven lines: in a step, a TaskProlog may have said something before.
        { read -r before && read -r host && read -r again && read -r excluded && read -r KP_FINAL && read -r broken &&
            read -r KP_START_S; } < <(tail -n 7 <<<"$KP_ANSWER") || true
    else
        kp_log "the records of earlier attempts could not be read: only a preflight can exclude a host"
    fi
    [[ $before =~ ^[0-9]+$ ]] || before=$(kp_count_crashes)
    [[ -z $broken || -n $KP_PREFLIGHT ]] || KP_FAULT="has a broken $broken"
    if ((KP_COMMITTED <= KP_COMMITTED_BEFORE)); then
        KP_NO_PROGRESS=$((before + 1))
        ! kp_was_cut_short || KP_NO_PROGRESS=$before
    fi

    [[ -z $KP_PREFLIGHT ]] || host=$KP_BAD again=$KP_BAD
    [[ -z $KP_LOST ]] || host=$KP_LOST again=$KP_LOST
    [[ $KP_STATE != interrupted && -z $KP_FINAL ]] || return 0
    KP_BLAMED=$host
    [[ -n $again ]] || return 0
    # Slurm itself keeps the next start off a node that is lost.
    kp_replace "$host" || [[ -n $KP_LOST ]] || kp_leave_out "$host" "${excluded:-0}"
}

kp_leave_out() { # <hosts> <how many the job already does without>: sets KP_EXCLUDED, unless too few others are left
    local most=${KEMPNER_EXCLUDE:-2} node left=0 out
    ((most > 0)) || return 0
    if (($2 >= most)); then
        kp_log "$1: $KP_FAULT, not excluded: $2 nodes are already (KEMPNER_EXCLUDE=$most)"
        return 0
    fi

    # With fewer nodes than it needs, the job would wait for ever.
    out=" ${1//,/ } $(kp_excluded | xargs -r scontrol show hostnames | paste -sd' ') "
    while read -r node; do
        [[ $out == *" $node "* ]] || left=$((left + 1))
    done < <(sinfo -h -N -p "$(kp_field Partition)" -o '%N %t' |
        awk '$2 !~ /down|drain|drng|fail|maint|unk/ { print $1 }' | sort -u)
    if ((left < KP_NODES + ${KEMPNER_SPARES:-0})); then
        kp_log "$1: $KP_FAULT, not excluded: the other nodes of the partition, $left, are too few"
        return 0
    fi
    KP_EXCLUDED=$1
}

kp_leave_out_spent() { # adds the hosts that spares have replaced to KP_EXCLUDED: Slurm would take them again
    local host pattern already
    ((${#KP_SPENT[@]} > 0)) || return 0
    pattern=$(kp_chain_jobs)
    pattern='"decision": "(requeue|chain)".* "job": "('${pattern//,/|}')".* "excluded": "[^"]'
    already=$(kp_shielded grep -csE "$pattern" "$KP_RUN_DIR/attempts.jsonl") || true
    [[ -n $KP_EXCLUDED ]] || KP_FAULT="was replaced by a spare node"
    for host in "${KP_SPENT[@]}"; do
        kp_leave_out "${KP_EXCLUDED:+$KP_EXCLUDED,}$host" "${already:-0}"
        already=$((already + 1))
    done
}

kp_excluded() { # the nodes that the job is kept off, as Slurm writes them, or nothing
    local list
    list=$(kp_field ExcNodeList)
    [[ $list == '(null)' ]] || echo "$list"
}

kp_exclude() { # <job>: keeps it off KP_EXCLUDED. Of a requeued job, Slurm takes this only once the job is pending again
    local tries list
    list=$(kp_excluded)
    for ((tries = 0; tries < 30; tries++)); do
        if scontrol update JobId="$1" ExcNodeList="${list:+$list,}$KP_EXCLUDED" 2>/dev/null; then
            kp_log "$KP_EXCLUDED: $KP_FAULT, excluded from the next starts of this job (KEMPNER_EXCLUDE=0: never)"
            return 0
        fi
        sleep 0.1
    done
    kp_log "$KP_EXCLUDED: $KP_FAULT, but scontrol refused to exclude it from the job"
    KP_EXCLUDED=''
}

# --- the decision ------------------------------------------------------------------------------------------

kp_decide() { # <what happened, for when the run itself does not say>: requeues the job, or does not
    local what=$1 most=${KEMPNER_MAX_CRASHES:-3} state pending=$KP_PENDING
    # Between two attempts a signal must not be lost: kp_on_signal keeps it.
    [[ $KP_RESTARTS -gt 0 && -z $KP_CHILD ]] || kp_deaf
    [[ -z $KP_DECIDED ]] || return 0 # a second signal has come while the first one was handled
    kp_look
    if kp_may_restart && [[ $KP_PENDING == "$pending" ]]; then
        kp_record restart "$what ($(kp_reached))"
        return
    fi

    kp_deaf
    [[ $KP_PENDING == "$pending" ]] || kp_look # a subshell may have died of the signal
    [[ -z $KP_REPLACED ]] || KP_REPLACED='' KP_EXCLUDED=''
    [[ $KP_STATE != interrupted ]] || what=${KP_INTERRUPTED:-interrupted and saved}
    what+=" ($(kp_reached))"
    state=$KP_JOB_STATE
    if [[ $KP_STATE =~ ^(done|stopped|failed)$ ]]; then
        kp_record end "the run is $KP_STATE"
    elif [[ ${KP_CODE:-} == 2 ]]; then
        what=$(kp_refusal)
        kp_record end "bad input${what:+: $what}"
    elif [[ $state != RUNNING && $(kp_field Reason) != TimeLimit ]] && kp_chain_survives; then
        kp_record chain "Slurm is ending the job ($state, $(kp_field Reason)); job $KP_SUCCESSOR continues it"
    elif [[ $state != RUNNING && $(kp_field Reason) != TimeLimit ]]; then
        kp_record leave "$(kp_leaving)"
    elif ! kp_is_batch; then
        kp_record end "$what; only a batch job is requeued"
    elif [[ $KP_PENDING == INT ]]; then
        kp_record end "$what; SIGINT between two attempts"
    elif [[ -z $KP_CHAIN && $(kp_field Requeue) == 0 ]]; then
        kp_record end "$what; the job was submitted with --no-requeue"
    elif kp_judge && [[ -n $KP_FINAL ]]; then
        kp_record end "$KP_FINAL; another attempt would end in the same way"
    elif ((KP_NO_PROGRESS >= most)); then
        kp_record end "$what; $KP_NO_PROGRESS attempts in a row without progress (KEMPNER_MAX_CRASHES=$most)"
    elif [[ -n $KP_PREFLIGHT && -z $KP_EXCLUDED ]]; then
        kp_record end "$what; there are no other nodes to take"
    elif [[ -n $KP_CHAIN ]]; then
        kp_chain_on "$what"
    elif kp_requeue; then
        kp_record requeue "$what${KP_EXCLUDED:+; without $KP_EXCLUDED: $KP_FAULT}"
    else
        kp_record end "$what; scontrol requeue was refused"
    fi
}

kp_leaving() { # why the job is left to Slurm, in words: those of scancel are known to attempts.py
    if [[ $KP_JOB_STATE,$(kp_field Reason),$(kp_field Restarts) =~ ^(COMPLETING|CANCELLED),None,$KP_START$ ]]; then
        echo "the job was cancelled (Slurm: $KP_JOB_STATE)" # a requeue counts at once
    else
        echo "Slurm is ending the job (${KP_JOB_STATE:-no answer}), and decides whether it starts again"
    fi
}

kp_deaf() { # a requeue signals this shell, and its subshells would die of it
    trap '' TERM INT HUP USR1 USR2
}

kp_look() { # at the run and the job: sets KP_STATE, KP_COMMITTED, KP_JOB, KP_JOB_STATE; forgets what kp_judge found
    KP_BLAMED='' KP_EXCLUDED='' KP_REPLACED='' KP_FINAL='' KP_NO_PROGRESS='' KP_START_S='' KP_JUDGED='' KP_JOB_STATE=''
    KP_FAULT="failed twice in a row"
    [[ -z $KP_PREFLIGHT ]] || KP_FAULT="failed the preflight"
    kp_verdict
    KP_COMMITTED=$(kp_committed_step)
    ((KP_COMMITTED <= KP_COMMITTED_BEFORE)) || KP_NO_PROGRESS=0
    ! kp_show_job || KP_JOB_STATE=$(kp_field JobState)
}

kp_requeue() { # starts the job again, without KP_EXCLUDED; fails when Slurm refuses
    kp_leave_out_spent
    kp_shielded scontrol requeue "$(kp_job_id)" || return 1
    [[ -z $KP_EXCLUDED ]] || kp_exclude "$(kp_job_id)"
}

kp_finish() { # ends the script: requeues where that is right; exits 0, 75 (interrupted), 2 (bad input) or srun's code
    if kp_in_job; then
        [[ -n $KP_DECIDED ]] || kp_decide "the step ended with exit code $KP_CODE" || true
        # The next job of a chain has a directory of its own.
        [[ $KP_DECIDED != end && ($KP_DECIDED != chain || $KP_JOB_STATE != RUNNING) ]] || kp_unstage
        [[ $KP_DECIDED != end ]] || kp_propose
    else
        kp_verdict
    fi
    # A script of the user's own must not go on to its next command: Slurm is about to end it.
    [[ $KP_DECIDED != requeue ]] || kp_is_whole_script || { trap - TERM && sleep 60; } || true
    case $KP_DECIDED,$KP_STATE in
        requeue,* | chain,* | *,done | *,stopped) exit 0 ;;
        *,interrupted) exit $((KP_CODE == 2 ? 2 : 75)) ;; # 2: of another part of the job
        # srun's code is 0, too, when a node has failed.
        *,failed | *,running | end,* | leave,*) exit $((KP_CODE ? KP_CODE : 1)) ;;
    esac
    exit "$KP_CODE"
}

kp_stay_ended() { # the EXIT trap: makes sure that an end is the end
    # Slurm 24.05 and later mark a job that was preempted with a grace time, and after our own requeue the mark is
    # still there: the job would be requeued once more at its next end, even if the run is done.
    [[ -z $KP_DRY && (-z $KP_DECIDED || $KP_DECIDED == end) ]] && kp_in_job && [[ -z $KP_BESIDE ]] || return 0

    # Without a decision it is bad input; or Slurm itself ends the script to requeue the job, which must stay possible.
    [[ -n $KP_DECIDED ]] || { kp_show_job && [[ $(kp_field JobState) == RUNNING ]]; } || return 0
    kp_chain_cancel "the job has ended before its run began"
    ! kp_is_batch || ! kp_is_whole_script || kp_shielded scontrol update JobId="$(kp_job_id)" Requeue=0 >/dev/null 2>&1 || true
}
