# shellcheck shell=bash
# Monitors the parts of rl.sh: detects losses and handles them (docs/extensions/rl.md). Lower-case
# names without a "local" are variables of kp_run_rl.

# an orchestrator that is silent this long is ended, and the job restarts
readonly KP_ORCHESTRATOR_SILENT_S=120

# --- while they run -------------------------------------------------------------------------------

kp_look_at_run() { # once the trainer has begun: links the logs of all parts; removes what earlier
    # attempts have left
    local latest name
    [[ -n $before ]] || return 0
    latest=$(readlink -- "$KP_RUN_DIR/logs/latest") || return 0
    [[ $latest != "$before" ]] || return 0
    before=''
    ln -sfn -- rank-0.log "$KP_RUN_DIR/logs/$latest/trainer-0.log"
    for name in orchestrator $(seq -f 'engine-%.0f' 0 $((KP_RL[engines] - 1))); do
        ln -sfn -- "../${KP_RL[logs]##*/}/$name.log" "$KP_RUN_DIR/logs/$latest/$name.log"
    done
    for name in "$KP_RUN_DIR"/rl/*; do
        [[ $name == "${KP_RL[exchange]}" || ! -d $name/weights || ! -d $name/engines ]] ||
            rm -rf -- "$name"
    done
}

kp_see_absence() { # detects that the whole job was suspended (scontrol suspend, gang scheduling):
    # no part is to blame
    local gap=$((SECONDS - ${awake:=$SECONDS})) engine
    awake=$SECONDS
    ((gap >= 10)) || return 0
    kp_log "this script stood still for $gap s: the silence of that time does not count"
    orchestrator_seen_at=$((orchestrator_seen_at + gap))
    for engine in "${!engine_seen[@]}"; do
        engine_seen[engine]=$((engine_seen[engine] + gap))
    done
}

kp_look_at_orchestrator() { # handles its end: without it there are no samples to train on
    local code=0 last
    [[ -n $orchestrator ]] || return 0
    if kill -0 "$orchestrator" 2>/dev/null; then
        kp_hear_orchestrator
        return
    fi
    wait "$orchestrator" || code=$?
    orchestrator=''
    # Its end is orderly once the last weights exist: the trainer is still saving.
    printf -v last 'v%08d' "${KP_RL[max_steps]}"
    ((code != 0)) || [[ ! -e ${KP_RL[exchange]}/weights/$last/manifest.json ]] || return 0
    kp_log "the orchestrator has ended with exit code $code: see ${KP_RL[logs]}/orchestrator.log"
    kp_leave_because "$code"
}

kp_hear_orchestrator() { # every 5 s: checks its heartbeat, and who waits for disk space; see
    # Beat in extensions/rl/exchange.py
    local beat full
    ((SECONDS >= listened + 5)) || return 0
    listened=$SECONDS
    full=$(cd "${KP_RL[exchange]}" && ls -d -- *.full 2>/dev/null) || true
    if [[ $full != "$waits" ]]; then
        waits=$full full=${full//.full/}
        if [[ -z $full ]]; then
            kp_log "the disk of $KP_RUN_DIR has room again"
        else
            kp_log "the disk of $KP_RUN_DIR is full: waiting up to 10 minutes for room:" \
                "${full//$'\n'/, }"
        fi
    fi
    beat=$(stat -c '%n %y' -- "${KP_RL[exchange]}"/orchestrator{,.full} 2>/dev/null) || true
    if [[ $beat != "$last_beat" || -z $beat ]]; then
        last_beat=$beat orchestrator_seen_at=$SECONDS
    elif ((SECONDS - orchestrator_seen_at > KP_ORCHESTRATOR_SILENT_S)); then
        kp_log "the orchestrator has done nothing for $KP_ORCHESTRATOR_SILENT_S s: ending it"
        orchestrator_seen_at=$SECONDS
        kp_kill_process "$orchestrator"
    fi
}

kp_leave_because() { # <exit code>: makes the trainer save and exit; code 2 means bad input
    [[ -z $leaving ]] || return 0
    leaving=1
    (($1 != 2)) || bad_input=1
    kp_signal TERM
}

kp_run_leaves() { # succeeds once no new engine is needed
    [[ -n $leaving ||
        $KP_SIGNAL =~ ^(TERM|INT|USR1|HUP)$ || -n $KP_DECIDED || -z $orchestrator ]]
}

kp_look_at_engines() { # restarts lost engines
    local engine code
    ((KP_RL[engines] > 0)) || return 0
    for engine in "${!engine_pids[@]}"; do
        if kill -0 "${engine_pids[engine]}" 2>/dev/null; then
            kp_look_at_engine "$engine"
            continue
        fi
        code=0
        wait "${engine_pids[engine]}" || code=$?
        unset "engine_pids[engine]"
        rm -f -- "${KP_RL[exchange]}/engines/engine-$engine"
        kp_run_leaves || kp_engine_ended "$engine" "$code"
    done
    for engine in "${!engine_next[@]}"; do
        if kp_run_leaves; then
            unset "engine_next[engine]"
        elif ((SECONDS >= engine_next[engine])); then
            unset "engine_next[engine]"
            kp_start_again "$engine"
        fi
    done
    if ((${#engine_pids[@]} + ${#engine_next[@]} == 0)) && ! kp_run_leaves; then
        kp_log "no engine is left"
        kp_leave_because 1
    fi
}

kp_look_at_engine() { # <engine>: probes a running engine; ends it if it has not answered for <most>
    # seconds, to be restarted
    local engine=$1 url code=0 most=60
    if [[ -z ${engine_there[engine]:-} ]]; then
        { read -r url <"${KP_RL[exchange]}/engines/engine-$engine"; } 2>/dev/null || return 0
        engine_there[engine]=$SECONDS engine_seen[engine]=$SECONDS ever_served=1
        kp_log "engine $engine at $url"
    fi
    if [[ -z ${probes[engine]:-} ]]; then
        ((SECONDS - engine_seen[engine] >= 5)) || return 0
        { read -r url <"${KP_RL[exchange]}/engines/engine-$engine"; } 2>/dev/null || return 0
        kp_probe "$url" &
        probes[engine]=$!
    elif ! kill -0 "${probes[engine]}" 2>/dev/null; then
        wait "${probes[engine]}" || code=$?
        unset "probes[engine]"
        ((code != 0)) || engine_seen[engine]=$SECONDS
    fi
    if ((SECONDS - engine_seen[engine] > most)); then
        kp_log "engine $engine does not answer for $most s: ending it"
        engine_seen[engine]=$SECONDS
        kp_kill_process "${engine_pids[engine]}"
    fi
}

kp_probe() { # <URL>: succeeds if an HTTP server answers there
    local place=${1#*://} line=''
    place=${place%%/*}
    # shellcheck disable=SC2016 # expanded in there
    line=$(trap '' TERM INT HUP USR1 USR2 &&
        exec timeout -s KILL 10 bash -c 'exec 3<>"/dev/tcp/$0/$1" &&
        printf "GET /health HTTP/1.0\r\n\r\n" >&3 && head -n 1 <&3' \
            "$(sed 's/^\[//; s/\]$//' <<<"${place%:*}")" "${place##*:}" 2>/dev/null) || true
    [[ $line == HTTP/* ]]
}

kp_kill_process() { # <pid>: kills a process at once, or has srun kill its tasks
    if kp_in_job; then
        kill -TERM "$1" 2>/dev/null || true
    else
        kill -KILL "$1" 2>/dev/null || true
    fi
}

kp_engine_ended() { # <engine> <exit code>: schedules a restart, unless it failed too often
    local engine=$1
    if (($2 == 2)) && [[ -z $ever_served ]]; then
        kp_log "engine $engine has refused its input: see ${KP_RL[logs]}/engine-$engine.log"
        kp_leave_because 2
        return
    fi
    # An engine that has served for a minute starts counting anew.
    [[ -z ${engine_there[engine]:-} ]] || ((SECONDS - engine_there[engine] < 60)) ||
        engine_tries[engine]=0
    engine_tries[engine]=$((engine_tries[engine] + 1))
    kp_log "engine $engine has ended with exit code $2"
    if ((engine_tries[engine] > KP_RL[restarts])); then
        kp_log "engine $engine is not started again: lost ${KP_RL[restarts]} times in a row" \
            "before (rl.inference.restarts)"
        return
    fi
    # An engine that is lost repeatedly waits longer each time.
    engine_next[engine]=$((SECONDS + (engine_tries[engine] - 1) * 5))
}

kp_start_again() { # <engine>: restarts it, unless lost nodes prevent it
    local node lost_host
    node=$(kp_names $((KP_RL[engine_node] + $1 / KP_RL[on_node])) 1)
    if kp_in_job && ! kp_place_step "${KP_RL[job_nodes]}" "$node"; then
        kp_log "engine $1 is not started again: $lost_host is lost"
        return
    fi
    if [[ $step_place == --overlap ]] && ((KP_GPUS > 0 && KP_RL[on_node] > 1)); then
        kp_log "engine $1 is not started again: the job has lost a node, so Slurm" \
            "gives no GPU to a new step; the job's next start has it"
        return
    fi
    kp_log "engine $1 is started again"
    kp_start_engine "$1"
}

# --- the end --------------------------------------------------------------------------------------

kp_end_others() { # after the trainer, ends the orchestrator, which may be finishing an evaluation,
    # then the engines
    local engine end=$((SECONDS + 20)) told='' KP_SRUN_NAME=$KP_SRUN_NAME name=$KP_SRUN_NAME
    kp_verdict
    if [[ -n $orchestrator ]] && kill -0 "$orchestrator" 2>/dev/null; then
        kp_set_child "$orchestrator" # now it receives the signals
        KP_SRUN_NAME+=-orchestrator
        [[ $KP_STATE != 'done' || -n $KP_SIGNAL ]] || told=no
        while kill -0 "$orchestrator" 2>/dev/null; do
            [[ -n $told ]] || { told=1 && kp_tell; }
            # let its last evaluation finish
            if [[ $told == no && -z $KP_SIGNAL ]]; then
                end=$((SECONDS + 20))
                kp_see_absence
                kp_hear_orchestrator
            elif ((SECONDS >= end)); then
                kp_log "the orchestrator has not ended by itself: ending it"
                kp_kill_process "$orchestrator"
                end=$((SECONDS + 10))
            fi
            [[ $told != no ]] || kp_look_at_engines
            sleep 0.1 || true
        done
    fi
    KP_SRUN_NAME=$name leaving=1
    kp_end_guard
    kp_end_engines
    kp_set_child ''
    rm -rf -- "${KP_RL[exchange]}"
    rmdir -- "$KP_RUN_DIR/rl" 2>/dev/null || true
    [[ -z $bad_input ]] || kp_set_code 2
    kp_set_size "${KP_RL[job_nodes]}" "$KP_TASKS" "$KP_GPUS" # a requeue needs all of them
}

kp_end_engines() {
    local engine tries
    for engine in "${engine_pids[@]}"; do
        kp_set_child "$engine"
        if kp_in_job; then # signals all engines at once
            KP_SRUN_NAME+=-engine kp_tell && break
        else
            kill -TERM "$engine" 2>/dev/null || true
        fi
    done
    for ((tries = 0; tries < 200; tries++)); do
        kill -0 "${engine_pids[@]}" 2>/dev/null || break # none is left
        ((tries != 100)) || for engine in "${engine_pids[@]}"; do kp_kill_process "$engine"; done
        sleep 0.1 || true
    done
}

kp_tell() { # asks KP_CHILD, or the steps named KP_SRUN_NAME, to end
    local KP_TASKS=1 KP_DEADLINE=$((SECONDS + KP_PATIENCE)) KP_ANSWER=''
    kp_signal TERM
}
