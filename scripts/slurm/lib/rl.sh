# shellcheck shell=bash
# The parts of rl.sh: a srun step for the trainer, one for each engine, one for the orchestrator; outside Slurm the same
# as processes. KP_CHILD is the trainer, so that signals reach it as everywhere. What is lost, and what is done about it:
# docs/rl.md.

readonly KP_ENGINE_PAUSE_S=5   # an engine that is lost again and again waits so much longer each time
readonly KP_ENGINE_SERVED_S=60 # one that was there for so long begins to count anew
readonly KP_ENGINE_SILENT_S=60 # one that answers nothing for so long is ended, and started again
readonly KP_LAST_EVALUATION_S=120 KP_ORCHESTRATOR_LEAVES_S=20
KP_ENGINE_PIDS=() KP_ENGINE_TRIES=() KP_ENGINE_NEXT=() KP_ENGINE_SEEN=() KP_ENGINE_THERE=() KP_PROBES=()
KP_ORCHESTRATOR='' KP_LEAVING='' KP_EVER_SERVED=''

# --- what runs where -------------------------------------------------------------------------------------------------

kp_rl_bench() { # with --bench in KP_ARGUMENTS: a short run of its own in its place; sets KP_BENCH
    local word others=() name=${KP_ARGUMENTS[0]##*/}
    KP_BENCH=''
    for word in "${KP_ARGUMENTS[@]}"; do
        if [[ $word == --bench ]]; then KP_BENCH=1; else others+=("$word"); fi
    done
    [[ -n $KP_BENCH ]] || return 0
    printf -v word -- '--run.dir=runs/bench-%s-%(%m%d-%H%M%S)T' "${name%.toml}" -1
    KP_ARGUMENTS=("${others[0]}" --train.max_steps=20 "$word" --metrics.log_interval=1 --checkpoint.interval=0
        --rl.eval_interval=0 "${others[@]:1}")
}

kp_rl_bench_tell() {
    [[ -z $KP_BENCH ]] || kp_python -m kempner.history.loop_bench "$KP_RUN_DIR" || true
}

kp_rl_place() { # <rl.py arguments>...: sets KP_PLACEMENT, its text, and KP_NODES, KP_TASKS, KP_GPUS, those of the trainer
    local code=0 line names='' values=() tasks
    KP_JOB_NODES=$KP_NODES KP_JOB_TASKS=$KP_TASKS KP_JOB_GPUS=$KP_GPUS
    [[ -z ${SLURM_HET_SIZE:-} ]] ||
        kp_die "rl.sh in a heterogeneous job: start the engines by serve.sh in the other partition, and give their" \
            "addresses as rl.inference.urls"
    [[ -z ${KP_SCRIPT:-} ]] || kp_die "rl.sh does not take --script: use sbatch"
    [[ -n ${KEMPNER_TRAIN:-} ]] || KP_TRAIN=$KP_ROOT/scripts/rl.py
    KP_ORCHESTRATE=${KEMPNER_ORCHESTRATE:-$KP_ROOT/scripts/orchestrate.py}
    KP_SERVE=${KEMPNER_SERVE:-$KP_ROOT/scripts/serve.py}
    kp_need_packages
    KP_TOML=$(kp_python "$KP_TRAIN" "$@" --check) || code=$?
    if ((code == 0)); then
        [[ $KP_TOML != *$'\ndevice = "cpu"'* ]] || kp_in_job || KP_GPUS=0
        names=$(kp_rl_names)
        line=$(kp_python -m kempner.rl.placement --nodes "$KP_NODES" --tasks "$KP_TASKS" --gpus "$KP_GPUS" \
            --names "$names" <<<"$KP_TOML") || code=$?
    fi
    if ((code != 0)); then
        kp_log "not started: the check of the configuration ended with exit code $code"
        exit "$code"
    fi

    KP_NODE_CPUS=$((${KP_CPUS:-1} * KP_TASKS))
    mapfile -t values <<<"${line%%$'\n--'*}"
    read -r KP_NODES KP_TASKS KP_ENGINES KP_ON_NODE KP_ENGINE_NODE tasks <<<"${values[0]}"
    read -r KP_TP KP_SLOTS KP_RESTARTS KP_MAX_STEPS <<<"${values[1]}"
    KP_ENGINE_KIND=${values[2]} KP_PLACEMENT=("${values[@]:3}")
    KP_ENGINE_ARGS=()
    [[ $line != *$'\n--\n'* ]] || mapfile -t KP_ENGINE_ARGS <<<"${line#*$'\n--\n'}"
    IFS=, read -ra KP_NAMES <<<"$names"
    [[ -z ${KP_DRY_AWAY:-} ]] || KP_NODE_CPUS=$tasks # what the nodes have is not known
    if kp_in_job || [[ -n $KP_DRY ]]; then
        ((KP_NODE_CPUS >= tasks)) || kp_die "[rl.deployment] needs $tasks tasks on a node, which has $KP_NODE_CPUS" \
            "CPU(s): give --ntasks-per-node=$tasks --cpus-per-task=N"
        KP_CPUS=$((KP_NODE_CPUS / tasks))
    fi
    ((KP_GPUS == 0)) || KP_GPUS=$KP_TASKS
}

kp_rl_names() { # the nodes of the job, so far as they are known, with commas
    local names=''
    ! kp_in_job || names=$(scontrol show hostnames "$(kp_field NodeList)" 2>/dev/null | paste -sd,) || true
    [[ -n $KP_DRY ]] || kp_in_job || names=$(uname -n)
    echo "${names:-$(seq -f 'NODE%.0f' -s, "$KP_NODES")}"
}

kp_rl_tell() { # <rl.py arguments>...: with --check, says the placement and ends the script
    local word
    for word; do
        [[ $word == --check ]] || continue
        printf '%s\n' "${KP_PLACEMENT[@]}"
        exit 0
    done
    KP_EXCHANGE=$KP_RUN_DIR/rl/$KEMPNER_ATTEMPT_ID KP_RL_LOGS=$KP_RUN_DIR/logs/rl-$KEMPNER_ATTEMPT_ID
}

kp_rl_preflight() { # of all nodes of the job
    local KP_NODES=$KP_JOB_NODES KP_TASKS=$KP_JOB_TASKS KP_GPUS=$KP_JOB_GPUS
    kp_preflight
}

kp_dry_commands() { # in place of dry_run.sh's: the placement, and a command for each kind of process
    local command
    KP_EXCHANGE=$KP_RUN_DIR/rl/$KEMPNER_ATTEMPT_ID KP_RL_LOGS=$KP_RUN_DIR/logs/rl-$KEMPNER_ATTEMPT_ID
    ((${#KP_PLACEMENT[@]} == 0)) || printf '  %s\n' "${KP_PLACEMENT[@]}"
    for command in trainer orchestrator engine; do
        [[ $command != engine ]] || ((KP_ENGINES > 0)) || continue
        echo "the command of $([[ $command == engine ]] && echo "each engine" || echo "the $command"):"
        "kp_${command}_command" "${KP_ENGINE_NODE}" "${KP_ARGUMENTS[@]}"
        printf ' '
        printf ' %q' "${KP_SRUN[@]}"
        echo
    done
}

# --- the commands ----------------------------------------------------------------------------------------------------

kp_trainer_command() { # <anything> <rl.py arguments>...: sets KP_SRUN
    kp_srun_command "$KP_TRAIN" "${@:2}"
    # Without --mem=0 the first step on a node would take all of its memory.
    KP_SRUN=(srun --exact --mem=0 --nodelist="$(kp_names 0 "$KP_NODES")" "${KP_SRUN[@]:1}")
}

kp_orchestrator_command() { # <anything> <rl.py arguments>...: sets KP_SRUN: beside the trainer, with any CPU, without a GPU
    local KP_SRUN_NAME=$KP_SRUN_NAME-orchestrator KP_NODES=1 KP_TASKS=1 KP_GPUS=0 KP_CPUS=$KP_NODE_CPUS
    kp_srun_command "$KP_ORCHESTRATE" "${@:2}"
    KP_SRUN=(srun --overlap --mem=0 --nodelist="$(kp_names 0 1)" --gres=none --open-mode=append
    --output="$KP_RL_LOGS/orchestrator.log" "${KP_SRUN[@]:1}")
}

kp_engine_command() { # <number of its node>: sets KP_SRUN
    local KP_SRUN_NAME=$KP_SRUN_NAME-engine KP_NODES=1 KP_TASKS=1 KP_GPUS=$((KP_GPUS > 0 ? KP_TP : 0))
    local KP_CPUS=$((KP_CPUS * KP_TP))
    kp_engine_words
    kp_srun_command "${KP_WORDS[@]}"
    KP_SRUN=(srun --exact --mem=0 --nodelist="$(kp_names "$1" 1)" --open-mode=append
    --output="$KP_RL_LOGS/engine-${KEMPNER_ENGINE:-0}.log" "${KP_SRUN[@]:1}")
}

kp_engine_words() { # sets KP_WORDS, those of an engine after "python"
    local host=0.0.0.0
    kp_in_job || [[ -n $KP_DRY ]] || host=127.0.0.1
    KP_WORDS=("$KP_SERVE")
    [[ $KP_ENGINE_KIND == kit ]] || KP_WORDS=(-m kempner.rl.vllm_engine)
    KP_WORDS+=(--weights "$KP_EXCHANGE/weights" --host "$host" --port 0 --token-file "$KP_EXCHANGE/token"
        --publish "$KP_EXCHANGE/engines" --slots "$KP_SLOTS")
    [[ $KP_DEVICE == auto || $KP_ENGINE_KIND != kit ]] || KP_WORDS+=(--device "$KP_DEVICE")
    KP_WORDS+=("${KP_ENGINE_ARGS[@]}")
}

kp_names() { # <first> <how many>: names of nodes of the job, with commas
    local IFS=,
    echo "${KP_NAMES[*]:$1:$2}"
}

# --- starts ----------------------------------------------------------------------------------------------------------

kp_run_rl() { # <rl.py arguments>...: until all parts have ended; sets KP_CODE
    local engine
    for engine in "${KP_PLACEMENT[@]}"; do kp_log "$engine"; done
    KP_LATEST=$(readlink -- "$KP_RUN_DIR/logs/latest") || true
    KP_SRUN_LOG=$KP_RUN_DIR/logs/srun-$KEMPNER_ATTEMPT_ID.log
    kp_make_exchange || kp_die "$KP_EXCHANGE cannot be written: make room, or give another --run.dir"
    kp_in_job || kp_share_machine

    kp_start_trainer "$@"
    kp_start_orchestrator "$@"
    kp_start_guard
    for ((engine = 0; engine < KP_ENGINES; engine++)); do
        KP_ENGINE_TRIES[engine]=0
        kp_start_engine "$engine"
    done
    [[ -z $KP_PENDING ]] || kp_on_signal "$KP_PENDING"
    while kill -0 "$KP_CHILD" 2>/dev/null; do
        kp_look_at_run
        kp_look_at_orchestrator
        kp_look_at_engines
        sleep 0.2 || true
    done
    kp_wait
    kp_end_others
}

kp_make_exchange() { # the directory of this attempt, for this user alone, with a token for requests to engines
    mkdir -p -- "$KP_RL_LOGS" || return 1
    (umask 077 && mkdir -p -- "$KP_EXCHANGE"/{weights,engines} &&
        od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"$KP_EXCHANGE/token")
}

kp_share_machine() { # sets KP_SEEN, the GPUs of each part outside Slurm, engines first; and the threads of each
    local parts=$((KP_ENGINES + KP_TASKS))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > parts ? $(nproc) / parts : 1))}
    ((KP_JOB_GPUS > 0)) || return 0
    if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
        IFS=, read -ra KP_SEEN <<<"$CUDA_VISIBLE_DEVICES"
    else
        mapfile -t KP_SEEN < <(seq 0 $((KP_JOB_GPUS - 1)))
    fi
}

kp_seen() { # <first> <how many>: exports CUDA_VISIBLE_DEVICES outside Slurm, where this machine has GPUs
    local IFS=,
    ((KP_JOB_GPUS == 0)) || export CUDA_VISIBLE_DEVICES="${KP_SEEN[*]:$1:$2}"
}

kp_tied() { # <signal>: the words before a command that gets that signal when this shell dies, of kill -9, too
    setpriv --pdeathsig "$1" true 2>/dev/null && echo "setpriv --pdeathsig $1 --" || true
}

kp_start_trainer() { # <rl.py arguments>...
    local words=("${KP_INSIDE[@]}" "$KP_PYTHON") tied
    if kp_in_job; then
        kp_trainer_command 0 "$@"
        # What srun says of a task that dies is looked at afterwards: see kp_srun.
        kp_start "${KP_SRUN[@]}" 2> >(trap '' TERM INT HUP USR1 USR2 && exec tee -a -- "$KP_SRUN_LOG" >&2)
        return
    fi
    ((KP_TASKS == 1)) || words+=(-m torch.distributed.run --standalone --nproc-per-node="$KP_TASKS")
    read -ra tied < <(kp_tied TERM) || true
    kp_seen $((KP_ENGINES * KP_TP)) "$KP_TASKS"
    kp_start "${tied[@]}" "${words[@]}" "$KP_TRAIN" "$@"
}

kp_start_orchestrator() { # <rl.py arguments>...
    local tied
    if kp_in_job; then
        kp_orchestrator_command 0 "$@"
        setsid "${KP_SRUN[@]}" </dev/null 2> >(trap '' TERM INT HUP USR1 USR2 && exec tee -a -- "$KP_SRUN_LOG" >&2) &
    else
        read -ra tied < <(kp_tied TERM) || true
        setsid "${tied[@]}" env CUDA_VISIBLE_DEVICES= "${KP_INSIDE[@]}" "$KP_PYTHON" "$KP_ORCHESTRATE" "$@" \
            </dev/null >>"$KP_RL_LOGS/orchestrator.log" 2>&1 &
    fi
    KP_ORCHESTRATOR=$!
}

kp_start_guard() { # on two nodes with engines, if there are any: see rl_guard.sh
    local guards=$((KP_JOB_NODES - KP_ENGINE_NODE))
    guards=$((guards < 2 ? guards : 2))
    kp_in_job && ((KP_ENGINES > 0 && KP_ENGINE_NODE > 0)) && kp_is_batch && [[ $(kp_field Requeue) != 0 ]] || return 0
    setsid srun --overlap --no-kill --mem=0 --gres=none --nodes="$guards" --ntasks="$guards" --ntasks-per-node=1 \
        --cpus-per-task=1 --nodelist="$(kp_names "$KP_ENGINE_NODE" "$guards")" --job-name="$KP_SRUN_NAME-guard" \
        bash "$KP_LIB/rl_guard.sh" "$(kp_job_id)" "${KP_NAMES[0]}" </dev/null >/dev/null 2>&1 &
    KP_GUARD=$!
}

kp_start_engine() { # <engine>
    local tied
    rm -f -- "$KP_EXCHANGE/engines/engine-$1"
    unset "KP_ENGINE_THERE[$1]" "KP_PROBES[$1]"
    export KEMPNER_ENGINE=$1
    if kp_in_job; then
        kp_engine_command $((KP_ENGINE_NODE + $1 / KP_ON_NODE))
        setsid "${KP_SRUN[@]}" </dev/null &
    else
        kp_engine_words
        kp_seen $(($1 * KP_TP)) "$KP_TP"
        read -ra tied < <(kp_tied KILL) || true
        setsid "${tied[@]}" "${KP_INSIDE[@]}" "$KP_PYTHON" "${KP_WORDS[@]}" \
            </dev/null >>"$KP_RL_LOGS/engine-$1.log" 2>&1 &
    fi
    KP_ENGINE_PIDS[$1]=$!
    unset KEMPNER_ENGINE
}

# --- while they run --------------------------------------------------------------------------------------------------

kp_look_at_run() { # once the trainer has the run: links to the logs of all parts; what earlier attempts have left goes
    local latest name
    [[ -n ${KP_LATEST+set} ]] || return 0
    latest=$(readlink -- "$KP_RUN_DIR/logs/latest") || return 0
    [[ $latest != "$KP_LATEST" ]] || return 0
    unset KP_LATEST
    ln -sfn -- rank-0.log "$KP_RUN_DIR/logs/$latest/trainer-0.log"
    for name in orchestrator $(seq -f 'engine-%.0f' 0 $((KP_ENGINES - 1))); do
        ln -sfn -- "../${KP_RL_LOGS##*/}/$name.log" "$KP_RUN_DIR/logs/$latest/$name.log"
    done
    for name in "$KP_RUN_DIR"/rl/*; do
        [[ $name == "$KP_EXCHANGE" ]] || rm -rf -- "$name"
    done
}

kp_look_at_orchestrator() { # without it nothing is left to train on
    local code=0
    [[ -n $KP_ORCHESTRATOR ]] && ! kill -0 "$KP_ORCHESTRATOR" 2>/dev/null || return 0
    wait "$KP_ORCHESTRATOR" || code=$?
    KP_ORCHESTRATOR=''
    # Its end is orderly once the last version is there: the trainer still saves.
    if ((code == 0)) && [[ -e $(printf '%s/weights/v%08d/manifest.json' "$KP_EXCHANGE" "$KP_MAX_STEPS") ]]; then
        return 0
    fi
    kp_log "the orchestrator has ended with exit code $code: see $KP_RL_LOGS/orchestrator.log"
    kp_leave_because "$code"
}

kp_leave_because() { # <exit code>: the trainer saves and leaves; that code is bad input if it is 2
    [[ -z $KP_LEAVING ]] || return 0
    KP_LEAVING=1
    (($1 != 2)) || KP_BAD_INPUT=1
    kp_signal TERM
}

kp_run_leaves() { # true once nothing is worth a new engine
    [[ -n $KP_LEAVING || $KP_SIGNAL =~ ^(TERM|INT|USR1|HUP)$ || -n $KP_DECIDED || -z $KP_ORCHESTRATOR ]]
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

kp_look_at_engine() { # <engine>: of one that runs: does it answer?
    local engine=$1 url code=0
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
    if ((SECONDS - KP_ENGINE_SEEN[engine] > KP_ENGINE_SILENT_S)); then
        kp_log "engine $engine does not answer for $KP_ENGINE_SILENT_S s: ending it"
        KP_ENGINE_SEEN[engine]=$SECONDS
        kp_kill_process "${KP_ENGINE_PIDS[engine]}"
    fi
}

kp_probe() { # <URL>: does a server answer anything there?
    local place=${1#*://} line=''
    place=${place%%/*}
    # shellcheck disable=SC2016 # expanded in there
    line=$(trap '' TERM INT HUP USR1 USR2 && exec timeout -s KILL 10 bash -c 'exec 3<>"/dev/tcp/$0/$1" &&
        printf "GET /health HTTP/1.0\r\n\r\n" >&3 && head -n 1 <&3' \
        "$(sed 's/^\[//; s/\]$//' <<<"${place%:*}")" "${place##*:}" 2>/dev/null) || true
    [[ $line == HTTP/* ]]
}

kp_kill_process() { # <pid>: at once; srun, which kills its tasks then, or the process itself
    if kp_in_job; then kill -TERM "$1" 2>/dev/null || true; else kill -KILL "$1" 2>/dev/null || true; fi
}

kp_engine_ended() { # <engine> <exit code>
    local engine=$1
    if (($2 == 2)) && [[ -z $KP_EVER_SERVED ]]; then
        kp_log "engine $engine has refused its input: see $KP_RL_LOGS/engine-$engine.log"
        kp_leave_because 2
        return
    fi
    [[ -z ${KP_ENGINE_THERE[engine]:-} ]] || ((SECONDS - KP_ENGINE_THERE[engine] < KP_ENGINE_SERVED_S)) ||
        KP_ENGINE_TRIES[engine]=0
    KP_ENGINE_TRIES[engine]=$((KP_ENGINE_TRIES[engine] + 1))
    kp_log "engine $engine has ended with exit code $2"
    if ((KP_ENGINE_TRIES[engine] > KP_RESTARTS)); then
        kp_log "engine $engine is not started again: lost $KP_RESTARTS times in a row before (rl.inference.restarts)"
        return
    fi
    KP_ENGINE_NEXT[engine]=$((SECONDS + (KP_ENGINE_TRIES[engine] - 1) * KP_ENGINE_PAUSE_S))
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

# --- the end ---------------------------------------------------------------------------------------------------------

kp_end_others() { # after the trainer: the orchestrator, which may have an evaluation to finish; then the engines
    local engine end=$((SECONDS + KP_ORCHESTRATOR_LEAVES_S)) told='' name=$KP_SRUN_NAME
    kp_verdict
    if [[ -n $KP_ORCHESTRATOR ]] && kill -0 "$KP_ORCHESTRATOR" 2>/dev/null; then
        KP_CHILD=$KP_ORCHESTRATOR KP_SRUN_NAME+=-orchestrator # signals reach it now
        [[ $KP_STATE != 'done' || -n $KP_SIGNAL ]] || end=$((SECONDS + KP_LAST_EVALUATION_S)) told=no
        while kill -0 "$KP_ORCHESTRATOR" 2>/dev/null; do
            [[ -n $told ]] || { told=1 && kp_tell; }
            if ((SECONDS >= end)); then
                kp_log "the orchestrator has not ended by itself: ending it"
                kp_kill_process "$KP_ORCHESTRATOR"
                end=$((SECONDS + 10))
            fi
            [[ $told != no ]] || kp_look_at_engines
            sleep 0.1 || true
        done
    fi
    KP_SRUN_NAME=$name KP_LEAVING=1
    [[ -z ${KP_GUARD:-} ]] || kill -TERM "$KP_GUARD" 2>/dev/null || true
    kp_end_engines
    KP_CHILD=''
    rm -rf -- "$KP_EXCHANGE"
    rmdir -- "$KP_RUN_DIR/rl" 2>/dev/null || true
    [[ -z ${KP_BAD_INPUT:-} ]] || KP_CODE=2
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
