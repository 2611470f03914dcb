# shellcheck shell=bash
# Clears variables inherited from the submitting shell or an enclosing job. Sourced first.

# Slurm's commands read these as hidden options: with SQUEUE_STATES=PENDING a running job is not
# listed, and with SLURM_TIME_FORMAT=relative its end time cannot be parsed.
# src/kempner/jobs/slurm.py does the same.
unset "${!SQUEUE_@}" "${!SINFO_@}" "${!SACCT_@}" "${!SCONTROL_@}" "${!SCANCEL_@}" \
    SLURM_TIME_FORMAT SLURM_BITSTR_LEN

kp_own_array() { # unsets array variables inherited from another job, in which sbatch was run
    [[ -n ${SLURM_ARRAY_JOB_ID:-} && -n ${SLURM_JOB_ID:-} ]] || return 0
    # that job has ended, or there is no answer
    if ! kp_ask scontrol show job "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}"; then
        kp_ask scontrol show job "$SLURM_JOB_ID" && [[ $KP_ANSWER != *ArrayJobId=* ]] || return 0
    elif kp_is_this_job; then
        return 0
    fi
    unset "${!SLURM_ARRAY_@}"
}

kp_is_this_job() { # succeeds if KP_ANSWER is the record of job SLURM_JOB_ID
    [[ " ${KP_ANSWER//$'\n'/ } " == *" JobId=$SLURM_JOB_ID "* ]]
}
