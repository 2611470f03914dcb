# shellcheck shell=bash
# From the script's arguments to the running ranks: the check of the configuration, the banner, srun.

kp_take() { # <arguments of the script>...: sets KP_WORDS, and KP_ARGUMENTS, those for train.py; --dry-run: dry_run.sh
    local word options='--(nodes|nodelist|ntasks.*|gpus.*|gres|cpus-per-.*|mem|partition|account|qos|time)|-[NnptAqcG]'
    KP_ARGUMENTS=("$@") KP_WORDS=("$@")
    for word; do
        case $word in
            --dry-run) KP_DRY=1 ;;
            --submit) KP_DRY=submit ;;
        esac
    done
    if [[ -n $KP_DRY ]]; then
        # shellcheck source-path=SCRIPTDIR source=lib/dry_run.sh
        source "$KP_LIB/dry_run.sh"
        kp_dry_take "$@"
    else
        for word; do # train.py takes --nodes for its own --check
            [[ ! ${word%%=*} =~ ^($options)$ ]] ||
                kp_die "'$word' is an option of sbatch: put it before the script: sbatch $word .../multinode.sh CONFIG"
        done
    fi
    ((${#KP_ARGUMENTS[@]} > 0)) ||
        kp_die "no configuration given: name one after the script, such as configs/train/debug.toml"
    [[ ${KP_ARGUMENTS[0]} != @* || $KP_DRY == submit ]] || kp_take_line "${KP_ARGUMENTS[0]#@}"
}

kp_take_line() { # <file>: puts the line of this task of an array, a configuration, in place of the first argument
    local line=() task=${SLURM_ARRAY_TASK_ID:-0}
    mapfile -t -s "$task" -n 1 line <"$1" || kp_die "@$1 cannot be read: name a file with a configuration on each line"
    [[ -n ${line[0]:-} ]] || kp_die "@$1 has no line for task $task: sbatch --array=0-N, with N+1 lines"
    KP_ARGUMENTS[0]=${line[0]}
}

kp_check() { # <train.py arguments>...: checks them in one process before any GPU is used; sets KP_TOML, KP_RUN_DIR,
    # KP_CHECKPOINTS, KP_DEVICE, KP_DATA (directories of token shards) and KP_COMMITTED_BEFORE
    local code=0 values
    kp_check_notify
    kp_need_packages
    KP_TOML=$(kp_python "$KP_TRAIN" "$@" --check --nodes "$KP_NODES" --gpus-per-node "$KP_TASKS") || code=$?
    if ((code != 0)); then
        kp_log "not started: the check of the configuration ended with exit code $code"
        exit "$code"
    fi
    mapfile -d '' -t values < <(
        kp_python -c 'import os, sys
try:
    import tomllib
except ImportError:
    import tomli as tomllib
cfg = tomllib.load(sys.stdin.buffer)
found = [cfg["run"]["dir"], cfg.get("checkpoint", {}).get("dir", ""), cfg.get("distributed", {}).get("device", "auto")]
data = cfg.get("data", {})
paths = map(os.path.expanduser, [data.get("dataset_path", ""), *(source["path"] for source in data.get("sources", []))])
found += [path for path in paths if os.path.isfile(os.path.join(path, "dataset.json"))]
sys.stdout.write("\0".join(found) + "\0")' <<<"$KP_TOML"
    )
    [[ -n ${values[0]:-} ]] || kp_die "the checked configuration has no run.dir: leave --help and --check out"
    KP_RUN_DIR=$(realpath -m -- "${values[0]}")
    KP_CHECKPOINTS=$(realpath -m -- "${values[1]:-$KP_RUN_DIR/checkpoints}")
    KP_DEVICE=${values[2]:-auto} KP_DATA=("${values[@]:3}")
    [[ -z $KP_DRY ]] || kp_dry_tell # ends here

    mkdir -p -- "$KP_RUN_DIR/logs" || kp_die "run.dir $KP_RUN_DIR cannot be written: give another --run.dir"
    KP_COMMITTED_BEFORE=$(kp_committed_step)
    kp_mark check
}

kp_banner() { # says what is about to run, and where; stops when the network that the user named is not there
    local nodes what='no GPU'
    ((KP_GPUS == 0)) || what='one GPU each'
    if ! kp_in_job; then
        kp_log "$(uname -n), outside Slurm: world size $KP_TASKS, $what"
        kp_log "run directory $KP_RUN_DIR"
        return
    fi

    mapfile -t nodes < <(scontrol show hostnames "$(kp_field NodeList)" | head -n "$KP_NODES")
    KEMPNER_PEERS=$(kp_peers | paste -sd' ')
    export KEMPNER_PEERS
    kp_log "job $(kp_job_id) ($(kp_job_name)), restart count ${SLURM_RESTART_COUNT:-0}," \
        "time limit $(kp_field TimeLimit)"
    kp_log "nodes ${nodes[*]}: $KP_NODES x $KP_TASKS = world size $((KP_NODES * KP_TASKS)), $what, $KP_CPUS CPU(s) each"
    ((${#KP_SPARES[@]} == 0)) || kp_log "spare nodes: ${KP_SPARES[*]}"
    kp_log "master ${nodes[0]} (${KEMPNER_PEERS%% *})"
    kp_profile_note

    if kp_is_batch; then # this is the first node
        bash "$KP_LIB/task.sh"
        KEMPNER_SAID=$(uname -n)
        KEMPNER_SIGNAL_LEAD=${KEMPNER_SIGNAL_LEAD:-$(kp_signal_lead "$0")}
        export KEMPNER_SAID KEMPNER_SIGNAL_LEAD
        kp_keep_log
    fi
    kp_log "run directory $KP_RUN_DIR"
}

kp_peers() { # the addresses of the first two nodes of the job: from any node, one of them is another host
    local node pattern='NodeAddr=([^[:space:]]+)'
    while read -r node; do
        [[ ! $(scontrol show node "$node") =~ $pattern ]] || node=${BASH_REMATCH[1]}
        getent ahosts "$node" | awk 'NR == 1 { print $1 }' || true
    done < <(scontrol show hostnames "$(kp_field NodeList)" | head -n 2)
}

kp_signal_lead() { # <script>: seconds from the warning to the end, by SBATCH_SIGNAL or the header: Slurm does not say
    local line given='' pattern='@([0-9]+)'
    while read -r line; do
        [[ $line != '#SBATCH --signal='* ]] || given=$line
    done <"$1"
    given=${SBATCH_SIGNAL:-$given}
    [[ ! $given =~ $pattern ]] || echo "${BASH_REMATCH[1]}"
}

kp_keep_log() { # makes the batch log appear in the run directory too, as logs/batch-JOB.log
    local file target
    file=$(readlink "/proc/$$/fd/1") && [[ -f $file ]] || return 0
    target=$KP_RUN_DIR/logs/batch-$(kp_job_id).log
    [[ $file -ef $target ]] || ln -f -- "$file" "$target" 2>/dev/null || ln -sf -- "$file" "$target"
}

kp_run() { # <train.py arguments>...: trains, again after a crash, until kp_decide has another answer; sets KP_CODE
    while :; do
        ((${#KP_PLACES[@]} == 0)) || kp_start_beside
        kp_attempt "$@"
        ((KP_RESTARTS > 0)) && [[ -z $KP_DECIDED ]] || break
        kp_decide "the step ended with exit code $KP_CODE" || true
        # A signal since then: it must not be lost in a start.
        if [[ $KP_DECIDED == restart ]] && kp_asked_to_leave; then
            KP_DECIDED=''
            kp_decide "asked to leave between two attempts" || true
        fi
        [[ $KP_DECIDED == restart ]] || break
        kp_again
    done
    kp_end_beside
}

kp_attempt() { # <train.py arguments>...: trains until every rank has left; sets KP_CODE, that of srun or torchrun
    if kp_in_job; then
        kp_srun "$KP_TRAIN" "$@"
    elif ((KP_TASKS == 1)); then
        kp_start "${KP_INSIDE[@]}" "$KP_PYTHON" "$KP_TRAIN" "$@"
    else
        kp_start "${KP_INSIDE[@]}" "$KP_PYTHON" -m torch.distributed.run --standalone --nproc-per-node="$KP_TASKS" \
            "$KP_TRAIN" "$@"
    fi
    [[ -z $KP_PENDING ]] || kp_on_signal "$KP_PENDING"
    KP_PENDING=''
    kp_early_stop
    kp_watch
    # In a job that survives a lost node a srun may wait for that node until the time limit.
    if ((KP_RESTARTS > 0 || ${#KP_PLACES[@]} > 0)); then kp_await; else kp_wait; fi
    kp_watch_end
    [[ -z $KP_EARLY_STOP ]] || kill "$KP_EARLY_STOP" 2>/dev/null || true
}

kp_early_stop() { # with KEMPNER_EARLY_STOP, of a sweep: stops a run that falls behind the others; sets KP_EARLY_STOP
    KP_EARLY_STOP=''
    [[ -n ${KEMPNER_EARLY_STOP:-} ]] || return 0
    "${KP_INSIDE[@]}" "$KP_PYTHON" -m kempner.sweep.early_stop "$KP_RUN_DIR" </dev/null &
    KP_EARLY_STOP=$!
}

kp_propose() { # with KEMPNER_PROPOSE, of a sweep: submits the points that follow from this result, too
    [[ -n ${KEMPNER_PROPOSE:-} ]] && kp_is_batch || return 0
    kp_as_submitted
    kp_shielded env -i "${KP_ENVIRONMENT[@]}" "$KEMPNER_PROPOSE_PYTHON" "$KP_ORIGIN/scripts/sweep.py" \
        "$KEMPNER_PROPOSE" submit --from-job ||
        kp_log "the sweep's next points were not submitted: see above; 'sweep.py $KEMPNER_PROPOSE submit' does so"
}

kp_srun_command() { # <Python arguments>...: sets KP_SRUN, one task per GPU on all nodes of the job; exports variables
    local more blocked=(env "--block-signal=TERM,INT,USR1,USR2" KEMPNER_SIGNALS_WAIT=1)
    KP_SRUN=(
        srun --job-name="$KP_SRUN_NAME" --nodes="$KP_NODES" --ntasks=$((KP_NODES * KP_TASKS))
        --ntasks-per-node="$KP_TASKS" --cpus-per-task="$KP_CPUS" --kill-on-bad-exit=1 --wait=300 --mpi=none
        --immediate=300 # seconds: a host that dies and comes back at once can leave a step waiting until the time limit
        --export=ALL    # sbatch --export=NONE would reach the tasks too
    )

    # No --gpu-bind=none: CUDA_VISIBLE_DEVICES would stay unset, and another job's GPUs on a shared node be taken.
    ((KP_GPUS == 0)) || KP_SRUN+=(--gpus-per-node="$KP_GPUS")
    [[ -z $KP_BESIDE ]] || KP_SRUN+=(--jobid="$SLURM_JOB_ID" --overlap)
    ((${#KP_PLACES[@]} == 0)) || KP_SRUN+=(--nodelist="$(kp_comma "${KP_PLACES[@]}")")
    # Once a job has lost a host, Slurm 22.05 lets exclusive steps wait for ever.
    [[ -z $KP_DROPPED ]] || KP_SRUN+=(--overlap)
    read -ra more <<<"${KEMPNER_SRUN:-}"
    KP_SRUN+=("${more[@]}" "${KP_CONTAINER_FLAGS[@]}")

    kp_forget_request # the flags above say it all
    export SRUN_CPUS_PER_TASK=$KP_CPUS OMP_NUM_THREADS=${OMP_NUM_THREADS:-$KP_CPUS}

    # See task.sh. A program in place of train.py unblocks them when it is ready.
    ! "${blocked[@]}" true 2>/dev/null || KP_SRUN+=("${blocked[@]}")
    KP_SRUN+=(bash "$KP_LIB/task.sh")
    ((${#KP_CONTAINER_FLAGS[@]} > 0)) || KP_SRUN+=("${KP_INSIDE[@]}") # pyxis: the whole task is inside
    KP_SRUN+=("$KP_PYTHON" "$@")
}

kp_srun() { # <Python arguments>...: starts the step
    kp_srun_command "$@"
    KP_SRUN_LOG=$KP_RUN_DIR/logs/srun-$KEMPNER_ATTEMPT_ID.log
    kp_mark batch-script
    # What srun says of a task that dies is looked at afterwards. The signals that end a job must not end tee: srun
    # would die of the broken pipe.
    kp_start "${KP_SRUN[@]}" 2> >(trap '' TERM INT HUP USR1 USR2 && exec tee -a -- "$KP_SRUN_LOG" >&2)
    [[ -z ${KEMPNER_STARTUP+set} ]] || KEMPNER_STARTUP='' # another step of this start has not waited in the queue
}

kp_start() { # <command>...: in the background, and in a session of its own: Ctrl-C reaches this shell alone
    setsid "$@" </dev/null &
    KP_CHILD=$!
}

kp_wait() { # waits for KP_CHILD, however many signals end a wait early; sets KP_CODE
    while kill -0 "$KP_CHILD" 2>/dev/null; do wait "$KP_CHILD" || true; done
    KP_CODE=0
    wait "$KP_CHILD" || KP_CODE=$?
    KP_CHILD=''
}
