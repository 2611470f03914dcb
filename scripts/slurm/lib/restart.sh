# shellcheck shell=bash
# After a crash or a hang the job keeps its nodes: the next attempt is another step of the same job.
# If a node is lost or to blame, a spare replaces it (KEMPNER_SPARES). kp_decide (requeue.sh) says
# when to do so.

# seconds for ranks asked to exit, once one of them has been killed; tests shorten it
KP_LEAVING_S=${KP_LEAVING_S:-120}

KP_RESTARTS=0 # restarts in place left
# if the job survives a lost node: the nodes that train, and those that wait
KP_PLACES=() KP_SPARES=()
KP_LOST='' # nodes that do not answer
# former places that were to blame: no later start of the job uses them
KP_SPENT=()
KP_STUCK=''             # not empty: a task could not be killed
KP_DROPPED=''           # not empty: the job has lost a node
KP_GUARD='' KP_SPARE='' # sruns of guard.sh and KEMPNER_SPARE_COMMAND

kp_own_steps() { # prints the script, if it restarts lost steps itself
    :
}

kp_places() { # sets KP_RESTARTS and, if the job survives a lost node, KP_PLACES and KP_SPARES;
    # subtracts the spares from KP_NODES
    local most=${KEMPNER_RESTARTS:-10} spares=${KEMPNER_SPARES:-0} own
    [[ $most =~ ^(0|[1-9][0-9]{0,5})$ ]] ||
        kp_die "KEMPNER_RESTARTS=$most: must be a number of restarts, such as 10, or 0 for none"
    [[ $spares =~ ^(0|[1-9][0-9]{0,3})$ ]] ||
        kp_die "KEMPNER_SPARES=$spares: must be a number of nodes, such as 1"
    ((spares > 0)) || [[ -z ${KEMPNER_SPARE_COMMAND:-} ]] ||
        kp_die "KEMPNER_SPARE_COMMAND runs on spare nodes, and there are none:" \
            "give KEMPNER_SPARES, or unset it"
    [[ -n $KP_DRY ]] || kp_is_batch || return 0
    own=$(kp_own_steps)
    if [[ -n $own ]]; then
        ((spares == 0)) ||
            kp_die "KEMPNER_SPARES=$spares: $own uses no spare nodes: unset it"
        return 0
    fi
    KP_RESTARTS=$most
    if ((spares > 0)); then
        ((most > 0)) ||
            kp_die "KEMPNER_SPARES=$spares needs restarts in place: KEMPNER_RESTARTS must not be 0"
        ((spares < KP_NODES)) ||
            kp_die "KEMPNER_SPARES=$spares, but the job has $KP_NODES node(s): give --nodes=N," \
                "those that train and the spares together, such as --nodes=$((spares + 2))"
        kp_survives ||
            kp_die "KEMPNER_SPARES=$spares: this job would end with the first node that it loses:" \
                "export SBATCH_NO_KILL=set before sbatch (a job cannot see --no-kill on sbatch's" \
                "command line)"
    fi
    if [[ -z $KP_DRY ]] && kp_survives; then
        mapfile -t KP_PLACES < <(kp_hostnames "$(kp_field NodeList)")
        KP_SPARES=("${KP_PLACES[@]:KP_NODES-spares}")
        KP_PLACES=("${KP_PLACES[@]:0:KP_NODES-spares}")
    fi
    kp_set_size $((KP_NODES - spares)) "$KP_TASKS" "$KP_GPUS"
}

kp_no_restart() { # lets no further step follow in this start of the job
    KP_RESTARTS=0
}

kp_survives() { # succeeds if the job was submitted with --no-kill, as far as known: Slurm
    # does not show it
    [[ -z $KP_DRY || -z ${KP_ASKED[no_kill]+set}${KP_ASKED[k]+set} ]] || return 0
    [[ ${SBATCH_NO_KILL-off} =~ ^(set)?$ ]] ||
        grep -qE '^#SBATCH +(-k|--no-kill)(=set)? *$' "$0" 2>/dev/null
}

kp_comma() { # <word>...: prints them joined by commas
    local IFS=,
    echo "$*"
}

# --- while a step runs ----------------------------------------------------------------------------

kp_await() { # waits for the step; ends the other ranks soon after one has failed; sets
    # KP_CODE, KP_LOST, KP_STUCK
    # last: seconds that the others have to record what they have seen, once a rank has failed.
    # gone: seconds until ranks that srun kills have exited, if the job can restart in place.
    local line fd failed='' over='' ended='' next=0 due last=5 gone=30 patience=5
    KP_LOST='' KP_STUCK=''
    # the log's file system may fail at any time
    { exec {fd}<"$KP_SRUN_LOG"; } 2>/dev/null || exec {fd}</dev/null
    while kill -0 "$KP_CHILD" 2>/dev/null; do
        while IFS= read -r line <&"$fd"; do
            [[ $line == 'srun: error: '*': task'* || $line == 'srun: error: Node failure'* ]] ||
                continue
            [[ -z $failed ]] || continue
            # Ranks asked to exit may be in a long save. But a killed rank cannot take part
            # in it, another may be frozen, and srun's request to end them may not have
            # reached the controller.
            if [[ ${KP_SIGNAL:-USR2} != USR2 ]]; then
                [[ $line != *': Killed' ]] || failed=$SECONDS patience=$KP_LEAVING_S
                continue
            fi
            failed=$SECONDS
            kp_find_lost
            [[ -z $KP_LOST ]] || patience=1
        done
        if ((SECONDS >= next)); then
            next=$((SECONDS + 5))
            kp_verdict
            ! kp_is_over || over=${over:-$SECONDS}
        fi

        due=''
        # After an orderly end, a srun that misses it, as after a host came back, must
        # not hold the job.
        [[ -z $over ]] || due=$((over + 60))
        [[ -z $failed ]] || due=$((failed + patience))
        if [[ -n $ended ]]; then
            if ((SECONDS >= ended + patience)); then
                # It waits for a lost host until Slurm notices (minutes), for a rank whose
                # memory the driver still releases, or for one that cannot be killed.
                if [[ -z $KP_LOST ]] && ((patience < gone)) && kp_may_restart; then
                    patience=$gone
                    kp_find_lost
                    [[ -z $KP_LOST ]] || patience=0
                    continue
                fi
                [[ -n $KP_LOST ]] || kp_give_up_restart "$patience"
                kill -KILL "$KP_CHILD" 2>/dev/null || true
                break
            fi
        elif [[ -n $due ]] && ((SECONDS >= due)); then
            ended=$SECONDS
            ((patience < last)) || patience=$last
            # faulty_host.py ignores deaths after this line; srun kills its tasks.
            { echo "kempner: ending the other ranks" >>"$KP_SRUN_LOG"; } 2>/dev/null || true
            kill -TERM "$KP_CHILD" 2>/dev/null || true
        fi
        sleep 0.2 || true
    done
    exec {fd}<&-
    kp_wait
    kp_verdict
    [[ -n $failed ]] || kp_is_over || kp_find_lost
    # As after a host has restarted: to Slurm the step goes on there, and a new one waits for it.
    [[ -n $KP_STUCK$KP_LOST ]] ||
        ! grep -qs "^srun: error: Timed out waiting for job step to complete" "$KP_SRUN_LOG" ||
        kp_give_up_restart $((SECONDS - ${ended:-${failed:-$SECONDS}}))
}

kp_give_up_restart() { # <seconds that the ranks had to exit>: sets KP_STUCK
    ! kp_may_restart ||
        kp_log "no restart in place: srun has not killed all ranks within $1 s, and those left" \
            "may hold their GPUs"
    KP_STUCK=1
}

kp_is_over() { # succeeds if the run has recorded an orderly end
    [[ $KP_STATE =~ ^(done|stopped|interrupted|failed)$ ]]
}

kp_drop_spares() { # <what is wrong> <host>...: drops those that are spares
    local host spares=()
    for host in "${KP_SPARES[@]}"; do
        if [[ " ${*:2} " == *" $host "* ]]; then
            kp_log "the spare node $host $1: it is dropped"
        else
            spares+=("$host")
        fi
    done
    KP_SPARES=("${spares[@]}")
}

kp_drop_unfit_spares() { # drops spares whose device failed audit.py
    local host unfit=()
    for host in "${KP_SPARES[@]}"; do
        [[ ! -e $KP_RUN_DIR/.unfit-$SLURM_JOB_ID-$host ]] || unfit+=("$host")
    done
    kp_drop_spares "computes wrong numbers (logs/spare.log)" "${unfit[@]}"
}

kp_find_lost() { # sets KP_LOST, the nodes of this run that cannot start tasks; drops lost spares
    local KP_DEADLINE=$((SECONDS + KP_PATIENCE)) KP_ANSWER=''
    local hosts=("${KP_PLACES[@]}" "${KP_SPARES[@]}")
    local host left gone=() lost=()
    local failed='s/^srun: error: Task launch for .* failed on node ([^:]+): .*/\1/p'
    # A host may be back but unusable: Slurm has removed it from the job, or late requests to end an
    # earlier start have revoked the job's credentials there.
    mapfile -t gone < <(sed -nE "$failed" "$KP_SRUN_LOG" 2>/dev/null)
    if kp_show_job; then
        mapfile -t left < <(scontrol show hostnames "$(kp_field NodeList)")
        for host in "${hosts[@]}"; do
            # Without an answer, no host counts as lost.
            [[ ${#left[@]} == 0 || " ${left[*]} " == *" $host "* ]] || gone+=("$host")
        done
        ((${#hosts[@]} > 0)) || hosts=("${left[@]}")
    fi
    ((${#hosts[@]} < 2)) || kp_find_silent "${hosts[@]}"
    ((${#gone[@]} > 0)) || return 0

    KP_DROPPED=1
    kp_drop_spares "does not answer" "${gone[@]}"
    for host in "${hosts[@]}"; do
        [[ " ${gone[*]} " != *" $host "* ]] ||
            [[ ${#KP_PLACES[@]} != 0 && " ${KP_PLACES[*]} " != *" $host "* ]] ||
            lost+=("$host")
    done
    KP_LOST=$(kp_comma "${lost[@]}")
    [[ -z $KP_LOST ]] || kp_log "$KP_LOST: no answer from its slurmd, or it starts no task"
}

kp_find_silent() { # <host>...: adds those whose slurmd accepts no connection to gone
    local default='' host at_port word most=100
    local -A address=() ports=() pids=()
    kp_ask scontrol show config || return 0
    [[ ! $KP_ANSWER =~ SlurmdPort[[:space:]]*=[[:space:]]*([0-9]+) ]] || default=${BASH_REMATCH[1]}
    # bash reads a pipe byte by byte: the full records of 1,000 nodes would take until the deadline.
    # shellcheck disable=SC2016 # the inner shell's
    kp_ask bash -c 'set -o pipefail
        scontrol show node "$0" | grep -aoE "(^|[[:space:]])(NodeName|NodeAddr|Port)=[^[:space:]]+"
    ' "$(kp_comma "$@")" || return 0
    for word in $KP_ANSWER; do
        case $word in
            NodeName=*) host=${word#*=} ;;
            NodeAddr=*) address[$host]=${word#*=} ;;
            Port=*) ports[$host]=${word#*=} ;;
        esac
    done

    # The controller marks a host down only SlurmdTimeout after its last answer (default 300 s).
    # At most so many are asked at a time: three processes each.
    while (($# > 0)); do
        pids=()
        for host in "${@:1:most}"; do
            [[ -n ${address[$host]:-} ]] || continue
            at_port=${ports[$host]:-${default:-6818}}
            # shellcheck disable=SC2016 # the inner shell's
            kp_shielded timeout 3 bash -c ': <"/dev/tcp/$0/$1"' "${address[$host]}" \
                "$at_port" 2>/dev/null &
            pids[$host]=$!
        done
        for host in "${!pids[@]}"; do
            # A signal ends wait early with its own code: the host would seem lost.
            while kill -0 "${pids[$host]}" 2>/dev/null; do wait "${pids[$host]}" || true; done
            wait "${pids[$host]}" || gone+=("$host")
        done
        shift $(($# < most ? $# : most))
    done
}

# --- between two attempts -------------------------------------------------------------------------

kp_asked_to_leave() { # succeeds after a signal that asks for more than a save
    [[ ${KP_SIGNAL:-USR2} != USR2 || ${KP_PENDING:-USR2} != USR2 ]]
}

kp_may_restart() { # succeeds unless restarts are used up, the run is over or was asked to leave
    ((KP_RESTARTS > 0)) && ! kp_asked_to_leave && ! kp_is_over
}

kp_could_restart() { # succeeds if the job allows another step, whatever happened to the last one
    kp_is_batch && kp_may_restart && [[ -z $KP_STUCK && $KP_JOB_STATE == RUNNING ]]
}

kp_next_attempt() { # after the decision to restart: prepares the next attempt, with its name,
    # its nodes and its baseline of progress
    local host places=() id=$KEMPNER_ATTEMPT_ID number=0 # of this restart
    if [[ -n ${KP_DECISION[replaced]} ]]; then
        kp_end_spare_command
        for host in "${KP_PLACES[@]}"; do
            if [[ ,${KP_DECISION[replaced]}, == *",$host,"* ]]; then
                kp_log "$host is replaced by the spare node ${KP_SPARES[0]}"
                [[ -n $KP_LOST ]] || KP_SPENT+=("$host")
                host=${KP_SPARES[0]} KP_SPARES=("${KP_SPARES[@]:1}")
            fi
            places+=("$host")
        done
        KP_PLACES=("${places[@]}")
        [[ -z $KP_LOST ]] || kp_end_guard # it may have run there
    fi
    KP_RESTARTS=$((KP_RESTARTS - 1))
    kp_note_progress "$KP_COMMITTED" # as the decision saw it: there may be more by now
    kp_set_decided ''
    kp_forget_signal
    KP_LOST=''
    [[ $id != *.*.*.* ]] || number=${id##*.} id=${id%.*}
    kp_name_attempt "$id.$((number + 1))"
}

# --- beside the run -------------------------------------------------------------------------------

kp_start_beside() { # starts what runs beside the ranks, unless it runs already: the guard and
    # the spares' command
    local host others=()
    export KEMPNER_IDLE="${KP_SPARES[*]}"
    for host in "${KP_PLACES[@]}" "${KP_SPARES[@]}"; do
        [[ $host == "$(kp_field BatchHost)" ]] || others+=("$host")
    done
    kill -0 "${KP_GUARD:-none}" 2>/dev/null || kp_start_guard "${others[@]}"
    kill -0 "${KP_SPARE:-none}" 2>/dev/null || kp_start_spare_command
}

kp_end_beside() { # ends them, or the job's end would wait for them
    kp_end_guard
    kp_end_spare_command
}

kp_start_guard() { # <other host>...: starts guard.sh on up to two of them, in case this host is
    # lost; sets KP_GUARD
    local on
    KP_GUARD=''
    (($# > 0)) && kp_is_batch || return 0
    mapfile -t on < <(printf '%s\n' "$1" "${!#}" | sort -u)
    kp_beside guard --no-kill --mem=0 --gres=none --cpus-per-task=1 "${on[@]}" -- \
        bash "$KP_LIB/guard.sh" "$(kp_job_id)" "$KP_START" \
        ${KP_CHAIN:+"$KP_JOURNAL" "$KP_CHAIN" "$KP_LINK" "$KP_PYTHON"}
    KP_GUARD=$!
}

kp_end_guard() {
    [[ -z $KP_GUARD ]] || kill -TERM "$KP_GUARD" 2>/dev/null || true
    KP_GUARD=''
}

kp_start_spare_command() { # with KEMPNER_SPARE_COMMAND: runs it once on each idle spare; sets
    # KP_SPARE
    local cpus=$((KP_TASKS * KP_CPUS)) gpus=()
    KP_SPARE=''
    [[ -n ${KEMPNER_SPARE_COMMAND:-} ]] && ((${#KP_SPARES[@]} > 0)) || return 0
    ((KP_GPUS == 0)) || gpus=(--gpus-per-node="$KP_GPUS")
    kp_log "${KP_SPARES[*]}: idle, and run KEMPNER_SPARE_COMMAND (logs/spare.log)"
    KEMPNER_RUN_DIR=$KP_RUN_DIR kp_beside spare "${gpus[@]}" --cpus-per-task="$cpus" \
        "${KP_SPARES[@]}" -- nice -n 19 bash -c "$KEMPNER_SPARE_COMMAND"
    KP_SPARE=$!
}

kp_end_spare_command() { # ends it: its node is needed
    local tries
    [[ -n $KP_SPARE ]] || return 0
    kill -TERM "$KP_SPARE" 2>/dev/null || true # srun then kills its tasks
    for ((tries = 0; tries < 20; tries++)); do
        kill -0 "$KP_SPARE" 2>/dev/null || break
        sleep 0.1 || true
    done
    kill -KILL "$KP_SPARE" 2>/dev/null || true
    KP_SPARE=''
}

kp_beside() { # <name> <srun's options>... <host>... -- <command>...: starts a background step with
    # a task per host
    local name=$1 options=() hosts=()
    shift
    while [[ $1 == --* && $1 != -- ]]; do options+=("$1") && shift; done
    while [[ $1 != -- ]]; do hosts+=("$1") && shift; done
    (
        kp_forget_request
        unset KEMPNER_ATTEMPT_ID KEMPNER_BATCH_BEGAN
        exec setsid srun --job-name="$name" --overlap --mpi=none --export=ALL "${options[@]}" \
            --nodes="${#hosts[@]}" --ntasks="${#hosts[@]}" --ntasks-per-node=1 \
            --nodelist="$(kp_comma "${hosts[@]}")" "${@:2}"
    ) </dev/null >>"$KP_RUN_DIR/logs/$name.log" 2>&1 &
}
