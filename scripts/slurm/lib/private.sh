# shellcheck shell=bash
# Checks a directory in a place that others can write to, such as /tmp or a node's
# /local: whoever creates its name first, or may rename it, controls its contents. The
# same in Python: src/kempner/jobs/system/private.py.

kp_private() { # <absolute path> [make]: if it is not safe to run or read files there, prints why
    # and fails; make: creates it
    local above
    above=$(realpath -m -- "${1%/*}/.") || above=/
    if [[ ! -d $above && -n ${2:-} ]]; then
        kp_private "$above" make || return
    fi
    kp_is_safe_above "$above" || return
    [[ -z ${2:-} ]] || mkdir -m 700 -- "$1" 2>/dev/null || [[ -e $1 || -L $1 ]] || {
        echo "$1 cannot be created"
        return 1
    }
    kp_is_ours "$1" "$(stat -c '%a %u' -- "$1" 2>/dev/null)"
}

kp_is_ours() { # <path> <mode and owner>: succeeds if only this user may write to the directory;
    # else prints why not
    local mode=${2% *} wrong=''
    if [[ -L $1 ]]; then
        wrong="is a link"
    elif [[ ! -d $1 || -z $mode ]]; then
        wrong="is not a directory"
    elif [[ ${2#* } != "$(id -u)" ]]; then
        wrong="belongs to another user"
    elif ((8#$mode & 8#022)); then
        wrong="may be written by others (mode $mode)"
    fi
    [[ -z $wrong ]] || {
        echo "$1 $wrong"
        return 1
    }
}

kp_is_safe_above() { # <path without links>: succeeds if only root and this user may rename its
    # entries; else prints why not
    local path=$1 mode owner others
    others=" 0 $(id -u) "
    # In a container's user namespace, root may not be mapped.
    grep -qE '^ +0 +0 +4294967295$' /proc/self/uid_map 2>/dev/null ||
        others+="$(cat /proc/sys/kernel/overflowuid) "
    while :; do
        read -r mode owner < <(stat -c '%a %u' -- "$path" 2>/dev/null) || {
            echo "$path is not there"
            return 1
        }
        # In a sticky directory (1000), such as /tmp, only the owner of an entry may rename it.
        if [[ $others != *" $owner "* ]]; then
            echo "$path belongs to another user"
            return 1
        elif ((8#$mode & 8#022 && ! (8#$mode & 8#1000))); then
            echo "$path may be written by others (mode $mode)"
            return 1
        fi
        [[ $path != / ]] || return 0
        path=${path%/*} path=${path:-/}
    done
}
