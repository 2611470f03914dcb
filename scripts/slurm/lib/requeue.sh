# shellcheck shell=bash
# The end of a start: what has happened, whether the job is requeued, without which hosts. Sourced by all.sh.
# The table of decisions is in docs/slurm.md.

kp_committed_step() { # the step of the newest complete checkpoint, -1 when there is none
    local link pattern='step_0*([0-9]+)/*$'
    link=$(kp_shielded readlink "$KP_CHECKPOINTS/latest") || true
    [[ $link =~ $pattern ]] && echo "${BASH_REMATCH[1]}" || echo -1
}

kp_verdict() { # sets KP_STATE to what status.json says of this start, or to nothing
    local text='' pattern='"state": *"([a-z]+)"'
    { read -r -d '' text <"$KP_RUN_DIR/status.json"; } 2>/dev/null || true
    [[ $text == *"\"$KEMPNER_ATTEMPT_ID\""* && $text =~ $pattern ]] && KP_STATE=${BASH_REMATCH[1]} || KP_STATE=''
}

kp_no_progress() { # <committed step>: the attempts of this job in a row, with this one, that have made no progress
    local line no_progress=0 pattern='"no_progress": ([0-9]+)' job
    job="\"job\": \"$(kp_job_id)\""
    if (($1 <= KP_COMMITTED_BEFORE)); then
        while read -r line; do
            [[ $line != *'"event": "decision"'*"$job"* || ! $line =~ $pattern ]] || no_progress=${BASH_REMATCH[1]}
        done < <(kp_shielded cat "$KP_RUN_DIR/attempts.jsonl" 2>/dev/null)
        no_progress=$((no_progress + 1))
    fi
    echo "$no_progress"
}

kp_record() { # <requeue, end or leave (to Slurm)> <why>: the one line that says what was decided, in the log and in attempts.jsonl
    KP_DECIDED=$1
    kp_log "$1: $2"
    printf '{"event": "decision", "decision": "%s", "why": "%s", "job": "%s", "restart": %d, "attempt_id": "%s", ' \
        "$1" "$2" "$(kp_job_id)" "${SLURM_RESTART_COUNT:-0}" "$KEMPNER_ATTEMPT_ID" >>"$KP_RUN_DIR/attempts.jsonl"
    printf '"step": %d, "no_progress": %d, "blamed": "%s", "excluded": "%s", "batch_began": %d, "time": %(%s)T}\n' \
        "$KP_COMMITTED" "$KP_NO_PROGRESS" "$KP_BLAMED" "$KP_EXCLUDED" "${KEMPNER_BATCH_BEGAN:-0}" -1 >>"$KP_RUN_DIR/attempts.jsonl"
    [[ -z ${KEMPNER_MAIL:-} || $1 != end ]] || kp_mail "$2"
}

kp_mail() { # <what happened>: one mail to KEMPNER_MAIL, once the run has ended for good
    printf '%s\nrun directory %s\n' "$1" "$KP_RUN_DIR" |
        kp_shielded mail -s "job $(kp_job_id) ($(kp_field JobName)): $1" -- "$KEMPNER_MAIL" ||
        kp_log "no mail to $KEMPNER_MAIL: 'mail' has failed on $(uname -n)"
}

kp_blame() { # after a crash or a hang: sets KP_BLAMED, its host, and KP_EXCLUDED, the same when it is to be left out
    local host=$KP_BAD again=$KP_BAD most=${KEMPNER_EXCLUDE:-2} excluded node left=0 out
    [[ $KP_STATE != interrupted ]] || return 0
    if [[ -z $KP_PREFLIGHT ]]; then
        { read -r host && read -r again; } < <(kp_shielded "${KP_INSIDE[@]}" "$KP_PYTHON" -m kempner.history.faulty_host \
            "$KP_RUN_DIR" "$(kp_job_id)" "$KEMPNER_ATTEMPT_ID" "$KP_SRUN_LOG") || true
    fi
    KP_BLAMED=${host:-}
    [[ -n $again && $most != 0 ]] || return 0
    excluded=$(grep -c "\"job\": \"$(kp_job_id)\".*\"excluded\": \"[^\"]" "$KP_RUN_DIR/attempts.jsonl") || true
    if ((excluded >= most)); then
        kp_log "$host: $KP_FAULT, not excluded: $excluded nodes are already (KEMPNER_EXCLUDE=$most)"
        return 0
    fi
    # Fewer nodes than the job needs, and it would wait for ever.
    out=" ${host//,/ } $(kp_excluded | xargs -r scontrol show hostnames | paste -sd' ') "
    while read -r node; do
        [[ $out == *" $node "* ]] || left=$((left + 1))
    done < <(sinfo -h -N -p "$(kp_field Partition)" -o '%N %t' | awk '$2 !~ /down|drain|drng|fail|maint|unk/ { print $1 }' | sort -u)
    if ((left < KP_NODES)); then
        kp_log "$host: $KP_FAULT, not excluded: the other nodes of the partition, $left, are too few"
        return 0
    fi
    KP_EXCLUDED=$host
}

kp_excluded() { # the nodes that the job is kept off, as Slurm writes them, or nothing
    local list
    list=$(kp_field ExcNodeList)
    [[ $list == '(null)' ]] || echo "$list"
}

kp_exclude() { # keeps the requeued job off KP_EXCLUDED: Slurm takes this only once the job is pending again
    local tries list
    list=$(kp_excluded)
    for ((tries = 0; tries < 30; tries++)); do
        if scontrol update JobId="$(kp_job_id)" ExcNodeList="${list:+$list,}$KP_EXCLUDED" 2>/dev/null; then
            kp_log "$KP_EXCLUDED: $KP_FAULT, excluded from the next starts of this job (KEMPNER_EXCLUDE=0: never)"
            return 0
        fi
        sleep 0.1
    done
    kp_log "$KP_EXCLUDED: $KP_FAULT, but scontrol did not take it out of the job"
    KP_EXCLUDED=''
}

kp_decide() { # <what happened, for when the run itself does not say>: requeues the job, or does not
    local what=$1 most=${KEMPNER_MAX_CRASHES:-3} state
    KP_BLAMED='' KP_EXCLUDED='' KP_FAULT="failed twice in a row"
    [[ -z $KP_PREFLIGHT ]] || KP_FAULT="failed the preflight"
    trap '' TERM INT HUP USR1 USR2 # a requeue signals this shell, and its subshells would die of it
    kp_verdict
    KP_COMMITTED=$(kp_committed_step)
    KP_NO_PROGRESS=$(kp_no_progress "$KP_COMMITTED")
    [[ $KP_STATE != interrupted ]] || what="interrupted and saved"
    what+=" (newest checkpoint: step $KP_COMMITTED)"
    kp_show_job || true
    state=$(kp_field JobState)
    if [[ $KP_STATE =~ ^(done|stopped|failed)$ ]]; then
        kp_record end "the run is $KP_STATE"
    elif [[ ${KP_CODE:-} == 2 ]]; then
        kp_record end "bad input"
    elif [[ $state != RUNNING && $(kp_field Reason) != TimeLimit ]]; then
        kp_record leave "Slurm is ending the job (${state:-no answer}); whether it starts again is not up to this script"
    elif ! kp_is_batch; then
        kp_record end "$what; only a batch job is requeued"
    elif [[ $(kp_field Requeue) == 0 ]]; then
        kp_record end "$what; the job was submitted with --no-requeue"
    elif ((KP_NO_PROGRESS >= most)); then
        kp_record end "$what; $KP_NO_PROGRESS attempts in a row without progress (KEMPNER_MAX_CRASHES=$most)"
    elif kp_blame && [[ -n $KP_PREFLIGHT && -z $KP_EXCLUDED ]]; then
        kp_record end "$what; there are no other nodes to take"
    elif kp_shielded scontrol requeue "$(kp_job_id)"; then
        [[ -z $KP_EXCLUDED ]] || kp_exclude
        kp_record requeue "$what"
    else
        kp_record end "$what; scontrol requeue was refused"
    fi
}

kp_finish() { # ends the script: requeues where that is right; exits 0, 75 (interrupted), 2 (bad input) or srun's code
    if kp_in_job; then
        [[ -n $KP_DECIDED ]] || kp_decide "the step ended with exit code $KP_CODE" || true
    else
        kp_verdict
    fi
    case $KP_DECIDED,$KP_STATE in
        requeue,* | *,done | *,stopped) exit 0 ;;
        *,interrupted) exit 75 ;;
        *,failed | *,running) exit $((KP_CODE ? KP_CODE : 1)) ;;
    esac
    exit "$KP_CODE"
}
