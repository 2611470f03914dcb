# shellcheck shell=bash
# Starts Ray on the job's nodes as one step, and follows what the nodes report.

readonly NOT_UP=75 DIED=70 # exit codes

RAY_PIDS=()                       # PID of kempner.jobs.ray.node on each node
RAY_READY=''                      # the cluster's resources once it is complete
RAY_SIGNAL=''                     # the signal that ends the job
RAY_SIGNALED=()                   # nodes that have received a signal
RAY_FAULT='' RAY_FAULT_CODE=''    # the first fault, and the exit code for it
declare -A RAY_PID=() RAY_CODE=() # of srun, for the steps "ray" and "driver"

ray_srun() { # <nodes>: sets RAY_SRUN, a step with one task per node that overlaps other steps
    local more
    read -ra more <<<"${KEMPNER_SRUN:-}"
    RAY_SRUN=(
        srun --jobid="$SLURM_JOB_ID" --overlap --nodes="$1" --ntasks="$1" --ntasks-per-node=1
        --cpus-per-task="$CPUS_PER_WORKER" --mpi=none --export=ALL
    )
    ((GPUS_PER_NODE == 0)) || RAY_SRUN+=(--gpus-per-node="$GPUS_PER_NODE")
    RAY_SRUN+=("${more[@]}")
}

ray_launch() { # <name> <srun command>...: starts a step; its output and srun's pid and exit code
    # arrive as events
    # Not as a child of this shell: Slurm sends SIGTERM to all its descendants, and srun would then
    # kill its step.
    # shellcheck disable=SC2016 # that shell's own variables
    (setsid bash -c '"${@:2}" &
        echo "PID $1 $!"
        code=0
        wait "$!" || code=$?
        echo # srun may have died in the middle of a line
        echo "CODE $1 $code"' - "$@" </dev/null >&"$RAY_EVENTS" &)
}

ray_poll() { # handles one line from the steps, waiting at most 0.2 s; fails if there is none
    local line rest
    if ! read -r -t 0 -u "$RAY_EVENTS"; then
        # A read that times out within a line would lose part of it: wait on another pipe instead.
        read -r -t 0.2 -u "$RAY_CLOCK" || true
        read -r -t 0 -u "$RAY_EVENTS" || return 1
    fi
    IFS= read -r -u "$RAY_EVENTS" line
    rest=${line#* }
    case $line in
        'UP '*) RAY_PIDS[${rest%% *}]=${rest#* } ;;
        'PID '*) RAY_PID[${rest%% *}]=${rest#* } ;;
        'CODE '*) RAY_CODE[${rest%% *}]=${rest#* } ;;
        'READY '*) RAY_READY=$rest ;;
        'SIGNAL '*)
            RAY_SIGNALED[${rest%% *}]=1
            # When a node dies, Slurm signals the others. Only a signal to all nodes means that the
            # job should end.
            ((${#RAY_SIGNALED[@]} < KP_NODES)) || RAY_SIGNAL=${RAY_SIGNAL:-${rest#* }}
            ;;
        'FAULT '*) [[ -n $RAY_FAULT ]] || RAY_FAULT_CODE=${rest%% *} RAY_FAULT=${rest#* } ;;
        ?*) printf '%s\n' "$line" ;;
    esac
}

ray_start() { # starts Ray on all nodes
    local words
    # One pipe carries the steps' output to this shell; nobody writes to the other.
    exec {RAY_EVENTS}<> <(:) {RAY_CLOCK}<> <(:)
    RAY_DEADLINE=$((${RAY_BEGAN%.*} + START_TIMEOUT))
    words=(
        --job="$SLURM_JOB_ID" --nodes "${RAY_PLACES[@]}" --ports="$RAY_PORTS"
        --dedicated-head="$DEDICATED_RAY_HEAD" --logs="$RAY_LOGS" --cpus="$CPUS_PER_WORKER"
        --gpus="$GPUS_PER_NODE" --object-store="${OBJECT_STORE_MEMORY:-0}" --memory="$RAY_MEMORY"
        --began="$RAY_BEGAN" --deadline="$RAY_DEADLINE" --log-sync="$RAY_LOG_SYNC_FREQUENCY"
    )
    kp_log "job $SLURM_JOB_ID, restart count ${SLURM_RESTART_COUNT:-0}: Ray on ${RAY_NODES[*]}," \
        "$CPUS_PER_WORKER CPU(s) and $GPUS_PER_NODE GPU(s) each"
    kp_log "head ${RAY_NODES[0]} ($RAY_ADDRESS), logs $RAY_LOGS"

    # Labels and redirections would change srun's output, which is parsed here.
    kp_forget_request
    unset SLURM_LABELIO "${!SLURM_STD@}"

    ray_srun "$KP_NODES"
    # If one task exits, end the whole step; Slurm signals the others.
    RAY_SRUN+=(--job-name="ray-$KEMPNER_ATTEMPT_ID" --kill-on-bad-exit=1 --wait=60
        "${KP_CONTAINER_FLAGS[@]}")
    ((${#KP_CONTAINER_FLAGS[@]} == 0)) || RAY_SRUN+=(sh "$KP_LIB/inside.sh")
    RAY_SRUN+=(env KEMPNER_SIGNALS_WAIT=1 bash "$KP_LIB/task.sh")
    ((${#KP_CONTAINER_FLAGS[@]} > 0)) || RAY_SRUN+=("${KP_INSIDE[@]}")
    ray_launch ray "${RAY_SRUN[@]}" bash "$KP_LIB/ray_node.sh" "$RAY_LOGS" \
        "$SETUP_COMMAND" "${words[@]}"
}

ray_ended() { # succeeds if Ray, a signal or the file ENDED ends the job; sets
    # RAY_FAULT if it is Ray
    local k silent=''
    [[ -z $RAY_SIGNAL && -z $RAY_FAULT ]] || return 0
    if [[ -n ${RAY_CODE[ray]:-} ]]; then
        [[ -e $RAY_LOGS/ENDED ]] || {
            RAY_FAULT="Ray's step has ended with exit code ${RAY_CODE[ray]}:"
            RAY_FAULT+=" see srun's messages above"
        }
        return 0
    fi
    # Normally the head reports a missing node; this covers a head that cannot.
    [[ -z $RAY_READY ]] && printf -v k '%(%s)T' -1 && ((k > RAY_DEADLINE + 5)) || return 1
    for k in "${!RAY_NODES[@]}"; do [[ -n ${RAY_PIDS[k]:-} ]] || silent+=" ${RAY_NODES[k]}"; done
    RAY_FAULT="not complete after $START_TIMEOUT s (START_TIMEOUT);"
    RAY_FAULT+=" nothing was heard from:${silent:- (all nodes answer)}"
}

ray_exit_if_ended() { # exits if the cluster has ended
    ray_ended || return 0
    [[ -z $RAY_SIGNAL ]] || exit $((128 + $(kill -l "$RAY_SIGNAL")))
    if [[ -n $RAY_FAULT ]]; then
        kp_log "$RAY_FAULT"
        [[ -n $RAY_READY ]] || exit "${RAY_FAULT_CODE:-$NOT_UP}"
        exit "$DIED"
    fi
    kp_log "ENDED: the end was requested by that file"
    [[ -z ${RAY_PID[driver]:-} ]] || exit 143 # the command was still running
    exit 0
}

ray_wait_until_ready() { # waits until every node is alive with all its CPUs and GPUs
    while [[ -z $RAY_READY ]]; do
        ray_poll || true
        ray_exit_if_ended
    done
    kp_log "ready: $RAY_READY"
}

ray_log_dashboard() { # logs how to reach the dashboard, which listens only on the head's loopback
    local me jump=''
    [[ $DASHBOARD_PORT != 0 ]] || return 0
    me=$(id -un)
    [[ -z ${SLURM_SUBMIT_HOST:-} ]] || jump="-J $me@$SLURM_SUBMIT_HOST "
    kp_log "dashboard: ssh -N -L $DASHBOARD_PORT:127.0.0.1:$DASHBOARD_PORT $jump$me@${RAY_NODES[0]}"
    kp_log "then http://127.0.0.1:$DASHBOARD_PORT; it asks for the token, which is in $RAY_TOKEN"
}
