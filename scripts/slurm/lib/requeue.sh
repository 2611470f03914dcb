# shellcheck shell=bash
# The end of an attempt: what happened, whether the job is requeued, and without which hosts.
# docs/reference/slurm.md has the table of decisions.

KP_JUDGE_S=${KP_JUDGE_S:-20} # seconds to decide what follows; tests shorten it
KP_AWAY_S=10                 # seconds between queries to a controller that is away
KP_EARLY_HOST=''             # the host where a start ended before its step
KP_ENDING=''                 # not empty: Slurm is ending the job, or it was cancelled
KP_DECIDED=''                # the decision: restart, requeue, chain, end or leave
# Its details: no_progress (consecutive attempts without progress), kind (of fault), blamed (a
# node), excluded (nodes, comma-separated), fault (theirs, in words), replaced (nodes that spares
# replace, comma-separated), pause (minutes), refused (Slurm's reason against a requeue)
declare -A KP_DECISION

kp_set_decision() { # [NAME=VALUE]...: resets KP_DECISION to these values
    local word
    KP_DECISION=([no_progress]='' [kind]='' [blamed]='' [excluded]='' [fault]='' [replaced]=''
        [pause]=0 [refused]='')
    for word; do KP_DECISION[${word%%=*}]=${word#*=}; done
}
kp_set_decision

kp_newest_step() { # <checkpoint directory>: prints the step of the newest complete
    # checkpoint, or -1
    local link pattern='step_0*([0-9]+)/*$'
    link=$(kp_shielded readlink "$1/latest") || true
    [[ $link =~ $pattern ]] && echo "${BASH_REMATCH[1]}" || echo -1
}

kp_committed_step() { # prints the step from which the run would resume
    kp_newest_step "$KP_CHECKPOINTS"
}

kp_note_progress() { # [step]: sets KP_COMMITTED_BEFORE, the baseline for this attempt's progress
    KP_COMMITTED_BEFORE=${1-$(kp_committed_step)}
}

kp_reached() { # prints the progress in words
    if ((KP_COMMITTED < 0)); then
        echo "no checkpoint yet"
    else
        echo "$(kp_measure) $KP_COMMITTED"
    fi
}

kp_measure() { # prints what kp_committed_step counts
    echo "newest checkpoint: step"
}

kp_step() { # prints the step for the records
    echo "$KP_COMMITTED"
}

kp_refusal() { # prints why a program rejected its input: the first problem in srun's log
    sed -nE 's/^  - (.*)/\1/p; s/^.*rank [0-9]+ on [^ :]+: (.*)/\1/p' "$KP_SRUN_LOG" 2>/dev/null |
        head -n 1 || true
}

kp_verdict() { # sets KP_STATE to the state of this attempt in status.json, if any
    local text='' pattern='"state": *"([a-z]+)"'
    { read -r -d '' text <"$KP_RUN_DIR/status.json"; } 2>/dev/null || true
    [[ $text == *"\"$KEMPNER_ATTEMPT_ID\""* && $text =~ $pattern ]] &&
        KP_STATE=${BASH_REMATCH[1]} || KP_STATE=''
}

kp_idle_reason() { # prints why an interrupted attempt gave the job back, if it was idle
    local text='' pattern='"reason": *"(idle for [^"]*)"'
    { read -r -d '' text <"$KP_RUN_DIR/status.json"; } 2>/dev/null || true
    [[ ! $text =~ $pattern ]] || printf ': %s' "${BASH_REMATCH[1]}"
}

# --- the record -----------------------------------------------------------------------------------

kp_set_decided() { # <decision, or nothing>: sets KP_DECIDED
    KP_DECIDED=$1
}

kp_record() { # <restart, requeue, chain, end or leave> <why>: records it in the log and
    # in attempts.jsonl (events.py)
    local file=$KP_RUN_DIR/attempts.jsonl line
    kp_set_decided "$1"
    kp_log "$1: $2"
    line=(
        append "$file" event=decision decision="$1" why="$2" job="$(kp_job_id)"
        restart:="${SLURM_RESTART_COUNT:-0}" attempt_id="$KEMPNER_ATTEMPT_ID" step:="$(kp_step)"
        no_progress:="${KP_DECISION[no_progress]:-null}" blamed="${KP_DECISION[blamed]:-}"
        excluded="${KP_DECISION[excluded]:-}" kind="${KP_DECISION[kind]:-}"
        batch_began:="${KEMPNER_BATCH_BEGAN:-0}" committed:="${KP_COMMITTED:-null}"
    )
    KP_UNRECORDED=''
    # A container may take longer to start than the job has left; outside a batch
    # job nothing follows.
    kp_records "${line[@]}" || { ((${#KP_INSIDE[@]} > 0)) && kp_is_batch && kp_history &&
        KP_DEADLINE=$((SECONDS + KP_JUDGE_S)) kp_ask "${KP_HISTORY[@]}" "$KP_LIB/records.py" \
            "${line[@]}"; } || {
        kp_log "the decision cannot be recorded in $file"
        KP_UNRECORDED=${KP_DECISION[no_progress]:-0}
    }
    [[ ! $1 =~ ^(end|leave)$ ]] || kp_chain_cancel "$1: $2"
    [[ $1 == requeue ]] || kp_notify "$@" # takes seconds, and the job may be near its limit
}

# --- whose fault it was ---------------------------------------------------------------------------

kp_count_crashes() { # prints how many consecutive attempts before this one made no progress,
    # by the decisions
    # Count as kempner.jobs.records.judge does: a decision has null if there was no time to count.
    # If no Python starts, count this script's restarts and all starts of the job, so that every
    # crash loop is bounded.
    local count=0 number KP_VALUES=() code=0
    kp_find_records "$KP_RUN_DIR/attempts.jsonl" event=decision "job=$(kp_chain_jobs)" -- \
        no_progress || code=$?
    [[ $code == 0 || $code == 3 ]] || count=${KP_UNRECORDED:-$(kp_field Restarts)}
    for number in "${KP_VALUES[@]}"; do
        if [[ -n $number ]]; then count=$number; else count=$((count + 1)); fi
    done
    echo "$count"
}

kp_was_cut_short() { # succeeds if this attempt was asked to exit before training began, and not by
    # its time limit
    local end now KP_VALUES=()
    [[ ${KP_SIGNAL:-USR2} != USR2 ]] || return 1
    if [[ $(kp_field PreemptTime) =~ ^(None)?$ ]] &&
        end=$(date -d "$(kp_field EndTime)" +%s 2>/dev/null); then
        printf -v now '%(%s)T' -1
        # the next start would have no more time either
        ((end - now > ${KEMPNER_SIGNAL_LEAD:-120} + 60)) || return 1
    fi
    kp_find_records "$KP_RUN_DIR/attempts.jsonl" event=start "attempt_id=$KEMPNER_ATTEMPT_ID" -- \
        time || return 0
    ((${#KP_VALUES[@]} == 0))
}

kp_judge() { # <what happened>: asks kempner.jobs.records.judge once what follows; sets KP_DECISION,
    # and answered, why and notes of kp_decide
    local KP_DEADLINE=$((SECONDS + KP_JUDGE_S)) KP_ANSWER='' facts start='' name
    answered='' why='' notes=''
    kp_history # there may be no time to start a container
    kp_drop_unfit_spares
    kp_facts "$1"
    if ! kp_is_batch; then # it can only end: start no container for that
        kp_judge_alone "$1"
        return
    fi
    if kp_ask "${KP_HISTORY[@]}" "$KP_MODULE" kempner.jobs.records.judge "$KP_RUN_DIR" \
        "${KP_SRUN_LOG:-none}" "${facts[@]}"; then
        # Read after this word: a TaskProlog, or a module that Python loads, may have
        # printed something first.
        {
            read -r answered && read -r why
            for name in kind no_progress blamed excluded replaced fault pause; do
                read -r "KP_DECISION[$name]"
            done
            read -r start && read -r notes
        } <<<"${KP_ANSWER##*kempner-answer$'\n'}" || true
    fi
    if [[ ! $answered =~ ^(restart|requeue|chain|end|leave)$ ||
        ! ${KP_DECISION[no_progress]}${KP_DECISION[pause]}$start =~ ^[0-9]+$ ]]; then
        kp_log "the records of earlier attempts could not be read: only a preflight can" \
            "exclude a host"
        kp_judge_alone "$1"
    fi
}

kp_facts() { # <what happened>: sets the caller's facts to what only this script knows
    local batch=0 end now left='' requeue=1 chain='' IFS=' '
    ! kp_is_batch || batch=1
    if [[ -n $KP_CHAIN ]]; then
        chain=next
        ((KP_LINK < KEMPNER_CHAIN)) || chain=last
    elif [[ $(kp_field Requeue) == 0 ]]; then
        requeue=0
    fi
    end=$(kp_field EndTime)
    if [[ $end == [0-9]* ]] && end=$(date -d "$end" +%s 2>/dev/null); then
        printf -v now '%(%s)T' -1
        left=$((end - ${KEMPNER_SIGNAL_LEAD:-120} - now))
    fi
    facts=(
        run="$KP_STATE" what="$1" code="${KP_CODE:-}" refusal="$(kp_refusal)"
        before="$(kp_count_crashes)" committed="$KP_COMMITTED"
        committed_before="$KP_COMMITTED_BEFORE" command="${KEMPNER_COMMAND:-}"
        jobs="$(kp_chain_jobs)" request="$(kp_request)" attempt="$KEMPNER_ATTEMPT_ID"
        began="${KEMPNER_BATCH_BEGAN:-}" job="${KP_ENDING:-running}" slurm="$(kp_in_words)"
        batch="$batch" requeue="$requeue" chain="$chain" tasks="${KP_TASKS:-1}"
        nodes="${KP_NODES:-1}" places="${KP_PLACES[*]:-$(kp_hosts)}" spares="${#KP_SPARES[@]}"
        wanted_spares="${KEMPNER_SPARES:-0}" lost="$KP_LOST" spent="${KP_SPENT[*]}" left="$left"
        max_crashes="${KEMPNER_MAX_CRASHES:-3}" max_excluded="${KEMPNER_EXCLUDE:-2}"
        max_wait="${KEMPNER_MAX_WAIT:-24}"
    )
    [[ -z $KP_PREFLIGHT ]] || facts+=(preflight=1 bad="$KP_BAD")
    [[ -z $KP_EARLY_HOST ]] || facts+=(early="$KP_EARLY_HOST")
    [[ $KP_PENDING != INT ]] || facts+=(interrupt=1)
    ! kp_chain_survives || facts+=(successor="$KP_SUCCESSOR")
    ! kp_was_cut_short || facts+=(cut_short=1)
    ! kp_could_restart || facts+=(room=1)
    ! grep -qE '^srun: error: Unable to create step|: ranks of an earlier attempt do not end' \
        "$KP_SRUN_LOG" 2>/dev/null ||
        facts+=(not_created=1)
}

kp_request() { # prints the job's request in scontrol's words: which other nodes fit?
    local name
    for name in Partition ReqNodeList ExcNodeList Features TresPerNode Reservation; do
        printf '%s=%s ' "$name" "$(kp_field "$name")"
    done
}

kp_hosts() { # prints the nodes of the job, on one line
    kp_shielded scontrol show hostnames "$(kp_field NodeList)" 2>/dev/null | paste -sd' '
}

kp_see_end() { # sets KP_ENDING if Slurm is ending the job: ending, or cancelled by somebody
    KP_ENDING=''
    [[ $KP_JOB_STATE != RUNNING && $(kp_field Reason) != TimeLimit ]] || return 0
    KP_ENDING=ending
    # A requeue increases Restarts at once.
    local cancelled="^(COMPLETING|CANCELLED),None,$KP_START$"
    [[ ! $KP_JOB_STATE,$(kp_field Reason),$(kp_field Restarts) =~ $cancelled ]] ||
        KP_ENDING=cancelled
}

kp_in_words() { # prints the state of the job
    local reason
    reason=$(kp_field Reason)
    [[ $KP_ENDING == ending && ! $reason =~ ^(None)?$ ]] || reason=''
    echo "${KP_JOB_STATE:-no answer}${reason:+, $reason}"
}

kp_judge_alone() { # <what happened>: replaces kp_judge if Python does not answer; bounds
    # every crash loop
    local count
    answered=requeue why=$1 notes=''
    count=$(kp_count_crashes)
    kp_was_cut_short || count=$((count + 1))
    ((KP_COMMITTED <= KP_COMMITTED_BEFORE)) || count=0
    kp_set_decision no_progress="$count"
    if [[ $KP_STATE =~ ^(done|stopped|failed)$ ]]; then
        answered=end why="the run is $KP_STATE"
    elif [[ -n $KP_ENDING ]]; then
        answered=leave
        why="Slurm is ending the job ($(kp_in_words)), and decides whether it starts again"
        ! kp_chain_survives || answered=chain why="Slurm is ending the job ($(kp_in_words))"
    elif ! kp_is_batch; then
        answered=end why="$1; only a batch job is requeued"
        [[ ${KP_CODE:-} != 2 ]] || why="bad input: $(kp_refusal)" why=${why%: }
    elif ((count >= ${KEMPNER_MAX_CRASHES:-3})); then
        answered=end
        why="$1; $count attempts in a row without progress"
        why+=" (KEMPNER_MAX_CRASHES=${KEMPNER_MAX_CRASHES:-3})"
    elif kp_could_restart && [[ -z $KP_LOST$KP_PREFLIGHT && ${KP_CODE:-} != 2 ]] &&
        ((count < 2)); then
        answered=restart
    elif [[ -n $KP_CHAIN ]]; then
        answered=chain
    elif [[ $(kp_field Requeue) == 0 ]]; then
        answered=end why="$1; the job was submitted with --no-requeue"
    elif [[ -n $KP_PREFLIGHT && -n $KP_BAD ]]; then
        KP_DECISION[excluded]=$KP_BAD KP_DECISION[fault]="failed the preflight"
        why="$1; without $KP_BAD: ${KP_DECISION[fault]}"
    fi
}

kp_excluded() { # prints the nodes excluded from the job, as Slurm writes them
    local list
    list=$(kp_field ExcNodeList)
    [[ $list == '(null)' ]] || echo "$list"
}

kp_exclude() { # <job> <nodes> <their fault>: excludes them from the job. For a requeued job, Slurm
    # accepts this only once the job is pending again
    local tries list
    list=$(kp_excluded)
    for ((tries = 0; tries < 30; tries++)); do
        if scontrol update JobId="$1" ExcNodeList="${list:+$list,}$2" 2>/dev/null; then
            kp_log "$2: $3, excluded from the next starts of this job" \
                "(KEMPNER_EXCLUDE=0: never)"
            return 0
        fi
        sleep 0.1
    done
    kp_log "$2: $3, but scontrol refused to exclude it from the job"
    KP_DECISION[excluded]=''
}

kp_exclude_decided() { # <job>: excludes the nodes of the decision, if any
    [[ -z ${KP_DECISION[excluded]} ]] ||
        kp_exclude "$1" "${KP_DECISION[excluded]}" "${KP_DECISION[fault]}"
}

# --- the decision ---------------------------------------------------------------------------------

kp_decide() { # <what happened, unless the run says so>: requeues the job if needed
    local what=$1 pending=$KP_PENDING
    local answered why notes # set by kp_judge
    # Between two attempts signals must not be lost: kp_on_signal keeps them.
    [[ $KP_RESTARTS -gt 0 && -z $KP_CHILD ]] || kp_ignore_signals
    [[ -z $KP_DECIDED ]] || return 0 # a second signal came while the first was handled
    kp_read_state
    [[ $KP_STATE != interrupted ]] ||
        what=${KP_INTERRUPTED:-interrupted and saved}$(kp_idle_reason)
    what+=" ($(kp_reached))"
    kp_judge "$what"
    # a signal changes what follows, and a subshell may have died of it
    if [[ $KP_PENDING != "$pending" ]]; then
        kp_ignore_signals
        kp_read_state
        kp_judge "$what"
    fi
    [[ -z $notes ]] || kp_log "$notes"
    if [[ $answered == restart ]]; then
        kp_record restart "$why"
        return
    fi

    kp_ignore_signals
    if [[ $answered == chain && $KP_JOB_STATE == RUNNING ]]; then
        kp_chain_on "$why"
    elif [[ $answered != requeue ]]; then
        kp_record "$answered" "$why"
    else
        # record first: after the request, Slurm may end this script at any time
        kp_record requeue "$why"
        if kp_requeue; then
            kp_notify requeue "$why"
            return
        fi
        KP_DECISION[excluded]=''
        why+="; scontrol requeue was refused"
        kp_record end "$why${KP_DECISION[refused]:+: ${KP_DECISION[refused]}}"
    fi
}

kp_ignore_signals() { # ignores signals: a requeue signals this shell, and its subshells would die
    trap '' TERM INT HUP USR1 USR2
}

kp_read_state() { # looks at the run and the job: sets KP_STATE, KP_COMMITTED, KP_JOB,
    # KP_JOB_STATE; resets KP_DECISION
    kp_set_decision
    KP_JOB_STATE=''
    kp_verdict
    KP_COMMITTED=$(kp_committed_step)
    ((KP_COMMITTED <= KP_COMMITTED_BEFORE)) || KP_DECISION[no_progress]=0
    ! kp_wait_for_job || KP_JOB_STATE=$(kp_field JobState)
    kp_see_end
}

kp_wait_for_job() { # like kp_show_job, but waits while the controller is away, as
    # silence tells nothing
    local said='' most=$((SECONDS + 3600 * ${KEMPNER_MAX_WAIT:-24}))
    until kp_show_job; do
        kp_can_wait && ((SECONDS < most)) || return 1
        [[ ! $(kp_shielded scontrol show job "$(kp_job_id)" 2>&1) =~ Invalid\ job\ id ]] || return 1
        [[ -n $said ]] || kp_log "Slurm does not answer: this script waits until it does"
        said=1
        kp_shielded sleep "$KP_AWAY_S"
    done
}

kp_can_wait() { # succeeds in the batch script, even before Slurm has reported on the job
    if [[ -n $KP_JOB ]]; then kp_is_batch; else [[ ${ENVIRONMENT:-} == BATCH && -z $KP_BESIDE ]]; fi
}

kp_requeue() { # requeues the job according to KP_DECISION; fails if Slurm refuses
    kp_ask_requeue || return 1
    kp_exclude_decided "$(kp_job_id)"
    kp_put_off_decided "$(kp_job_id)"
}

kp_ask_requeue() { # asks until the job is no longer RUNNING; on an explicit refusal, sets
    # KP_DECISION[refused] and fails
    # Other errors come from a controller that is away or in transition: a backup taking over,
    # munge restarting, ...
    local said tries=0 most=$((SECONDS + 3600 * ${KEMPNER_MAX_WAIT:-24}))
    local refusal='[Dd]enied|disabled|[Oo]nly batch|Invalid job id|Invalid user'
    KP_DECISION[refused]=''
    until said=$(kp_shielded scontrol requeue "$(kp_job_id)" 2>&1); do
        # A lost answer is not a refusal: the requeue may have happened, which increases
        # Restarts at once.
        ! kp_show_job ||
            [[ $(kp_field Restarts) == "$KP_START" && $(kp_field JobState) != PENDING ]] || return 0
        said=${said//$'\n'/; } tries=$((tries + 1))
        if [[ $said =~ $refusal ]] && ((tries > 2)) || ((SECONDS >= most)); then
            KP_DECISION[refused]=$said
            return 1
        fi
        ((tries != 1)) || kp_log "scontrol requeue: ${said:-no answer}; asking again"
        kp_shielded sleep $((tries < 10 ? tries : 10))
    done
}

kp_put_off_decided() { # <job>: delays its start by the decision's pause; Slurm accepts this once
    # the job is pending again
    local tries minutes=${KP_DECISION[pause]}
    ((minutes > 0)) || return 0
    for ((tries = 0; tries < 30; tries++)); do
        kp_shielded scontrol update JobId="$1" StartTime="now+${minutes}minutes" 2>/dev/null &&
            return 0
        kp_shielded sleep 0.1
    done
    kp_log "scontrol refused to postpone the next start"
}

kp_has_others() { # succeeds if the partition has more nodes than the job needs, not
    # counting excluded ones
    local total='TotalNodes=([0-9]+)' left
    [[ $(kp_shielded scontrol show partition "$(kp_field Partition)" 2>/dev/null) =~ $total ]] ||
        return 1
    left=$((BASH_REMATCH[1] - $(scontrol show hostnames "$(kp_excluded)" 2>/dev/null | wc -l)))
    ((left > $(kp_field NumNodes)))
}

kp_without_this_host() { # <directory>: if an earlier start, or job of the chain, has used it,
    # requeues the job on other hosts and exits
    # The records are in that directory, so attempts cannot be counted: pause instead.
    [[ -z $KP_DRY && -z $KP_CHAIN && -n ${SLURMD_NODENAME:-} ]] && kp_is_batch &&
        kp_show_job || return 0
    [[ $(kp_field Restarts)${KEMPNER_CHAIN_LINK:-} != 0 && $(kp_field JobState) == RUNNING ]] ||
        return 0
    kp_set_decision fault="does not see $1" pause=10
    [[ ${KEMPNER_EXCLUDE:-2} == 0 ]] || ! kp_has_others || KP_DECISION[excluded]=$SLURMD_NODENAME
    kp_ignore_signals
    kp_log "requeue: $SLURMD_NODENAME does not see $1: the job starts again in 10 minutes"
    kp_requeue || return 0
    kp_set_decided requeue
    exit 0
}

kp_finish() { # ends the script: requeues if needed; exits with 0, 75 (interrupted), 2 (bad input)
    # or srun's code
    if kp_in_job; then
        [[ -n $KP_DECIDED ]] || kp_decide "the step ended with exit code $KP_CODE" || true
        # The next job of a chain has its own staging directory.
        [[ $KP_DECIDED != end && ($KP_DECIDED != chain || $KP_JOB_STATE != RUNNING) ]] || kp_unstage
        [[ $KP_DECIDED != end ]] || kp_propose
    else
        kp_verdict
    fi
    # A user's script must not continue with its next command: Slurm is about to end it, and signals
    # processes one after the other. So wait until it has been signalled.
    if [[ $KP_DECIDED == requeue ]] && ! kp_is_whole_script; then
        trap 'sleep 2; exit 143' TERM
        sleep 60 &
        wait "$!" || true
    fi
    case $KP_DECIDED,$KP_STATE in
        requeue,* | chain,* | *,done | *,stopped) exit 0 ;;
        *,interrupted) exit $((KP_CODE == 2 ? 2 : 75)) ;; # 2: from another part of the job
        # srun's code is also 0 when a node has failed.
        *,failed | *,running | end,* | leave,*) exit $((KP_CODE ? KP_CODE : 1)) ;;
    esac
    exit "$KP_CODE"
}

kp_stay_ended() { # <exit code>: the EXIT trap: handles every end before a step, and keeps ended
    # jobs from restarting
    [[ -z $KP_DRY && (-z $KP_DECIDED || $KP_DECIDED == end) ]] && kp_in_job &&
        [[ -z $KP_BESIDE ]] || return 0

    # Without a decision it is bad input, or Slurm is ending the script to requeue the job, which
    # must stay possible.
    if [[ -z $KP_DECIDED ]]; then
        kp_wait_for_job && [[ $(kp_field JobState) == RUNNING ]] || return 0
        ! kp_is_batch || ! kp_is_whole_script || kp_ended_early "$1"
        [[ -z $KP_DECIDED || $KP_DECIDED == end ]] || exit 0 # it restarts
        [[ -n $KP_DECIDED ]] || ! kp_is_batch || ! kp_is_whole_script || kp_notify_early "$1"
    fi
    # Slurm 24.05 and later mark a job preempted with a grace time, and keep the mark after our own
    # requeue: the job would be requeued again at its next end, even if the run is done.
    kp_chain_cancel "the job has ended before its run began"
    ! kp_is_batch || ! kp_is_whole_script ||
        kp_shielded scontrol update JobId="$(kp_job_id)" Requeue=0 >/dev/null 2>&1 || true
}

kp_end_early() { # <run directory> <what is wrong; what to do>: ends the job for good, and records
    # it if the run has records
    local why=${*:2}
    if kp_is_batch && kp_is_whole_script && [[ -e $1/attempts.jsonl ]]; then
        kp_use_run "$1"
        kp_set_decision
        KP_STATE=''
        KP_COMMITTED=$(kp_committed_step)
        kp_record end "$why"
    fi
    kp_die "$why"
}

kp_early_run() { # sets KP_RUN_DIR, if this start did not come to its check, to the run of the
    # job's earlier starts; exits if another host may see it
    local run=${KP_ROOT%/code/*} above
    [[ -z ${KP_RUN_DIR:-} ]] || return 0
    [[ $KP_ROOT != "$KP_ORIGIN" ]] || run=$(kp_run_of_job)
    [[ -n $run ]] || return 0
    # If only the run is gone, somebody has removed it.
    above=${run%/eval} above=${above%/*}
    [[ -e $above/ ]] || kp_without_this_host "$run"
    kp_use_run "$run"
}

kp_ended_early() { # <exit code>: decides after a start that ended before its step
    # An earlier start of this job, or job of its chain, passed with the same command, so the cause
    # is the host or the site. Only in a first start is it bad input.
    (($1 != 0 && $1 != 130)) || return 0
    kp_early_run
    [[ -n ${KP_RUN_DIR:-} && -e $KP_RUN_DIR/attempts.jsonl ]] && kp_chain_early || return 0
    [[ $KP_LINK != 0 || $(kp_field Restarts) != 0 ]] || return 0
    kp_set_code "$1"
    kp_no_restart
    kp_use_run "$KP_RUN_DIR" "${KP_CHECKPOINTS:-}"
    [[ -n ${KP_COMMITTED_BEFORE:-} ]] || kp_note_progress
    KP_EARLY_HOST=${SLURMD_NODENAME:-$(uname -n)}
    kp_decide "this start has ended with exit code $1 before its step" || true
}
