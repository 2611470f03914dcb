# shellcheck shell=bash
# Programs of a job that run only on its first node, without srun.

kp_alone() { # <Python arguments>...: runs them to completion and forwards signals; sets KP_CODE
    kp_start "${KP_INSIDE[@]}" "$KP_PYTHON" "$@"
    kp_pass_pending
    kp_wait
}
