# shellcheck shell=bash
# The parts of rl.sh up to their start: a srun step for the trainer, one for each engine, one for
# the orchestrator; outside Slurm the same as processes. KP_CHILD is the trainer, so that signals
# reach it as everywhere. rl_watch.sh looks after them.

KP_OWN_STEPS=rl.sh
KP_ENGINE_PIDS=() KP_ENGINE_TRIES=()
KP_ORCHESTRATOR=''

# --- what runs where ------------------------------------------------------------------------------

kp_rl_bench() { # with --bench in KP_ARGUMENTS: a short run of its own in its place; sets KP_BENCH
    local word others=() name=${KP_ARGUMENTS[0]##*/}
    KP_BENCH=''
    for word in "${KP_ARGUMENTS[@]}"; do
        if [[ $word == --bench ]]; then KP_BENCH=1; else others+=("$word"); fi
    done
    [[ -n $KP_BENCH ]] || return 0
    printf -v word -- '--run.dir=runs/bench-%s-%(%m%d-%H%M%S)T' "${name%.toml}" -1
    KP_ARGUMENTS=("${others[0]}" --train.max_steps=20 "$word" --metrics.log_interval=1
        --checkpoint.interval=0 --rl.eval_interval=0 "${others[@]:1}")
}

kp_rl_bench_tell() {
    [[ -z $KP_BENCH ]] ||
        kp_python "$KP_MODULE" kempner.jobs.report.loop_bench "$KP_RUN_DIR" || true
}

kp_rl_place() { # <rl.py arguments>...: sets KP_PLACEMENT, its text, and KP_NODES, KP_TASKS, KP_GPUS
    # of the trainer
    local code=0 line names='' values=() tasks toml
    KP_JOB_NODES=$KP_NODES KP_JOB_TASKS=$KP_TASKS KP_JOB_GPUS=$KP_GPUS
    [[ -z ${SLURM_HET_SIZE:-} ]] ||
        kp_die "rl.sh in a heterogeneous job: start the engines by serve.sh in the other" \
            "partition, and give their addresses as rl.inference.urls"
    [[ -z ${KP_SCRIPT:-} ]] || kp_die "rl.sh does not take --script: use sbatch"
    [[ -n ${KEMPNER_TRAIN:-} ]] || KP_TRAIN=$KP_ROOT/scripts/rl.py
    KP_ORCHESTRATE=$(kp_of_copy "${KEMPNER_ORCHESTRATE:-$KP_ROOT/scripts/orchestrate.py}")
    KP_SERVE=$(kp_of_copy "${KEMPNER_SERVE:-$KP_ROOT/scripts/serve.py}")
    kp_need_packages
    kp_checked numpy "$KP_MODULE" kempner.jobs.check "$KP_TRAIN" "$@" || code=$?
    toml=${KP_VALUES[0]:-}
    if ((code == 0)); then
        [[ $toml != *$'\ndevice = "cpu"'* ]] || kp_in_job || KP_GPUS=0
        names=$(kp_rl_names)
        line=$(kp_python_of kempner.extensions.planner.placement "$KP_MODULE" \
            kempner.extensions.planner.placement --nodes "$KP_NODES" --tasks "$KP_TASKS" \
            --gpus "$KP_GPUS" --names "$names" <<<"$toml") || code=$?
    fi
    if ((code != 0)); then
        kp_log "not started: the check of the configuration ended with exit code $code"
        exit "$code"
    fi

    KP_NODE_CPUS=$((${KP_CPUS:-1} * KP_TASKS))
    # see kp_values
    line=${line#*kempner-answer$'\n'} line=${line%$'\n'kempner-answer*} line=${line%$'\n'}
    mapfile -t values <<<"${line%%$'\n--'*}"
    [[ ${values[0]} =~ ^[0-9]+(\ -?[0-9]+){5}$ && ${values[1]:-} =~ ^[0-9]+(\ [0-9]+){3}$ ]] ||
        kp_die "kempner.extensions.planner.placement has answered '${values[0]}':" \
            "see what $KP_PYTHON prints"
    read -r KP_NODES KP_TASKS KP_ENGINES KP_ON_NODE KP_ENGINE_NODE tasks <<<"${values[0]}"
    read -r KP_TP KP_SLOTS KP_ENGINE_RESTARTS KP_MAX_STEPS <<<"${values[1]}"
    KP_ENGINE_KIND=${values[2]} KP_PLACEMENT=("${values[@]:3}")
    KP_ENGINE_ARGS=()
    [[ $line != *$'\n--\n'* ]] || mapfile -t KP_ENGINE_ARGS <<<"${line#*$'\n--\n'}"
    IFS=, read -ra KP_NAMES <<<"$names"
    [[ -z ${KP_DRY_AWAY:-} ]] || KP_NODE_CPUS=$tasks # what the nodes have is not known
    if kp_in_job || [[ -n $KP_DRY ]]; then
        ((KP_NODE_CPUS >= tasks)) ||
            kp_die "[rl.deployment] needs $tasks tasks on a node, which has $KP_NODE_CPUS" \
                "CPU(s): give --ntasks-per-node=$tasks --cpus-per-task=N"
        KP_CPUS=$((KP_NODE_CPUS / tasks))
    fi
    ((KP_GPUS == 0)) || KP_GPUS=$KP_TASKS
}

kp_rl_names() { # the nodes of the job, so far as they are known, with commas
    local names=''
    ! kp_in_job ||
        names=$(scontrol show hostnames "$(kp_field NodeList)" 2>/dev/null | paste -sd,) || true
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
    KP_EXCHANGE=$KP_RUN_DIR/rl/$KEMPNER_ATTEMPT_ID
    KP_RL_LOGS=$KP_RUN_DIR/logs/rl-$KEMPNER_ATTEMPT_ID
}

kp_rl_preflight() { # of all nodes of the job
    local KP_NODES=$KP_JOB_NODES KP_TASKS=$KP_JOB_TASKS KP_GPUS=$KP_JOB_GPUS
    kp_preflight
}

kp_dry_commands() { # in place of dry_run.sh's: the placement, and a command for each kind of
    # process
    local command
    KP_EXCHANGE=$KP_RUN_DIR/rl/$KEMPNER_ATTEMPT_ID
    KP_RL_LOGS=$KP_RUN_DIR/logs/rl-$KEMPNER_ATTEMPT_ID
    ((${#KP_PLACEMENT[@]} == 0)) || printf '  %s\n' "${KP_PLACEMENT[@]}"
    for command in trainer orchestrator engine; do
        [[ $command != engine ]] || ((KP_ENGINES > 0)) || continue
        echo "the command of" \
            "$([[ $command == engine ]] && echo "each engine" || echo "the $command"):"
        "kp_${command}_command" "${KP_ENGINE_NODE}" "${KP_ARGUMENTS[@]}"
        printf ' '
        printf ' %q' "${KP_SRUN[@]}"
        echo
    done
}

# --- the commands ---------------------------------------------------------------------------------

kp_trainer_command() { # <anything> <rl.py arguments>...: sets KP_SRUN
    # Without --mem=0 the first step on a node would take all of its memory.
    kp_srun_command --exact --mem=0 --nodelist="$(kp_names 0 "$KP_NODES")" -- "$KP_TRAIN" "${@:2}"
}

kp_orchestrator_command() { # <anything> <rl.py arguments>...: sets KP_SRUN: beside the trainer,
    # without a GPU
    local KP_SRUN_NAME=$KP_SRUN_NAME-orchestrator KP_NODES=1 KP_TASKS=1 KP_GPUS=0
    local KP_CPUS=$KP_NODE_CPUS
    kp_srun_command --overlap --mem=0 --nodelist="$(kp_names 0 1)" --gres=none --open-mode=append \
        --output="$KP_RL_LOGS/orchestrator.log" -- "$KP_ORCHESTRATE" "${@:2}"
}

kp_engine_command() { # <number of its node>: sets KP_SRUN
    local KP_SRUN_NAME=$KP_SRUN_NAME-engine KP_NODES=1 KP_TASKS=1
    local KP_GPUS=$((KP_GPUS > 0 ? KP_TP : 0))
    local KP_CPUS=$((KP_CPUS * KP_TP))
    kp_engine_words
    kp_srun_command --exact --mem=0 --nodelist="$(kp_names "$1" 1)" --open-mode=append \
        --output="$KP_RL_LOGS/engine-${KEMPNER_ENGINE:-0}.log" -- "${KP_ENGINE_WORDS[@]}"
}

kp_engine_words() { # sets KP_ENGINE_WORDS, those of an engine after "python"
    local host=0.0.0.0
    kp_in_job || [[ -n $KP_DRY ]] || host=127.0.0.1
    KP_ENGINE_WORDS=("$KP_SERVE")
    [[ $KP_ENGINE_KIND == kit ]] ||
        KP_ENGINE_WORDS=("$KP_MODULE" kempner.extensions.rl.engines.vllm_engine)
    KP_ENGINE_WORDS+=(--weights "$KP_EXCHANGE/weights" --host "$host" --port 0 --token-file
        "$KP_EXCHANGE/token" --publish "$KP_EXCHANGE/engines" --slots "$KP_SLOTS")
    [[ $KP_DEVICE == auto || $KP_ENGINE_KIND != kit ]] || KP_ENGINE_WORDS+=(--device "$KP_DEVICE")
    KP_ENGINE_WORDS+=("${KP_ENGINE_ARGS[@]}")
}

kp_names() { # <first> <how many>: names of nodes of the job, with commas
    local IFS=,
    echo "${KP_NAMES[*]:$1:$2}"
}

# --- starts ---------------------------------------------------------------------------------------

kp_run_rl() { # <rl.py arguments>...: until all parts have ended; sets KP_CODE
    # The logs of the attempt before, until those of this one are there. Of the orchestrator: when
    # its sign of life was last looked at, that sign, and what waits for room. Whether a part has
    # refused its input.
    local engine before listened=0 last_beat='' waits='' bad_input=''
    for engine in "${KP_PLACEMENT[@]}"; do kp_log "$engine"; done
    before=$(readlink -- "$KP_RUN_DIR/logs/latest") || before=none
    kp_open_srun_log
    kp_make_exchange ||
        kp_die "$KP_EXCHANGE cannot be written: make room, or give another --run.dir"
    kp_in_job || kp_share_machine

    kp_start_trainer "$@"
    kp_start_orchestrator "$@"
    kp_start_guard "${KP_NAMES[@]:1}"
    for ((engine = 0; engine < KP_ENGINES; engine++)); do
        KP_ENGINE_TRIES[engine]=0
        kp_start_engine "$engine"
    done
    [[ -z $KP_PENDING ]] || kp_on_signal "$KP_PENDING"
    while kill -0 "$KP_CHILD" 2>/dev/null; do
        kp_look_at_run
        kp_see_absence
        kp_look_at_orchestrator
        kp_look_at_engines
        sleep 0.2 || true
    done
    kp_wait
    kp_end_others
}

kp_make_exchange() { # the directory of this attempt, for this user alone, with a token for requests
    # to engines
    mkdir -p -- "$KP_RL_LOGS" || return 1
    (umask 077 && mkdir -p -- "$KP_EXCHANGE"/{weights,engines} &&
        od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"$KP_EXCHANGE/token")
}

kp_share_machine() { # sets KP_VISIBLE_GPUS, the GPUs of each part outside Slurm, engines first; and
    # the threads of each
    local parts=$((KP_ENGINES + KP_TASKS))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > parts ? $(nproc) / parts : 1))}
    ((KP_JOB_GPUS > 0)) || return 0
    if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
        IFS=, read -ra KP_VISIBLE_GPUS <<<"$CUDA_VISIBLE_DEVICES"
    else
        mapfile -t KP_VISIBLE_GPUS < <(seq 0 $((KP_JOB_GPUS - 1)))
    fi
}

kp_set_visible_gpus() { # <first> <how many>: exports CUDA_VISIBLE_DEVICES outside Slurm, where this
    # machine has GPUs
    local IFS=,
    ((KP_JOB_GPUS == 0)) || export CUDA_VISIBLE_DEVICES="${KP_VISIBLE_GPUS[*]:$1:$2}"
}

kp_dies_with_us() { # <signal>: the words before a command that gets that signal when this shell
    # dies, of kill -9, too
    setpriv --pdeathsig "$1" true 2>/dev/null && echo "setpriv --pdeathsig $1 --" || true
}

kp_start_trainer() { # <rl.py arguments>...
    local words=("${KP_INSIDE[@]}" "$KP_PYTHON") tied blocked
    if kp_in_job; then
        kp_trainer_command 0 "$@"
        # What srun says of a task that dies is looked at afterwards: see kp_srun.
        kp_start "${KP_SRUN[@]}" \
            2> >(trap '' TERM INT HUP USR1 USR2 && exec tee -a -- "$KP_SRUN_LOG" >&2)
        return
    fi
    ((KP_TASKS == 1)) || words+=(-m torch.distributed.run --standalone --nproc-per-node="$KP_TASKS")
    read -ra tied < <(kp_dies_with_us TERM) || true
    kp_set_visible_gpus $((KP_ENGINES * KP_TP)) "$KP_TASKS"
    read -ra blocked < <(kp_blocked) || true
    kp_start "${tied[@]}" "${blocked[@]}" "${words[@]}" "$KP_TRAIN" "$@"
}

kp_start_orchestrator() { # <rl.py arguments>...
    local tied
    if kp_in_job; then
        kp_orchestrator_command 0 "$@"
        setsid "${KP_SRUN[@]}" </dev/null \
            2> >(trap '' TERM INT HUP USR1 USR2 && exec tee -a -- "$KP_SRUN_LOG" >&2) &
    else
        read -ra tied < <(kp_dies_with_us TERM) || true
        setsid "${tied[@]}" env CUDA_VISIBLE_DEVICES= "${KP_INSIDE[@]}" "$KP_PYTHON" \
            "$KP_ORCHESTRATE" "$@" \
            </dev/null >>"$KP_RL_LOGS/orchestrator.log" 2>&1 &
    fi
    KP_ORCHESTRATOR=$!
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
        kp_set_visible_gpus $(($1 * KP_TP)) "$KP_TP"
        read -ra tied < <(kp_dies_with_us KILL) || true
        setsid "${tied[@]}" "${KP_INSIDE[@]}" "$KP_PYTHON" "${KP_ENGINE_WORDS[@]}" \
            </dev/null >>"$KP_RL_LOGS/engine-$1.log" 2>&1 &
    fi
    KP_ENGINE_PIDS[$1]=$!
    unset KEMPNER_ENGINE
}
