# shellcheck shell=bash
# Turns signals to the batch script into requests to the ranks.

KP_SIGNAL=''               # the last signal
KP_PENDING=${KP_PENDING:-} # a signal that came before srun started
KP_EARLY=''                # see kp_cap_lead
KP_PIDS=()                 # running processes of pack.sh and replicas.sh, by number

readonly KP_PATIENCE=5 # seconds that a handler may wait for Slurm's answers in total

kp_listen() { # traps the signals that end a job or ask for a save
    # "|| true": a failing command in a handler must not end this shell through errexit
    trap 'kp_on_signal TERM || true' TERM USR1 HUP
    trap 'kp_on_signal INT || true' INT
    trap 'kp_on_signal USR2 || true' USR2
}

kp_set_pending() { # <signal, or nothing>: keeps it until a process can receive it
    KP_PENDING=$1
}

kp_keep_signal() { # <signal>: for pack.sh: also keeps it for runs that are about to start
    KP_SIGNAL=$1 KP_PENDING=$1
}

kp_set_pid() { # <number> <pid>: records that of a run of pack.sh, or of a replica
    KP_PIDS[$1]=$2
}

kp_forget_pids() {
    KP_PIDS=()
}

kp_pass_pending() { # after a start: forwards the signal that came before it
    [[ -z $KP_PENDING ]] || kp_on_signal "$KP_PENDING"
}

kp_forget_signal() { # forgets that of an attempt that has ended
    KP_SIGNAL=''
}

kp_apart() { # <command>...: runs it in its own session: Ctrl-C kills it at once, and Python
    # prints no traceback
    (
        trap 'kill -KILL "$!" 2>/dev/null; exit 130' INT
        setsid "$@" <&0 &
        wait "$!"
    )
}

kp_on_signal() { # <signal>: forwards a request to the ranks, unless Slurm is already ending the job
    # Each query to an absent controller takes 20 s, which would use up the warning time.
    local KP_DEADLINE=$((SECONDS + KP_PATIENCE)) KP_ANSWER=''
    if [[ -z $KP_CHILD ]]; then
        [[ $1 != INT || -n $KP_SRUN_LOG ]] || exit 130
        # The ranks get it as soon as they start; between two attempts kp_decide handles it.
        [[ $1 == USR2 && -n $KP_PENDING ]] || KP_PENDING=$1
        return
    fi
    [[ -z $KP_DECIDED ]] || return 0

    if [[ $1 == TERM ]] && kp_is_batch && kp_show_job && [[ $(kp_field JobState) != RUNNING ]]; then
        KP_DEADLINE=''
        kp_decide "the time limit was reached" # Slurm has signalled the ranks itself
        return
    fi

    [[ $1 != TERM ]] || ! kp_postpone || return 0
    if [[ $1 == INT && $KP_SIGNAL == INT ]] && ! kp_is_batch; then
        kp_log "second Ctrl-C: ending the run at once"
        kp_signal KILL
    else
        KP_SIGNAL=$1
        case $1 in
            INT) kp_log "SIGINT: the run saves and stops; a second one ends it at once" ;;
            TERM) kp_log "SIGTERM: the run saves and stops, to be resumed later" ;;
            USR2) kp_log "SIGUSR2: the run saves and continues" ;;
        esac
        kp_signal "$1"
    fi
}

kp_signal_lead() { # <script>: prints the seconds from the warning to the end, from SBATCH_SIGNAL or
    # the header: Slurm does not report it
    local line given='' pattern='@([0-9]+)'
    while read -r line; do
        [[ $line != '#SBATCH --signal='* ]] || given=$line
    done <"$1"
    given=${SBATCH_SIGNAL:-$given}
    [[ ! $given =~ $pattern ]] || echo "${BASH_REMATCH[1]}"
}

kp_cap_lead() { # caps KEMPNER_SIGNAL_LEAD at a quarter of a short time limit; sets KP_EARLY to
    # the former value
    local limit pattern='^00:0([0-9]):([0-9]{2})$'
    [[ ${KEMPNER_SIGNAL_LEAD:-} =~ ^[0-9]+$ && $(kp_field TimeLimit) =~ $pattern ]] || return 0
    limit=$((60 * BASH_REMATCH[1] + 10#${BASH_REMATCH[2]}))
    ((4 * KEMPNER_SIGNAL_LEAD > limit)) || return 0
    kp_log "note: a time limit of $(kp_field TimeLimit) is short: the warning is passed on" \
        "$((limit / 4)) s before its end, not $KEMPNER_SIGNAL_LEAD s"
    KP_EARLY=$KEMPNER_SIGNAL_LEAD KEMPNER_SIGNAL_LEAD=$((limit / 4))
}

kp_postpone() { # succeeds for the warning of a short time limit, and schedules it again for
    # later: see kp_cap_lead
    local left
    [[ -n $KP_EARLY ]] && left=$(kp_seconds_left) || return 1
    # Slurm sends it up to 60 s earlier than asked. Any other or second signal is a user's request.
    ((left <= KP_EARLY + 65 && left > KEMPNER_SIGNAL_LEAD + 1)) || return 1
    KP_EARLY=''
    kp_log "SIGTERM, $left s before the end of the job: passed on $KEMPNER_SIGNAL_LEAD s before" \
        "it; a second one at once"
    (kp_ignore_signals && sleep $((left - KEMPNER_SIGNAL_LEAD)) && kill -TERM $$ 2>/dev/null) &
}

kp_seconds_left() { # prints the seconds until the job's time limit; fails during a preemption,
    # which moves the end
    local begin end limit now
    begin=$(date -d "$(kp_field StartTime)" +%s 2>/dev/null) &&
        end=$(date -d "$(kp_field EndTime)" +%s 2>/dev/null) &&
        limit=$(date -d "1970-01-01T$(kp_field TimeLimit)Z" +%s 2>/dev/null) || return 1
    ((end - begin == limit)) || return 1
    printf -v now '%(%s)T' -1
    echo $((end - now))
}

kp_has_begun() { # <pid>: succeeds once it is the program: bash's child, setsid and env
    # would lose a SIGINT
    local name=''
    { read -r name <"/proc/$1/comm"; } 2>/dev/null || true
    [[ ! $name =~ ^(bash|setsid|env)$ ]]
}

kp_signal() { # <signal>: sends it only to this run's ranks
    local steps=() tries ranks asked='' id age name fresh
    if ! kp_in_job; then
        ranks=("$KP_CHILD")
        # torchrun may not have started them yet
        for ((tries = 0; KP_TASKS > 1 && tries < 100; tries++)); do
            read -ra ranks <"/proc/$KP_CHILD/task/$KP_CHILD/children" || break
            ((${#ranks[@]} < KP_TASKS)) || break
            sleep 0.1
        done
        for ((tries = 0; tries < 50; tries++)); do
            ! kp_has_begun "${ranks[0]}" || break
            sleep 0.1
        done
        kill -s "$1" "${ranks[@]}" 2>/dev/null || true
        return
    fi

    # run.sh: the supervisors look for this file.
    if [[ -n ${KP_ASKS:-} && $1 != KILL ]]; then
        # They may not have read an earlier request yet.
        ! echo "$1" >>"$KP_RUN_DIR/.ask-$KEMPNER_ATTEMPT_ID" || return 0
    fi

    # Slurm refuses the signal while the step is still starting on some node: retry. In a step's
    # first second, a task may not have blocked the signal yet and would die.
    for ((tries = 0; tries < 10; tries++)); do
        if kp_ask squeue -h -s -j "$(kp_job_id)" -o '%i %M %j'; then
            asked=1 steps=() fresh=''
            while read -r id age name; do
                [[ $name == "$KP_SRUN_NAME" ]] || continue
                steps+=("$id")
                [[ $1 == KILL || ! $age =~ ^0:0[01]$ ]] || fresh=1
            done <<<"$KP_ANSWER"
        fi
        ((${#steps[@]} == 0)) || [[ -n $fresh ]] ||
            ! kp_ask scancel --signal="$1" "${steps[@]}" || return 0
        kill -0 "$KP_CHILD" 2>/dev/null || return 0
        [[ -z $KP_DEADLINE ]] || ((SECONDS < KP_DEADLINE)) || break
        kp_shielded sleep 0.5
    done

    if [[ -n $asked && ${#steps[@]} == 0 ]]; then
        kp_log "the step has not started: nothing to save"
        kill -TERM "${KP_PIDS[@]:-$KP_CHILD}" 2>/dev/null || true
    elif [[ -n $KP_DEADLINE ]]; then
        kp_signal_by_srun "$1"
    fi
}

kp_signal_by_srun() { # <signal>: like kp_signal without the controller: srun forwards
    # only USR1 and USR2
    kp_log "Slurm has not answered for $KP_PATIENCE s: asking the ranks through srun"
    case $1 in
        TERM) kill -USR1 "${KP_PIDS[@]:-$KP_CHILD}" ;; # the trainer treats it like TERM
        USR2) kill -USR2 "${KP_PIDS[@]:-$KP_CHILD}" ;;
        KILL) kill -TERM "${KP_PIDS[@]:-$KP_CHILD}" ;; # srun then kills the ranks
        INT) : >"$KP_RUN_DIR/STOP" ;;                  # another way to stop the trainer
    esac || true
}
