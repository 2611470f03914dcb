# shellcheck shell=bash
# Records of a run: records.py writes and reads them, with any Python of this host,
# outside the container.

kp_records() { # <command of records.py> <words>...: runs it; fails if the file cannot be used, or
    # no Python starts
    local python code
    for python in "$KP_PYTHON" python3; do
        code=0
        kp_shielded "$python" -I -S "$KP_LIB/records.py" "$@" 2>/dev/null || code=$?
        [[ $code != 0 && $code != 3 ]] || return "$code"
    done
    return 1
}

kp_find_records() { # <file> NAME=VALUE... -- NAME...: sets KP_VALUES to the named values of
    # each matching line
    kp_values kp_records find "$@"
}
