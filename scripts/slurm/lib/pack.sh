# shellcheck shell=bash
# Several runs on one node. Each has a subshell, which does for it what singlenode.sh does for the
# only run of a job, with an equal part of the node. This shell waits for them, and requeues the
# job. Sourced by pack.sh, after all.sh.

# The exit code of a subshell whose run has to go on: at once; when the job is requeued; then
# without this node, too.
KP_OWN_STEPS=pack.sh
readonly KP_NOW=100 KP_LATER=101 KP_ELSEWHERE=102

kp_pack_take() { # <K> <CONFIG>... or <K> @FILE: sets KP_PACK, how many runs fit on the node, and
    # KP_POINTS, this job's
    local usage="sbatch scripts/slurm/pack.sh 4 CONFIG..., 1 to 4 of them" task
    kp_take "$@"
    KP_PACK=${KP_ARGUMENTS[0]} KP_POINTS=("${KP_ARGUMENTS[@]:1}")
    [[ $KP_PACK =~ ^[1-9][0-9]?$ ]] || kp_die "'$KP_PACK' is not a number of runs: $usage"
    if [[ ${KP_POINTS[0]:-} == @* ]]; then
        kp_own_array
        task=$((${SLURM_ARRAY_TASK_ID:-0} * KP_PACK))
        { mapfile -t -s "$task" -n "$KP_PACK" KP_POINTS <"${KP_POINTS[0]#@}"; } 2>/dev/null ||
            kp_die "${KP_POINTS[0]} cannot be read: name a file with a configuration on each line"
    fi
    ((${#KP_POINTS[@]} > 0 && ${#KP_POINTS[@]} <= KP_PACK)) ||
        kp_die "${#KP_POINTS[@]} configuration(s) for $KP_PACK runs: $usage"
}

kp_pack_share() { # makes KP_TASKS and KP_GPUS those of one run; with --dry-run shows the first one,
    # and ends here
    kp_in_job || kp_die "pack.sh runs in a job: sbatch scripts/slurm/pack.sh; here singlenode.sh" \
        "starts one run"
    ((KP_NODES == 1)) ||
        kp_die "pack.sh on $KP_NODES nodes: give --nodes=1, and an array for more runs"
    ((KP_TASKS % KP_PACK == 0)) ||
        kp_die "$KP_TASKS task(s) for $KP_PACK runs: give --gpus-per-node, or --ntasks-per-node," \
            "a multiple of $KP_PACK"
    KP_TASKS=$((KP_TASKS / KP_PACK))
    ((KP_GPUS == 0)) || KP_GPUS=$KP_TASKS
    # Without --mem=0 the first step would take all of the memory, and the others would wait for it.
    KEMPNER_SRUN="--exact --mem=0 ${KEMPNER_SRUN:-}"
    [[ -n $KP_DRY ]] || return 0
    [[ -z ${KP_SCRIPT:-} ]] || kp_die "pack.sh takes no --script: use sbatch"
    KP_ARGUMENTS=("${KP_POINTS[0]}")
    kp_check "${KP_ARGUMENTS[@]}"
}

kp_pack_run() { # runs them all to their ends; sets KP_PACK_GOES_ON if one has to go on, and KP_CODE
    local slot code
    KP_PACK_GOES_ON='' KP_CODE=0 KP_EXCLUDED=''
    trap 'kp_pack_signal TERM || true' TERM USR1 HUP
    trap 'kp_pack_signal INT || true' INT
    trap 'kp_pack_signal USR2 || true' USR2
    kp_log "job $(kp_job_id), restart count ${SLURM_RESTART_COUNT:-0}, node $(kp_field NodeList):" \
        "${#KP_POINTS[@]} run(s), each with $KP_TASKS task(s) and $KP_GPUS GPU(s)"
    for slot in "${!KP_POINTS[@]}"; do kp_pack_start "$slot"; done

    while ((${#KP_PIDS[@]} > 0)); do
        for slot in "${!KP_PIDS[@]}"; do
            ! kill -0 "${KP_PIDS[slot]}" 2>/dev/null || continue
            code=0
            wait "${KP_PIDS[slot]}" || code=$?
            unset "KP_PIDS[slot]"
            kp_pack_ended "$slot" "$code"
        done
        sleep 0.2 || true
    done
}

kp_pack_start() { # <number of the run>
    kp_point "${KP_POINTS[$1]}" &
    KP_PIDS[$1]=$!
}

kp_pack_signal() { # <signal>: for each run
    # Pending: of those that are about to start.
    [[ $1 == USR2 ]] || KP_SIGNAL=$1 KP_PENDING=$1
    ((${#KP_PIDS[@]} == 0)) || kill -s "$1" "${KP_PIDS[@]}" 2>/dev/null || true
}

kp_pack_ended() { # <number of the run> <exit code of its subshell>
    local name=${KP_POINTS[$1]##*/} code=$2
    # A signal before its trap was set; or one since the run has crashed.
    [[ -z $KP_SIGNAL ]] || ((code != KP_NOW && code <= 128)) || code=$KP_LATER
    case $code in
        "$KP_NOW")
            kp_log "$name: starts again"
            kp_pack_start "$1"
            ;;
        "$KP_LATER" | "$KP_ELSEWHERE")
            kp_log "$name: goes on when the job is requeued"
            KP_PACK_GOES_ON=1
            ((code == KP_LATER)) || KP_EXCLUDED=$(kp_field NodeList)
            ;;
        *)
            kp_log "$name: has ended with exit code $code"
            ((code == 0)) || KP_CODE=$code
            ;;
    esac
}

kp_pack_finish() { # ends the script: requeues the job when a run has to go on; the others see that
    # they have ended
    trap '' TERM INT HUP USR1 USR2
    KP_DECIDED=end KP_FAULT="failed twice in a row"
    # Slurm is ending the job
    ! kp_wait_for_job || [[ -z $KP_PACK_GOES_ON || $(kp_field JobState) == RUNNING ]] ||
        KP_DECIDED=leave
    if [[ -n $KP_PACK_GOES_ON && $KP_DECIDED == end ]]; then
        if kp_ask_requeue; then
            [[ -z $KP_EXCLUDED ]] || kp_exclude "$(kp_job_id)"
            KP_DECIDED=requeue
        else
            kp_log "scontrol requeue was refused: $KP_REFUSED: the runs that have to go on must" \
                "be submitted again"
        fi
    fi
    kp_log "$KP_DECIDED"
    [[ $KP_DECIDED == end ]] || exit 0
    if [[ -n ${KEMPNER_STAGE:-} ]]; then
        KEMPNER_STAGED=$KEMPNER_STAGE/kempner-$SLURM_JOB_ID
        kp_unstage
    fi
    exit "$KP_CODE"
}

# --- in the subshell of one run -------------------------------------------------------------------

kp_point() { # <configuration>: one attempt; ends the subshell
    local turn
    trap 'kp_on_signal TERM || true' TERM USR1 HUP
    trap 'kp_on_signal INT || true' INT
    trap 'kp_on_signal USR2 || true' USR2
    printf -v KEMPNER_BATCH_BEGAN '%(%s)T' -1
    KEMPNER_ATTEMPT_ID=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$BASHPID
    KP_SRUN_NAME=kempner-$KEMPNER_ATTEMPT_ID
    kp_check "$1"
    kp_log "run directory $KP_RUN_DIR"
    kp_skip_if_ended
    exec >>"$KP_RUN_DIR/logs/batch-$(kp_job_id).log" 2>&1
    kp_banner
    kp_preflight
    exec {turn}<"$0" && flock "$turn" # one copies the data, for all that read them
    kp_stage
    exec {turn}<&-
    kp_run "$1"
    kp_finish
}

kp_skip_if_ended() { # ends the subshell when an earlier start of this job has decided that the run
    # has ended for good
    local KP_VALUES=()
    kp_find_records "$KP_RUN_DIR/attempts.jsonl" event=decision "job=$(kp_job_id)" -- \
        decision why || true
    ((${#KP_VALUES[@]} > 0)) && [[ ${KP_VALUES[-2]} == end ]] || return 0
    kp_log "it has ended in an earlier start of this job"
    [[ ${KP_VALUES[-1]} == 'the run is '@(done|stopped)* ]] || exit 1
    exit 0
}

kp_keep_log() { # in place of launch.sh's: the log is in the run directory already
    :
}

kp_requeue() { # in place of requeue.sh's: the job is requeued when all runs have ended, unless
    # Slurm is ending it now
    [[ $(kp_field JobState) == RUNNING ]] || kp_ask_requeue
}

kp_finish() { # in place of requeue.sh's: ends the subshell, whose exit code says whether the run
    # has to go on
    [[ -n $KP_DECIDED ]] || kp_decide "the step ended with exit code $KP_CODE" || true
    case $KP_DECIDED in
        requeue)
            [[ $KP_STATE != interrupted && $KP_SIGNAL != TERM ]] || exit "$KP_LATER"
            [[ -z $KP_EXCLUDED ]] || exit "$KP_ELSEWHERE"
            exit "$KP_NOW"
            ;;
        end) kp_propose ;;
    esac
    [[ ! $KP_STATE =~ ^(done|stopped)$ ]] || exit 0
    exit $((KP_CODE == 2 ? 2 : 1))
}
