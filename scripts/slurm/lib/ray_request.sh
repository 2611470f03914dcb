# shellcheck shell=bash
# The request of a ray.sh user: variables, resources, nodes and ports, checked before
# any step starts.

RAY_NODES=() RAY_ADDRESSES=() # of each node
RAY_PLACES=()                 # NAME=ADDRESS of each node, for Python
# NAME=value of each port, on one line; see kempner.jobs.ray.ports
RAY_PORTS=''
RAY_LOGS='' RAY_ATTACH='' RAY_TOKEN='' # paths

ray_defaults() { # sets the unset variables' defaults; keeps all from Ray's workers
    : "${COMMAND:=}" "${SETUP_COMMAND:=}" "${CONTAINER:=}" "${MOUNTS:=}" "${CONTAINER_RUNTIME:=}" \
        "${SECRETS_FILE:=}"
    : "${GPUS_PER_NODE:=}" "${CPUS_PER_WORKER:=}" "${DEDICATED_RAY_HEAD:=0}" \
        "${OBJECT_STORE_MEMORY:=}"
    : "${RAY_LOG_SYNC_FREQUENCY:=0}" "${START_TIMEOUT:=600}" "${UV_CACHE_DIR_OVERRIDE:=}"
    : "${BASE_LOG_DIR:=$SLURM_SUBMIT_DIR}"
    export -n COMMAND SETUP_COMMAND CONTAINER MOUNTS CONTAINER_RUNTIME SECRETS_FILE GPUS_PER_NODE \
        CPUS_PER_WORKER DEDICATED_RAY_HEAD OBJECT_STORE_MEMORY RAY_LOG_SYNC_FREQUENCY \
        START_TIMEOUT UV_CACHE_DIR_OVERRIDE BASE_LOG_DIR
}

ray_names() { # sets the paths, and the KEMPNER_* equivalents of variables in docs/guide/ray.md
    RAY_LOGS=$(realpath -m -- "$BASE_LOG_DIR")/$SLURM_JOB_ID-logs
    RAY_LOGS+=${SLURM_RESTART_COUNT:+-r$SLURM_RESTART_COUNT}
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
    mkdir -p -- "$UV_CACHE_DIR" ||
        kp_die "UV_CACHE_DIR_OVERRIDE=$UV_CACHE_DIR cannot be created: give another"
    KEMPNER_MOUNTS+=,$UV_CACHE_DIR:$UV_CACHE_DIR
}

ray_number() { # <variable> <least> <most>: exits unless it is an integer in that range
    [[ ${!1} =~ ^(0|[1-9][0-9]{0,14})$ ]] || kp_die "$1=${!1}: give a whole number from $2 to $3"
    (($2 <= ${!1} && ${!1} <= $3)) || kp_die "$1=${!1}: give a whole number from $2 to $3"
}

ray_least_cpus() { # prints the job's smallest CPU count on a node; Slurm writes 8(x2),4
    local item least=0 items
    IFS=, read -ra items <<<"$SLURM_JOB_CPUS_PER_NODE"
    for item in "${items[@]}"; do
        item=${item%%(*}
        ((least > 0 && least <= item)) || least=$item
    done
    echo "$least"
}

ray_resources() { # sets KP_NODES and the resources of each node for Ray; exits if the job has fewer
    local cpus line nodes
    nodes=$(kp_field NumNodes)
    kp_set_size "$nodes" 1 0
    kp_gpus
    GPUS_PER_NODE=${GPUS_PER_NODE:-$KP_GPUS}
    cpus=$(ray_least_cpus)
    CPUS_PER_WORKER=${CPUS_PER_WORKER:-$cpus}

    ray_number GPUS_PER_NODE 0 "$KP_GPUS"
    ray_number CPUS_PER_WORKER 1 "$cpus"
    ray_number START_TIMEOUT 1 86400
    ray_number RAY_LOG_SYNC_FREQUENCY 0 86400
    ray_number DEDICATED_RAY_HEAD 0 1
    ((DEDICATED_RAY_HEAD == 0 || KP_NODES > 1)) ||
        kp_die "DEDICATED_RAY_HEAD=1 on one node: no node could run tasks; give --nodes=2"
    # Ray's minimum is 78643200 bytes.
    [[ -z $OBJECT_STORE_MEMORY ]] || ray_number OBJECT_STORE_MEMORY 78643200 999999999999999

    RAY_MEMORY=0 # MiB: the job's smallest memory on a node
    while read -r line; do
        [[ $line =~ ^Nodes=.*\ Mem=([0-9]+) ]] || continue
        ((RAY_MEMORY > 0 && RAY_MEMORY <= BASH_REMATCH[1])) || RAY_MEMORY=${BASH_REMATCH[1]}
    done <<<"$KP_JOB"
}

ray_address() { # <node> <address or name>: prints the IPv4 address at which other nodes reach it
    local found
    # Many hosts resolve their own name to 127.x, which Ray would replace by an address
    # of its choice.
    found=$(getent ahostsv4 "$2" | awk '$1 !~ /^127\./ { print $1; exit }') || true
    [[ -n $found || $1 != "${SLURMD_NODENAME:-}" ]] || found=$(hostname -I | awk '{ print $1 }')
    [[ -n $found ]] ||
        kp_die "$1: no IPv4 address for '$2' (NodeAddr): Ray needs one; see getent ahostsv4 $2"
    echo "$found"
}

ray_find_nodes() { # sets RAY_NODES, RAY_ADDRESSES and RAY_PLACES, in Slurm's order
    local line node nodes
    declare -A address=()
    nodes=$(kp_field NodeList)
    mapfile -t RAY_NODES < <(kp_shielded scontrol show hostnames "$nodes")
    while read -r line; do
        [[ ! $line =~ NodeName=([^ ]+).*\ NodeAddr=([^ ]+) ]] ||
            address[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
    done < <(kp_shielded scontrol show node -o "$nodes")
    for node in "${RAY_NODES[@]}"; do
        line=$(ray_address "$node" "${address[$node]:-$node}") # exits with 2 if there is none
        RAY_ADDRESSES+=("$line")
        RAY_PLACES+=("$node=$line")
    done
}

ray_choose_python() { # sets RAY_PYTHON, a Python on this host for kempner.jobs.ray.ports, which
    # needs no packages
    local python
    # With pyxis, the image's Python would cost a step that imports the whole image again.
    if ((${#KP_INSIDE[@]} > 0)); then
        for python in "$KP_ROOT/.venv/bin/python" python3; do
            "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue
            RAY_PYTHON=("$python")
            return
        done
    fi
    RAY_PYTHON=("${KP_INSIDE[@]}" "$KP_PYTHON")
}

ray_ports() { # sets RAY_PORTS and a variable for each port; exits if the user's ports cannot work
    local word
    ray_choose_python
    # it prints why
    RAY_PORTS=$("${RAY_PYTHON[@]}" "$KP_MODULE" kempner.jobs.ray.ports "$CPUS_PER_WORKER" \
        "${RAY_PLACES[@]}") || exit
    # Unexport them: a web server in a worker would use PORT as its own.
    for word in $RAY_PORTS; do export -n "${word?}"; done
}

ray_prepare() { # creates the log directory and the token
    [[ ${KP_RUNTIME:-} != charliecloud ]] ||
        kp_die "ray.sh does not enter containers of charliecloud: give CONTAINER_RUNTIME=pyxis," \
            "apptainer or singularity"
    mkdir -p -- "$RAY_LOGS" || kp_die "$RAY_LOGS cannot be created: give another BASE_LOG_DIR"
    export KEMPNER_PEERS="${RAY_ADDRESSES[*]:0:2}" RAY_ADDRESS=${RAY_ADDRESSES[0]}:$PORT
    # On SIGTERM, Ray drains for 30 s, as long as KillWait: Slurm would kill it before it ends.
    export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0

    # A token in ~/.ray would change only the head's mode, and RAY_AUTH_TOKEN would
    # override the file.
    export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token} RAY_AUTH_TOKEN_PATH=$RAY_TOKEN
    unset RAY_AUTH_TOKEN

    # Left over from a dead batch host, or from the same job ID on another cluster.
    rm -f -- "${RAY_LOGS%/*}/$SLURM_JOB_ID-logs"*/.ray-token "$RAY_LOGS/ENDED"
    : >"$RAY_ATTACH" ||
        kp_die "$RAY_ATTACH cannot be written: submit from a directory that you can write to"
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_TOKEN")
}
