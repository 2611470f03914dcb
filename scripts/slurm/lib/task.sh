#!/usr/bin/env bash
# One task of a step: choose the node's fast network, then execute the command.
#
#   srun ... task.sh COMMAND...     without a command: only print the network of this node
#
# Variables that the user has set are kept. Otherwise the order of preference is: an InfiniBand
# interface that is up and has an address; RoCE; EFA; Slingshot; the interface that leads to the
# other nodes (KEMPNER_PEERS: their addresses).
set -euo pipefail
# The trainer handles these signals as soon as Python runs; until then they must not end the task.
# srun started this script with them blocked, so that they stay pending; if env cannot block signals
# (coreutils before 8.31), they are lost.
[[ -n ${KEMPNER_SIGNALS_WAIT:-} ]] || trap '' TERM INT USR1 USR2

readonly SYS=${KEMPNER_SYS:-/sys} PROC=${KEMPNER_PROC:-/proc} # tests provide their own trees

read_line() { # <file>: prints its first line, if any
    local line=''
    { read -r line <"$1"; } 2>/dev/null || true
    echo "$line"
}

# --- what an earlier attempt has left -------------------------------------------------------------

# seconds; tests shorten it: after a kill, a rank whose GPU or file system hangs takes time to go
readonly GONE_S=${KEMPNER_GONE_S:-30}

list_earlier() { # prints the processes of ranks, and their descendants, of an earlier start or
    # attempt of this job
    local mine start script number file text mark
    local pattern=$'\nKEMPNER_RANK_OF=([0-9]+)\\.([0-9]+)\\.([0-9]+)(\\.([0-9]+))?'
    IFS=. read -r mine start script number <<<"${KEMPNER_ATTEMPT_ID:-}"
    [[ $mine == "${SLURM_JOB_ID:-}" && $start =~ ^[0-9]+$ && $script =~ ^[0-9]+$ ]] || return 0
    ((start > 0 || ${number:-0} > 0)) || return 0 # the very first attempt
    while IFS= read -r file; do
        text=$({ tr '\0' '\n' <"$file"; } 2>/dev/null) || continue
        # skip other jobs: a rank may have called sbatch
        [[ $'\n'$text$'\n' == *$'\n'"SLURM_JOB_ID=$mine"$'\n'* ]] || continue
        [[ $'\n'$text =~ $pattern ]] || continue
        mark=("${BASH_REMATCH[@]}")
        ((mark[2] < start)) || [[ ${mark[2]}.${mark[3]} == "$start.$script" ]] || continue
        ((mark[2] < start || ${mark[5]:-0} < ${number:-0})) || continue
        file=${file%/environ}
        echo "${file##*/}"
    done < <(grep -lazE "^KEMPNER_RANK_OF=$mine\." "$PROC"/[0-9]*/environ 2>/dev/null || true)
}

end_earlier() { # kills the ranks of earlier attempts, and waits until they are gone
    local end=$((SECONDS + GONE_S)) left told=''
    while left=$(list_earlier) && [[ -n $left ]]; do
        left=${left//$'\n'/ }
        if [[ -z $told && ${SLURM_LOCALID:-0} == 0 ]]; then
            printf '[%(%F %T)T] kempner: %s: ends what an earlier attempt has left: %s\n' -1 \
                "$(uname -n)" "$left"
        fi
        told=1
        # shellcheck disable=SC2086 # several
        kill -KILL $left 2>/dev/null || true
        if ((SECONDS >= end)); then # restart.sh looks for these words
            echo "kempner: error: $(uname -n): ranks of an earlier attempt do not end: $left" >&2
            exit 1
        fi
        sleep 0.2
    done
}

if [[ -n ${SLURM_STEP_ID:-} ]] && (($# > 0)); then
    end_earlier
    export KEMPNER_RANK_OF=${KEMPNER_ATTEMPT_ID:-}
fi

# --- what the node has ----------------------------------------------------------------------------

list_addresses() { # prints a line "interface address" per global address ("?" without iproute2)
    if command -v ip >/dev/null; then
        ip -o addr show up scope global 2>/dev/null |
            awk '$3 ~ /^inet/ { sub(/@.*/, "", $2); sub(/\/.*/, "", $4); print $2, $4 }'
    else # an interface with its own route has an address
        {
            awk 'NR > 1 { print $1, "?" }' "$PROC/net/route" &&
                awk '$4 == "00" { print $6, "?" }' "$PROC/net/if_inet6"
        } 2>/dev/null
    fi
}

is_excluded() { # <interface>: succeeds if the user keeps NCCL off it: "^" and prefixes, or "^=" and
    # names
    local item items value=${NCCL_SOCKET_IFNAME:-}
    [[ $value == ^* ]] || return 1
    value=${value#^}
    IFS=, read -ra items <<<"${value#=}"
    for item in "${items[@]}"; do
        [[ $1 != "$item" && ($value == =* || -z $item || $1 != "$item"*) ]] || return 0
    done
    return 1
}

find_interfaces() { # sets ALL (this node's interfaces), UP (those with a link and an
    # address, and not excluded) and ADDRESS[name]
    local name address path
    declare -gA ADDRESS=()
    ALL=() UP=()
    for path in "$SYS"/class/net/*; do ALL+=("${path##*/}"); done
    while read -r name address; do
        [[ -z ${ADDRESS[$name]:-} && $name != lo ]] || continue
        ! is_excluded "$name" || continue
        [[ $(read_line "$SYS/class/net/$name/operstate") != *down ]] || continue
        ADDRESS[$name]=$address
        UP+=("$name")
    done < <(list_addresses)
}

find_ports() { # <link layer>: prints its active RDMA ports as device:port, fastest first
    local port device
    for port in "$SYS"/class/infiniband/*/ports/*; do
        [[ $(read_line "$port/link_layer") == "$1" && $(read_line "$port/state") == 4:* ]] ||
            continue
        device=${port%/ports/*}
        # a rate reads "400 Gb/sec (4X NDR)"
        echo "$(read_line "$port/rate") ${device##*/}:${port##*/}"
    done | sort -s -k1,1nr | sed 's/.* //'
}

interface_of() { # <device:port>: prints the network interface of an Ethernet RDMA port, if any
    local device=$SYS/class/infiniband/${1%:*} name path
    name=$(read_line "$device/ports/${1#*:}/gid_attrs/ndevs/0")
    for path in "$device"/device/net/*; do name=${name:-${path##*/}}; done
    path=$(readlink "$SYS/class/net/$name/master") || true # in a bond the master has the address
    [[ -z $path ]] || name=${path##*/}
    echo "$name"
}

subnet_of() { # <device:port>: prints an InfiniBand port's subnet prefix: ports with different
    # ones are disconnected
    local gid
    gid=$(read_line "$SYS/class/infiniband/${1%:*}/ports/${1#*:}/gids/0")
    echo "${gid%:*:*:*:*}"
}

find_fabric() { # sets FABRIC to the largest group of InfiniBand ports that reach each other, and
    # FABRICS to the number of groups
    local port subnet ports
    declare -A group=()
    FABRIC=()
    while read -r port; do
        subnet="subnet $(subnet_of "$port")"
        group[$subnet]+="$port "
    done < <(find_ports InfiniBand)
    FABRICS=${#group[@]}
    # use the group with the most ports: storage has fewer
    for subnet in "${!group[@]}"; do
        read -ra ports <<<"${group[$subnet]}"
        ((${#ports[@]} <= ${#FABRIC[@]})) || FABRIC=("${ports[@]}")
    done
}

on_fabric() { # <interface>: succeeds unless it is known to be on another InfiniBand fabric
    local path known=''
    for path in "$SYS/class/net/$1/device/infiniband"/*; do
        [[ ! -e $path ]] || known=${path##*/}
    done
    [[ -z $known || " ${FABRIC[*]}" == *" $known:"* || $FABRICS -lt 2 ]]
}

has_efa() { # succeeds if there is an Elastic Fabric Adapter, under any udev name
    local device
    for device in "$SYS"/class/infiniband/*; do
        [[ ${device##*/} != efa* && $(readlink "$device/device/driver") != */efa ]] || return 0
    done
    return 1
}

route_to() { # <address>: prints the interface that leads there, if any
    local pattern=' dev ([^ ]+)' parts address name destination mask longest=-1 found=''
    if command -v ip >/dev/null; then
        [[ ! $(ip -o route get "$1" 2>/dev/null) =~ $pattern ]] || echo "${BASH_REMATCH[1]}"
    elif [[ $1 == *.* ]]; then # IPv4 in /proc: little-endian hexadecimal
        IFS=. read -ra parts <<<"$1"
        address=$((parts[0] | parts[1] << 8 | parts[2] << 16 | parts[3] << 24))
        while read -r name destination _ _ _ _ _ mask _; do
            [[ $mask =~ ^[0-9A-F]{8}$ ]] || continue # the header line
            (((address & 16#$mask) == 16#$destination)) || continue
            mask=$(printf '%d' "0x${mask:6:2}${mask:4:2}${mask:2:2}${mask:0:2}")
            ((mask > longest)) || continue
            longest=$mask found=$name
        done <"$PROC/net/route"
        [[ -z $found ]] || echo "$found"
    fi
}

route_to_peer() { # prints the interface that leads to the first peer on another host, if any
    local peer name
    for peer in ${KEMPNER_PEERS:-}; do
        name=$(route_to "$peer")
        [[ -n $name && $name != lo ]] || continue
        ! is_excluded "$name" || continue
        echo "$name"
        return
    done
}

# --- the choice -----------------------------------------------------------------------------------

choose() { # sets INTERFACE (empty: none usable), NETWORK (its kind) and WHY
    local name port
    for name in "${UP[@]}"; do
        if [[ $name == ib* || $(read_line "$SYS/class/net/$name/type") == 32 ]] &&
            on_fabric "$name"; then
            INTERFACE=$name NETWORK=InfiniBand WHY="InfiniBand, up"
            return
        fi
    done
    while read -r port; do
        name=$(interface_of "$port")
        if [[ -n ${ADDRESS[${name:-none}]:-} ]]; then
            INTERFACE=$name NETWORK=RoCE WHY="RoCE, $port is active"
            return
        fi
    done < <(find_ports Ethernet)
    INTERFACE=$(route_to_peer) NETWORK=Ethernet
    WHY="no fast network is up; this one leads to the other nodes"
    [[ -n $INTERFACE ]] ||
        WHY="no fast network is up, and no route to another node is known (KEMPNER_PEERS)"
    if has_efa; then
        NETWORK=EFA WHY="EFA is available; sockets take the route to the other nodes"
        return
    fi
    for name in "${UP[@]}"; do
        if [[ $name == hsn* ]]; then
            INTERFACE=$name NETWORK=Slingshot WHY="Slingshot, up"
            return
        fi
    done
}

take_given() { # <variable>: checks the user's value; sets INTERFACE to the first interface in it
    local item name found any='' missing='' items value=${!1}
    [[ $value != ^* ]] || return 0 # NCCL's "^" excludes interfaces and names none
    IFS=, read -ra items <<<"${value#=}"
    for item in "${items[@]}"; do
        found=''
        # NCCL takes prefixes unless the value starts with "="; the others take full names
        for name in "${ALL[@]}"; do
            [[ $name != "$item" ]] || found=$name
            [[ $1 != NCCL* || $value == =* || $name != "$item"* ]] || found=${found:-$name}
        done
        any+=$found
        [[ -n $found ]] || missing=${missing:-$item}
        INTERFACE=${INTERFACE:-$found}
    done
    # For NCCL, one match is enough: a site's modules list the interfaces of all
    # nodes, as ib,hsn,bond.
    [[ -n $missing && ($1 != NCCL* || -z $any) ]] || return 0
    echo "kempner: error: $1=$value: $(uname -n) has no interface '$missing'; it has ${ALL[*]}:" \
        "name one of them, or unset $1" >&2
    exit 2
}

is_prefix() { # <interface>: succeeds if another interface's name starts with this one's
    local name
    for name in "${ALL[@]}"; do [[ $name == "$1" || $name != "$1"* ]] || return 0; done
    return 1
}

for_nccl() { # <interface>: prints its name for NCCL, which matches prefixes: ib1 would
    # also match ib10
    if [[ $NETWORK == Slingshot ]]; then
        echo hsn # all of them, hsn0 to hsn3
    elif is_prefix "$1"; then
        echo "=$1"
    else
        echo "$1"
    fi
}

set_unset() { # <variable> <value>: exports it unless the user has set it
    [[ -n ${!1:-} ]] || export "$1=$2"
}

set_fabric() { # exports variables that the fabric needs besides an interface
    case $NETWORK in
        InfiniBand | RoCE)
            # NCCL uses every active port, including Ethernet ports and those of other fabrics. With
            # "=" it takes names literally: mlx5_1 does not match mlx5_10.
            local hca
            hca="=$(IFS=, && echo "${FABRIC[*]}")"
            if ((${#FABRIC[@]} > 0)) && [[ -z ${NCCL_IB_HCA:-} ]] &&
                { ((FABRICS > 1)) || [[ -n $(find_ports Ethernet) ]]; }; then
                export NCCL_IB_HCA=$hca
                WHY+=", NCCL_IB_HCA=$hca keeps NCCL off the other RDMA ports"
            fi
            ;;
        EFA)
            # AWS, "EFA cheatsheet" (github.com/aws-samples/awsome-distributed-training,
            # 1.architectures): the provider; no huge pages, which can make a fork (torch.compile's
            # workers) fail with "Cannot allocate memory".
            set_unset FI_PROVIDER efa
            set_unset FI_EFA_USE_HUGE_PAGE 0
            ;;
        Slingshot)
            # HPE's settings for NCCL over libfabric, as published by sites: docs.cscs.ch
            # (software/communication/nccl) and docs.isambard.ac.uk (guides/nccl). Unless host
            # registration is off, CUDA allocations can deadlock; the default completion queue is
            # too short for large jobs.
            set_unset FI_CXI_DISABLE_HOST_REGISTER 1
            set_unset FI_CXI_DEFAULT_CQ_SIZE 131072
            set_unset FI_MR_CACHE_MONITOR userfaultfd
            set_unset NCCL_CROSS_NIC 1
            ;;
    esac
}

passed_over() { # prints the other interfaces, and why each was not chosen
    local name shown=0 text=''
    for name in "${ALL[@]}"; do
        [[ $name != lo && $name != "$INTERFACE" ]] || continue
        shown=$((shown + 1))
        ((shown <= 8)) || continue
        text+=", $name"
        if is_excluded "$name"; then
            text+=" (excluded)"
        elif [[ $(read_line "$SYS/class/net/$name/operstate") == *down ]]; then
            text+=" (down)"
        elif [[ -z ${ADDRESS[$name]:-} ]]; then
            text+=" (no address)"
        fi
    done
    ((shown <= 8)) || text+=" and $((shown - 8)) more"
    echo "${text:+; passed over:${text#,}}"
}

set_network() { # exports this node's choice for NCCL, gloo and TensorPipe
    local variable
    INTERFACE='' WHY='' NETWORK=''
    find_interfaces
    find_fabric
    for variable in NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME; do
        [[ -n ${!variable:-} ]] || continue
        take_given "$variable"
        WHY+="${WHY:+, }$variable=${!variable} is given"
    done
    local given=$INTERFACE told=$WHY
    choose # also if one is given: the fabric's variables do not depend on the interface
    if [[ -n $given ]]; then
        INTERFACE=$given WHY=$told
    else # gloo knows no "^": it gets one of the others
        WHY="${told:+$told; }$WHY"
    fi
    if [[ -n $INTERFACE ]]; then
        set_unset NCCL_SOCKET_IFNAME "$(for_nccl "$INTERFACE")"
        set_unset GLOO_SOCKET_IFNAME "$INTERFACE"
        set_unset TP_SOCKET_IFNAME "$INTERFACE"
    fi
    set_fabric
    [[ -z $given ]] || NETWORK=given
    export KEMPNER_NETWORK=$NETWORK # preflight compares the nodes
}

set_network
if [[ ${SLURM_LOCALID:-0} == 0 && ${KEMPNER_SAID:-} != "$(uname -n)" ]]; then # one line per node
    address=${ADDRESS[${INTERFACE:-none}]:-}
    printf '[%(%F %T)T] kempner: network of %s: %s\n' -1 "$(uname -n)" \
        "${INTERFACE:-left to NCCL and gloo}${address:+ ($address)}: ${WHY}$(passed_over)" \
        2>/dev/null || true
fi
may_use() { # <path in KEMPNER_STAGED>: succeeds if it exists and nobody else can have put it
    # there; see stage.sh
    local why
    [[ -e $KEMPNER_STAGED/$1 ]] || return 1
    # shellcheck source-path=SCRIPTDIR source=private.sh
    source "${BASH_SOURCE[0]%/*}/private.sh"
    why=$(kp_private "$KEMPNER_STAGED") && return
    echo "kempner: WARNING: $(uname -n): nothing in $KEMPNER_STAGED is used: $why" >&2
    return 1
}

if [[ -n ${KEMPNER_STAGED_PYTHON:-} && ${1:-} == "$KEMPNER_STAGED_PYTHON" ]] &&
    may_use environment/.complete; then
    [[ $(<"$KEMPNER_STAGED/environment/.complete") != "${KEMPNER_STAGED_SUM:-}" ]] ||
        set -- "$KEMPNER_STAGED/environment/bin/python" "${@:2}"
fi
if [[ -n ${KEMPNER_STAGED_IMAGE:-} ]] && may_use image.sif; then
    for ((i = 1; i <= $#; i++)); do
        [[ ${!i} != "$KEMPNER_STAGED_IMAGE" ]] || {
            set -- "${@:1:i-1}" "$KEMPNER_STAGED/image.sif" "${@:i+1}"
            break
        }
    done
fi
if [[ -n ${KP_KEEP:-} ]]; then # the image must not override these: see container.sh
    KP_KEPT=$(env | grep -E "$KP_KEEP") || true
    export KP_KEPT
fi
if (($# > 0)) && [[ -n ${KP_RUN_DIR:-} && ",${KEMPNER_NSYS:-}," == *",${SLURM_PROCID:-0},"* ]]; then
    # It records between cudaProfilerStart and cudaProfilerStop, which the trainer calls around the
    # steps that a PROFILE file requests; the rank outlives each recording.
    if command -v nsys >/dev/null; then
        export KEMPNER_UNDER_NSYS=1
        set -- nsys profile --trace=cuda,nvtx,cublas,cudnn --sample=none --cpuctxsw=none \
            --capture-range=cudaProfilerApi --capture-range-end=repeat --kill=none \
            --output="$KP_RUN_DIR/logs/nsys-rank-${SLURM_PROCID:-0}-%p" "$@"
    else
        echo "kempner: WARNING: KEMPNER_NSYS=$KEMPNER_NSYS: $(uname -n) has no nsys; rank" \
            "${SLURM_PROCID:-0} runs without it" >&2
    fi
fi
(($# == 0)) || exec "$@"
