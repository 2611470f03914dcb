# shellcheck shell=bash
# Resource profiles, site.d/NAME.env: KEMPNER_SITE=NAME. Variables already set win.

# variables set in both the profile and the environment: the profile's values
declare -A KP_OVERRULED=()
KP_PROFILE='' # the profile in use, site.d/NAME.env

kp_profile_file() { # prints the profile that KEMPNER_SITE names, if any: a file of that
    # name takes precedence
    [[ -z ${KEMPNER_SITE:-} || $KEMPNER_SITE == */* || -r $KEMPNER_SITE ]] ||
        echo "site.d/$KEMPNER_SITE.env"
}

kp_read_profile() { # <site.d/NAME.env>: reads it; sets KP_PROFILE and KP_OVERRULED
    local name assigned=()
    local pattern='s/^[[:space:]]*(export[[:space:]]+)?([A-Za-z_][A-Za-z0-9_]*)=.*/\2/p'
    local -A kept=()
    # Variables that sbatch reads (its manual, INPUT ENVIRONMENT VARIABLES): it
    # silently ignores others.
    local known='ACCOUNT|ACCTG_FREQ|BATCH|BURST_BUFFER|CLUSTERS|COMMENT|CONSTRAINT|CONTAINER'
    known+='|CORE_SPEC|CPUS_PER_GPU|DELAY_BOOT|DISTRIBUTION|EXCLUSIVE|EXPORT|GPU_BIND|GPU_FREQ'
    known+='|GPUS|GPUS_PER_NODE|GPUS_PER_TASK|GRES|HINT|JOB_NAME|MEM_BIND|MEM_PER_NODE|NETWORK'
    known+='|NO_KILL|NO_REQUEUE|OPEN_MODE|OVERCOMMIT|PARTITION|POWER|PREFER|PROFILE|QOS|REQUEUE'
    known+='|RESERVATION|REQ_SWITCH|SIGNAL|SPREAD_JOB|THREAD_SPEC'
    known+='|THREADS_PER_CORE|TIMELIMIT|USE_MIN_NODES|WAIT4SWITCH|WCKEY'
    # Like site.env, it may contain secrets, and so is not in the code copy.
    local file=${KP_ORIGIN:-$KP_ROOT}/$1
    # the run has started with it: continue
    if [[ ! -r $file && ${KP_ORIGIN:-$KP_ROOT} != "$KP_ROOT" ]]; then
        kp_log "warning: KEMPNER_SITE=$KEMPNER_SITE: $file is gone: its settings" \
            "no longer apply"
        return 0
    fi
    [[ -r $file ]] ||
        kp_die "KEMPNER_SITE=$KEMPNER_SITE: there is no $1, only $(kp_profiles): give one of" \
            "them, or a path"
    kp_can_source "$file"
    mapfile -t assigned < <(sed -nE "$pattern" "$file")
    for name in "${assigned[@]}"; do
        [[ ! $name =~ ^SBATCH_MEM_PER_[CG]PU$ ]] ||
            kp_die "$1: because the scripts give --mem=0, sbatch silently ignores" \
                "$name: give the memory of a node, SBATCH_MEM_PER_NODE=64G"
        [[ ! $name =~ ^SBATCH_ || $name =~ ^SBATCH_($known)$ ]] ||
            kp_die "$1: sbatch does not read $name: correct it, or give the option on the" \
                "command line"
        # paths are extended, not replaced
        [[ ! -v $name || $name == *PATH ]] || kept[$name]=${!name}
    done
    kp_source "$file"
    KP_PROFILE=$1
    for name in "${!kept[@]}"; do
        [[ ${!name} == "${kept[$name]}" ]] || KP_OVERRULED[$name]=${!name}
        export "$name=${kept[$name]}"
    done
}

kp_profiles() { # prints their names
    basename -s .env -- "${KP_ORIGIN:-$KP_ROOT}"/site.d/*.env | paste -sd' '
}

kp_profile_from() { # <SBATCH_ variable>: prints where its value comes from, for --dry-run
    local name pattern="^[[:space:]]*(export[[:space:]]+)?$1="
    if [[ -n ${KP_OVERRULED[$1]+set} ]]; then
        echo "$1 ($KP_PROFILE has ${KP_OVERRULED[$1]})"
    elif [[ -n $KP_PROFILE ]] && grep -qE "$pattern" "${KP_ORIGIN:-$KP_ROOT}/$KP_PROFILE"; then
        echo "$KP_PROFILE"
    else
        echo "$1"
    fi
}

kp_profile_note() { # logs where the job differs from the profile, which sbatch itself does not read
    local name have want
    [[ -n $KP_PROFILE ]] || return 0
    for name in Partition Account QOS; do
        want=SBATCH_$(kp_upper "$name") have=$(kp_field "$name")
        want=${KP_OVERRULED[$want]:-${!want:-}}
        [[ -z $want || -z $have || ,$want, == *",$have,"* ]] ||
            kp_log "note: the job has $name=$have, and $KP_PROFILE $want (sbatch does not" \
                "read profiles: see --submit)"
    done
}

kp_submit() { # for --submit: runs sbatch with the profile or site.env in its environment
    ! kp_in_job || kp_die "--submit: already inside job $(kp_job_id): leave it out"
    kp_need_slurm
    exec sbatch "${KP_REQUEST[@]}" "$0" "${KP_ARGUMENTS[@]}"
}
