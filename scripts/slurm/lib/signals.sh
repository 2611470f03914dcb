# shellcheck shell=bash
# Signals to the batch script become requests to the ranks.

kp_on_signal() { # <signal>: passes a request on to the ranks, unless Slurm is already ending the job
    if [[ -z $KP_CHILD ]]; then
        [[ $1 != INT ]] || exit 130
        KP_PENDING=$1 # the ranks get it as soon as they are there
        return
    fi
    [[ -z $KP_DECIDED ]] || return 0
    if [[ $1 == TERM ]] && kp_is_batch && kp_show_job && [[ $(kp_field JobState) != RUNNING ]]; then
        kp_decide "the time limit struck" # Slurm has told the ranks itself
        return
    fi
    if [[ $1 == INT && $KP_SIGNAL == INT ]] && ! kp_is_batch; then
        kp_log "second Ctrl-C: ending the run at once"
        kp_signal KILL
    else
        KP_SIGNAL=$1
        case $1 in
            INT) kp_log "SIGINT: the run saves and stops; once more ends it at once" ;;
            TERM) kp_log "SIGTERM: the run saves and stops to go on later" ;;
            USR2) kp_log "SIGUSR2: the run saves and goes on" ;;
        esac
        kp_signal "$1"
    fi
}

kp_signal() { # <signal>: sends it to this run's ranks alone
    local step tries ranks
    if ! kp_in_job; then
        ranks=("$KP_CHILD")
        ((KP_TASKS == 1)) || read -ra ranks <"/proc/$KP_CHILD/task/$KP_CHILD/children" || true
        kill -s "$1" "${ranks[@]}" 2>/dev/null || true
        return
    fi
    for ((tries = 0; tries < 10; tries++)); do
        step=$(kp_shielded squeue -h -s -j "$(kp_job_id)" -o '%i %j' 2>/dev/null | sed -n "s/ $KP_SRUN_NAME\$//p")
        # A step that is only being started on some node refuses it.
        [[ -z $step ]] || ! kp_shielded scancel --signal="$1" "$step" 2>/dev/null || return 0
        kill -0 "$KP_CHILD" 2>/dev/null || return 0
        kp_shielded sleep 0.5
    done
    if [[ -z $step ]]; then
        kp_log "the step has not started: nothing to save"
        kill -TERM "$KP_CHILD" 2>/dev/null || true
    fi
}
