# shellcheck shell=bash
# Queries about the job as Slurm sees it.

KP_BESIDE=${KP_BESIDE:-} # not empty: runs beside another job's steps, as interactive.sh does
KP_JOB=${KP_JOB:-}       # scontrol's last record of the job
KP_START=''              # the job's restart count when this script first asked
KP_ANSWER=''             # output of kp_ask
KP_DETAILS=(-d)          # shows the GPUs of each node
# when kp_ask gives up, in SECONDS; empty: it waits as long as Slurm's commands do
KP_DEADLINE=''

kp_need_slurm() { # exits if Slurm's commands are missing
    command -v sbatch >/dev/null ||
        kp_die "no sbatch here: this needs Slurm's commands: load their module," \
            "or go to a login node of the cluster"
}

kp_use_job() { # <job>: makes this shell act for a running job, even inside another job
    local name
    [[ $1 =~ ^[0-9]+(_[0-9]+)?$ ]] ||
        kp_die "'$1' is not the number of a job: squeue --me lists yours"
    kp_need_slurm
    for name in "${!SLURM_@}"; do [[ $name == SLURM_CONF ]] || unset "$name"; done
    SLURM_JOB_ID=$1 KP_BESIDE=1
    kp_show_job || kp_die "no job '$1': squeue --me lists yours"
    [[ $(kp_field JobState) == RUNNING ]] ||
        kp_die "job $1 is $(kp_field JobState), not RUNNING: wait until it runs"
    SLURM_JOB_ID=$(kp_field JobId) # srun needs the number, even for an array task
    # By it task.sh tells the ranks of this start from those of earlier ones.
    SLURM_RESTART_COUNT=${KP_START:-0}
}

kp_in_job() { # succeeds in an allocation: a batch script, salloc's shell, or
    # KP_BESIDE a running job
    [[ -n ${SLURM_JOB_ID:-} ]]
}

kp_need_job() { # <script>: exits outside a job, except for --dry-run
    [[ -n $KP_DRY ]] || kp_in_job ||
        kp_die "$1 runs in a job: sbatch scripts/slurm/$1; outside Slurm singlenode.sh trains" \
            "on this machine"
}

kp_is_batch() { # succeeds in the batch script, the only place that may requeue
    # Slurm 24.11 and later count the script's starts in BatchFlag: 2 after a preemption.
    kp_in_job &&
        [[ -z $KP_BESIDE && -z ${SLURM_STEP_NUM_TASKS:-} && $(kp_field BatchFlag) == [1-9]* ]]
}

kp_is_whole_script() { # succeeds if this is the job's batch script, not a command in
    # a user's script
    local parent=''
    { read -r parent <"/proc/$PPID/comm"; } 2>/dev/null || true
    [[ -z $parent || $parent == slurmstepd ]]
}

kp_job_id() { # prints the job ID; for an array, that of the task, as the number alone may
    # mean all tasks
    if [[ -n ${SLURM_ARRAY_JOB_ID:-} && -z $KP_BESIDE ]]; then
        echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    else
        echo "$SLURM_JOB_ID"
    fi
}

kp_forget_request() { # unsets variables of the job's request that would contradict srun's flags
    # Newer Slurm versions use SLURM_TRES_PER_TASK for --gpus-per-task.
    unset "${!SLURM_GPUS@}" SLURM_GPU_BIND "${!SLURM_NTASKS@}" "${!SLURM_TRES_PER_TASK@}"
}

kp_as_submitted() { # <command>...: runs it, shielded, in the environment of the shell that
    # submitted this job
    # Otherwise variables of Slurm and these scripts would reach the next job, and secrets would
    # reach Slurm's files; with SBATCH_WAIT this job would wait for the next one. Values are never
    # put on a command line, which everybody on the host can read.
    local ours="SLURM_|KP_|SBATCH_WAIT=|KEMPNER_(EARLY_STOP|CHAIN_LINK|PEER_KEY)="
    ours+="${KP_SECRET_NAMES:+|(${KP_SECRET_NAMES// /|})=}"
    local conf=${SLURM_CONF:-} entry entries
    (
        trap '' TERM INT HUP USR1 USR2
        mapfile -d '' -t entries \
            < <(grep -zE '^[A-Za-z_][A-Za-z_0-9]*=' "/proc/$$/environ" | grep -zvE "^($ours)")
        while IFS= read -r entry; do
            unset -v "$entry" 2>/dev/null || true # some are read-only, such as SHELLOPTS
        done < <(compgen -e)
        for entry in "${entries[@]}" ${conf:+"SLURM_CONF=$conf"}; do
            export "${entry?}" 2>/dev/null || true
        done
        exec "$@"
    )
}

kp_shielded() { # <command>...: runs it shielded from the signals that end a job
    (trap '' TERM INT HUP USR1 USR2 && exec "$@")
}

kp_ask() { # <command>...: runs it shielded and sets KP_ANSWER to its output; fails if it fails,
    # or at KP_DEADLINE
    KP_ANSWER=$(trap '' TERM INT HUP USR1 USR2 && kp_until "$KP_DEADLINE" "$@" 2>/dev/null)
}

kp_until() { # <time in SECONDS, or nothing> <command>...: passes on its output and exit code; kills
    # it at that time and fails
    local fd text code=0
    [[ -n $1 ]] || exec "${@:2}"
    (($1 > SECONDS)) || return 1
    exec {fd}< <(exec "${@:2}")

    # Not timeout(1), which would forward job-ending signals to a command that must ignore them.
    IFS= read -r -d '' -t $(($1 - SECONDS)) -u "$fd" text || code=$?
    if ((code > 128)); then
        kill -KILL "$!"
        return 1
    fi
    printf '%s' "$text"
    wait "$!"
}

kp_set_job() { # <text>: sets KP_JOB to what Slurm would report for a job that does not exist yet
    KP_JOB=$1
}

kp_show_job() { # sets KP_JOB to scontrol's record of the job; without an answer,
    # leaves it and fails
    local tries code
    for ((tries = 0; tries < 5; tries++)); do
        code=0
        kp_ask scontrol show job "${KP_DETAILS[@]}" "$(kp_job_id)" || code=$?
        # where users may not see the nodes, scontrol of Slurm 22.05 crashes (segmentation fault)
        if ((code > 128)); then
            KP_DETAILS=()
            continue
        fi
        if [[ -n ${SLURM_ARRAY_JOB_ID:-} && -z $KP_JOB ]] &&
            ! { ((code == 0)) && kp_is_this_job; }; then
            kp_own_array
        elif ((code == 0)) && [[ -n $KP_ANSWER ]]; then
            KP_JOB=$KP_ANSWER
            # While this host was cut off, Slurm may have restarted the job elsewhere: this script
            # must not end, requeue or restart that start. Do not use SLURM_RESTART_COUNT, which
            # sbatch inside another job inherits.
            [[ ${KP_START:=$(kp_field Restarts)} == "$(kp_field Restarts)" ]] ||
                KP_JOB=${KP_JOB/JobState=RUNNING/JobState=RESTARTED}
            return 0
        fi
        kp_shielded sleep 0.2
    done
    return 1
}

kp_hostnames() { # <list>: prints its hosts, one per line; clients without a slurm.conf
    # ask the controller
    local hosts most=$((SECONDS + 3600 * ${KEMPNER_MAX_WAIT:-24}))
    until hosts=$(kp_shielded scontrol show hostnames "$1" 2>/dev/null); do
        [[ -n $1 ]] && kp_can_wait && ((SECONDS < most)) || return 1
        kp_shielded sleep 2
    done
    printf '%s\n' "$hosts"
}

kp_field() { # <name>: prints that field of KP_JOB, if any
    [[ ! $KP_JOB =~ (^|[[:space:]])"$1"=([^[:space:]]*) ]] || echo "${BASH_REMATCH[2]}"
}

kp_job_name() { # prints the name of KP_JOB, which may contain blanks: it is the last
    # field of its line
    [[ ! $KP_JOB =~ [[:space:]]JobName=([^$'\n']*) ]] || echo "${BASH_REMATCH[1]% }"
}
