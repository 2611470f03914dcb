#!/usr/bin/env bash
# Run a real Slurm cluster of virtual hosts on this machine, to try and test the kit.
#
#   testbed.sh install              install the packages it needs (Debian, Ubuntu; root)
#   testbed.sh up [NODES] [GPUS]    boot it (default: 2 hosts with 4 GPUs each); prints a line for
#                                   your shell:
#                                   eval "$(scripts/slurm/testbed.sh up 2 4)"; sinfo; sbatch ...
#   testbed.sh down                 stop it and remove every trace
#   testbed.sh status               show what is up, and Slurm's view of it
#   testbed.sh crash NODE           kill all processes on a host at once (head: the controller's)
#   testbed.sh revive NODE          boot that host again
#   testbed.sh away SECONDS         stop the controller for SECONDS; returns when it is back
#   testbed.sh cut NODE             unplug the host's fast network (ib0)
#   testbed.sh join NODE            plug it in again
#   testbed.sh bytes NODE IFACE     print the bytes that the host has received over em4 or ib0,
#                                   which tell the network used
#   testbed.sh exec NODE COMMAND    run a command on that host
#   testbed.sh as USER COMMAND      run a command as a user of a site: alice, or mallory beside her
#   testbed.sh break NODE FAULT     on a site with nodes: break a host (unmounted, eio or python)
#                                   until it boots again
#   testbed.sh path                 with SLURM_BIN=DIR: print the PATH that starts with the programs
#                                   of that Slurm
#
# Each host has its own processes, hostname, /etc/hosts, /sys/class/net, management NIC (em4,
# 10.77.ID.k) and fast NIC (ib0, 10.78.ID.k); all share this machine's file system. Several clusters
# can run side by side, each with its own number: KEMPNER_TESTBED=3 testbed.sh up. With
# KEMPNER_TESTBED_OWNER=PID the cluster goes down when that process is gone.
# KEMPNER_TESTBED_CONF="JobRequeue=0 KillWait=2" changes lines of slurm.conf;
# KEMPNER_TESTBED_GPU=h100 gives the GPUs a type. KEMPNER_TESTBED_SITE=hostile adds the problems of
# real sites (or only some, comma-separated: slow,noise,accounting,home,nodes,twin,clock,memory);
# KEMPNER_TESTBED_SEED selects which calls fail there. SLURM_BIN=DIR uses the Slurm whose programs
# are in DIR, or in DIR/bin and DIR/sbin, instead of the one in PATH.
set -euo pipefail

die() { # <what is wrong; what to do>
    printf 'testbed: %s\n' "$*" >&2
    exit 2
}

readonly ID=${KEMPNER_TESTBED:-1}
[[ $ID =~ ^[1-9][0-9]{0,2}$ && $ID -le 250 ]] ||
    die "KEMPNER_TESTBED=$ID: must be a number from 1 to 250"
readonly STATE=/run/kempner-testbed-$ID
readonly PORT=$((20000 + 10 * ID))
# The clusters of a machine share /tmp and /dev/shm: their job numbers must not collide.
readonly FIRST_JOB=$((1000 * (ID - 1) + 1))
SELF=$(realpath "${BASH_SOURCE[0]}")
readonly SELF
export SLURM_CONF=$STATE/slurm.conf

# shellcheck source-path=SCRIPTDIR source=lib/help.sh
source "${SELF%/*}/lib/help.sh"
# shellcheck source-path=SCRIPTDIR source=testbed/site.sh
source "${SELF%/*}/testbed/site.sh"
# shellcheck source-path=SCRIPTDIR source=testbed/users.sh
source "${SELF%/*}/testbed/users.sh"
# shellcheck source-path=SCRIPTDIR source=testbed/slow.sh
source "${SELF%/*}/testbed/slow.sh"
# shellcheck source-path=SCRIPTDIR source=testbed/noise.sh
source "${SELF%/*}/testbed/noise.sh"
# shellcheck source-path=SCRIPTDIR source=testbed/accounting.sh
source "${SELF%/*}/testbed/accounting.sh"
# shellcheck source-path=SCRIPTDIR source=testbed/home.sh
source "${SELF%/*}/testbed/home.sh"
# shellcheck source-path=SCRIPTDIR source=testbed/nodes.sh
source "${SELF%/*}/testbed/nodes.sh"
# shellcheck source-path=SCRIPTDIR source=testbed/twin.sh
source "${SELF%/*}/testbed/twin.sh"
# shellcheck source-path=SCRIPTDIR source=testbed/clock.sh
source "${SELF%/*}/testbed/clock.sh"
# shellcheck source-path=SCRIPTDIR source=testbed/memory.sh
source "${SELF%/*}/testbed/memory.sh"

take_slurm() { # with SLURM_BIN=DIR: prepends its programs to PATH; exits if one is missing
    # or does not fit
    local dir program conf missing=() version versions=''
    [[ -n ${SLURM_BIN:-} ]] || return 0
    conf=$(mktemp) # newer clients report their version only with a slurm.conf
    printf 'ClusterName=testbed\nSlurmctldHost=head\n' >"$conf"
    for dir in "$SLURM_BIN/sbin" "$SLURM_BIN/bin" "$SLURM_BIN"; do
        [[ ! -d $dir || :$PATH: == *":$(realpath "$dir"):"* ]] || PATH=$(realpath "$dir"):$PATH
    done
    for program in slurmctld slurmd srun sbatch salloc scancel scontrol squeue sinfo; do
        dir=$(type -P "$program") && [[ ${dir%/*} == "$(realpath "$SLURM_BIN")"?(/bin|/sbin) ]] || {
            missing+=("$program")
            continue
        }
        version=$(SLURM_CONF=$conf "$program" -V 2>/dev/null) ||
            die "SLURM_BIN=$SLURM_BIN: '$program -V' does not run"
        version=${version##* }
        [[ " $versions " == *" $version "* ]] || versions+="${versions:+ }$version"
    done
    rm -f "$conf"
    ((${#missing[@]} == 0)) ||
        die "SLURM_BIN=$SLURM_BIN has no ${missing[*]}: name the directory that holds Slurm's" \
            "programs, or its bin and sbin"
    [[ $versions != *' '* ]] ||
        die "SLURM_BIN=$SLURM_BIN: its programs are of several versions: $versions"
    version=${versions%.*}
    ((10#${version/./} >= 2205)) ||
        die "SLURM_BIN=$SLURM_BIN: Slurm $versions is too old: 22.05 is needed"
}

namespace() { # <host>: prints the name of its network namespace
    printf 'kp%s-%s' "$ID" "$1"
}

# --- what the hosts read --------------------------------------------------------------------------

write_slurm_conf() { # <nodes> <gpus per node>
    local nodes=$1 gpus=$2 k gres=
    ((gpus == 0)) || gres="Gres=gpu:${KEMPNER_TESTBED_GPU:+$KEMPNER_TESTBED_GPU:}$gpus"
    cat <<CONF
ClusterName=testbed$ID
FirstJobId=$FIRST_JOB
SlurmctldHost=head(10.77.$ID.254)
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 1))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also the delay before a requeued job starts again (120 s unless it is set)
AuthInfo=socket=$STATE/munge/socket,cred_expire=5
StateSaveLocation=$STATE/ctld
SlurmdSpoolDir=$STATE/spool/%n
SlurmctldPidFile=$STATE/pid/slurmctld
SlurmdPidFile=$STATE/pid/slurmd-%n
SlurmctldLogFile=$STATE/log/slurmctld.log
SlurmdLogFile=$STATE/log/%n.log
SlurmdDebug=verbose
JobCompType=jobcomp/filetxt
JobCompLoc=$STATE/log/jobcomp.log
AccountingStorageType=accounting_storage/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# start a job as soon as there is room, not at the scheduler's next cycle
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=10
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
CONF
    # Only enough CPUs for one task per GPU: the hosts share the cores of one machine.
    for ((k = 1; k <= nodes; k++)); do
        echo "NodeName=node$k NodeAddr=10.77.$ID.$k CPUs=$((gpus > 4 ? gpus : 4))" \
            "RealMemory=16000 $gres State=UNKNOWN"
    done
    echo "PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP" \
        "PriorityTier=1 GraceTime=20"
    echo "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10"
}

write_files() { # <nodes> <gpus per node>
    local nodes=$1 gpus=$2 k
    write_slurm_conf "$nodes" "$gpus" >"$SLURM_CONF"
    for ((k = 0; k < gpus; k++)); do
        mknod "$STATE/dev/gpu$k" c 1 3 # a second /dev/null: slurmd counts GPUs by device files
        echo "NodeName=node[1-$nodes] Name=gpu" \
            "${KEMPNER_TESTBED_GPU:+Type=$KEMPNER_TESTBED_GPU }File=$STATE/dev/gpu$k"
    done >"$STATE/gres.conf"
    {
        echo "127.0.0.1 localhost"
        echo "10.77.$ID.254 head"
        for ((k = 1; k <= nodes; k++)); do echo "10.77.$ID.$k node$k"; done
        # PyTorch looks up the name of an IPv4 peer in this form; without these lines
        # it asks the DNS.
        for ((k = 1; k <= nodes; k++)); do echo "::ffff:10.77.$ID.$k from-node$k"; done
        echo "::ffff:127.0.0.1 from-localhost"
    } >"$STATE/hosts"
    (umask 077 && head -c 1024 /dev/urandom >"$STATE/munge/key")
}

# --- hosts ----------------------------------------------------------------------------------------

start() { # <host> [nsenter option]: starts it in a PID namespace, so that one kill ends
    # all its processes
    setsid nsenter "${2:---net=/proc/self/ns/net}" \
        unshare --uts --mount --pid --fork --kill-child --mount-proc bash "$SELF" init "$1" \
        </dev/null >"$STATE/log/$1.init" 2>&1 &
    echo $! >"$STATE/pid/$1"
}

init() { # <host>: runs as the first process of a host; when a daemon ends, so do this
    # process and the host
    hostname "$1"
    site host "$1"
    mount --bind "$STATE/hosts" /etc/hosts
    start_munged "$1"
    if [[ $1 == head ]]; then
        site head
        slurmctld -D &
    else
        # A fresh /sys shows only this host's interfaces; Slurm also needs the control groups in it.
        mount -t sysfs sysfs "$STATE/sys"
        mount --rbind /sys/fs/cgroup "$STATE/sys/fs/cgroup"
        mount --rbind "$STATE/sys" /sys
        # A shell's background jobs ignore SIGINT; newer slurmds would pass that on
        # to batch scripts.
        env --default-signal=INT,QUIT slurmd -D -N "$1" &
    fi
    wait -n
}

start_munged() { # <host>: starts its own, as on a real host, because a munged accepts each
    # credential only once
    # A Slurm built with --enable-multiple-slurmd would accept it again; others refuse.
    if [[ $1 != head ]]; then
        mkdir -p "$STATE/munge-$1"
        cp -p "$STATE/munge/key" "$STATE/munge-$1/key"
        mount --bind "$STATE/munge-$1" "$STATE/munge"
    fi
    rm -f "$STATE/munge/socket"
    munged --foreground --force --key-file="$STATE/munge/key" --socket="$STATE/munge/socket" \
        --pid-file="$STATE/munge/pid" --log-file="$STATE/munge/log" \
        --seed-file="$STATE/munge/seed" &
    until [[ -S $STATE/munge/socket ]]; do sleep 0.01; done
}

stop() { # <host>: kills every process on it and waits until they are gone
    local outer
    [[ -s $STATE/pid/$1 ]] || return 0
    outer=$(<"$STATE/pid/$1")
    rm -f "$STATE/pid/$1"
    kill_and_wait "$(first_process "$outer")" "$outer"
}

first_process() { # <pid of unshare>: prints the host's process 1 as this machine numbers
    # it, if it exists
    { tr -d ' ' <"/proc/$1/task/$1/children"; } 2>/dev/null || true
}

kill_and_wait() { # <pid>...
    local pid tries
    for pid in "$@"; do
        kill -KILL "${pid:-none}" 2>/dev/null || continue
        for ((tries = 0; tries < 500; tries++)); do
            grep -qs '^State:.[^Z]' "/proc/$pid/status" || break
            sleep 0.01
        done
    done
}

plug() { # <host> <nic> <name of this machine's end> <bridge> <address>
    ip link add "$3" type veth peer name "$2" netns "$(namespace "$1")"
    ip link set "$3" master "$4" up
    ip -n "$(namespace "$1")" addr add "$5/24" dev "$2"
    ip -n "$(namespace "$1")" link set "$2" up
}

boot() { # <host>
    local k=${1#node}
    ip netns add "$(namespace "$1")"
    ip -n "$(namespace "$1")" link set lo up
    plug "$1" em4 "m$ID-$k" "kpm$ID" "10.77.$ID.$k"
    plug "$1" ib0 "i$ID-$k" "kpi$ID" "10.78.$ID.$k"
    start "$1" "--net=/run/netns/$(namespace "$1")"
}

need_node() { # <host>: exits if there is no such host
    [[ -e $SLURM_CONF ]] ||
        die "cluster $ID is not up: testbed.sh up, or KEMPNER_TESTBED=NUMBER of one that is"
    [[ ${1:-} == node* && -e /run/netns/$(namespace "$1") ]] ||
        die "no host '${1:-}' in cluster $ID; there is: $(list_nodes | paste -sd' ')"
}

need_host() { # <host>: the same, but allows the head
    [[ ${1:-} == head && -e $SLURM_CONF ]] || need_node "${1:-}"
}

revive() { # <host>
    if [[ $1 == head ]]; then
        start head
        wait_for slurmctld scontrol ping
        # the guard knows the head by its PID
        [[ -z ${KEMPNER_TESTBED_OWNER:-} ]] || down_with "$KEMPNER_TESTBED_OWNER"
    else
        start "$1" "--net=/run/netns/$(namespace "$1")"
    fi
}

away() { # <seconds>: shuts the controller down cleanly, so that it keeps its state as in a failover
    local head tries
    [[ ${1:-} =~ ^[0-9]+$ ]] || die "away SECONDS: a number, not '${1:-}'"
    need_host head
    head=$(first_process "$(<"$STATE/pid/head")")
    scontrol shutdown slurmctld >/dev/null 2>&1 || true
    for ((tries = 0; tries < 100; tries++)); do
        kill -0 "${head:-none}" 2>/dev/null || break
        sleep 0.1
    done
    stop head
    sleep "$1"
    revive head
}

list_nodes() {
    ip netns list |
        awk -v prefix="kp$ID-" 'index($1, prefix) == 1 { print substr($1, length(prefix) + 1) }'
}

# --- commands -------------------------------------------------------------------------------------

missing_commands() {
    local command
    for command in slurmctld slurmd munged sinfo ip nsenter unshare setsid; do
        command -v "$command" >/dev/null || echo "$command"
    done
}

check_machine() {
    local missing
    [[ $EUID == 0 ]] || die "needs root, to make network namespaces: sudo $SELF $*"
    mapfile -t missing < <(missing_commands)
    ((${#missing[@]} == 0)) || die "not installed: ${missing[*]}; run: $SELF install"
    unshare --net --mount --pid --fork true 2>/dev/null ||
        die "namespaces are not allowed here (a container?): run it in a VM, or start the" \
            "container with --privileged"
}

up() { # [nodes] [gpus per node]
    local nodes=${1:-2} gpus=${2:-4} k chosen
    [[ $nodes =~ ^[1-9][0-9]?$ && $gpus =~ ^[0-9]{1,2}$ ]] ||
        die "up [NODES 1..99] [GPUS PER NODE 0..99], not: up $*"
    choose_site "$nodes"
    chosen=("${SITE[@]}")
    check_machine "up $nodes $gpus"
    if [[ -s $STATE/pid/head ]] && kill -0 "$(<"$STATE/pid/head")" 2>/dev/null; then
        die "cluster $ID is up: export SLURM_CONF=$SLURM_CONF; or take it down;" \
            "or KEMPNER_TESTBED=$((ID % 250 + 1))"
    fi
    down # removes what a crash may have left
    [[ -z $(ip -o route show "10.77.$ID.0/24") ]] ||
        die "10.77.$ID.0/24 is in use here: set KEMPNER_TESTBED to another number"
    trap down EXIT # clean up if it cannot boot
    mkdir -m 755 "$STATE"
    mkdir "$STATE"/{ctld,spool,pid,log,dev,sys,munge}
    write_files "$nodes" "$gpus"
    NODES=$nodes GPUS=$gpus SITE=("${chosen[@]}")
    ((${#SITE[@]} == 0)) || printf '%s\n' "${SITE[@]}" >"$STATE/site"
    site files
    for k in ${KEMPNER_TESTBED_CONF:-}; do set_conf "$k"; done
    for k in m i; do ip link add "kp$k$ID" up type bridge; done
    ip addr add "10.77.$ID.254/24" dev "kpm$ID"
    start head
    wait_for slurmctld scontrol ping
    for ((k = 1; k <= nodes; k++)); do boot "node$k"; done
    wait_for "idle hosts" all_idle "$nodes"
    site up
    [[ -z ${KEMPNER_TESTBED_OWNER:-} ]] || down_with "$KEMPNER_TESTBED_OWNER"
    trap - EXIT
    echo "testbed: cluster $ID is up: $nodes host(s), $gpus GPU(s) each; down again:" \
        "KEMPNER_TESTBED=$ID $SELF down" >&2
    [[ -z ${SLURM_BIN:-} ]] || printf 'export PATH=%q\n' "$PATH"
    [[ ! -t 1 ]] || echo "testbed: type this line in your shell, and sinfo, sbatch and the others" \
        "talk to it:" >&2
    echo "export SLURM_CONF=$SLURM_CONF"
}

wait_for() { # <what> <command>...: waits until the command succeeds, at most 30 s
    local tries
    for ((tries = 0; tries < 600; tries++)); do
        "${@:2}" >/dev/null 2>&1 && return 0
        sleep 0.05
    done
    tail -n 5 "$STATE"/log/* >&2
    die "no $1 within 30 s"
}

all_idle() { # <nodes>: succeeds if Slurm can use them all
    (($(sinfo -h -N -p gpu -t idle -o %N | wc -l) == $1))
}

down_with() { # <pid>: takes this cluster down when that process is gone
    setsid bash "$SELF" guard "$1" "$(<"$STATE/pid/head")" </dev/null >/dev/null 2>&1 &
}

guard() { # <pid> <pid of the head>: takes this cluster down when that process ends; ends if another
    # cluster takes its number
    while [[ $(cat "$STATE/pid/head" 2>/dev/null) == "$2" ]]; do
        kill -0 "$1" 2>/dev/null || {
            down
            return
        }
        sleep 0.5
    done
}

down() {
    local host leftover
    for host in $(list_nodes) head; do stop "$host"; done
    for host in $(list_nodes); do
        mapfile -t leftover < <(ip netns pids "$(namespace "$host")")
        kill_and_wait "${leftover[@]}"
        ip netns del "$(namespace "$host")"
    done
    read_site
    site down
    ip link del "kpm$ID" 2>/dev/null || true
    ip link del "kpi$ID" 2>/dev/null || true
    rm -rf "$STATE"
}

on_host() { # <host> <command>...
    need_node "$1"
    nsenter --target "$(first_process "$(<"$STATE/pid/$1")")" --net --uts --mount --pid -- \
        env -C "$PWD" "${@:2}"
}

status() {
    [[ -e $SLURM_CONF ]] ||
        die "cluster $ID is not up: testbed.sh up, or KEMPNER_TESTBED=NUMBER of one that is"
    echo "export SLURM_CONF=$SLURM_CONF"
    sinfo -N -p gpu -o '%N %T %G %E'
    squeue
}

install() {
    # For scripts/slurm/tmux.sh and its tests, and for the tests of the page and of containers.
    local packages=(tmux chromium charliecloud-runtime)
    local of_a_site=(slurmdbd mariadb-server-core mariadb-client-core)
    if [[ -n $(missing_commands) ]]; then
        [[ $EUID == 0 ]] || die "needs root: sudo $SELF install"
        command -v apt-get >/dev/null ||
            die "no apt-get here: install slurmctld, slurmd, the Slurm clients," \
                "munge and iproute2 by hand"
        packages+=(slurmctld slurmd slurm-client munge iproute2 util-linux)
    elif [[ $EUID != 0 ]] || ! command -v apt-get >/dev/null; then
        return 0
    elif command -v tmux >/dev/null && command -v chromium >/dev/null &&
        command -v ch-run >/dev/null &&
        [[ -z $(accounting_lacks) ]]; then
        return 0
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q
    apt-get install -q -y --no-install-recommends "${packages[@]}"
    apt-get install -q -y --no-install-recommends "${of_a_site[@]}" ||
        echo "testbed: a site has no accounting here: ${of_a_site[*]} cannot be installed" >&2
}

COMMANDS="install, up, down, status, crash, revive, away, cut, join"
readonly COMMANDS+=", bytes, exec, as, break, path"
case ${1:-} in
    -h | --help)
        kp_header
        exit
        ;;
    up) most=3 ;;
    crash | revive | away | cut | join) most=2 ;;
    bytes | break) most=3 ;;
    exec | as | init | login | break_host | guard) most=$# ;;
    install | down | status | path) most=1 ;;
    *) die "no command '${1:-}': give one of $COMMANDS; --help says what they do" ;;
esac
(($# <= most)) || die "$1: unexpected argument '${*:most+1:1}': --help says what it takes"
take_slurm
read_site
case $1 in
    up | down | status | install | init | login | break_host | guard | away) "$@" ;;
    crash) need_host "${2:-}" && stop "$2" ;;
    revive) need_host "${2:-}" && stop "$2" && revive "$2" ;;
    cut) need_node "${2:-}" && ip link set "i$ID-${2#node}" down ;;
    join) need_node "${2:-}" && ip link set "i$ID-${2#node}" up ;;
    bytes)
        need_node "${2:-}"
        case ${3:-} in
            em4) end=m ;;
            ib0) end=i ;;
            *) die "bytes $2 IFACE: em4 or ib0, not '${3:-}'" ;;
        esac
        # sent by this end = received by the host
        cat "/sys/class/net/$end$ID-${2#node}/statistics/tx_bytes"
        ;;
    exec)
        (($# > 2)) || die "exec NODE COMMAND: no command is given"
        on_host "${@:2}"
        ;;
    as)
        [[ -e $SLURM_CONF ]] ||
            die "cluster $ID is not up: testbed.sh up, or KEMPNER_TESTBED=NUMBER of one that is"
        (($# > 2)) || die "as USER COMMAND: no command is given"
        as "${@:2}"
        ;;
    break)
        need_node "${2:-}"
        [[ " ${FAULTS[*]} " == *" ${3:-} "* ]] ||
            die "break NODE FAULT: one of ${FAULTS[*]}, not '${3:-}'"
        on_host "$2" bash "$SELF" break_host "$3"
        ;;
    path) echo "$PATH" ;;
esac
