# shellcheck shell=bash
# From the script's arguments to running ranks: the configuration check, the banner, srun.

KP_DRY=''      # not empty: --dry-run
KP_DEVICE=auto # cpu, cuda or auto
KP_DATA=()     # directories of token shards
KP_LAUNCHER='' # run.sh: torchrun, if that is the command
KP_CHILD=''    # the running srun; in replicas.sh the judge
KP_SRUN_LOG='' # srun's log of this attempt

kp_take() { # <arguments of the script>...: sets KP_WORDS, and KP_ARGUMENTS (those for
    # train.py); --dry-run: dry_run.sh
    local word nothing
    kp_set_arguments "$@"
    KP_WORDS=("$@")
    kp_take_dry "$@"
    if [[ -z $KP_DRY ]]; then
        for word; do # train.py takes --nodes for its own --check
            ! kp_is_sbatch_option "$word" ||
                kp_die "'$word' is an option of sbatch: put it before the script:" \
                    "sbatch $word .../multinode.sh CONFIG"
        done
    fi
    nothing="no configuration given: name one after the script, such as configs/train/debug.toml"
    ((${#KP_ARGUMENTS[@]} > 0)) || kp_die "${KP_NOTHING_GIVEN:-$nothing}"
    [[ ${KP_ARGUMENTS[0]} != @* || $KP_DRY == submit ]] || kp_take_line "${KP_ARGUMENTS[0]#@}"
}

kp_set_arguments() { # <argument>...: sets KP_ARGUMENTS
    KP_ARGUMENTS=("$@")
}

kp_take_dry() { # <arguments of the script>...: sets KP_DRY; with --dry-run or --submit: dry_run.sh
    local word
    for word; do
        case $word in
            --dry-run) KP_DRY=1 ;;
            --submit) KP_DRY=submit ;;
            *) kp_own_option "$word" ;;
        esac
    done
    [[ -n $KP_DRY ]] || return 0
    # shellcheck source-path=SCRIPTDIR source=lib/dry_run.sh
    source "$KP_LIB/dry_run.sh"
    kp_dry_take "$@"
}

kp_own_options() { # prints the options that are neither sbatch's nor overrides, for --dry-run
    echo 'bench|tune|minutes|out|allow|record'
}

kp_use_program() { # <file>: sets KP_TRAIN, the program that every task runs
    KP_TRAIN=$1
}

kp_set_launcher() { # <torchrun, or nothing>: sets KP_LAUNCHER
    KP_LAUNCHER=$1
}

kp_use_run() { # <run directory> [its checkpoints]: sets KP_RUN_DIR and KP_CHECKPOINTS
    KP_RUN_DIR=$1 KP_CHECKPOINTS=${2:-$1/checkpoints}
}

kp_tune() { # with --tune in KP_ARGUMENTS: runs scripts/tune.py instead of train.py
    local word others=()
    for word in "${KP_ARGUMENTS[@]}"; do [[ $word == --tune ]] || others+=("$word"); done
    ((${#others[@]} < ${#KP_ARGUMENTS[@]})) || return 0
    ((${#others[@]} > 0)) || kp_die "--tune: no configuration given: name one after the script"
    [[ -z ${KEMPNER_TRAIN:-} ]] ||
        kp_die "--tune measures scripts/train.py, not KEMPNER_TRAIN=$KEMPNER_TRAIN: unset it"
    kp_set_arguments "${others[@]}"
    kp_use_program "$KP_ROOT/scripts/tune.py"
}

kp_take_line() { # <file>: replaces the first argument by this array task's line, a configuration
    local line=() task
    kp_own_array
    task=${SLURM_ARRAY_TASK_ID:-0}
    { mapfile -t -s "$task" -n 1 line <"$1"; } 2>/dev/null ||
        kp_die "@$1 cannot be read: name a file with a configuration on each line"
    [[ -n ${line[0]:-} ]] ||
        kp_die "@$1 has no line for task $task: sbatch --array=0-N, with N+1 lines"
    KP_ARGUMENTS[0]=${line[0]}
}

kp_check() { # <train.py arguments>...: checks them in one process before any GPU is used; sets
    # KP_VALUES (the first is TOML), KP_RUN_DIR, KP_CHECKPOINTS, KP_DEVICE, KP_DATA (directories of
    # token shards) and KP_COMMITTED_BEFORE
    local code=0
    kp_check_notify
    kp_need_packages
    if [[ -n ${KP_CHECKED:-} ]]; then # kp_code asked before switching to the copy
        eval "kp_set_values $KP_CHECKED"
        unset KP_CHECKED
    else
        kp_check_run "$KP_TRAIN" "$@" --nodes "$KP_NODES" --gpus-per-node "$KP_TASKS" || code=$?
    fi
    if ((code != 0)); then
        kp_log "not started: the check of the configuration ended with exit code $code"
        exit "$code"
    fi
    kp_take_values ||
        kp_die "the checked configuration has no run.dir: leave --help and --check out"
    # Mount the paths as given, which may be symbolic links.
    kp_mount_run "${KP_VALUES[1]}" ${KP_VALUES[2]:+"${KP_VALUES[2]}"}
    [[ -z $KP_DRY ]] || kp_dry_tell # exits here

    mkdir -p -- "$KP_RUN_DIR/logs" ||
        kp_die "run.dir $KP_RUN_DIR cannot be written: give another --run.dir"
    kp_run_note
    [[ -z ${KEMPNER_NSYS:-} ]] || kp_nsys
    kp_note_progress
    KEMPNER_COMMAND=$(sha256sum <<<"${KP_VALUES[0]}") # identifies the run; see StartEvent
    export KEMPNER_COMMAND=${KEMPNER_COMMAND:0:12}
    kp_mark check
}

kp_take_values() { # sets what kp_check sets, and KP_INPUTS (configuration files),
    # from kempner.jobs.check's answer
    local i run checkpoints
    [[ -n ${KP_VALUES[1]:-} ]] || return 1
    run=$(realpath -m -- "${KP_VALUES[1]}")
    checkpoints=$(realpath -m -- "${KP_VALUES[2]:-$run/checkpoints}")
    kp_use_run "$run" "$checkpoints"
    KP_DEVICE=${KP_VALUES[3]:-auto}
    for ((i = 4; i < ${#KP_VALUES[@]}; i++)); do
        [[ -n ${KP_VALUES[i]} ]] || break
    done
    KP_DATA=("${KP_VALUES[@]:4:i-4}") KP_INPUTS=("${KP_VALUES[@]:i+1}")
}

kp_nsys() { # prepares task.sh's use of nsys; warns of ranks in KEMPNER_NSYS that the job lacks
    local rank
    export KP_RUN_DIR
    for rank in ${KEMPNER_NSYS//,/ }; do
        ((rank < KP_NODES * KP_TASKS)) ||
            kp_log "WARNING: KEMPNER_NSYS=$KEMPNER_NSYS: there is no rank $rank: the run has" \
                "$((KP_NODES * KP_TASKS)) rank(s)"
    done
}

kp_banner() { # logs what will run, and where; exits if the user's network interface does not exist
    local nodes what='no GPU'
    ((KP_GPUS == 0)) || what='one GPU each'
    ((KP_GPUS <= KP_TASKS)) || what="$KP_GPUS GPUs each"
    if ! kp_in_job; then
        kp_log "$(uname -n), outside Slurm: world size $KP_TASKS, $what"
        kp_log "run directory $KP_RUN_DIR"
        return
    fi

    mapfile -t nodes < <(kp_hostnames "$(kp_field NodeList)" | head -n "$KP_NODES")
    KEMPNER_PEERS=$(kp_peers | paste -sd' ')
    export KEMPNER_PEERS
    kp_log "job $(kp_job_id) ($(kp_job_name)), restart count ${SLURM_RESTART_COUNT:-0}," \
        "time limit $(kp_field TimeLimit)"
    kp_log "nodes ${nodes[*]}: $KP_NODES x $KP_TASKS = world size $((KP_NODES * KP_TASKS))," \
        "$what, $KP_CPUS CPU(s) each"
    ((${#KP_SPARES[@]} == 0)) || kp_log "spare nodes: ${KP_SPARES[*]}"
    kp_log "master ${nodes[0]:-unknown} (${KEMPNER_PEERS%% *})"
    kp_profile_note

    if kp_is_batch; then # this is the first node
        bash "$KP_LIB/task.sh"
        KEMPNER_SAID=$(uname -n)
        KEMPNER_SIGNAL_LEAD=${KEMPNER_SIGNAL_LEAD:-$(kp_signal_lead <(kp_batch_script))}
        # otherwise Slurm warns the ranks or the user's script
        ! kp_is_whole_script || kp_cap_lead
        export KEMPNER_SAID KEMPNER_SIGNAL_LEAD
        kp_keep_log
    fi
    kp_log "run directory $KP_RUN_DIR"
    kp_same_size
}

kp_peers() { # prints the addresses of the job's first two nodes: from any node, one is another host
    local nodes node='' word
    local -A address=()
    mapfile -t nodes < <(kp_hostnames "$(kp_field NodeList)" | head -n 2)
    # One query for both.
    for word in $(scontrol show node "$(kp_comma "${nodes[@]}")"); do
        case $word in
            NodeName=*) node=${word#*=} ;;
            NodeAddr=*) address[${node:-none}]=${word#*=} ;;
        esac
    done
    for node in "${nodes[@]}"; do
        getent ahosts "${address[$node]:-$node}" | awk 'NR == 1 { print $1 }' || true
    done
}

kp_batch_script() { # prints the job's script: a user's script may run this one
    if [[ ${0##*/} == slurm_script ]] ||
        ! kp_shielded scontrol write batch_script "$SLURM_JOB_ID" - 2>/dev/null; then
        cat -- "$0"
    fi
}

kp_keep_log() { # links the batch log into the run directory as logs/batch-JOB.log
    local file target
    file=$(readlink "/proc/$$/fd/1") && [[ -f $file ]] || return 0
    target=$KP_RUN_DIR/logs/batch-$(kp_job_id).log
    [[ $file -ef $target ]] || ln -f -- "$file" "$target" 2>/dev/null ||
        ln -sf -- "$file" "$target" 2>/dev/null || true
}

kp_run() { # <train.py arguments>...: trains, restarting after crashes while kp_decide says
    # so; sets KP_CODE
    while :; do
        ((${#KP_PLACES[@]} == 0)) || kp_start_beside
        kp_attempt "$@"
        ((KP_RESTARTS > 0)) && [[ -z $KP_DECIDED ]] || break
        kp_decide "the step ended with exit code $KP_CODE" || true
        # A signal since then must not be lost during a start.
        if [[ $KP_DECIDED == restart ]] && kp_asked_to_leave; then
            kp_set_decided ''
            kp_decide "asked to leave between two attempts" || true
        fi
        [[ $KP_DECIDED == restart ]] || break
        kp_next_attempt
    done
    kp_end_beside
}

kp_attempt() { # <train.py arguments>...: trains until all ranks have exited; sets KP_CODE to the
    # code of srun or torchrun
    local blocked early_stop=''
    read -ra blocked < <(kp_blocked) || true
    if kp_in_job; then
        kp_srun "$KP_TRAIN" "$@"
    elif ((KP_TASKS == 1)); then
        kp_start "${blocked[@]}" "${KP_INSIDE[@]}" "$KP_PYTHON" "$KP_TRAIN" "$@"
    else
        kp_start "${blocked[@]}" "${KP_INSIDE[@]}" "$KP_PYTHON" -m torch.distributed.run \
            --standalone --nproc-per-node="$KP_TASKS" "$KP_TRAIN" "$@"
    fi
    kp_pass_pending
    kp_set_pending ''
    kp_early_stop
    kp_watch
    # In a job that survives a lost node, srun may wait for that node until the time limit.
    if ((KP_RESTARTS > 0 || ${#KP_PLACES[@]} > 0)); then kp_await; else kp_wait; fi
    kp_find_bad_input
    kp_watch_end
    [[ -z $early_stop ]] || kill "$early_stop" 2>/dev/null || true
}

kp_find_bad_input() { # sets KP_CODE to 2 if the first task to end found bad input: srun returns the
    # highest code, that of the tasks which it killed because of this one
    local first
    ((KP_CODE == 137 || KP_CODE == 143)) || return 0
    first=$(grep -m 1 -E '^srun: error: [^ ]+: tasks? ' "$KP_SRUN_LOG" 2>/dev/null) || return 0
    [[ $first != *': Exited with exit code 2' ]] || KP_CODE=2
}

kp_blocked() { # prints a prefix that starts a program with its signals blocked until it is
    # ready for them
    local words=(env "--block-signal=TERM,INT,USR1,USR2")
    ((${#KP_INSIDE[@]} > 0)) || ! "${words[@]}" true 2>/dev/null || echo "${words[@]}"
}

kp_early_stop() { # with KEMPNER_EARLY_STOP, in a sweep: starts a process that stops the run if it
    # falls behind; sets the caller's early_stop
    [[ -n ${KEMPNER_EARLY_STOP:-} ]] || return 0
    "${KP_INSIDE[@]}" "$KP_PYTHON" "$KP_MODULE" kempner.extensions.sweep.early_stop \
        "$KP_RUN_DIR" </dev/null &
    early_stop=$!
}

kp_propose() { # with KEMPNER_PROPOSE, in a sweep: submits the points proposed after this result
    [[ -n ${KEMPNER_PROPOSE:-} ]] && kp_is_batch || return 0
    kp_as_submitted "$KEMPNER_PROPOSE_PYTHON" "$KP_ORIGIN/scripts/sweep.py" \
        "$KEMPNER_PROPOSE" submit --from-job ||
        kp_log "the sweep's next points were not submitted: see above;" \
            "'sweep.py $KEMPNER_PROPOSE submit' does so"
}

kp_srun_command() { # [srun's options]... -- <Python arguments>...: sets KP_SRUN, which starts one
    # task per GPU on all nodes of the job unless the options say otherwise; exports variables
    local more options=() blocked=(env "--block-signal=TERM,INT,USR1,USR2" KEMPNER_SIGNALS_WAIT=1)
    while [[ $1 != -- ]]; do options+=("$1") && shift; done
    shift
    # if the submission directory is gone, srun would start nothing from there
    [[ -d $PWD ]] || cd /
    KP_SRUN=(
        srun --job-name="$KP_SRUN_NAME" --nodes="$KP_NODES" --ntasks=$((KP_NODES * KP_TASKS))
        # without the last two, ranks would wait forever for a lost one
        --ntasks-per-node="$KP_TASKS" --cpus-per-task="$KP_CPUS" --kill-on-bad-exit=1 --wait=300
        --mpi="${KEMPNER_MPI:-none}"
        # seconds: a host that dies and quickly returns can leave a step waiting until
        # the time limit
        --immediate=300
        --export=ALL # otherwise sbatch --export=NONE would apply to the tasks too
    )

    # No --gpu-bind=none: CUDA_VISIBLE_DEVICES would stay unset, and on a shared node tasks would
    # use another job's GPUs.
    ((KP_GPUS == 0)) || KP_SRUN+=(--gpus-per-node="$KP_GPUS")
    # By default srun alternates a node's tasks between sockets; GPUs are numbered socket by socket.
    ((KP_GPUS == 0)) || [[ -n ${SLURM_DISTRIBUTION:-} ]] || KP_SRUN+=(--distribution=block:block)
    [[ -z $KP_BESIDE ]] || KP_SRUN+=(--jobid="$SLURM_JOB_ID" --overlap)
    ((${#KP_PLACES[@]} == 0)) || KP_SRUN+=(--nodelist="$(kp_comma "${KP_PLACES[@]}")")
    # Once a job has lost a host, Slurm 22.05 lets exclusive steps wait forever.
    [[ -z $KP_DROPPED ]] || KP_SRUN+=(--overlap)
    read -ra more <<<"${KEMPNER_SRUN:-}"
    KP_SRUN+=("${options[@]}" "${more[@]}" "${KP_CONTAINER_FLAGS[@]}")

    kp_forget_request # the flags above replace it
    export SRUN_CPUS_PER_TASK=$KP_CPUS OMP_NUM_THREADS=${OMP_NUM_THREADS:-$KP_CPUS}

    kp_keep

    # See task.sh. A program used instead of train.py unblocks the signals when it is ready.
    # pyxis: the whole task runs inside, with the image's env
    if ((${#KP_CONTAINER_FLAGS[@]} > 0)); then
        KP_SRUN+=(sh "$KP_LIB/inside.sh" --task bash "$KP_LIB/task.sh")
    else
        ! "${blocked[@]}" true 2>/dev/null || KP_SRUN+=("${blocked[@]}")
        KP_SRUN+=(bash "$KP_LIB/task.sh" "${KP_INSIDE[@]}")
    fi
    KP_SRUN+=("$KP_PYTHON" "$@")
}

# shellcheck disable=SC2034 # its results are the caller's
kp_place_step() { # <number of nodes at the job's start> <host>...: sets the caller's step_place
    # to srun's option for one more step on these hosts; fails if the job has lost one of them, and
    # sets the caller's lost_host to it
    local KP_DEADLINE=$((SECONDS + KP_PATIENCE)) KP_ANSWER='' host left=()
    step_place=--exact
    ! kp_show_job || mapfile -t left < <(scontrol show hostnames "$(kp_field NodeList)")
    ((${#left[@]} > 0)) || return 0 # without an answer, no host counts as lost
    for host in "${@:2}"; do
        lost_host=$host
        [[ " ${left[*]} " == *" $host "* ]] || return 1
    done
    # Once a job has lost a host, Slurm 22.05 lets exclusive steps wait forever although their cores
    # are free. Overlapping steps that share a host could get the same GPU.
    ((${#left[@]} == $1)) || step_place=--overlap
}

kp_srun() { # <Python arguments>...: starts the step
    kp_srun_command -- "$@"
    kp_open_srun_log
    kp_mark batch-script
    # srun's messages about dead tasks are examined later. Signals that end a job must not end tee:
    # srun would die of the broken pipe.
    kp_start "${KP_SRUN[@]}" \
        2> >(trap '' TERM INT HUP USR1 USR2 && exec tee -a -- "$KP_SRUN_LOG" >&2)
    # later steps of this start have not waited in the queue
    [[ -z ${KEMPNER_STARTUP+set} ]] || KEMPNER_STARTUP=''
}

kp_open_srun_log() { # sets KP_SRUN_LOG, srun's log; if the run directory is not writable, a
    # file in TMPDIR
    KP_SRUN_LOG=$KP_RUN_DIR/logs/srun-$KEMPNER_ATTEMPT_ID.log
    { mkdir -p -- "$KP_RUN_DIR/logs" && : >>"$KP_SRUN_LOG"; } 2>/dev/null && return
    KP_SRUN_LOG=$(mktemp -t kempner-srun.XXXXXX) || KP_SRUN_LOG=/dev/null
    kp_log "srun's log cannot be written in $KP_RUN_DIR/logs: it is $KP_SRUN_LOG"
}

kp_start() { # <command>...: starts it in the background in a new session: Ctrl-C reaches
    # only this shell
    [[ $1 != kp_outside ]] || kp_outside
    kp_keep
    setsid "$@" </dev/null &
    KP_CHILD=$!
}

kp_wait() { # waits for KP_CHILD, even if signals interrupt wait; sets KP_CODE
    # Bash would report a killed child on standard error.
    while kill -0 "$KP_CHILD" 2>/dev/null; do wait "$KP_CHILD" 2>/dev/null || true; done
    KP_CODE=0
    wait "$KP_CHILD" 2>/dev/null || KP_CODE=$?
    KP_CHILD=''
}

kp_set_child() { # <pid, or nothing>: sets KP_CHILD, the process that receives signals
    KP_CHILD=$1
}

kp_set_code() { # <exit code>: sets KP_CODE, the exit code of the run
    KP_CODE=$1
}
