# shellcheck shell=bash
# What the launch scripts share: the job as Slurm sees it, the network of a node, srun, signals, requeue.
# To be sourced; does nothing by itself. Facts about Slurm behind this file: docs/slurm.md.

kp_log() { # <message>
    printf '[%(%T)T] kempner: %s\n' -1 "$*"
}

kp_die() { # <what is wrong; what to do>: ends with 2, the exit code of bad input
    printf 'kempner: error: %s\n' "$*" >&2
    exit 2
}

# --- where things are --------------------------------------------------------------------------------------------

kp_setup() { # sets KP_ROOT, KP_PYTHON, KP_TRAIN, KP_RC; reads site.env; inside a job also KP_JOB (see kp_show_job)
    KP_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    KP_SIGNAL='' KP_CHILD='' KP_DECIDED='' KP_RC=0
    trap 'kp_on_signal TERM' TERM USR1
    trap 'kp_on_signal USR2' USR2
    trap 'kp_on_signal INT' INT
    kp_site
    KP_TRAIN=${KEMPNER_TRAIN:-$KP_ROOT/scripts/train.py}
    KP_PYTHON=${KEMPNER_PYTHON:-$KP_ROOT/.venv/bin/python}
    [[ -n ${KEMPNER_PYTHON:-} || -x $KP_PYTHON ]] || KP_PYTHON=python3
    command -v "$KP_PYTHON" >/dev/null || kp_die "no Python at '$KP_PYTHON': make the environment, or set KEMPNER_PYTHON"
    export PYTHONUNBUFFERED=1 PYTHONPATH=$KP_ROOT/src${PYTHONPATH:+:$PYTHONPATH}
    [[ -z ${SLURM_JOB_ID:-} ]] || kp_show_job || kp_die "scontrol does not know job $(kp_job_id)"
}

kp_site() { # reads the site file: KEMPNER_SITE, or site.env of the repository; what it sets is exported
    local file=${KEMPNER_SITE:-$KP_ROOT/site.env}
    [[ -z ${KEMPNER_SITE:-} || -r $file ]] || kp_die "KEMPNER_SITE=$file: no such file"
    [[ -r $file ]] || return 0
    set +eu -a # modules and the like are not written for errexit and nounset
    # shellcheck source=/dev/null
    source "$file"
    set -eu +a
}

# --- the job as Slurm sees it ------------------------------------------------------------------------------------

kp_job_id() { # the job, or the one task of an array: its plain number may mean the whole array
    if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then
        echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    else
        echo "$SLURM_JOB_ID"
    fi
}

kp_show_job() { # sets KP_JOB to scontrol's text; fails when Slurm does not answer
    local id tries
    id=$(kp_job_id)
    for ((tries = 0; tries < 5; tries++)); do
        # When Slurm ends a job it signals this shell's children as well: they must not die before they answer.
        KP_JOB=$(kp_shielded scontrol show job -d "$id" 2>/dev/null) && [[ -n $KP_JOB ]] && return 0
        kp_shielded sleep 0.2
    done
    return 1
}

kp_shielded() { # <command>...: runs it out of reach of the job's signals
    (trap '' TERM INT HUP USR1 USR2 && exec "$@")
}

kp_field() { # <name>: that field of KP_JOB
    [[ $KP_JOB =~ (^|[[:space:]])"$1"=([^[:space:]]*) ]] && echo "${BASH_REMATCH[2]}"
}

kp_is_batch() { # true in the batch script of a job: not in salloc's shell, not in a step
    [[ $(kp_field BatchFlag) == 1 && -z ${SLURM_STEP_NUM_TASKS:-} && -n ${SLURM_JOB_ID:-} && -z ${KP_BESIDE:-} ]]
}

kp_gpu_count() { # <GRES or TRES text>: how many GPUs it names; gpu, gpu:4, gpu:h100:4, gres/gpu=4, several types
    local text=$1 count=0 pattern='gpu([:=][A-Za-z][^:=,(]*)?([:=]([0-9]+))?(.*)'
    while [[ $text =~ $pattern ]]; do
        count=$((count + ${BASH_REMATCH[3]:-1}))
        text=${BASH_REMATCH[4]}
    done
    echo "$count"
}

kp_gpus() { # sets KP_GPUS, the GPUs of each node, and KP_GPUS_ASKED: empty when they only came with the whole node
    local line counts='' asked
    while read -r line; do
        [[ $line != Nodes=*GRES=* ]] || counts+=" $(kp_gpu_count "${line##*GRES=}")"
    done <<<"$KP_JOB"
    counts=$(tr ' ' '\n' <<<"${counts# }" | sort -u | paste -sd' ')
    KP_GPUS_ASKED='' KP_GPUS=${counts:-0}
    if asked=$(kp_field TresPerNode) && [[ $asked == *gpu* ]]; then
        KP_GPUS=$(kp_gpu_count "$asked")
        KP_GPUS_ASKED="--gpus-per-node=$KP_GPUS"
        return
    fi
    [[ $KP_GPUS != *' '* ]] || kp_die "the nodes have different numbers of GPUs ($KP_GPUS): give --gpus-per-node=N"
    if asked=$(kp_field TresPerTask) && [[ $asked == *gpu* ]]; then
        KP_GPUS_ASKED="--gpus-per-task=$(kp_gpu_count "$asked")"
    elif asked=$(kp_field TresPerJob) && [[ $asked == *gpu* ]]; then
        asked=$(kp_gpu_count "$asked")
        ((asked % KP_NODES == 0)) || kp_die "--gpus=$asked on $KP_NODES nodes: give --gpus-per-node=N"
        KP_GPUS=$((asked / KP_NODES))
        KP_GPUS_ASKED="--gpus=$asked"
    fi
}

kp_tasks_asked() { # the tasks per node that the user asked for, or nothing
    local pattern='NtasksPerN:B:S:C=([1-9][0-9]*)' tasks=${SLURM_NTASKS:-0}
    if [[ $KP_JOB =~ $pattern ]]; then
        echo "${BASH_REMATCH[1]}"
    elif ((tasks > KP_NODES)) || { ((tasks > 0)) && kp_is_batch; }; then
        ((tasks % KP_NODES == 0)) || kp_die "--ntasks=$tasks on $KP_NODES nodes: give --ntasks-per-node=N"
        echo $((tasks / KP_NODES))
    fi
}

kp_tasks() { # sets KP_NODES, KP_TASKS (per node), KP_GPUS, KP_CPUS (per task); stops when the request contradicts itself
    local asked cpus
    KP_NODES=$(kp_field NumNodes)
    KP_NODES=${KP_NODES%%-*}
    kp_gpus
    asked=$(kp_tasks_asked)
    KP_TASKS=${asked:-$KP_GPUS}
    ((KP_TASKS > 0)) || KP_TASKS=1
    if ((KP_GPUS > 0 && KP_TASKS != KP_GPUS)); then
        [[ -z $KP_GPUS_ASKED && $KP_TASKS -lt $KP_GPUS ]] ||
            kp_die "$KP_TASKS task(s) per node but $KP_GPUS GPU(s) per node${KP_GPUS_ASKED:+ ($KP_GPUS_ASKED)};" \
                "one process drives one GPU: give --ntasks-per-node=$KP_GPUS, or --gpus-per-node=$KP_TASKS"
        kp_log "note: each node has $KP_GPUS GPUs, $KP_TASKS are used; leave --ntasks-per-node out to use all"
        KP_GPUS=$KP_TASKS
    fi
    cpus=$(($(kp_field NumCPUs) / KP_NODES))
    ((cpus >= KP_TASKS)) ||
        kp_die "$KP_TASKS task(s) per node on $cpus CPU(s) per node: give --ntasks-per-node=$KP_TASKS --cpus-per-task=N"
    KP_CPUS=${SLURM_CPUS_PER_TASK:-$((cpus / KP_TASKS))}
}

# --- the network of a node ---------------------------------------------------------------------------------------

kp_interfaces() { # sets KP_UP, the interfaces that are up and have an address, and KP_ADDRESS[name]
    local name family address state sys=${KP_SYS:-/sys}
    declare -gA KP_ADDRESS=()
    KP_UP=()
    while read -r _ name family address _; do
        name=${name%%@*} # a veth shows as ib0@if8
        state=$(cat "$sys/class/net/$name/operstate" 2>/dev/null) || state=unknown
        [[ $family == inet* && $state != *down && -z ${KP_ADDRESS[$name]:-} ]] || continue
        KP_ADDRESS[$name]=${address%%/*}
        KP_UP+=("$name")
    done < <(ip -o addr show up scope global 2>/dev/null)
}

kp_verbs_ports() { # <link layer>: the active RDMA ports of that kind, "<rate> <device>:<port>" a line, fastest first
    local port device sys=${KP_SYS:-/sys}
    for port in "$sys"/class/infiniband/*/ports/*; do
        [[ -r $port/link_layer && $(<"$port/link_layer") == "$1" && $(<"$port/state") == 4:* ]] || continue
        device=${port%/ports/*}
        echo "$(cut -d. -f1 <"$port/rate" | tr -dc '0-9 ' | cut -d' ' -f1) ${device##*/}:${port##*/}"
    done | sort -s -k1,1nr
}

kp_port_interface() { # <device>:<port>: the network interface on top of an Ethernet RDMA port
    local device=${KP_SYS:-/sys}/class/infiniband/${1%:*}
    cat "$device/ports/${1#*:}/gid_attrs/ndevs/0" 2>/dev/null || (cd "$device/device/net" 2>/dev/null && echo *)
}

kp_has_efa() { # true when this node has an Elastic Fabric Adapter, whatever udev calls it
    local device
    for device in "${KP_SYS:-/sys}"/class/infiniband/*; do
        [[ ${device##*/} != efa* && $(readlink "$device/device/driver") != */efa ]] || return 0
    done
    return 1
}

kp_route_interface() { # <address>...: the interface that leads to the first of them that is not this node itself
    local address route pattern=' dev ([^ ]+)'
    for address in "$@" default; do
        if [[ $address == default ]]; then
            route=$(ip -o route show default 2>/dev/null) || continue
        else
            route=$(ip -o route get "$address" 2>/dev/null) || continue
        fi
        [[ $route =~ $pattern && ${BASH_REMATCH[1]} != lo ]] || continue
        echo "${BASH_REMATCH[1]}"
        return
    done
}

kp_choose_interface() { # <address of a peer>...: prints "<interface> <why>"; nothing when there is none
    local name port
    for name in "${KP_UP[@]}"; do
        [[ $name != ib* && $(cat "${KP_SYS:-/sys}/class/net/$name/type" 2>/dev/null) != 32 ]] || {
            echo "$name InfiniBand"
            return
        }
    done
    while read -r _ port; do
        name=$(kp_port_interface "$port")
        [[ -z ${KP_ADDRESS[$name]:-} ]] || {
            echo "$name RoCE on $port"
            return
        }
    done < <(kp_verbs_ports Ethernet)
    name=$(kp_route_interface "$@")
    if kp_has_efa; then
        [[ -z $name ]] || echo "$name EFA; sockets follow the route to the other nodes"
        return
    fi
    for port in "${KP_UP[@]}"; do
        [[ $port != hsn* ]] || {
            echo "$port Slingshot"
            return
        }
    done
    [[ -z $name ]] || echo "$name no fast network found; it leads to the other nodes"
}

kp_given_interfaces() { # <variable> <its value>: the interfaces that a value of the user's names, by NCCL's grammar
    local variable=$1 value=$2 item name found have=()
    for name in "${KP_SYS:-/sys}"/class/net/*; do have+=("${name##*/}"); done
    [[ $value != ^* ]] || return 0
    for item in ${value//,/ }; do
        found=
        for name in "${have[@]}"; do
            [[ $name == "${item#=}" || ($variable == NCCL* && $value != =* && $name == "$item"*) ]] || continue
            found=1
            echo "$name"
        done
        [[ -n $found ]] || kp_die "$variable=$value: $(uname -n) has no interface '${item#=}'; it has: ${have[*]}; correct or unset it"
    done
}

kp_network() { # <address of a peer>...: exports this node's choice for NCCL, gloo and TensorPipe; sets KP_NETWORK, which says why
    local variable chosen='' why='' names ports
    kp_interfaces
    for variable in NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME; do
        [[ -n ${!variable:-} ]] || continue
        names=$(kp_given_interfaces "$variable" "${!variable}")
        [[ -n $chosen || -z $names ]] || chosen=$(head -n 1 <<<"$names")
        why+="${why:+, }$variable=${!variable} was given"
    done
    [[ -n $chosen ]] || read -r chosen why < <(kp_choose_interface "$@"; echo "$why") || true
    if [[ -z $chosen ]]; then
        KP_NETWORK="left to NCCL and gloo (${why:-no interface leads to another node})"
        return
    fi
    # NCCL takes a name as a prefix: ib1 would be ib10 too.
    names=("${KP_SYS:-/sys}/class/net/$chosen"?*)
    [[ ! -e ${names[0]} ]] && names= || names='='
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$names$chosen}
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$chosen} TP_SOCKET_IFNAME=${TP_SOCKET_IFNAME:-$chosen}
}
