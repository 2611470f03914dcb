# shellcheck shell=bash
# Several runs on one node. Each has a subshell, which does what singlenode.sh does for a single
# run, with an equal share of the node. This shell waits for them and requeues the job. Sourced by
# pack.sh, after all.sh.

# Exit codes of a subshell whose run has to continue: at once; after a requeue of the job; after a
# requeue without this node.
declare -rA KP_GO_ON=([now]=100 [later]=101 [elsewhere]=102)
# most: number of runs that fit on the node; goes_on: not empty once a run has to continue;
# excluded: the node, once a run has to continue without it
declare -A KP_PACK=([goes_on]='' [excluded]='')
KP_POINTS=() # the configurations of this job's runs

kp_own_steps() { # in place of restart.sh's: names this script
    echo pack.sh
}

kp_pack_take() { # <K> <CONFIG>... or <K> @FILE: sets KP_PACK[most] and KP_POINTS
    local usage="sbatch scripts/slurm/pack.sh 4 CONFIG..., 1 to 4 of them" task most
    kp_take "$@"
    most=${KP_ARGUMENTS[0]} KP_POINTS=("${KP_ARGUMENTS[@]:1}")
    [[ $most =~ ^[1-9][0-9]?$ ]] || kp_die "'$most' is not a number of runs: $usage"
    KP_PACK[most]=$most
    if [[ ${KP_POINTS[0]:-} == @* ]]; then
        kp_own_array
        task=$((${SLURM_ARRAY_TASK_ID:-0} * most))
        { mapfile -t -s "$task" -n "$most" KP_POINTS <"${KP_POINTS[0]#@}"; } 2>/dev/null ||
            kp_die "${KP_POINTS[0]} cannot be read: name a file with a configuration on each line"
    fi
    ((${#KP_POINTS[@]} > 0 && ${#KP_POINTS[@]} <= most)) ||
        kp_die "${#KP_POINTS[@]} configuration(s) for $most runs: $usage"
}

kp_pack_share() { # sets KP_TASKS and KP_GPUS to those of one run; with --dry-run shows the
    # first run and exits
    local most=${KP_PACK[most]} tasks
    kp_in_job || kp_die "pack.sh runs in a job: sbatch scripts/slurm/pack.sh; here singlenode.sh" \
        "starts one run"
    ((KP_NODES == 1)) ||
        kp_die "pack.sh on $KP_NODES nodes: give --nodes=1, and an array for more runs"
    ((KP_TASKS % most == 0)) ||
        kp_die "$KP_TASKS task(s) for $most runs: give --gpus-per-node, or --ntasks-per-node," \
            "a multiple of $most"
    tasks=$((KP_TASKS / most))
    kp_set_size 1 "$tasks" $((KP_GPUS > 0 ? tasks : 0))
    # Without --mem=0, the first step would take all memory, and the others would wait.
    KEMPNER_SRUN="--exact --mem=0 ${KEMPNER_SRUN:-}"
    [[ -n $KP_DRY ]] || return 0
    [[ -z ${KP_SCRIPT:-} ]] || kp_die "pack.sh takes no --script: use sbatch"
    kp_set_arguments "${KP_POINTS[0]}"
    kp_check "${KP_ARGUMENTS[@]}"
}

kp_pack_run() { # runs all to completion; sets KP_CODE, and KP_PACK[goes_on] if one has to continue
    local slot code
    kp_set_code 0
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

kp_pack_start() { # <number of the run>: starts its subshell
    kp_point "${KP_POINTS[$1]}" &
    kp_set_pid "$1" "$!"
}

kp_pack_signal() { # <signal>: forwards it to each run
    # Pending for runs that are about to start.
    [[ $1 == USR2 ]] || kp_keep_signal "$1"
    ((${#KP_PIDS[@]} == 0)) || kill -s "$1" "${KP_PIDS[@]}" 2>/dev/null || true
}

kp_pack_ended() { # <number of the run> <exit code of its subshell>: handles its end
    local name=${KP_POINTS[$1]##*/} code=$2
    # The signal came before the trap was set, or after the run crashed.
    [[ -z $KP_SIGNAL ]] || ((code != KP_GO_ON[now] && code <= 128)) ||
        code=${KP_GO_ON[later]}
    case $code in
        "${KP_GO_ON[now]}")
            kp_log "$name: starts again"
            kp_pack_start "$1"
            ;;
        "${KP_GO_ON[later]}" | "${KP_GO_ON[elsewhere]}")
            kp_log "$name: goes on when the job is requeued"
            KP_PACK[goes_on]=1
            ((code == KP_GO_ON[later])) || KP_PACK[excluded]=$(kp_field NodeList)
            ;;
        *)
            kp_log "$name: has ended with exit code $code"
            ((code == 0)) || kp_set_code "$code"
            ;;
    esac
}

kp_pack_finish() { # requeues the job if a run has to continue, and ends the script; the other runs
    # see that they have ended
    trap '' TERM INT HUP USR1 USR2
    kp_set_decided end
    # Slurm is already ending the job
    ! kp_wait_for_job || [[ -z ${KP_PACK[goes_on]} || $(kp_field JobState) == RUNNING ]] ||
        kp_set_decided leave
    if [[ -n ${KP_PACK[goes_on]} && $KP_DECIDED == end ]]; then
        if kp_ask_requeue; then
            kp_set_decision excluded="${KP_PACK[excluded]}" fault="failed twice in a row"
            kp_exclude_decided "$(kp_job_id)"
            kp_set_decided requeue
        else
            kp_log "scontrol requeue was refused: ${KP_DECISION[refused]}: the runs that have to" \
                "go on must be submitted again"
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

kp_point() { # <configuration>: runs one attempt; ends the subshell
    local turn
    kp_forget_pids # this run must not signal the others' processes
    trap 'kp_on_signal TERM || true' TERM USR1 HUP
    trap 'kp_on_signal INT || true' INT
    trap 'kp_on_signal USR2 || true' USR2
    kp_name_attempt "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$BASHPID"
    kp_check "$1"
    kp_log "run directory $KP_RUN_DIR"
    kp_skip_if_ended
    exec >>"$KP_RUN_DIR/logs/batch-$(kp_job_id).log" 2>&1
    kp_banner
    kp_preflight
    exec {turn}<"$0" && flock "$turn" # only one run copies the data that all read
    kp_stage
    exec {turn}<&-
    kp_run "$1"
    kp_finish
}

kp_skip_if_ended() { # ends the subshell if an earlier start of this job decided that the run has
    # ended for good
    local KP_VALUES=()
    kp_find_records "$KP_RUN_DIR/attempts.jsonl" event=decision "job=$(kp_job_id)" -- \
        decision why || true
    ((${#KP_VALUES[@]} > 0)) && [[ ${KP_VALUES[-2]} == end ]] || return 0
    kp_log "it has ended in an earlier start of this job"
    [[ ${KP_VALUES[-1]} == 'the run is '@(done|stopped)* ]] || exit 1
    exit 0
}

kp_keep_log() { # in place of launch.sh's: does nothing, as the log is in the run directory already
    :
}

kp_run_note() { # in place of code.sh's: does nothing, as a job has many runs
    :
}

kp_requeue() { # in place of requeue.sh's: does nothing unless Slurm is ending the job, which is
    # requeued after all runs have ended
    [[ $(kp_field JobState) == RUNNING ]] || kp_ask_requeue
}

kp_finish() { # in place of requeue.sh's: ends the subshell; the exit code says whether the run
    # has to continue
    [[ -n $KP_DECIDED ]] || kp_decide "the step ended with exit code $KP_CODE" || true
    case $KP_DECIDED in
        requeue)
            [[ $KP_STATE != interrupted && $KP_SIGNAL != TERM ]] || exit "${KP_GO_ON[later]}"
            [[ -z ${KP_DECISION[excluded]} ]] || exit "${KP_GO_ON[elsewhere]}"
            exit "${KP_GO_ON[now]}"
            ;;
        end) kp_propose ;;
    esac
    [[ ! $KP_STATE =~ ^(done|stopped)$ ]] || exit 0
    exit $((KP_CODE == 2 ? 2 : 1))
}
