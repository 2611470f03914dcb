# shellcheck shell=bash
# Programs of a job that run on its first node alone, without srun.

kp_alone() { # <Python arguments>...: runs them to their end, and passes signals on; sets KP_CODE
    kp_start "${KP_INSIDE[@]}" "$KP_PYTHON" "$@"
    kp_pass_pending
    kp_wait
}
