# shellcheck shell=bash
# The variables that a user may set, and checks of their values; docs/reference/slurm.md and
# docs/extensions/rl.md describe each. Source lib/all.sh.

KP_VARIABLES=(ROOT SITE PYTHON TRAIN MAX_CRASHES MAX_WAIT IDLE_LIMIT RESTARTS SPARES SPARE_COMMAND
    EXCLUDE CHAIN SIGNAL_LEAD PREFLIGHT PREFLIGHT_LEAST PREFLIGHT_SECONDS PREFLIGHT_SLOW
    MEMORY_GIB CODE STAGE STAGE_ENVIRONMENT CONTAINER MOUNTS CONTAINER_RUNTIME SECRETS MAIL
    NOTIFY WEBHOOK PAGE
    SRUN MPI NPROC NSYS NUMA PORTS ORCHESTRATE SERVE SERVE_TOKEN VLLM)

kp_is_setting() { # <variable>: succeeds if it is one of them
    [[ " ${KP_VARIABLES[*]} " == *" ${1#KEMPNER_} "* ]]
}

kp_check_variables() { # warns of KEMPNER_ variables that no file of the kit mentions
    # Only warn: a cluster has the same name, and its modules may set variables of their own.
    local name near
    while read -r name; do
        ! kp_is_setting "$name" || continue
        ! grep -rqwF -- "$name" "$KP_ROOT/scripts" "$KP_ROOT/src" || continue
        near=$(kp_nearest "${name#KEMPNER_}" "${KP_VARIABLES[@]}")
        kp_log "warning: nothing reads $name${near:+ (did you mean KEMPNER_$near?)}:" \
            "docs/reference/slurm.md has the list"
    done < <(compgen -A export KEMPNER_)
}

kp_check_settings() { # exits on invalid values, which would otherwise end the job in mid-run
    local name
    for name in KEMPNER_MAX_CRASHES KEMPNER_MAX_WAIT KEMPNER_IDLE_LIMIT KEMPNER_NPROC; do
        [[ ${!name:-1} =~ ^[1-9][0-9]{0,5}$ ]] ||
            kp_die "$name=${!name}: must be a whole number from 1"
    done
    for name in KEMPNER_EXCLUDE KEMPNER_SIGNAL_LEAD; do
        [[ ${!name:-0} =~ ^(0|[1-9][0-9]{0,5})$ ]] ||
            kp_die "$name=${!name}: must be a whole number from 0"
    done
    for name in KEMPNER_PREFLIGHT_LEAST KEMPNER_PREFLIGHT_SECONDS; do
        [[ ${!name:-0} =~ ^[0-9]{1,9}([.][0-9]+)?$ ]] ||
            kp_die "$name=${!name}: must be a number from 0, such as 12.5"
    done
    [[ ${KEMPNER_MEMORY_GIB:-1} =~ ^[0-9]{1,6}([.][0-9]+)?$ &&
        ${KEMPNER_MEMORY_GIB:-1} == *[1-9]* ]] ||
        kp_die "KEMPNER_MEMORY_GIB=$KEMPNER_MEMORY_GIB: must be a number of GiB over 0"
    for name in KEMPNER_PREFLIGHT KEMPNER_STAGE_ENVIRONMENT; do
        [[ ${!name:-0} =~ ^[01]$ ]] ||
            kp_die "$name=${!name}: must be 1, or 0, which is the same as unset"
    done
    [[ ${KEMPNER_NSYS:-0} =~ ^(0|[1-9][0-9]{0,5})(,(0|[1-9][0-9]{0,5}))*$ ]] ||
        kp_die "KEMPNER_NSYS=$KEMPNER_NSYS: must be numbers of ranks, such as 0,8"
    [[ ${KEMPNER_NUMA:-1} =~ ^[01]$ ]] ||
        kp_die "KEMPNER_NUMA=$KEMPNER_NUMA: must be 0, or 1, which is the same as unset"
    if [[ ! ${KEMPNER_PORTS:-1024-65535} =~ ^([1-9][0-9]{3,4})-([1-9][0-9]{3,4})$ ]] ||
        ((1024 > BASH_REMATCH[1] || BASH_REMATCH[1] >= BASH_REMATCH[2] || \
        BASH_REMATCH[2] > 65535)); then
        kp_die "KEMPNER_PORTS=$KEMPNER_PORTS: must be the first and the last port of a range of" \
            "at least 2, from 1024 to 65535, such as 15000-20000"
    fi
    [[ ${KEMPNER_MPI:-none} =~ ^[a-z][a-z0-9_]*$ ]] ||
        kp_die "KEMPNER_MPI=$KEMPNER_MPI: must be a value of srun --mpi, such as pmix:" \
            "'srun --mpi=list' shows them"
    [[ ${KEMPNER_CODE:-1} =~ ^[01]$ ]] ||
        kp_die "KEMPNER_CODE=$KEMPNER_CODE: 1, or unset, copies the code for the run;" \
            "0 runs the repository itself"
    [[ ${KEMPNER_STAGE:-/} == /* ]] ||
        kp_die "KEMPNER_STAGE=$KEMPNER_STAGE: must be an absolute path, of a directory on each" \
            "node's own disk"
    [[ ${KEMPNER_STAGE_ENVIRONMENT:-0} == 0 || -n ${KEMPNER_STAGE:-} ]] ||
        kp_die "KEMPNER_STAGE_ENVIRONMENT=1 needs KEMPNER_STAGE, a directory on each" \
            "node's own disk"
}
