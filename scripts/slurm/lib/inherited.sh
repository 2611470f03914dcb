# shellcheck shell=bash
# What the shell of the submission, or a job around this one, hands on and must not answer for it:
# sourced first.

# Slurm's commands read these as options that nobody sees: with SQUEUE_STATES=PENDING a job that
# runs is not there, and with SLURM_TIME_FORMAT=relative it has no end. src/kempner/jobs/slurm.py
# does the same.
unset "${!SQUEUE_@}" "${!SINFO_@}" "${!SACCT_@}" "${!SCONTROL_@}" "${!SCANCEL_@}" \
    SLURM_TIME_FORMAT SLURM_BITSTR_LEN

kp_own_array() { # forgets the variables of an array where they are of another job, in a task of
    # which sbatch was typed
    [[ -n ${SLURM_ARRAY_JOB_ID:-} && -n ${SLURM_JOB_ID:-} ]] || return 0
    # it has ended, or no answer
    if ! kp_ask scontrol show job "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}"; then
        kp_ask scontrol show job "$SLURM_JOB_ID" && [[ $KP_ANSWER != *ArrayJobId=* ]] || return 0
    elif kp_is_this_job; then
        return 0
    fi
    unset "${!SLURM_ARRAY_@}"
}

kp_is_this_job() { # true when KP_ANSWER, the record of a job, is that of SLURM_JOB_ID
    [[ " ${KP_ANSWER//$'\n'/ } " == *" JobId=$SLURM_JOB_ID "* ]]
}
