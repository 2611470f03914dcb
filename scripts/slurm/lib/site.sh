# shellcheck shell=bash
# The script's environment: the repository, its Python, site.env, the secrets.

KP_SECRET_NAMES='' # names of the variables in KEMPNER_SECRETS

kp_setup() { # sets KP_ROOT, KP_PYTHON, KP_TRAIN and, in a job, KP_JOB; reads
    # site.env; traps signals
    kp_listen
    trap 'kp_stay_ended $? || true' EXIT
    kp_begin
    [[ $KP_ROOT != "$KP_ORIGIN" ]] || kp_check_variables # the copy would repeat the warnings
    kp_enter
    ! kp_in_job || [[ -n ${KP_DRY}${KP_BESIDE} ]] || kp_startup
}

kp_startup() { # exports KEMPNER_STARTUP, the times of the phases of this start:
    # src/kempner/jobs/ranks/startup.py
    local submitted
    submitted=$(date -d "$(kp_field SubmitTime)" +%s 2>/dev/null) || submitted=$KEMPNER_BATCH_BEGAN
    export KEMPNER_STARTUP="submitted=$submitted queue=$KEMPNER_BATCH_BEGAN"
}

kp_mark() { # <phase>: records that it has just ended
    # EPOCHREALTIME needs bash 5, and has the locale's decimal point.
    local now=${EPOCHREALTIME:-$(date +%s.%N)}
    [[ -z ${KEMPNER_STARTUP+set} ]] || KEMPNER_STARTUP+=" $1=${now/,/.}"
}

kp_find_root() { # sets KP_ROOT, the repository, or its copy, that contains these scripts
    KP_ROOT=$(cd "$KP_LIB/../../.." && pwd)
}

kp_begin() { # sets KP_ROOT, KP_ORIGIN (see code.sh) and the attempt's names; reads site.env
    kp_find_root
    KP_ORIGIN=$KP_ROOT
    [[ ! -e $KP_ROOT/.kempner-origin ]] || KP_ORIGIN=$(<"$KP_ROOT/.kempner-origin")
    [[ $KP_DRY != submit ]] || { kp_read_site && kp_submit; }
    kp_name_attempt "${SLURM_JOB_ID:-$(uname -n)}.${SLURM_RESTART_COUNT:-0}.$$"
    KEMPNER_BATCH_BEGAN=${KP_BEGAN:-$KEMPNER_BATCH_BEGAN}
    export -n KP_BEGAN KP_PENDING
    export KEMPNER_BATCH_BEGAN KEMPNER_ATTEMPT_ID
    # The processes of this start authenticate each other by it (src/kempner/jobs/ranks/peers.py):
    # never put it on a command line.
    KEMPNER_PEER_KEY=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    export KEMPNER_PEER_KEY
    kp_read_site
}

kp_name_attempt() { # <its ID>: begins this attempt now; sets KP_SRUN_NAME, the name of its steps
    KEMPNER_ATTEMPT_ID=$1 KP_SRUN_NAME=kempner-$1
    printf -v KEMPNER_BATCH_BEGAN '%(%s)T' -1
}

kp_enter() { # sets KP_PYTHON, KP_TRAIN and, in a job, KP_JOB; reads the secrets
    local program
    kp_check_settings
    kp_read_secrets
    [[ $KP_ROOT != *:* ]] ||
        kp_die "the kit's path has a colon, where PYTHONPATH would split it: $KP_ROOT: move the kit"
    program=$(kp_of_copy "${KEMPNER_TRAIN:-$KP_ROOT/scripts/train.py}")
    kp_use_program "$program"
    export PYTHONUNBUFFERED=1 PYTHONPATH=$KP_ROOT/src${PYTHONPATH:+:$PYTHONPATH}
    kp_choose_python
    if kp_in_job; then
        kp_wait_for_job || kp_die "scontrol knows no job $(kp_job_id)"
        # sbatch in a restarted job passes on that job's count.
        [[ -z $KP_START ]] || export SLURM_RESTART_COUNT=$KP_START
    elif [[ -n $KP_DRY ]]; then
        kp_dry_job
    fi
}

kp_read_site() { # reads the site file, KEMPNER_SITE or the repository's site.env, and
    # exports its variables
    local file=${KEMPNER_SITE:-${KP_ORIGIN:-$KP_ROOT}/site.env} profile
    profile=$(kp_profile_file)
    if [[ -n $profile ]]; then
        kp_read_profile "$profile"
        return
    fi
    if [[ ! -e $file && ! -L $file ]]; then
        [[ -z ${KEMPNER_SITE:-} ]] ||
            kp_die "KEMPNER_SITE=$file cannot be read: correct or unset it"
        return 0
    fi
    kp_can_source "$file"
    kp_source "$file"
}

kp_is_secret() { # <variable>: succeeds if its value must not be shown: by its name, or because it
    # is a URL with a password, as for a proxy
    local name pattern='TOKEN|SECRET|WEBHOOK|PASSWORD|PASSWD|CREDENTIAL|APIKEY|_KEY$|^KEY$|_PAT$'
    name=$(kp_upper "$1")
    [[ $name =~ $pattern ||
        " $KP_SECRET_NAMES " == *" $1 "* ||
        $1 =~ ^[A-Za-z_][A-Za-z_0-9]*$ && ${!1:-} =~ ://[^/@[:space:]]*:[^/@[:space:]]+@ ]]
}

kp_read_secrets() { # reads KEMPNER_SECRETS, a file of NAME=value lines that others cannot read
    local file=${KEMPNER_SECRETS:-} mode
    local pattern='s/^[[:space:]]*(export[[:space:]]+)?([A-Za-z_][A-Za-z0-9_]*)=.*/\2/p'
    [[ -n $file ]] || return 0
    mode=$(stat -L -c %a -- "$file" 2>/dev/null) ||
        kp_die "KEMPNER_SECRETS=$file cannot be read: correct or unset it"
    [[ ! -d $file ]] ||
        kp_die "KEMPNER_SECRETS=$file is a directory: give a file of NAME=value lines"
    [[ $mode =~ ^[0-7]00$ ]] ||
        kp_die "KEMPNER_SECRETS=$file may be read by others (mode $mode): chmod 600 ${file@Q}"
    kp_can_source "$file" secrets
    kp_source "$file" secrets
    KP_SECRET_NAMES=$(sed -nE "$pattern" "$file" | paste -sd' ')
}
