# shellcheck shell=bash
# lowcomm.mode = steps: one srun step per replica, restarted if it is lost. Sourced by
# replicas.sh, after all.sh. Replica 0 works in the run directory itself, replica I in
# RUN/replicas/I, as a separate run.

kp_own_steps() { # in place of restart.sh's: names this script
    echo replicas.sh
}

kp_run_replicas() { # <train.py arguments>...: trains until every replica has exited; sets KP_CODE
    # Per replica: consecutive starts without a checkpoint, the newest step at the last start, when
    # it may restart, when its srun is killed. Then: whether all must exit.
    local tries=() steps=() not_before=() kill_at=() all_leave=''
    local slot hosts silence per_node=$KP_TASKS KP_NODES=$KP_NODES KP_GPUS=$KP_GPUS
    local KP_TASKS=$KP_TASKS
    mapfile -t hosts < <(kp_hostnames "$(kp_field NodeList)")
    kp_count_replicas # from here on, nodes, tasks and GPUs are those of one replica
    kp_note_progress
    kp_set_code 0
    kp_open_srun_log
    export KEMPNER_REPLICAS=$KP_REPLICAS KEMPNER_DOOR=$KP_RUN_DIR/.door-$KEMPNER_ATTEMPT_ID
    kp_open_door
    kp_start_guard "${hosts[@]:1}"

    for ((slot = 0; slot < KP_REPLICAS; slot++)); do
        tries[slot]=0
        kp_start_replica "$slot" "$@"
    done
    kp_pass_pending
    while ((${#KP_PIDS[@]} + ${#not_before[@]} > 0)); do
        kp_look_after "$@"
        sleep 0.2 || true
    done

    kill -KILL "$KP_CHILD" 2>/dev/null || true # it ignores job-ending signals
    wait "$KP_CHILD" 2>/dev/null || true
    kp_set_child ''
    kp_end_guard # otherwise the job's end would wait for it
    rm -f -- "$KEMPNER_DOOR"*
    kp_write_status
}

kp_count_replicas() { # sets KP_REPLICAS, the caller's silence, and the size of each replica:
    # KP_NODES, KP_TASKS, KP_GPUS
    local world=$((KP_NODES * KP_TASKS)) ranks tasks KP_VALUES=("${KP_VALUES[@]}")
    kp_values kp_python_of kempner.extensions.lowcomm.config -c "$KP_NOT_HERE"'
from kempner.config.toml import loads
from kempner.extensions.lowcomm.config import LowcommConfig
told = loads(sys.stdin.read()).get("lowcomm", {}).items()
section = LowcommConfig(**{k: v for k, v in told if k != "raw" and v != "none"}) # "none" is unset
steps = section.on and section.mode == "steps"
count = section.count(int(sys.argv[1]), int(sys.argv[2])) if steps else 0
print("kempner-answer", count, section.silence, sep="\0", end="\0")' "$world" "$KP_TASKS" \
        <<<"${KP_VALUES[0]}" || exit
    KP_REPLICAS=${KP_VALUES[0]:-}
    silence=${KP_VALUES[1]:-}
    [[ $KP_REPLICAS =~ ^[0-9]+$ ]] ||
        kp_die "'$KP_PYTHON' does not say how many replicas there are: see above"
    ((KP_REPLICAS > 0)) ||
        kp_die "replicas.sh is for lowcomm.mode = steps: submit multinode.sh for this configuration"
    ranks=$((world / KP_REPLICAS))
    tasks=$((ranks < KP_TASKS ? ranks : KP_TASKS))
    kp_set_size $((ranks / tasks)) "$tasks" $((KP_GPUS > 0 ? tasks : 0))
    kp_log "$KP_REPLICAS replicas of $KP_NODES node(s) x $KP_TASKS task(s)"
}

kp_open_door() { # starts the judge of live replicas
    # (kempner/extensions/lowcomm/judge.py) as KP_CHILD
    local waited
    rm -f -- "${KEMPNER_DOOR%.*.*}".* # left by a start of this job whose host was lost
    kp_start bash "$KP_LIB/task.sh" "${KP_INSIDE[@]}" "$KP_PYTHON" "$KP_MODULE" \
        kempner.extensions.lowcomm.judge "$KEMPNER_DOOR" "${KEMPNER_PEERS%% *}" \
        --silence "$silence" --log "$KP_RUN_DIR/replicas.jsonl"
    for ((waited = 0; waited < 600; waited++)); do
        [[ ! -s $KEMPNER_DOOR ]] || return 0
        kill -0 "$KP_CHILD" 2>/dev/null || break
        sleep 0.1 || true
    done
    kp_die "the store of the replicas has not started: see above"
}

kp_start_replica() { # <replica> <train.py arguments>...: starts its step
    local slot=$1 place
    kp_place "$slot" || return 0
    ((tries[slot] == 0)) ||
        kp_log "replica $slot is started again: it joins at the end of a round"
    export KEMPNER_REPLICA=$slot
    rm -f -- "$KEMPNER_DOOR.here.$slot"
    # Without --mem=0, the first step on a node would take all its memory.
    kp_srun_command "${place[@]}" --no-kill --mem=0 -- "$KP_TRAIN" "${@:2}"
    steps[slot]=$(kp_replica_step "$slot")
    setsid "${KP_SRUN[@]}" </dev/null \
        2> >(trap '' TERM INT HUP USR1 USR2 && exec tee -a -- "$KP_SRUN_LOG" >&2) &
    kp_set_pid "$slot" "$!"
}

kp_place() { # <replica>: sets the caller's place to srun options for its hosts; fails if one
    # of them is lost
    local first=$(($1 * ${#hosts[@]} / KP_REPLICAS)) ours step_place lost_host
    ours=("${hosts[@]:first:KP_NODES}")
    place=(--exact --nodelist="$(IFS=, && echo "${ours[*]}")")
    ((tries[$1] > 0)) || return 0
    if ! kp_place_step "${#hosts[@]}" "${ours[@]}"; then
        kp_log "replica $1 stays away: the job has lost $lost_host"
        return 1
    fi
    ((KP_TASKS < per_node)) || place[0]=$step_place # replicas that share a host stay exclusive
}

kp_look_after() { # <train.py arguments>...: checks all replicas once
    local slot code mark
    if [[ -e $KEMPNER_DOOR.over ]] || ! kill -0 "$KP_CHILD" 2>/dev/null; then
        all_leave=1 # too few are left, or the judge is gone: all exit
    fi
    for slot in "${!KP_PIDS[@]}"; do
        mark=$KEMPNER_DOOR.silent.$slot
        if [[ -e $mark ]]; then # stopped or unreachable: its step may never end by itself
            rm -f -- "$mark"
            kp_end_step "$slot" "replica $slot does not answer"
        elif kp_is_ending && [[ ! -e $KEMPNER_DOOR.here.$slot ]]; then
            # Slurm may never create its step once the job has lost a host, even if
            # the host is back.
            kp_end_step "$slot" "replica $slot has not arrived, and is no longer needed"
        fi
        ((SECONDS < ${kill_at[slot]:-SECONDS + 1})) ||
            kill -KILL "${KP_PIDS[slot]}" 2>/dev/null || true
        ! kill -0 "${KP_PIDS[slot]}" 2>/dev/null || continue
        code=0
        wait "${KP_PIDS[slot]}" || code=$?
        unset "KP_PIDS[slot]" "kill_at[slot]"
        kp_replica_ended "$slot" "$code"
    done

    for slot in "${!not_before[@]}"; do
        if kp_is_ending; then
            unset "not_before[slot]"
        elif ((SECONDS >= not_before[slot])); then
            unset "not_before[slot]"
            kp_start_replica "$slot" "$@"
        fi
    done
}

kp_is_ending() { # succeeds if no replica should start any more; USR2 only asks for a save
    [[ -n $all_leave || ${KP_SIGNAL:-USR2} != USR2 ]]
}

kp_end_step() { # <replica> <why>: ends its step; if srun does not, because it waits for a lost
    # host, it is killed later
    [[ -z ${kill_at[$1]:-} ]] || return 0
    kill_at[$1]=$((SECONDS + 10)) # time for srun to end the step
    kp_log "$2: ending its step"
    kill -TERM "${KP_PIDS[$1]}" 2>/dev/null || true
}

kp_replica_ended() { # <replica> <exit code of its srun>: schedules a restart if the run goes on
    local most=${KEMPNER_MAX_CRASHES:-3}
    kp_replica_verdict "$1"
    kp_log "replica $1 has ended with exit code $2${KP_STATE:+: $KP_STATE}"
    ((KP_CODE != 0 && $2 != 2)) || kp_set_code "$2"
    # Exit code 0 is not enough: srun also returns it when its node has failed.
    if [[ $2 == 2 ||
        $KP_STATE =~ ^(done|stopped|interrupted|failed)$ || -e $KEMPNER_DOOR.over ]]; then
        all_leave=1 # the replicas have agreed to exit, or too few are left
    fi
    ! kp_is_ending || return 0
    (($(kp_replica_step "$1") <= steps[$1])) || tries[$1]=0
    tries[$1]=$((tries[$1] + 1))
    if ((tries[$1] > most)); then
        kp_log "replica $1 is not started again: $most starts in a row without a checkpoint" \
            "(KEMPNER_MAX_CRASHES)"
        return 0
    fi
    # A replica that is lost repeatedly waits longer each time.
    not_before[$1]=$((SECONDS + (tries[$1] - 1) * 5))
}

kp_replica_dir() { # <replica>: prints its run directory
    (($1 == 0)) && echo "$KP_RUN_DIR" || echo "$KP_RUN_DIR/replicas/$1"
}

kp_replica_verdict() { # <replica>: sets KP_STATE to its state in this attempt of the job
    local directory
    directory=$(kp_replica_dir "$1")
    local KP_RUN_DIR=$directory
    kp_verdict
}

kp_replica_step() { # <replica>: prints the step of its newest checkpoint
    local directory=$KP_CHECKPOINTS
    if (($1 > 0)); then
        directory=$KP_CHECKPOINTS/replicas/$1 # in checkpoint.dir
        [[ $KP_CHECKPOINTS != "$KP_RUN_DIR/checkpoints" ]] ||
            directory=$KP_RUN_DIR/replicas/$1/checkpoints
    fi
    kp_newest_step "$directory"
}

kp_committed_step() { # in place of requeue.sh's: prints the newest step of all replicas
    local slot newest=-1 step
    for ((slot = 0; slot < ${KP_REPLICAS:-1}; slot++)); do
        step=$(kp_replica_step "$slot")
        ((step <= newest)) || newest=$step
    done
    echo "$newest"
}

kp_write_status() { # writes the run's status.json from those of the replicas, the worst state first
    local state slot found=''
    for state in failed stopped done interrupted; do
        for ((slot = 0; slot < KP_REPLICAS; slot++)); do
            kp_replica_verdict "$slot"
            [[ $KP_STATE != "$state" || -n $found ]] || found=$slot
        done
    done
    ((${found:-0} > 0)) || return 0 # replica 0 has written it
    cp -- "$(kp_replica_dir "$found")/status.json" "$KP_RUN_DIR/.status.json.new"
    mv -- "$KP_RUN_DIR/.status.json.new" "$KP_RUN_DIR/status.json"
}
