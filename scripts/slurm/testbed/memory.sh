# shellcheck shell=bash
# Limits each host to 2 GB of memory: the kernel kills processes beyond that. Uses a control group
# (version 1 or 2) below this machine's own.

memory_group() { # prints the directory of the memory control group that this process is in
    local line
    line=$(grep -E '^[0-9]+:([a-z,]+,)?memory[,a-z]*:' /proc/self/cgroup) &&
        echo "/sys/fs/cgroup/memory${line#*:*:}" && return
    line=$(sed -n 's/^0:://p' /proc/self/cgroup)
    echo "/sys/fs/cgroup$line"
}

memory_limit() { # <group>: prints the file that holds its limit
    if [[ -e $1/memory.limit_in_bytes ]]; then
        echo "$1/memory.limit_in_bytes"
    else
        echo "$1/memory.max"
    fi
}

memory_lacks() {
    local group limit
    group=$(memory_group)/kempner-try-$$
    if mkdir "$group" 2>/dev/null; then
        limit=$(memory_limit "$group")
        [[ -w $limit ]] && echo 2G 2>/dev/null >"$limit" ||
            echo "control groups here do not limit memory"
        rmdir "$group"
    else
        echo "no control group can be made here"
    fi
}

memory_files() {
    memory_group >"$STATE/memory"
}

memory_host() { # <host>
    local group
    [[ $1 != head ]] || return 0
    group=$(<"$STATE/memory")/kempner-testbed-$ID-$1
    mkdir -p "$group"
    echo 2G >"$(memory_limit "$group")"
    # 0 means the writing process: this one, and so everything that the host will start.
    echo 0 >"$group/cgroup.procs"
}

memory_down() {
    local group
    [[ -s $STATE/memory ]] || return 0
    for group in "$(<"$STATE/memory")/kempner-testbed-$ID-"*; do
        rmdir "$group" 2>/dev/null || true
    done
}
