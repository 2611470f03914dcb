# shellcheck shell=bash
# The parts of rl.sh up to their start: one srun step each for the trainer, every engine and the
# orchestrator; outside Slurm they are processes. KP_CHILD is the trainer, so that signals reach it
# as in other scripts. rl_watch.sh monitors them.

# bench: not empty with --bench; job: job_nodes, job_tasks, job_gpus, node_cpus; engines: engines
# (their number), kind, engine_node (their first node), on_node (number per node), tp, slots,
# restarts; max_steps; programs: orchestrate, serve; directories: exchange, logs
declare -A KP_RL=()

kp_own_steps() { # in place of restart.sh's: names this script
    echo rl.sh
}

# --- what runs where ------------------------------------------------------------------------------

kp_rl_bench() { # with --bench in KP_ARGUMENTS: replaces the run by a short, separate one
    local word others=() name=${KP_ARGUMENTS[0]##*/}
    KP_RL[bench]=''
    for word in "${KP_ARGUMENTS[@]}"; do
        if [[ $word == --bench ]]; then KP_RL[bench]=1; else others+=("$word"); fi
    done
    [[ -n ${KP_RL[bench]} ]] || return 0
    printf -v word -- '--run.dir=runs/bench-%s-%(%m%d-%H%M%S)T' "${name%.toml}" -1
    kp_set_arguments "${others[0]}" --train.max_steps=20 "$word" --metrics.log_interval=1 \
        --checkpoint.interval=0 --rl.eval_interval=0 "${others[@]:1}"
}

kp_rl_bench_tell() {
    [[ -z ${KP_RL[bench]} ]] ||
        kp_python "$KP_MODULE" kempner.jobs.report.loop_bench "$KP_RUN_DIR" || true
}

kp_rl_place() { # <rl.py arguments>...: sets KP_PLACEMENT (its text) and the trainer's
    # KP_NODES, KP_TASKS, KP_GPUS
    local code=0 line names='' values=() toml
    local nodes per_node engines on_node engine_node tasks tp slots restarts max_steps
    local gpu_count=$KP_GPUS cpus=${KP_CPUS:-}
    KP_RL+=([job_nodes]=$KP_NODES [job_tasks]=$KP_TASKS [job_gpus]=$KP_GPUS)
    [[ -z ${SLURM_HET_SIZE:-} ]] ||
        kp_die "rl.sh in a heterogeneous job: start the engines by serve.sh in the other" \
            "partition, and give their addresses as rl.inference.urls"
    [[ -z ${KP_SCRIPT:-} ]] || kp_die "rl.sh does not take --script: use sbatch"
    [[ -n ${KEMPNER_TRAIN:-} ]] || kp_use_program "$KP_ROOT/scripts/rl.py"
    KP_RL[orchestrate]=$(kp_of_copy "${KEMPNER_ORCHESTRATE:-$KP_ROOT/scripts/orchestrate.py}")
    KP_RL[serve]=$(kp_of_copy "${KEMPNER_SERVE:-$KP_ROOT/scripts/serve.py}")
    kp_need_packages
    kp_checked numpy "$KP_MODULE" kempner.jobs.check "$KP_TRAIN" "$@" || code=$?
    toml=${KP_VALUES[0]:-}
    if ((code == 0)); then
        [[ $toml != *$'\ndevice = "cpu"'* ]] || kp_in_job || gpu_count=0
        names=$(kp_rl_names)
        line=$(kp_python_of kempner.extensions.planner.placement "$KP_MODULE" \
            kempner.extensions.planner.placement --nodes "$KP_NODES" --tasks "$KP_TASKS" \
            --gpus "$gpu_count" --names "$names" <<<"$toml") || code=$?
    fi
    if ((code != 0)); then
        kp_log "not started: the check of the configuration ended with exit code $code"
        exit "$code"
    fi

    KP_RL[node_cpus]=$((${KP_CPUS:-1} * KP_TASKS))
    # see kp_values
    line=${line#*kempner-answer$'\n'} line=${line%$'\n'kempner-answer*} line=${line%$'\n'}
    mapfile -t values <<<"${line%%$'\n--'*}"
    [[ ${values[0]} =~ ^[0-9]+(\ -?[0-9]+){5}$ && ${values[1]:-} =~ ^[0-9]+(\ [0-9]+){3}$ ]] ||
        kp_die "kempner.extensions.planner.placement has answered '${values[0]}':" \
            "see what $KP_PYTHON prints"
    read -r nodes per_node engines on_node engine_node tasks <<<"${values[0]}"
    read -r tp slots restarts max_steps <<<"${values[1]}"
    KP_RL+=([engines]=$engines [on_node]=$on_node [engine_node]=$engine_node [kind]=${values[2]}
        [tp]=$tp [slots]=$slots [restarts]=$restarts [max_steps]=$max_steps)
    KP_PLACEMENT=("${values[@]:3}")
    KP_ENGINE_ARGS=()
    [[ $line != *$'\n--\n'* ]] || mapfile -t KP_ENGINE_ARGS <<<"${line#*$'\n--\n'}"
    IFS=, read -ra KP_NAMES <<<"$names"
    [[ -z ${KP_DRY_AWAY:-} ]] || KP_RL[node_cpus]=$tasks # the nodes' resources are unknown
    if kp_in_job || [[ -n $KP_DRY ]]; then
        ((KP_RL[node_cpus] >= tasks)) ||
            kp_die "[rl.deployment] needs $tasks tasks on a node, which has ${KP_RL[node_cpus]}" \
                "CPU(s): give --ntasks-per-node=$tasks --cpus-per-task=N"
        cpus=$((KP_RL[node_cpus] / tasks))
    fi
    kp_set_size "$nodes" "$per_node" $((gpu_count > 0 ? per_node : 0)) "$cpus"
}

kp_rl_names() { # prints the job's nodes, as far as known, separated by commas
    local names=''
    ! kp_in_job ||
        names=$(scontrol show hostnames "$(kp_field NodeList)" 2>/dev/null | paste -sd,) || true
    [[ -n $KP_DRY ]] || kp_in_job || names=$(uname -n)
    echo "${names:-$(seq -f 'NODE%.0f' -s, "$KP_NODES")}"
}

kp_rl_tell() { # <rl.py arguments>...: with --check, prints the placement and exits
    local word
    for word; do
        [[ $word == --check ]] || continue
        printf '%s\n' "${KP_PLACEMENT[@]}"
        exit 0
    done
    KP_RL[exchange]=$KP_RUN_DIR/rl/$KEMPNER_ATTEMPT_ID
    KP_RL[logs]=$KP_RUN_DIR/logs/rl-$KEMPNER_ATTEMPT_ID
}

kp_rl_preflight() { # checks all nodes of the job
    local KP_NODES=${KP_RL[job_nodes]} KP_TASKS=${KP_RL[job_tasks]} KP_GPUS=${KP_RL[job_gpus]}
    kp_preflight
}

kp_dry_commands() { # in place of dry_run.sh's: prints the placement, and a command for each
    # kind of process
    local command
    KP_RL[exchange]=$KP_RUN_DIR/rl/$KEMPNER_ATTEMPT_ID
    KP_RL[logs]=$KP_RUN_DIR/logs/rl-$KEMPNER_ATTEMPT_ID
    ((${#KP_PLACEMENT[@]} == 0)) || printf '  %s\n' "${KP_PLACEMENT[@]}"
    for command in trainer orchestrator engine; do
        [[ $command != engine ]] || ((KP_RL[engines] > 0)) || continue
        echo "the command of" \
            "$([[ $command == engine ]] && echo "each engine" || echo "the $command"):"
        "kp_${command}_command" "${KP_RL[engine_node]}" "${KP_ARGUMENTS[@]}"
        printf ' '
        printf ' %q' "${KP_SRUN[@]}"
        echo
    done
}

# --- the commands ---------------------------------------------------------------------------------

kp_trainer_command() { # <anything> <rl.py arguments>...: sets KP_SRUN for the trainer
    # Without --mem=0, the first step on a node would take all its memory.
    kp_srun_command --exact --mem=0 --nodelist="$(kp_names 0 "$KP_NODES")" -- "$KP_TRAIN" "${@:2}"
}

kp_orchestrator_command() { # <anything> <rl.py arguments>...: sets KP_SRUN, which runs beside the
    # trainer, without a GPU
    local KP_SRUN_NAME=$KP_SRUN_NAME-orchestrator KP_NODES=1 KP_TASKS=1 KP_GPUS=0
    local KP_CPUS=${KP_RL[node_cpus]}
    kp_srun_command --overlap --mem=0 --nodelist="$(kp_names 0 1)" --gres=none --open-mode=append \
        --output="${KP_RL[logs]}/orchestrator.log" -- "${KP_RL[orchestrate]}" "${@:2}"
}

kp_engine_command() { # <number of its node>: sets KP_SRUN for an engine
    local KP_SRUN_NAME=$KP_SRUN_NAME-engine KP_NODES=1 KP_TASKS=1
    local KP_GPUS=$((KP_GPUS > 0 ? KP_RL[tp] : 0))
    local KP_CPUS=$((KP_CPUS * KP_RL[tp]))
    kp_engine_words
    kp_srun_command "${step_place:---exact}" --mem=0 --nodelist="$(kp_names "$1" 1)" \
        --open-mode=append --output="${KP_RL[logs]}/engine-${KEMPNER_ENGINE:-0}.log" \
        -- "${KP_ENGINE_WORDS[@]}"
}

kp_engine_words() { # sets KP_ENGINE_WORDS, an engine's arguments of "python"
    local host=0.0.0.0 exchange=${KP_RL[exchange]}
    kp_in_job || [[ -n $KP_DRY ]] || host=127.0.0.1
    KP_ENGINE_WORDS=("${KP_RL[serve]}")
    [[ ${KP_RL[kind]} == kit ]] ||
        KP_ENGINE_WORDS=("$KP_MODULE" kempner.extensions.rl.engines.vllm_engine)
    KP_ENGINE_WORDS+=(--weights "$exchange/weights" --host "$host" --port 0
        --token-file "$exchange/token" --publish "$exchange/engines" --slots "${KP_RL[slots]}")
    [[ $KP_DEVICE == auto || ${KP_RL[kind]} != kit ]] || KP_ENGINE_WORDS+=(--device "$KP_DEVICE")
    KP_ENGINE_WORDS+=("${KP_ENGINE_ARGS[@]}")
}

kp_names() { # <first> <count>: prints names of the job's nodes, separated by commas
    local IFS=,
    echo "${KP_NAMES[*]:$1:$2}"
}

# --- starts ---------------------------------------------------------------------------------------

kp_run_rl() { # <rl.py arguments>...: runs all parts until they have ended; sets KP_CODE
    # The logs of the previous attempt, until this one's exist. Orchestrator: when its heartbeat was
    # last checked, the heartbeat, when it last changed, and what waits for disk space. When this
    # loop last ran. Whether a part has refused its input, whether the run is ending, and whether
    # any engine has ever served. How an engine's step shares its node.
    local engine before orchestrator='' listened=0 last_beat='' orchestrator_seen_at=0 waits=''
    local awake='' bad_input='' leaving='' ever_served='' step_place=--exact
    # Per engine: its process, consecutive starts, when it may restart, when it last answered, when
    # it first served, and the process that probes it.
    local engine_pids=() engine_tries=() engine_next=() engine_seen=() engine_there=() probes=()
    for engine in "${KP_PLACEMENT[@]}"; do kp_log "$engine"; done
    before=$(readlink -- "$KP_RUN_DIR/logs/latest") || before=none
    kp_open_srun_log
    kp_make_exchange ||
        kp_die "${KP_RL[exchange]} cannot be written: make room, or give another --run.dir"
    kp_in_job || kp_share_machine

    kp_start_trainer "$@"
    kp_start_orchestrator "$@"
    kp_start_guard "${KP_NAMES[@]:1}"
    for ((engine = 0; engine < KP_RL[engines]; engine++)); do
        engine_tries[engine]=0
        kp_start_engine "$engine"
    done
    kp_pass_pending
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

kp_make_exchange() { # makes this attempt's private directory, with a token for requests to engines
    mkdir -p -- "${KP_RL[logs]}" || return 1
    (umask 077 && mkdir -p -- "${KP_RL[exchange]}"/{weights,engines} &&
        od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"${KP_RL[exchange]}/token")
}

kp_share_machine() { # sets KP_VISIBLE_GPUS, the parts' GPUs outside Slurm, engines
    # first; and OMP_NUM_THREADS
    local parts=$((KP_RL[engines] + KP_TASKS))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > parts ? $(nproc) / parts : 1))}
    ((KP_RL[job_gpus] > 0)) || return 0
    if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
        IFS=, read -ra KP_VISIBLE_GPUS <<<"$CUDA_VISIBLE_DEVICES"
    else
        mapfile -t KP_VISIBLE_GPUS < <(seq 0 $((KP_RL[job_gpus] - 1)))
    fi
}

kp_set_visible_gpus() { # <first> <count>: exports CUDA_VISIBLE_DEVICES outside Slurm, if this
    # machine has GPUs
    local IFS=,
    ((KP_RL[job_gpus] == 0)) || export CUDA_VISIBLE_DEVICES="${KP_VISIBLE_GPUS[*]:$1:$2}"
}

kp_dies_with_us() { # <signal>: prints a prefix that sends a command this signal when this shell
    # dies, even by SIGKILL
    setpriv --pdeathsig "$1" true 2>/dev/null && echo "setpriv --pdeathsig $1 --" || true
}

kp_start_trainer() { # <rl.py arguments>...
    local words=("${KP_INSIDE[@]}" "$KP_PYTHON") tied blocked
    if kp_in_job; then
        kp_trainer_command 0 "$@"
        # srun's messages about dead tasks are examined later: see kp_srun.
        kp_start "${KP_SRUN[@]}" \
            2> >(trap '' TERM INT HUP USR1 USR2 && exec tee -a -- "$KP_SRUN_LOG" >&2)
        return
    fi
    ((KP_TASKS == 1)) || words+=(-m torch.distributed.run --standalone --nproc-per-node="$KP_TASKS")
    read -ra tied < <(kp_dies_with_us TERM) || true
    kp_set_visible_gpus $((KP_RL[engines] * KP_RL[tp])) "$KP_TASKS"
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
            "${KP_RL[orchestrate]}" "$@" \
            </dev/null >>"${KP_RL[logs]}/orchestrator.log" 2>&1 &
    fi
    orchestrator=$!
}

kp_start_engine() { # <engine>
    local tied
    rm -f -- "${KP_RL[exchange]}/engines/engine-$1"
    unset "engine_there[$1]" "probes[$1]"
    export KEMPNER_ENGINE=$1
    if kp_in_job; then
        kp_engine_command $((KP_RL[engine_node] + $1 / KP_RL[on_node]))
        setsid "${KP_SRUN[@]}" </dev/null &
    else
        kp_engine_words
        kp_set_visible_gpus $(($1 * KP_RL[tp])) "${KP_RL[tp]}"
        read -ra tied < <(kp_dies_with_us KILL) || true
        setsid "${tied[@]}" "${KP_INSIDE[@]}" "$KP_PYTHON" "${KP_ENGINE_WORDS[@]}" \
            </dev/null >>"${KP_RL[logs]}/engine-$1.log" 2>&1 &
    fi
    engine_pids[$1]=$!
    unset KEMPNER_ENGINE
}
