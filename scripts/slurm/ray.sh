#!/usr/bin/env bash
# A Ray cluster over the nodes of a job: runs a command, or waits for you, and leaves nothing behind.
#
#   COMMAND="python driver.py" sbatch --nodes=4 scripts/slurm/ray.sh   batch: its exit code is the job's
#   sbatch --nodes=4 scripts/slurm/ray.sh                              interactive, until touch JOBID-logs/ENDED
#   bash JOBID-attach.sh [N|HOSTNAME] [-- COMMAND...]                  in both: a shell or a command on a node, 0 is the head
#
# Variables, logs, exit codes: docs/ray.md.
#SBATCH --job-name=ray
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

# sbatch runs a copy of this file from its spool directory; Slurm's record of the job names the original.
lib=$(dirname "${BASH_SOURCE[0]}")/lib/all.sh
if [[ ! -e $lib ]]; then
    job=$(scontrol show job "${SLURM_JOB_ID:-0}" 2>/dev/null) || true
    job=${job#*Command=} lib=${job%%/scripts/slurm/*}/scripts/slurm/lib/all.sh
    [[ -e $lib ]] || lib=${SLURM_SUBMIT_DIR:-}/scripts/slurm/lib/all.sh
    [[ -e $lib ]] || { echo "kempner: error: ray.sh was copied out of its repository: submit" \
        "REPOSITORY/scripts/slurm/ray.sh itself, or from the root of the repository" >&2 && exit 2; }
fi
# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "$lib"

readonly NOT_UP=75 DIED=70
readonly HEAD_PORTS=(PORT RAY_CLIENT_SERVER_PORT DASHBOARD_PORT)
readonly NODE_PORTS=(NODE_MANAGER_PORT OBJECT_MANAGER_PORT RUNTIME_ENV_AGENT_PORT DASHBOARD_AGENT_GRPC_PORT
    METRICS_EXPORT_PORT DASHBOARD_AGENT_LISTEN_PORT)

RAY_NODES=() RAY_ADDRESSES=() RAY_PIDS=() # of each node; the pid of its kempner.ray.node
RAY_READY='' RAY_SIGNAL=''                # what it has now; the signal that came
RAY_FAULT='' RAY_FAULT_CODE=''            # what has gone wrong first, and the exit code for it
RAY_LOGS='' RAY_ATTACH='' RAY_TOKEN=''    # paths
declare -A RAY_PID=() RAY_CODE=()         # of the steps "ray" and "driver": their srun, and its exit code
RAY_SIGNALED=()                           # the nodes that a signal has reached

# --- what is asked ---------------------------------------------------------------------------------------------

ray_defaults() { # the variables that nobody has set; none of them is for Ray's workers
    : "${COMMAND:=}" "${SETUP_COMMAND:=}" "${CONTAINER:=}" "${MOUNTS:=}" "${CONTAINER_RUNTIME:=}" "${SECRETS_FILE:=}"
    : "${GPUS_PER_NODE:=}" "${CPUS_PER_WORKER:=}" "${DEDICATED_RAY_HEAD:=0}" "${OBJECT_STORE_MEMORY:=}" "${PORT_STRIDE:=}"
    : "${RAY_LOG_SYNC_FREQUENCY:=0}" "${START_TIMEOUT:=600}" "${UV_CACHE_DIR_OVERRIDE:=}" "${BASE_LOG_DIR:=$SLURM_SUBMIT_DIR}"
    : "${PORT:=54514}" "${RAY_CLIENT_SERVER_PORT:=10001}" "${DASHBOARD_PORT:=8265}" "${DASHBOARD_AGENT_LISTEN_PORT:=52365}"
    : "${NODE_MANAGER_PORT:=53001}" "${OBJECT_MANAGER_PORT:=53003}" "${RUNTIME_ENV_AGENT_PORT:=53005}"
    : "${DASHBOARD_AGENT_GRPC_PORT:=53007}" "${METRICS_EXPORT_PORT:=53009}" "${MIN_WORKER_PORT:=54001}" "${MAX_WORKER_PORT:=54513}"
    export -n COMMAND SETUP_COMMAND CONTAINER MOUNTS CONTAINER_RUNTIME SECRETS_FILE GPUS_PER_NODE CPUS_PER_WORKER DEDICATED_RAY_HEAD \
        OBJECT_STORE_MEMORY PORT_STRIDE RAY_LOG_SYNC_FREQUENCY START_TIMEOUT UV_CACHE_DIR_OVERRIDE BASE_LOG_DIR \
        "${HEAD_PORTS[@]}" "${NODE_PORTS[@]}" MIN_WORKER_PORT MAX_WORKER_PORT
}

ray_names() { # sets the variables of lib/ for what has another name here, and the paths
    RAY_LOGS=$(realpath -m -- "$BASE_LOG_DIR")/$SLURM_JOB_ID-logs${SLURM_RESTART_COUNT:+-r$SLURM_RESTART_COUNT}
    RAY_ATTACH=$SLURM_SUBMIT_DIR/$SLURM_JOB_ID-attach.sh
    RAY_TOKEN=$RAY_LOGS/.ray-token
    KEMPNER_CONTAINER=${CONTAINER:-${KEMPNER_CONTAINER:-none}}
    KEMPNER_CONTAINER_RUNTIME=${CONTAINER_RUNTIME:-${KEMPNER_CONTAINER_RUNTIME:-}}
    [[ $CONTAINER_RUNTIME != none ]] || KEMPNER_CONTAINER=none
    KEMPNER_MOUNTS=${MOUNTS:-${KEMPNER_MOUNTS:-}}
    KEMPNER_MOUNTS=$RAY_LOGS:$RAY_LOGS${KEMPNER_MOUNTS:+,$KEMPNER_MOUNTS}
    KEMPNER_SECRETS=${SECRETS_FILE:-${KEMPNER_SECRETS:-}}
    [[ -n $UV_CACHE_DIR_OVERRIDE ]] || return 0
    export UV_CACHE_DIR=$UV_CACHE_DIR_OVERRIDE
    mkdir -p -- "$UV_CACHE_DIR" || kp_die "UV_CACHE_DIR_OVERRIDE=$UV_CACHE_DIR cannot be made"
    KEMPNER_MOUNTS+=,$UV_CACHE_DIR:$UV_CACHE_DIR
}

ray_number() { # <variable> <least> <most>: stops when it is no whole number in that range
    [[ ${!1} =~ ^(0|[1-9][0-9]{0,14})$ ]] || kp_die "$1=${!1}: give a whole number from $2 to $3"
    (($2 <= ${!1} && ${!1} <= $3)) || kp_die "$1=${!1}: give a whole number from $2 to $3"
}

ray_least_cpus() { # the CPUs that the job has on each node, the fewest; Slurm writes 8(x2),4
    local item least=0 items
    IFS=, read -ra items <<<"$SLURM_JOB_CPUS_PER_NODE"
    for item in "${items[@]}"; do
        item=${item%%(*}
        ((least > 0 && least <= item)) || least=$item
    done
    echo "$least"
}

ray_resources() { # sets KP_NODES and what each node gives to Ray; stops when that is more than the job has
    local cpus line
    KP_NODES=$(kp_field NumNodes)
    kp_gpus
    GPUS_PER_NODE=${GPUS_PER_NODE:-$KP_GPUS}
    cpus=$(ray_least_cpus)
    CPUS_PER_WORKER=${CPUS_PER_WORKER:-$cpus}
    ray_number GPUS_PER_NODE 0 "$KP_GPUS"
    ray_number CPUS_PER_WORKER 1 "$cpus"
    ray_number START_TIMEOUT 1 86400
    ray_number RAY_LOG_SYNC_FREQUENCY 0 86400
    ray_number DEDICATED_RAY_HEAD 0 1
    ((DEDICATED_RAY_HEAD == 0 || KP_NODES > 1)) || kp_die "DEDICATED_RAY_HEAD=1 on one node: nothing could work; give --nodes=2"
    # Ray refuses less.
    [[ -z $OBJECT_STORE_MEMORY ]] || ray_number OBJECT_STORE_MEMORY 78643200 999999999999999
    RAY_MEMORY=0 # MiB that the job has on each node, the least
    while read -r line; do
        [[ $line =~ ^Nodes=.*\ Mem=([0-9]+) ]] || continue
        ((RAY_MEMORY > 0 && RAY_MEMORY <= BASH_REMATCH[1])) || RAY_MEMORY=${BASH_REMATCH[1]}
    done <<<"$KP_JOB"
}

ray_address() { # <node> <address or name>: the IPv4 address that the other nodes reach: Ray rewrites 127.0.0.1, and a host may call itself so
    local found
    found=$(getent ahostsv4 "$2" | awk '$1 !~ /^127\./ { print $1; exit }') || true
    [[ -n $found || $1 != "${SLURMD_NODENAME:-}" ]] || found=$(hostname -I | awk '{ print $1 }')
    [[ -n $found ]] || kp_die "$1: no IPv4 address for '$2' (NodeAddr): Ray needs one; see getent ahostsv4 $2"
    echo "$found"
}

ray_find_nodes() { # sets RAY_NODES and RAY_ADDRESSES, in Slurm's order, and the default of PORT_STRIDE
    local line node nodes
    declare -A address=() owner=()
    nodes=$(kp_field NodeList)
    mapfile -t RAY_NODES < <(kp_shielded scontrol show hostnames "$nodes")
    while read -r line; do
        [[ ! $line =~ NodeName=([^ ]+).*\ NodeAddr=([^ ]+) ]] || address[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
    done < <(kp_shielded scontrol show node -o "$nodes")
    for node in "${RAY_NODES[@]}"; do
        line=$(ray_address "$node" "${address[$node]:-$node}") # ends with 2 when there is none
        RAY_ADDRESSES+=("$line")
        if [[ -n ${owner[$line]:-} ]]; then
            PORT_STRIDE=${PORT_STRIDE:-20}
            [[ $PORT_STRIDE != 0 ]] || kp_die "PORT_STRIDE=0: $node and ${owner[$line]} are the same host ($line): give 20"
        fi
        owner[$line]=$node
    done
    PORT_STRIDE=${PORT_STRIDE:-0}
}

ray_ports() { # stops when a port is none, or would be used twice on a host; warns of those that the kernel gives away too
    local name k port last low high width
    declare -A user=()
    for name in "${HEAD_PORTS[@]}" "${NODE_PORTS[@]}" MIN_WORKER_PORT MAX_WORKER_PORT; do
        [[ $name == DASHBOARD_PORT && $DASHBOARD_PORT == 0 ]] || ray_number "$name" 1024 65535
    done
    ray_number PORT_STRIDE 0 10000
    last=$((PORT_STRIDE > 0 ? KP_NODES - 1 : 0))
    width=$(((MAX_WORKER_PORT - MIN_WORKER_PORT + 1) / (last + 1)))
    ((width >= CPUS_PER_WORKER)) ||
        kp_die "MIN_WORKER_PORT=$MIN_WORKER_PORT to MAX_WORKER_PORT=$MAX_WORKER_PORT: $width a node, too few for $CPUS_PER_WORKER workers; give a wider range"
    for name in "${HEAD_PORTS[@]}" "${NODE_PORTS[@]}"; do
        for ((k = 0; k <= last; k++)); do
            [[ $k == 0 || " ${NODE_PORTS[*]} " == *" $name "* ]] || continue
            port=$((${!name} + k * PORT_STRIDE))
            ((port > 0)) || continue
            ((port <= 65535)) || kp_die "$name=${!name}: node $k would have $port: give a smaller PORT_STRIDE ($PORT_STRIDE)"
            ((port < MIN_WORKER_PORT || port > MAX_WORKER_PORT)) || user[$port]="a worker's"
            [[ -z ${user[$port]:-} ]] ||
                kp_die "$name=${!name}: port $port of node $k is ${user[$port]}: give another, or another PORT_STRIDE ($PORT_STRIDE)"
            user[$port]="$name's"
        done
    done
    read -r low high </proc/sys/net/ipv4/ip_local_port_range || return 0
    for port in "$MIN_WORKER_PORT" "$MAX_WORKER_PORT" "${!user[@]}"; do
        ((port < low || port > high)) || continue
        kp_log "note: worker ports $MIN_WORKER_PORT-$MAX_WORKER_PORT, or others, lie in the kernel's ephemeral range $low-$high:" \
            "a connection of another program may hold one"
        return 0
    done
}

ray_place() { # makes the log directory and the token
    mkdir -p -- "$RAY_LOGS" || kp_die "$RAY_LOGS cannot be made: give another BASE_LOG_DIR"
    export KEMPNER_PEERS="${RAY_ADDRESSES[*]:0:2}" RAY_ADDRESS=${RAY_ADDRESSES[0]}:$PORT
    # Ray drains 30 s on SIGTERM, as long as KillWait: Slurm would kill it before it has ended.
    export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
    # A token in ~/.ray would change the mode of the head alone, and RAY_AUTH_TOKEN would come before the file.
    export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token} RAY_AUTH_TOKEN_PATH=$RAY_TOKEN
    unset RAY_AUTH_TOKEN
    # Of a batch host that died, and of a job of this number on another cluster.
    rm -f -- "${RAY_LOGS%/*}/$SLURM_JOB_ID-logs"*/.ray-token "$RAY_LOGS/ENDED"
    : >"$RAY_ATTACH" || kp_die "$RAY_ATTACH cannot be written: submit from a directory of yours"
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_TOKEN")
}

# --- steps, and what they say --------------------------------------------------------------------------------------

ray_srun() { # <nodes>: sets RAY_SRUN, a step with one task on each, beside whatever runs there
    local more
    read -ra more <<<"${KEMPNER_SRUN:-}"
    RAY_SRUN=(
        srun --jobid="$SLURM_JOB_ID" --overlap --nodes="$1" --ntasks="$1" --ntasks-per-node=1 --cpus-per-task="$CPUS_PER_WORKER"
        --mpi=none --export=ALL
    )
    ((GPUS_PER_NODE == 0)) || RAY_SRUN+=(--gpus-per-node="$GPUS_PER_NODE")
    RAY_SRUN+=("${more[@]}")
}

ray_launch() { # <name> <srun command>...: starts a step; its output, the pid of srun and its exit code come as events
    # Not as a child of this shell: Slurm's SIGTERM reaches all processes below it, and srun would force the end of its step.
    # shellcheck disable=SC2016 # that shell's own variables
    (setsid bash -c '"${@:2}" &
        echo "PID $1 $!"
        code=0
        wait "$!" || code=$?
        echo # srun may have died within a line
        echo "CODE $1 $code"' - "$@" </dev/null >&"$RAY_EVENTS" &)
}

ray_listen() { # takes a line of what the steps say, 0.2 s at most; fails when they said nothing
    local line rest
    if ! read -r -t 0 -u "$RAY_EVENTS"; then
        # Time up in the midst of a line would lose a part of it: the patience is for another pipe.
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
            # A node that dies makes Slurm tell the others: all of them, that is Slurm's own wish, or somebody's.
            ((${#RAY_SIGNALED[@]} < KP_NODES)) || RAY_SIGNAL=${RAY_SIGNAL:-${rest#* }}
            ;;
        'FAULT '*) [[ -n $RAY_FAULT ]] || RAY_FAULT_CODE=${rest%% *} RAY_FAULT=${rest#* } ;;
        ?*) printf '%s\n' "$line" ;;
    esac
}

ray_start() { # starts Ray on all nodes
    local name option words=()
    exec {RAY_EVENTS}<> <(:) {RAY_CLOCK}<> <(:) # a pipe that this shell reads and its steps write; one that nobody writes
    for name in "${HEAD_PORTS[@]}" "${NODE_PORTS[@]}" MIN_WORKER_PORT MAX_WORKER_PORT PORT_STRIDE DEDICATED_RAY_HEAD; do
        option=${name,,}
        words+=("--${option//_/-}=${!name}")
    done
    RAY_DEADLINE=$((${RAY_BEGAN%.*} + START_TIMEOUT))
    words+=(
        --job="$SLURM_JOB_ID" --nodes="$(IFS=, && echo "${RAY_NODES[*]}")" --addresses="$(IFS=, && echo "${RAY_ADDRESSES[*]}")"
        --logs="$RAY_LOGS" --cpus="$CPUS_PER_WORKER" --gpus="$GPUS_PER_NODE" --object-store="${OBJECT_STORE_MEMORY:-0}"
        --memory="$RAY_MEMORY" --began="$RAY_BEGAN" --deadline="$RAY_DEADLINE" --log-sync="$RAY_LOG_SYNC_FREQUENCY"
    )
    kp_log "job $SLURM_JOB_ID, restart count ${SLURM_RESTART_COUNT:-0}: Ray on ${RAY_NODES[*]}, $CPUS_PER_WORKER CPU(s) and $GPUS_PER_NODE GPU(s) each"
    kp_log "head ${RAY_NODES[0]} ($RAY_ADDRESS), logs $RAY_LOGS"
    # The request in other words: the flags say it all. What changes the output of srun: it is read here.
    unset "${!SLURM_GPUS@}" SLURM_GPU_BIND "${!SLURM_NTASKS@}" "${!SLURM_TRES_PER_TASK@}" SLURM_LABELIO "${!SLURM_STD@}"
    ray_srun "$KP_NODES"
    # What lasts as long as the cluster ends when one of its tasks does: the others are told by Slurm.
    RAY_SRUN+=(--job-name="ray-$KEMPNER_ATTEMPT_ID" --kill-on-bad-exit=1 --wait=60 "${KP_CONTAINER_FLAGS[@]}")
    RAY_SRUN+=(env KEMPNER_SIGNALS_WAIT=1 bash "$KP_ROOT/scripts/slurm/lib/task.sh")
    ((${#KP_CONTAINER_FLAGS[@]} > 0)) || RAY_SRUN+=("${KP_INSIDE[@]}")
    ray_launch ray "${RAY_SRUN[@]}" bash "$KP_ROOT/scripts/slurm/ray_node.sh" "$RAY_LOGS" "$SETUP_COMMAND" "${words[@]}"
}

ray_ended() { # true when Ray, or somebody's wish, ends the job; sets RAY_FAULT when it is Ray
    local k silent=''
    [[ -z $RAY_SIGNAL && -z $RAY_FAULT ]] || return 0
    if [[ -n ${RAY_CODE[ray]:-} ]]; then
        [[ -e $RAY_LOGS/ENDED ]] || RAY_FAULT="Ray's step has ended with exit code ${RAY_CODE[ray]}: see srun's words above"
        return 0
    fi
    [[ -z $RAY_READY ]] && printf -v k '%(%s)T' -1 && ((k > RAY_DEADLINE + 5)) || return 1
    for k in "${!RAY_NODES[@]}"; do [[ -n ${RAY_PIDS[k]:-} ]] || silent+=" ${RAY_NODES[k]}"; done
    RAY_FAULT="not complete after $START_TIMEOUT s (START_TIMEOUT); nothing was heard from:${silent:- (all are there)}"
}

ray_exit_if_ended() { # ends the script when the cluster has come to an end
    ray_ended || return 0
    [[ -z $RAY_SIGNAL ]] || exit $((128 + $(kill -l "$RAY_SIGNAL")))
    if [[ -n $RAY_FAULT ]]; then
        kp_log "$RAY_FAULT"
        [[ -n $RAY_READY ]] || exit "${RAY_FAULT_CODE:-$NOT_UP}"
        exit "$DIED"
    fi
    kp_log "ENDED: somebody has asked for the end"
    [[ -z ${RAY_PID[driver]:-} ]] || exit 143 # the command was not done
    exit 0
}

ray_until_ready() { # waits until every node is alive with all that it has
    while [[ -z $RAY_READY ]]; do
        ray_listen || true
        ray_exit_if_ended
    done
    kp_log "ready: $RAY_READY"
}

ray_say_dashboard() { # says how to see the dashboard, which listens on the head's loopback alone
    local me
    [[ $DASHBOARD_PORT != 0 ]] || return 0
    me=$(id -un)
    kp_log "dashboard: ssh -N -L $DASHBOARD_PORT:127.0.0.1:$DASHBOARD_PORT ${SLURM_SUBMIT_HOST:+-J $me@$SLURM_SUBMIT_HOST }$me@${RAY_NODES[0]}"
    kp_log "then http://127.0.0.1:$DASHBOARD_PORT; it asks for the token, which is in $RAY_TOKEN"
}

# --- the driver, and the shells of others -------------------------------------------------------------------------------

ray_attach() { # [N or hostname] [--] [command...]: a shell or a command on a node of the cluster (of the script that ray_attachable writes)
    local k=0 node words
    if (($# > 0)) && [[ $1 != -- ]]; then
        for ((k = 0; k < ${#RAY_NODES[@]}; k++)); do
            [[ $1 != "$k" && $1 != "${RAY_NODES[k]}" ]] || break
        done
        ((k < ${#RAY_NODES[@]})) || kp_die "no node '$1' in job $RAY_JOB: give 0 to $((${#RAY_NODES[@]} - 1)), or one of ${RAY_NODES[*]}"
        shift
    fi
    [[ ${1:-} != -- ]] || shift
    for node in "${!SLURM_@}" "${!SRUN_@}"; do [[ $node == SLURM_CONF ]] || unset "$node"; done # those of another job's shell
    words=("${RAY_SRUN[@]}" --nodelist="${RAY_NODES[k]}")
    (($# > 0)) || [[ ! -t 0 ]] || words+=(--pty)
    exec "${words[@]}" "${RAY_ENTER[@]}" "${RAY_PIDS[k]}" "${RAY_INSIDE[@]}" "$@"
}

ray_attachable() { # writes JOBID-attach.sh; sets RAY_SRUN, RAY_ENTER and RAY_INSIDE, the way into a node
    ray_srun 1
    RAY_JOB=$SLURM_JOB_ID
    RAY_ENTER=(bash "$KP_ROOT/scripts/slurm/ray_enter.sh")
    RAY_INSIDE=("$RAY_JOB" "$PWD" --)
    # Whoever attaches may not have loaded apptainer's module.
    ((${#KP_INSIDE[@]} == 0)) || RAY_INSIDE=("$RAY_JOB" "$PWD" "$(command -v "${KP_INSIDE[0]}")" "${KP_INSIDE[@]:1}" --)
    # pyxis: into the container that is there; a name for it would keep it on the node.
    ((${#KP_CONTAINER_FLAGS[@]} == 0)) || RAY_INSIDE=("$RAY_JOB" "$PWD" enroot exec --)
    {
        echo "#!/usr/bin/env bash"
        echo "# Onto the Ray cluster of job $RAY_JOB: bash $RAY_JOB-attach.sh [N|HOSTNAME] [-- COMMAND...]"
        echo "# A shell or a command on node N (0: the head), in the job's environment. It goes with the job."
        echo "set -euo pipefail"
        # On a node without a configuration of its own this is slurmd's copy: elsewhere it does not exist.
        [[ -z ${SLURM_CONF:-} ]] || echo "[[ -n \${SLURM_CONF:-} || ! -r ${SLURM_CONF@Q} ]] || export SLURM_CONF=${SLURM_CONF@Q}"
        declare -p RAY_JOB RAY_NODES RAY_PIDS RAY_SRUN RAY_ENTER RAY_INSIDE
        declare -f kp_die ray_attach
        echo "ray_attach \"\$@\""
    } >"$RAY_ATTACH"
    chmod 700 "$RAY_ATTACH"
}

ray_drive() { # runs COMMAND on the head, as in an attach shell; ends the script with its exit code
    local end
    KP_SRUN_NAME=ray-driver-$KEMPNER_ATTEMPT_ID
    kp_log "driver: $RAY_LOGS/ray-driver.log"
    # It writes its log itself: srun loses the last words of a task that is killed.
    # shellcheck disable=SC2016 # that shell's own parameters
    ray_launch driver "${RAY_SRUN[@]}" --job-name="$KP_SRUN_NAME" --input=none --nodelist="${RAY_NODES[0]}" \
        "${RAY_ENTER[@]}" "${RAY_PIDS[0]}" "${RAY_INSIDE[@]}" bash -c 'exec >>"$1" 2>&1; exec bash -c "$2"' - "$RAY_LOGS/ray-driver.log" "$COMMAND"
    until [[ -n ${RAY_CODE[driver]:-} ]]; do
        ray_listen || true
        [[ -n ${RAY_CODE[driver]:-} ]] || ray_exit_if_ended
    done
    # A driver whose Ray dies, or that a signal reaches, too, may be the first to end.
    end=$((SECONDS + (RAY_CODE[driver] == 0 ? 0 : 2)))
    while ray_listen || ((SECONDS < end)); do ray_exit_if_ended; done
    [[ -z $RAY_SIGNAL ]] || ray_exit_if_ended
    kp_log "the command has ended with exit code ${RAY_CODE[driver]}"
    exit "${RAY_CODE[driver]}"
}

ray_wait() { # until somebody ends the job
    kp_log "interactive: bash $RAY_ATTACH [N|HOSTNAME] [-- COMMAND...]; the end: touch $RAY_LOGS/ENDED"
    while true; do
        ray_listen || true
        ray_exit_if_ended
    done
}

# --- the end -------------------------------------------------------------------------------------------------------

ray_wait_for() { # <step> <seconds>: waits so long at most for the end of a step; true when it has ended, or never was
    local end=$((SECONDS + $2))
    while [[ -n ${RAY_PID[$1]:-} && -z ${RAY_CODE[$1]:-} ]]; do
        ((SECONDS < end)) || return 1
        ray_listen || true
    done
}

ray_finish() { # whatever ends this script: ends the driver and Ray, removes what must not stay, keeps the exit code
    local code=$? state='' patience=8 began end start=$SECONDS
    set +e # a full disk is no reason to leave anything running
    began=$(date +%s%N)
    trap '' TERM INT HUP USR1 USR2
    rm -f -- "$RAY_ATTACH" "$RAY_TOKEN"
    [[ -z $RAY_SIGNAL ]] || kp_log "SIG$RAY_SIGNAL: ending the cluster"
    [[ -z $RAY_FAULT ]] || : >"$RAY_LOGS/ENDED" # the driver has lost its Ray: the nodes need not wait for it
    if ! ray_wait_for driver 0; then
        ! kp_show_job || state=$(kp_field JobState)
        KP_CHILD=${RAY_PID[driver]}
        # Else Slurm has told it, and there is no time. scancel takes 10 s where a host is gone.
        [[ $state != RUNNING ]] || kp_signal TERM &
        if [[ $state != RUNNING ]] || ! ray_wait_for driver 4; then
            kill -TERM "$KP_CHILD" 2>/dev/null # srun ends its task at once
        fi
    fi
    if [[ -n ${RAY_PID[ray]:-} ]]; then
        # A setup command does not look for ENDED, and a host that is gone does nothing.
        [[ -n $RAY_FAULT ]] || ((${#RAY_PIDS[@]} < KP_NODES)) || patience=15
        if ! : >"$RAY_LOGS/ENDED"; then
            KP_SRUN_NAME=ray-$KEMPNER_ATTEMPT_ID KP_CHILD=${RAY_PID[ray]}
            kp_signal TERM &
        fi
        if ! ray_wait_for ray $((start + patience - SECONDS)); then
            kp_log "not all nodes come to their end: killing the step"
            kill -TERM "${RAY_PID[ray]}" 2>/dev/null
            ray_wait_for ray 4
        fi
    fi
    end=$(date +%s%N)
    printf -v end '%d.%d' $(((end - began) / 1000000000)) $(((end - began) / 100000000 % 10))
    kp_log "end: exit code $code (shutdown $end s, $SECONDS s in all)"
    exit "$code"
}

for name in TERM INT HUP USR1 USR2; do
    # shellcheck disable=SC2064 # the name as it is now
    trap "RAY_SIGNAL=$name" "$name"
done
RAY_BEGAN=$(date +%s.%N)
kp_begin # the repository, site.env
kp_in_job || kp_die "ray.sh runs in a job: sbatch --nodes=N scripts/slurm/ray.sh"
ray_defaults   # the variables of docs/ray.md
ray_names      # what lib/ names otherwise
kp_enter       # secrets, container, the job as Slurm sees it
ray_resources  # CPUs, GPUs, memory of a node
ray_find_nodes # names and addresses
ray_ports      # no two the same
trap ray_finish EXIT
ray_place       # logs, token
ray_start       # srun
ray_until_ready # or 75
ray_say_dashboard
ray_attachable # JOBID-attach.sh
if [[ -n $COMMAND ]]; then ray_drive; else ray_wait; fi
