#!/usr/bin/env bash
# One task of a step: finds the fast network of its node, then becomes the command.
#
#   srun ... task.sh COMMAND...     without a command: only say which network this node would use
#
# A value that the user has set stays. Otherwise, in this order: an InfiniBand interface that is up and has an
# address; RoCE; EFA; Slingshot; the interface that leads to the other nodes (KEMPNER_PEERS: their addresses).
set -euo pipefail
# The trainer answers these as soon as Python runs; until then they must not end the task. srun has started us with
# them blocked, so that they wait; where env cannot do that (coreutils before 8.31), they are lost.
[[ -n ${KEMPNER_SIGNALS_WAIT:-} ]] || trap '' TERM INT USR1 USR2

readonly SYS=${KEMPNER_SYS:-/sys} # a test puts a tree of its own here

read_line() { # <file>: its first line, or nothing
    local line=''
    { read -r line <"$1"; } 2>/dev/null || true
    echo "$line"
}

find_interfaces() { # sets ALL, this node's interfaces; UP, those that have a link and an address; ADDRESS[name]
    local name family address path
    declare -gA ADDRESS=()
    ALL=() UP=()
    for path in "$SYS"/class/net/*; do ALL+=("${path##*/}"); done
    while read -r _ name family address _; do
        name=${name%%@*} # a virtual one shows as ib0@if8
        [[ $family == inet* && -z ${ADDRESS[$name]:-} ]] || continue
        [[ $(read_line "$SYS/class/net/$name/operstate") != *down ]] || continue
        ADDRESS[$name]=${address%%/*}
        UP+=("$name")
    done < <(ip -o addr show up scope global 2>/dev/null)
}

find_ports() { # <link layer>: the active RDMA ports of that kind as device:port, the fastest first
    local port device
    for port in "$SYS"/class/infiniband/*/ports/*; do
        [[ $(read_line "$port/link_layer") == "$1" && $(read_line "$port/state") == 4:* ]] || continue
        device=${port%/ports/*}
        echo "$(read_line "$port/rate") ${device##*/}:${port##*/}" # a rate reads "400 Gb/sec (4X NDR)"
    done | sort -s -k1,1nr | sed 's/.* //'
}

interface_of() { # <device:port>: the network interface on top of an Ethernet RDMA port, or nothing
    local device=$SYS/class/infiniband/${1%:*} name path
    name=$(read_line "$device/ports/${1#*:}/gid_attrs/ndevs/0")
    for path in "$device"/device/net/*; do name=${name:-${path##*/}}; done
    echo "$name"
}

has_efa() { # true when there is an Elastic Fabric Adapter, whatever udev has called it
    local device
    for device in "$SYS"/class/infiniband/*; do
        [[ ${device##*/} != efa* && $(readlink "$device/device/driver") != */efa ]] || return 0
    done
    return 1
}

route_to_peer() { # the interface that leads to the first peer that is another host, or nothing
    local peer pattern=' dev ([^ ]+)'
    for peer in ${KEMPNER_PEERS:-}; do
        [[ $(ip -o route get "$peer" 2>/dev/null) =~ $pattern && ${BASH_REMATCH[1]} != lo ]] || continue
        echo "${BASH_REMATCH[1]}"
        return
    done
}

choose() { # sets INTERFACE (empty: none will do) and WHY
    local name port
    for name in "${UP[@]}"; do
        if [[ $name == ib* || $(read_line "$SYS/class/net/$name/type") == 32 ]]; then
            INTERFACE=$name WHY="InfiniBand, up"
            return
        fi
    done
    while read -r port; do
        name=$(interface_of "$port")
        if [[ -n ${ADDRESS[${name:-none}]:-} ]]; then
            INTERFACE=$name WHY="RoCE, $port is active"
            return
        fi
    done < <(find_ports Ethernet)
    INTERFACE=$(route_to_peer)
    WHY="no fast network is up; this one leads to the other nodes"
    [[ -n $INTERFACE ]] || WHY="no fast network is up, and no route to another node is known (KEMPNER_PEERS)"
    if has_efa; then
        WHY="EFA is here; sockets take the route to the other nodes"
        return
    fi
    for name in "${UP[@]}"; do
        if [[ $name == hsn* ]]; then
            INTERFACE=$name WHY="Slingshot, up"
            return
        fi
    done
}

take_given() { # <variable>: checks the user's value; sets INTERFACE to the first interface that it names
    local item name found items value=${!1}
    [[ $value != ^* ]] || return 0 # NCCL's "any but these" names none
    IFS=, read -ra items <<<"${value#=}"
    for item in "${items[@]}"; do
        found=''
        for name in "${ALL[@]}"; do # NCCL takes prefixes unless the value begins with "="; the others take names
            [[ $name != "$item" ]] || found=$name
            [[ $1 != NCCL* || $value == =* || $name != "$item"* ]] || found=${found:-$name}
        done
        if [[ -z $found ]]; then
            echo "kempner: error: $1=$value: $(uname -n) has no interface '$item'; it has ${ALL[*]}: name one of them, or unset $1" >&2
            exit 2
        fi
        INTERFACE=${INTERFACE:-$found}
    done
}

is_prefix() { # <interface>: true when another one's name begins with it
    local name
    for name in "${ALL[@]}"; do [[ $name == "$1" || $name != "$1"* ]] || return 0; done
    return 1
}

set_network() { # exports the choice of this node for NCCL, gloo and TensorPipe
    local variable ports
    INTERFACE='' WHY=''
    find_interfaces
    for variable in NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME; do
        [[ -n ${!variable:-} ]] || continue
        take_given "$variable"
        WHY+="${WHY:+, }$variable=${!variable} is given"
    done
    [[ -n $WHY ]] || choose
    if [[ -n $INTERFACE ]]; then
        # NCCL takes a name as a prefix: ib1 would be ib10 too.
        if is_prefix "$INTERFACE"; then variable="=$INTERFACE"; else variable=$INTERFACE; fi
        export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$variable}
        export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$INTERFACE} TP_SOCKET_IFNAME=${TP_SOCKET_IFNAME:-$INTERFACE}
    fi
    # Where both kinds are active, NCCL would also send over the Ethernet ports.
    ports=$(find_ports InfiniBand | paste -sd,)
    if [[ -n $ports && -n $(find_ports Ethernet) && -z ${NCCL_IB_HCA:-} ]]; then
        export NCCL_IB_HCA="=$ports"
        WHY+=", NCCL_IB_HCA=$NCCL_IB_HCA keeps NCCL off the Ethernet ports"
    fi
}

set_network
if [[ ${SLURM_LOCALID:-0} == 0 && ${KEMPNER_SAID:-} != "$(uname -n)" ]]; then # one line per node
    printf '[%(%T)T] kempner: network of %s: %s\n' -1 "$(uname -n)" \
        "${INTERFACE:-left to NCCL and gloo}${ADDRESS[${INTERFACE:-none}]:+ (${ADDRESS[${INTERFACE:-none}]})}: ${WHY}"
fi
(($# == 0)) || exec "$@"
