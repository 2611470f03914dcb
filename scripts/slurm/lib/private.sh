# shellcheck shell=bash
# A directory in a place that others can write, such as /tmp or a node's /local: whoever makes its
# name first, or may rename it, says what is in it. The same in Python:
# src/kempner/jobs/system/private.py.

kp_private() { # <absolute path> [make]: prints why nothing may be run or read from there, and
    # fails; make: makes it
    local above
    above=$(realpath -m -- "${1%/*}/.") || above=/
    if [[ ! -d $above && -n ${2:-} ]]; then
        kp_private "$above" make || return
    fi
    kp_is_safe_above "$above" || return
    [[ -z ${2:-} ]] || mkdir -m 700 -- "$1" 2>/dev/null || [[ -e $1 || -L $1 ]] || {
        echo "$1 cannot be made"
        return 1
    }
    kp_is_ours "$1" "$(stat -c '%a %u' -- "$1" 2>/dev/null)"
}

kp_is_ours() { # <path> <mode and owner>: a directory of this user that nobody else may write; else
    # prints why not
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

kp_is_safe_above() { # <path without links>: nobody but root and this user may rename what is in it;
    # else prints why not
    local path=$1 mode owner others
    others=" 0 $(id -u) "
    # In a container's user namespace root may have no number of its own.
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
