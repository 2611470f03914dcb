# shellcheck shell=bash
# The parts of rl.sh from the start on: what is lost, and what is done about it:
# docs/extensions/rl.md.

# an orchestrator that does nothing for so long is ended: the job is started again
readonly KP_ORCHESTRATOR_SILENT_S=120
KP_ENGINE_NEXT=() KP_ENGINE_SEEN=() KP_ENGINE_THERE=() KP_PROBES=()
KP_LEAVING='' KP_EVER_SERVED=''
# when this loop last ran
KP_AWAKE=''
# when the orchestrator last gave a sign of life
KP_ORCHESTRATOR_SEEN_AT=0

# --- while they run -------------------------------------------------------------------------------

kp_look_at_run() { # once the trainer has the run: links to the logs of all parts; what earlier
    # attempts have left goes
    local latest name
    [[ -n $before ]] || return 0
    latest=$(readlink -- "$KP_RUN_DIR/logs/latest") || return 0
    [[ $latest != "$before" ]] || return 0
    before=''
    ln -sfn -- rank-0.log "$KP_RUN_DIR/logs/$latest/trainer-0.log"
    for name in orchestrator $(seq -f 'engine-%.0f' 0 $((KP_ENGINES - 1))); do
        ln -sfn -- "../${KP_RL_LOGS##*/}/$name.log" "$KP_RUN_DIR/logs/$latest/$name.log"
    done
    for name in "$KP_RUN_DIR"/rl/*; do
        [[ $name == "$KP_EXCHANGE" || ! -d $name/weights || ! -d $name/engines ]] ||
            rm -rf -- "$name"
    done
}

kp_see_absence() { # a job that was suspended (scontrol suspend, gang scheduling) was silent as a
    # whole: nobody is to blame
    local gap=$((SECONDS - ${KP_AWAKE:=$SECONDS})) engine
    KP_AWAKE=$SECONDS
    ((gap >= 10)) || return 0
    kp_log "this script stood still for $gap s: the silence of that time does not count"
    KP_ORCHESTRATOR_SEEN_AT=$((KP_ORCHESTRATOR_SEEN_AT + gap))
    for engine in "${!KP_ENGINE_SEEN[@]}"; do
        KP_ENGINE_SEEN[engine]=$((KP_ENGINE_SEEN[engine] + gap))
    done
}

kp_look_at_orchestrator() { # without it nothing is left to train on
    local code=0
    [[ -n $KP_ORCHESTRATOR ]] || return 0
    if kill -0 "$KP_ORCHESTRATOR" 2>/dev/null; then
        kp_hear_orchestrator
        return
    fi
    wait "$KP_ORCHESTRATOR" || code=$?
    KP_ORCHESTRATOR=''
    # Its end is orderly once the last version is there: the trainer still saves.
    if ((code == 0)) &&
        [[ -e $(printf '%s/weights/v%08d/manifest.json' "$KP_EXCHANGE" "$KP_MAX_STEPS") ]]; then
        return 0
    fi
    kp_log "the orchestrator has ended with exit code $code: see $KP_RL_LOGS/orchestrator.log"
    kp_leave_because "$code"
}

kp_hear_orchestrator() { # every 5 s: does it live, and who waits for room on a full disk? See Beat
    # in extensions/rl/exchange.py
    local beat full
    ((SECONDS >= listened + 5)) || return 0
    listened=$SECONDS
    full=$(cd "$KP_EXCHANGE" && ls -d -- *.full 2>/dev/null) || true
    if [[ $full != "$waits" ]]; then
        waits=$full full=${full//.full/}
        if [[ -z $full ]]; then
            kp_log "the disk of $KP_RUN_DIR has room again"
        else
            kp_log "the disk of $KP_RUN_DIR has no room: waiting for it, for 10 minutes:" \
                "${full//$'\n'/, }"
        fi
    fi
    beat=$(stat -c '%n %y' -- "$KP_EXCHANGE"/orchestrator{,.full} 2>/dev/null) || true
    if [[ $beat != "$last_beat" || -z $beat ]]; then
        last_beat=$beat KP_ORCHESTRATOR_SEEN_AT=$SECONDS
    elif ((SECONDS - KP_ORCHESTRATOR_SEEN_AT > KP_ORCHESTRATOR_SILENT_S)); then
        kp_log "the orchestrator does nothing for $KP_ORCHESTRATOR_SILENT_S s: ending it"
        KP_ORCHESTRATOR_SEEN_AT=$SECONDS
        kp_kill_process "$KP_ORCHESTRATOR"
    fi
}

kp_leave_because() { # <exit code>: the trainer saves and leaves; that code is bad input if it is 2
    [[ -z $KP_LEAVING ]] || return 0
    KP_LEAVING=1
    (($1 != 2)) || bad_input=1
    kp_signal TERM
}

kp_run_leaves() { # true once nothing is worth a new engine
    [[ -n $KP_LEAVING ||
        $KP_SIGNAL =~ ^(TERM|INT|USR1|HUP)$ || -n $KP_DECIDED || -z $KP_ORCHESTRATOR ]]
}

kp_look_at_engines() { # starts again those that are lost
    local engine code
    ((KP_ENGINES > 0)) || return 0
    for engine in "${!KP_ENGINE_PIDS[@]}"; do
        if kill -0 "${KP_ENGINE_PIDS[engine]}" 2>/dev/null; then
            kp_look_at_engine "$engine"
            continue
        fi
        code=0
        wait "${KP_ENGINE_PIDS[engine]}" || code=$?
        unset "KP_ENGINE_PIDS[engine]"
        rm -f -- "$KP_EXCHANGE/engines/engine-$engine"
        kp_run_leaves || kp_engine_ended "$engine" "$code"
    done
    for engine in "${!KP_ENGINE_NEXT[@]}"; do
        if kp_run_leaves; then
            unset "KP_ENGINE_NEXT[engine]"
        elif ((SECONDS >= KP_ENGINE_NEXT[engine])); then
            unset "KP_ENGINE_NEXT[engine]"
            kp_start_again "$engine"
        fi
    done
    if ((${#KP_ENGINE_PIDS[@]} + ${#KP_ENGINE_NEXT[@]} == 0)) && ! kp_run_leaves; then
        kp_log "no engine is left"
        kp_leave_because 1
    fi
}

kp_look_at_engine() { # <engine>: of one that runs: does it answer? One that answers nothing for
    # MOST seconds is ended, and started again
    local engine=$1 url code=0 most=60
    if [[ -z ${KP_ENGINE_THERE[engine]:-} ]]; then
        { read -r url <"$KP_EXCHANGE/engines/engine-$engine"; } 2>/dev/null || return 0
        KP_ENGINE_THERE[engine]=$SECONDS KP_ENGINE_SEEN[engine]=$SECONDS KP_EVER_SERVED=1
        kp_log "engine $engine at $url"
    fi
    if [[ -z ${KP_PROBES[engine]:-} ]]; then
        ((SECONDS - KP_ENGINE_SEEN[engine] >= 5)) || return 0
        { read -r url <"$KP_EXCHANGE/engines/engine-$engine"; } 2>/dev/null || return 0
        kp_probe "$url" &
        KP_PROBES[engine]=$!
    elif ! kill -0 "${KP_PROBES[engine]}" 2>/dev/null; then
        wait "${KP_PROBES[engine]}" || code=$?
        unset "KP_PROBES[engine]"
        ((code != 0)) || KP_ENGINE_SEEN[engine]=$SECONDS
    fi
    if ((SECONDS - KP_ENGINE_SEEN[engine] > most)); then
        kp_log "engine $engine does not answer for $most s: ending it"
        KP_ENGINE_SEEN[engine]=$SECONDS
        kp_kill_process "${KP_ENGINE_PIDS[engine]}"
    fi
}

kp_probe() { # <URL>: does a server answer anything there?
    local place=${1#*://} line=''
    place=${place%%/*}
    # shellcheck disable=SC2016 # expanded in there
    line=$(trap '' TERM INT HUP USR1 USR2 &&
        exec timeout -s KILL 10 bash -c 'exec 3<>"/dev/tcp/$0/$1" &&
        printf "GET /health HTTP/1.0\r\n\r\n" >&3 && head -n 1 <&3' \
            "$(sed 's/^\[//; s/\]$//' <<<"${place%:*}")" "${place##*:}" 2>/dev/null) || true
    [[ $line == HTTP/* ]]
}

kp_kill_process() { # <pid>: at once; srun, which kills its tasks then, or the process itself
    if kp_in_job; then
        kill -TERM "$1" 2>/dev/null || true
    else
        kill -KILL "$1" 2>/dev/null || true
    fi
}

kp_engine_ended() { # <engine> <exit code>
    local engine=$1
    if (($2 == 2)) && [[ -z $KP_EVER_SERVED ]]; then
        kp_log "engine $engine has refused its input: see $KP_RL_LOGS/engine-$engine.log"
        kp_leave_because 2
        return
    fi
    # One that was there for a minute begins to count anew.
    [[ -z ${KP_ENGINE_THERE[engine]:-} ]] || ((SECONDS - KP_ENGINE_THERE[engine] < 60)) ||
        KP_ENGINE_TRIES[engine]=0
    KP_ENGINE_TRIES[engine]=$((KP_ENGINE_TRIES[engine] + 1))
    kp_log "engine $engine has ended with exit code $2"
    if ((KP_ENGINE_TRIES[engine] > KP_ENGINE_RESTARTS)); then
        kp_log "engine $engine is not started again: lost $KP_ENGINE_RESTARTS times in a row" \
            "before (rl.inference.restarts)"
        return
    fi
    # One that is lost again and again waits so much longer each time.
    KP_ENGINE_NEXT[engine]=$((SECONDS + (KP_ENGINE_TRIES[engine] - 1) * 5))
}

kp_start_again() { # <engine>: unless its node is no longer there
    local node KP_DEADLINE=$((SECONDS + KP_PATIENCE))
    if kp_in_job && kp_show_job; then
        node=$(kp_names $((KP_ENGINE_NODE + $1 / KP_ON_NODE)) 1)
        if ! scontrol show hostnames "$(kp_field NodeList)" | grep -qxF -- "$node"; then
            kp_log "engine $1 is not started again: $node is lost"
            return
        fi
    fi
    kp_log "engine $1 is started again"
    kp_start_engine "$1"
}

# --- the end --------------------------------------------------------------------------------------

kp_end_others() { # after the trainer: the orchestrator, which may have an evaluation to finish;
    # then the engines
    local engine end=$((SECONDS + 20)) told='' name=$KP_SRUN_NAME
    kp_verdict
    if [[ -n $KP_ORCHESTRATOR ]] && kill -0 "$KP_ORCHESTRATOR" 2>/dev/null; then
        KP_CHILD=$KP_ORCHESTRATOR KP_SRUN_NAME+=-orchestrator # signals reach it now
        [[ $KP_STATE != 'done' || -n $KP_SIGNAL ]] || told=no
        while kill -0 "$KP_ORCHESTRATOR" 2>/dev/null; do
            [[ -n $told ]] || { told=1 && kp_tell; }
            # its last evaluation takes as long as it takes
            if [[ $told == no && -z $KP_SIGNAL ]]; then
                end=$((SECONDS + 20))
                kp_see_absence
                kp_hear_orchestrator
            elif ((SECONDS >= end)); then
                kp_log "the orchestrator has not ended by itself: ending it"
                kp_kill_process "$KP_ORCHESTRATOR"
                end=$((SECONDS + 10))
            fi
            [[ $told != no ]] || kp_look_at_engines
            sleep 0.1 || true
        done
    fi
    KP_SRUN_NAME=$name KP_LEAVING=1
    kp_end_guard
    kp_end_engines
    KP_CHILD=''
    rm -rf -- "$KP_EXCHANGE"
    rmdir -- "$KP_RUN_DIR/rl" 2>/dev/null || true
    [[ -z $bad_input ]] || KP_CODE=2
    KP_NODES=$KP_JOB_NODES # a requeue needs them all
}

kp_end_engines() {
    local engine tries
    for engine in "${KP_ENGINE_PIDS[@]}"; do
        KP_CHILD=$engine
        if kp_in_job; then # all of them at once
            KP_SRUN_NAME+=-engine kp_tell && break
        else
            kill -TERM "$engine" 2>/dev/null || true
        fi
    done
    for ((tries = 0; tries < 200; tries++)); do
        kill -0 "${KP_ENGINE_PIDS[@]}" 2>/dev/null || break # not one of them
        ((tries != 100)) || for engine in "${KP_ENGINE_PIDS[@]}"; do kp_kill_process "$engine"; done
        sleep 0.1 || true
    done
}

kp_tell() { # tells KP_CHILD, or the steps of the name KP_SRUN_NAME, to end
    local KP_TASKS=1 KP_DEADLINE=$((SECONDS + KP_PATIENCE)) KP_ANSWER=''
    kp_signal TERM
}
