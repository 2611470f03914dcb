# shellcheck shell=bash
# The job as Slurm sees it.

KP_BESIDE=${KP_BESIDE:-} # not empty: the job is someone else's; interactive.sh runs beside it
KP_JOB=${KP_JOB:-}       # what scontrol said about the job last
KP_START=''              # how often Slurm had started the job again when this script first asked
KP_ANSWER=''             # of kp_ask
KP_DETAILS=(-d)          # with the GPUs of each node
# in SECONDS: when kp_ask gives up; empty: it waits as long as Slurm's commands do
KP_DEADLINE=''

kp_need_slurm() { # stops where Slurm's commands are missing
    command -v sbatch >/dev/null ||
        kp_die "no sbatch here: this needs Slurm's commands: load their module," \
            "or go to a login node of the cluster"
}

kp_use_job() { # <job>: makes this shell speak for a running job, whatever job it is in itself
    local name
    [[ $1 =~ ^[0-9]+(_[0-9]+)?$ ]] ||
        kp_die "'$1' is not the number of a job: squeue --me lists yours"
    kp_need_slurm
    for name in "${!SLURM_@}"; do [[ $name == SLURM_CONF ]] || unset "$name"; done
    SLURM_JOB_ID=$1 KP_BESIDE=1
    kp_show_job || kp_die "no job '$1': squeue --me lists yours"
    [[ $(kp_field JobState) == RUNNING ]] ||
        kp_die "job $1 is $(kp_field JobState), not RUNNING: wait until it runs"
    SLURM_JOB_ID=$(kp_field JobId) # srun wants the number, also for a task of an array
}

kp_in_job() { # true inside an allocation: a batch script, salloc's shell, or KP_BESIDE a running
    # job
    [[ -n ${SLURM_JOB_ID:-} ]]
}

kp_need_job() { # <script>: stops outside a job, but for --dry-run
    [[ -n $KP_DRY ]] || kp_in_job ||
        kp_die "$1 runs in a job: sbatch scripts/slurm/$1; outside Slurm singlenode.sh trains" \
            "on this machine"
}

kp_is_batch() { # true in the batch script, the one place that may requeue
    # Slurm 24.11 and later count the starts of the script in BatchFlag: 2 after a preemption.
    kp_in_job &&
        [[ -z $KP_BESIDE && -z ${SLURM_STEP_NUM_TASKS:-} && $(kp_field BatchFlag) == [1-9]* ]]
}

kp_is_whole_script() { # true when this is the job's batch script; false for a command in a script
    # of the user's own
    local parent=''
    { read -r parent <"/proc/$PPID/comm"; } 2>/dev/null || true
    [[ -z $parent || $parent == slurmstepd ]]
}

kp_job_id() { # the job; of an array the one task, because the number alone may mean the whole array
    if [[ -n ${SLURM_ARRAY_JOB_ID:-} && -z $KP_BESIDE ]]; then
        echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    else
        echo "$SLURM_JOB_ID"
    fi
}

kp_forget_request() { # removes the job's request, which srun would read as well and contradict its
    # flags with
    # SLURM_TRES_PER_TASK is newer Slurm's word for --gpus-per-task.
    unset "${!SLURM_GPUS@}" SLURM_GPU_BIND "${!SLURM_NTASKS@}" "${!SLURM_TRES_PER_TASK@}"
}

kp_as_submitted() { # <command>...: runs it, shielded, with the variables of the shell that
    # submitted this job
    # What Slurm and these scripts have set would reach the next job, and secrets Slurm's files;
    # with SBATCH_WAIT this job would wait for the next one. No value becomes a word of a command
    # line: everybody on the host can read those.
    local ours="SLURM_|KP_|SBATCH_WAIT=|KEMPNER_(EARLY_STOP|CHAIN_LINK|PEER_KEY)="
    ours+="${KP_SECRET_NAMES:+|(${KP_SECRET_NAMES// /|})=}"
    local conf=${SLURM_CONF:-} entry entries
    (
        trap '' TERM INT HUP USR1 USR2
        mapfile -d '' -t entries \
            < <(grep -zE '^[A-Za-z_][A-Za-z_0-9]*=' "/proc/$$/environ" | grep -zvE "^($ours)")
        while IFS= read -r entry; do
            unset -v "$entry" 2>/dev/null || true # SHELLOPTS and some others are read-only
        done < <(compgen -e)
        for entry in "${entries[@]}" ${conf:+"SLURM_CONF=$conf"}; do
            export "${entry?}" 2>/dev/null || true
        done
        exec "$@"
    )
}

kp_shielded() { # <command>...: runs it so that the signals that end a job do not end it first
    (trap '' TERM INT HUP USR1 USR2 && exec "$@")
}

kp_ask() { # <command>...: sets KP_ANSWER to its output; shielded; fails when it fails, and at
    # KP_DEADLINE
    KP_ANSWER=$(trap '' TERM INT HUP USR1 USR2 && kp_until "$KP_DEADLINE" "$@" 2>/dev/null)
}

kp_until() { # <time in SECONDS, or nothing> <command>...: its output and exit code; kills it at
    # that time and fails
    local fd text code=0
    [[ -n $1 ]] || exec "${@:2}"
    (($1 > SECONDS)) || return 1
    exec {fd}< <(exec "${@:2}")

    # Not timeout(1): it would pass on, to a command that is to ignore them, the signals that end a
    # job.
    IFS= read -r -d '' -t $(($1 - SECONDS)) -u "$fd" text || code=$?
    if ((code > 128)); then
        kill -KILL "$!"
        return 1
    fi
    printf '%s' "$text"
    wait "$!"
}

kp_set_job() { # <text>: what Slurm would say of a job that is not there yet
    KP_JOB=$1
}

kp_show_job() { # sets KP_JOB to what scontrol says about the job now; fails, and leaves it, when it
    # says nothing
    local tries code
    for ((tries = 0; tries < 5; tries++)); do
        code=0
        kp_ask scontrol show job "${KP_DETAILS[@]}" "$(kp_job_id)" || code=$?
        # where users may not see the nodes, Slurm 22.05's dies of a segmentation fault
        if ((code > 128)); then
            KP_DETAILS=()
            continue
        fi
        if [[ -n ${SLURM_ARRAY_JOB_ID:-} && -z $KP_JOB ]] &&
            ! { ((code == 0)) && kp_is_this_job; }; then
            kp_own_array
        elif ((code == 0)) && [[ -n $KP_ANSWER ]]; then
            KP_JOB=$KP_ANSWER
            # While this host was cut off, Slurm may have started the job again elsewhere: this
            # script must not end, requeue or restart that start. Not by SLURM_RESTART_COUNT, which
            # sbatch inside another job hands on.
            [[ ${KP_START:=$(kp_field Restarts)} == "$(kp_field Restarts)" ]] ||
                KP_JOB=${KP_JOB/JobState=RUNNING/JobState=RESTARTED}
            return 0
        fi
        kp_shielded sleep 0.2
    done
    return 1
}

kp_hostnames() { # <list>: its hosts, a line each; where clients have no slurm.conf of their own,
    # the controller is asked
    local hosts most=$((SECONDS + 3600 * ${KEMPNER_MAX_WAIT:-24}))
    until hosts=$(kp_shielded scontrol show hostnames "$1" 2>/dev/null); do
        [[ -n $1 ]] && kp_can_wait && ((SECONDS < most)) || return 1
        kp_shielded sleep 2
    done
    printf '%s\n' "$hosts"
}

kp_field() { # <name>: that field of KP_JOB, or nothing
    [[ ! $KP_JOB =~ (^|[[:space:]])"$1"=([^[:space:]]*) ]] || echo "${BASH_REMATCH[2]}"
}

kp_job_name() { # the name of KP_JOB, which may have blanks: it is the last field of its line
    [[ ! $KP_JOB =~ [[:space:]]JobName=([^$'\n']*) ]] || echo "${BASH_REMATCH[1]% }"
}
