# shellcheck shell=bash
# KEMPNER_CHAIN=K: if Slurm may not requeue a job, a successor waits in the queue to continue it.
#
# The dependency is afterany, not singleton, which matches by job name and would serialize all of a
# user's runs with that name. RUN_DIR/chain.jsonl gets a line before and after each sbatch, so that
# no second successor is submitted if something ends this script in between.

# the script's arguments as sbatch got them: kp_take replaces @FILE by the line of the array task
KP_CHAIN_ARGUMENTS=("$@")
KP_CHAIN=''         # ID of this job's chain, its first job; empty: none
KP_LINK=0           # number of jobs before it
KP_SUCCESSOR=''     # the job that continues it
KP_CHAIN_OPTIONS=() # sbatch's options

# Fields that a successor shares with this job; NumNodes is compared separately.
KP_CHAIN_SAME=(Partition Account QOS TimeLimit Features Reservation Licenses Network CoreSpec
    Contiguous ReqNodeList ExcNodeList Nice MinTmpDiskNode MinMemoryNode MinMemoryCPU CPUs/Task
    NtasksPerN:B:S:C OverSubscribe TresPerNode TresPerJob TresPerTask TresPerSocket TresBind
    TresFreq CpusPerTres MemPerTres BurstBuffer)

kp_chain_check() { # exits if KEMPNER_CHAIN is invalid
    local most=${KEMPNER_CHAIN:=0}
    [[ $most =~ ^(0|[1-9][0-9]{0,2})$ ]] ||
        kp_die "KEMPNER_CHAIN=$most: must be the number of jobs that may follow this one," \
            "1 to 999, or 0 for none"
    ((most > 0)) && kp_in_job || return 0
    [[ -z $(kp_field ArrayTaskThrottle) ]] ||
        kp_die "KEMPNER_CHAIN: the jobs that follow the tasks of this array" \
            "would exceed its limit of $(kp_field ArrayTaskThrottle) at once: leave" \
            "%$(kp_field ArrayTaskThrottle) out"
}

kp_chain() { # with KEMPNER_CHAIN=K: exits if the user has ended the chain; submits the
    # successor and sets KP_SUCCESSOR
    kp_is_batch || return 0
    if ((${KEMPNER_CHAIN:-0} == 0)); then
        kp_chain_note
        return
    fi
    KP_JOURNAL=$KP_RUN_DIR/chain.jsonl
    kp_chain_place
    # Allow only one way to continue: after a lost node, Slurm would requeue this job, and the
    # successor would start as well.
    kp_shielded scontrol update JobId="$(kp_job_id)" Requeue=0 2>/dev/null || true
    if ((KP_LINK >= KEMPNER_CHAIN)); then
        kp_log "the last job of its chain: $KP_LINK were before it (KEMPNER_CHAIN=$KEMPNER_CHAIN)"
    elif kp_chain_submit; then
        kp_chain_compare
        kp_log "job $KP_SUCCESSOR continues this one: $((KP_LINK + 1)) of at most $KEMPNER_CHAIN" \
            "(KEMPNER_CHAIN)"
    else
        kp_log "no job continues this one yet: sbatch is tried again at the end"
    fi
}

kp_chain_note() { # logs what to expect for a job without a chain
    local name='PreemptMode=([A-Z]+)' mode
    if [[ $(kp_field Requeue) == 0 ]]; then
        kp_log "note: this job cannot be requeued (--no-requeue, or JobRequeue=0):" \
            "it ends at its time limit; KEMPNER_CHAIN=K lets up to K jobs continue it"
    elif kp_ask scontrol show partition "$(kp_field Partition)" && [[ $KP_ANSWER =~ $name ]]; then
        mode=${BASH_REMATCH[1]}
        [[ $mode != CANCEL ]] ||
            kp_log "note: partition $(kp_field Partition) cancels the jobs that it preempts" \
                "(PreemptMode=CANCEL): this one may not come back; KEMPNER_CHAIN=K lets up to K" \
                "jobs continue it"
    fi
}

kp_chain_tell() { # prints the chain for --dry-run
    ((${KEMPNER_CHAIN:-0} == 0)) ||
        echo "chain: up to $KEMPNER_CHAIN job(s) continue this one, each submitted while" \
            "the one before it runs (KEMPNER_CHAIN=$KEMPNER_CHAIN)"
}

# --- the journal ----------------------------------------------------------------------------------

kp_chain_write() { # <event> <job> <link> [why]: appends a line and syncs it to disk
    kp_records append "$KP_JOURNAL" event="$1" chain="$KP_CHAIN" link:="$3" job="$2" why="${4:-}" ||
        true
}

kp_chain_jobs() { # prints the jobs of the chain, separated by commas; without a chain, this job
    local KP_VALUES=()
    if [[ -n $KP_CHAIN ]]; then
        kp_find_records "$KP_JOURNAL" event=submitted "chain=$KP_CHAIN" "job=*" -- job || true
        kp_comma "$KP_CHAIN" "${KP_VALUES[@]}"
    else
        kp_job_id
    fi
}

# --- whose turn it is -----------------------------------------------------------------------------

kp_chain_place() { # sets KP_CHAIN and KP_LINK; exits if the predecessor was cancelled
    # or another job continues
    local chain link after KP_VALUES=()
    read -r chain link after <<<"${KEMPNER_CHAIN_LINK:-}" || true
    [[ -z $after ]] ||
        kp_find_records "$KP_JOURNAL" "chain=$chain" "link=$link" -- event job || true
    if ((${#KP_VALUES[@]} > 0)); then
        KP_CHAIN=$chain KP_LINK=$link
        # If the predecessor was killed between sbatch and its record, that record is written now.
        kp_find_records "$KP_JOURNAL" "chain=$chain" "link=$link" "job=*" -- job || true
        ((${#KP_VALUES[@]} > 0)) || kp_chain_write submitted "$(kp_job_id)" "$link"
        kp_chain_look_back "$after"
    else
        KP_CHAIN=$(kp_job_id) KP_LINK=0
    fi

    kp_find_records "$KP_JOURNAL" "chain=*" "job=*" -- event chain job || true
    ((${#KP_VALUES[@]} > 0)) || return 0
    set -- "${KP_VALUES[@]: -3}" # the fields of the last line
    [[ $1 != submitted || $3 == "$(kp_job_id)" ]] || ! kp_chain_queued "$3" ||
        kp_die "job $3 already continues $KP_RUN_DIR (KEMPNER_CHAIN of job $2): scancel $3," \
            "or wait for it"
}

kp_chain_look_back() { # <predecessor>: ends this job if the predecessor was
    # cancelled or has ended for good
    local state='' last='' why KP_VALUES=()
    # Slurm forgets a job minutes after its end (MinJobAge); accounting or our
    # records may still know it.
    if kp_ask scontrol show job "$1" && [[ $KP_ANSWER =~ JobState=([A-Z_]+) ]]; then
        state=${BASH_REMATCH[1]}
    elif kp_ask sacct -X -n -P -j "$1" -o State; then
        state=${KP_ANSWER%%[[:space:]]*}
    fi
    kp_find_records "$KP_RUN_DIR/attempts.jsonl" event=decision "job=$1" -- decision || true
    ((${#KP_VALUES[@]} == 0)) || last=${KP_VALUES[-1]}
    kp_find_records "$KP_JOURNAL" event=lost "job=$1" -- time || true
    if [[ $state == CANCELLED && ${#KP_VALUES[@]} == 0 ]]; then
        why="was cancelled"
    elif [[ $last == leave || $last == end ]]; then
        why="has ended for good"
    else
        return 0
    fi
    kp_chain_write ended "$(kp_job_id)" "$KP_LINK" "job $1 $why"
    kp_log "end: job $1, which this one was to continue, $why"
    exit 0
}

kp_chain_early() { # for a start that ends before kp_chain, or in it: sets KP_CHAIN and KP_LINK if
    # this is a later job of a chain; fails if it must not go on
    local place link
    [[ -n ${KEMPNER_CHAIN_LINK:-} && -z $KP_SUCCESSOR &&
        ${KEMPNER_CHAIN:-0} =~ ^[1-9][0-9]{0,2}$ ]] || return 0
    KP_JOURNAL=$KP_RUN_DIR/chain.jsonl
    # It exits if another job continues, or none may; kp_chain may have said so already.
    place=$(
        [[ -z $KP_CHAIN ]] || exec 2>/dev/null
        kp_chain_place >&2
        echo "$KP_CHAIN $KP_LINK"
    ) && [[ -n $place ]] || return 1
    link=${place#* }
    ((link > 0)) || return 0 # the variable is that of another job
    KP_CHAIN=${place% *} KP_LINK=$link
    kp_shielded scontrol update JobId="$(kp_job_id)" Requeue=0 2>/dev/null || true
}

kp_chain_queued() { # <job>: succeeds if it is in the queue, or if squeue does not answer
    ! kp_ask squeue --me -r -h -o %i || [[ $'\n'$KP_ANSWER$'\n' == *$'\n'"$1"$'\n'* ]]
}

kp_chain_find() { # sets KP_SUCCESSOR to the queued job that has the successor's
    # comment; fails if there is none
    local job comment name="kempner-chain=$KP_CHAIN.$((KP_LINK + 1))"
    kp_ask squeue --me -r -h -o '%i %k' || return 1
    while read -r job comment; do
        [[ " $comment " != *[\ \"]"$name"[\ \"]* ]] || { KP_SUCCESSOR=$job && return 0; }
    done <<<"$KP_ANSWER"
    return 1
}

# --- the successor --------------------------------------------------------------------------------

kp_rest() { # <name>: prints that field of KP_JOB, which extends to the end of its line
    [[ ! $KP_JOB =~ $'\n'[[:space:]]*"$1"=([^$'\n']*) ]] || echo "${BASH_REMATCH[1]% }"
}

kp_chain_script() { # sets the caller's variable script to the script to submit,
    # preferably that in the code copy
    script=$(kp_script_in "$KP_ROOT")
    script=${script:-$(kp_script)}
    [[ -f $script ]] ||
        kp_die "KEMPNER_CHAIN: this job's script, $script, is gone: put it back"
}

kp_chain_variables() { # adds options from the variables of the job's request
    local name value
    # Read the shell's initial environment: later exports by the kit are not part of the request.
    while IFS='=' read -r -d '' name value; do
        [[ -n $value ]] || continue
        case $name in
            SLURM_NTASKS | SLURM_NTASKS_PER_* | SLURM_GPUS | SLURM_GPUS_PER_* | \
                SLURM_CPUS_PER_TASK | SLURM_CPUS_PER_GPU | SLURM_MEM_PER_GPU | \
                SLURM_TRES_PER_TASK | SLURM_GPU_BIND | SLURM_HINT | SLURM_THREADS_PER_CORE)
                name=$(kp_lower "${name#SLURM_}")
                KP_CHAIN_OPTIONS+=("--${name//_/-}=$value")
                ;;
            # set if --signal was given
            KEMPNER_SIGNAL_LEAD) KP_CHAIN_OPTIONS+=("--signal=B:SIGTERM@$value") ;;
        esac
    done <"/proc/$$/environ"
}

kp_chain_request() { # sets KP_CHAIN_OPTIONS, sbatch options that repeat this job's request
    # sbatch's command line is gone, but Slurm's record of the job and the SLURM_* variables hold
    # its values; sbatch reads the header and the SBATCH_* variables again.
    local pair value task="${SLURM_ARRAY_JOB_ID:-}_${SLURM_ARRAY_TASK_ID:-}"
    KP_CHAIN_OPTIONS=(--export=ALL --job-name="$(kp_job_name)" --nodes="$(kp_field NumNodes)"
    --chdir="$(kp_rest WorkDir)")
    for pair in mem=MinMemoryNode mem-per-cpu=MinMemoryCPU; do
        value=$(kp_field "${pair#*=}")
        [[ -z $value || -n ${SLURM_MEM_PER_GPU:-} ]] || KP_CHAIN_OPTIONS+=("--${pair%%=*}=$value")
    done
    for pair in partition=Partition account=Account qos=QOS reservation=Reservation \
        constraint=Features licenses=Licenses time=TimeLimit nodelist=ReqNodeList \
        exclude=ExcNodeList nice=Nice core-spec=CoreSpec network=Network tmp=MinTmpDiskNode \
        mail-user=MailUser mail-type=MailType gpu-freq=TresFreq sockets-per-node=Socks/Node \
        bb=BurstBuffer; do
        value=$(kp_field "${pair#*=}")
        [[ -z $value || $value =~ ^(\(null\)|N/A|\*|0)$ ]] ||
            KP_CHAIN_OPTIONS+=("--${pair%%=*}=$value")
    done
    value=$(kp_field OverSubscribe)
    case $value in
        NO) ;; # --exclusive, in the header
        USER | MCS | TOPO) KP_CHAIN_OPTIONS+=("--exclusive=${value,,}") ;;
        *) KP_CHAIN_OPTIONS+=(--exclusive=oversubscribe) ;;
    esac
    [[ $(kp_field Contiguous) != 1 ]] || KP_CHAIN_OPTIONS+=(--contiguous)

    kp_chain_variables

    value=$(kp_field TresPerNode) value=${value//gres[:\/]/}
    [[ -z $value || " ${KP_CHAIN_OPTIONS[*]}" == *" --gpus-per-node="* ]] ||
        KP_CHAIN_OPTIONS+=("--gres=$value")
    [[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || KP_CHAIN_OPTIONS+=("--array=$SLURM_ARRAY_TASK_ID")
    for pair in output=StdOut error=StdErr; do
        value=$(kp_rest "${pair#*=}")
        # empty: same as the output
        [[ -n $value && ($pair == output=* || $value != "$(kp_rest StdOut)") ]] || continue
        # In a file name, sbatch reads % as the start of a pattern.
        value=${value//%/%%}
        [[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || value=${value//"$task"/%A_%a}
        # The record has the name with this job's ID in it; the successor has its own ID.
        [[ ! ${value##*/} =~ ^(.*[^0-9])?"$SLURM_JOB_ID"([^0-9].*)?$ ]] ||
            value=${value%/*}/${BASH_REMATCH[1]}%j${BASH_REMATCH[2]}
        KP_CHAIN_OPTIONS+=("--${pair%%=*}=$value")
    done
    value=$(kp_run_words)
    value=kempner-chain=$KP_CHAIN.$((KP_LINK + 1))${value:+ $value}
    KP_CHAIN_OPTIONS+=(
        "--comment=$(kp_comment_with "$(kp_comment_of_user "$(kp_rest Comment)")" "$value")")
}

kp_chain_submit() { # submits the successor; sets KP_SUCCESSOR; fails if sbatch fails
    local link=$((KP_LINK + 1)) said code=0 script
    kp_chain_script
    # only once: after the loss of a node, the job's record asks for fewer nodes
    ((${#KP_CHAIN_OPTIONS[@]} > 0)) || kp_chain_request
    kp_chain_write intent "" "$link"
    said=$(cd -- "${SLURM_SUBMIT_DIR:-.}" && kp_as_submitted env \
        "KEMPNER_CHAIN_LINK=$KP_CHAIN $link $(kp_job_id)" sbatch --parsable \
        --dependency="afterany:$(kp_job_id)" "${KP_CHAIN_OPTIONS[@]}" "$script" \
        "${KP_CHAIN_ARGUMENTS[@]}" 2>&1) || code=$?
    if ((code == 0)); then
        said=${said##*$'\n'} # warnings come first
        KP_SUCCESSOR=${said%%;*}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
    elif ! kp_chain_find; then # a lost answer is not a refusal
        kp_chain_write refused "" "$link" "$said"
        kp_log "sbatch: ${said//$'\n'/; }"
        return 1
    fi
    kp_chain_write submitted "$KP_SUCCESSOR" "$link"
}

kp_chain_compare() { # compares the successor's request with this job's: on a difference, exits in
    # the first job and warns in later ones
    local name there wrong='' mine yours
    kp_ask scontrol show job "$KP_SUCCESSOR" || return 0
    there=$KP_ANSWER
    for name in NumNodes "${KP_CHAIN_SAME[@]}"; do
        mine=$(kp_field "$name")
        yours=$(KP_JOB=$there kp_field "$name")
        [[ ${yours/#(null)/} == "${mine/#(null)/}" ||
            ($name == NumNodes && ${yours%%-*} == "$mine") ]] ||
            wrong+="${wrong:+, }$name=$mine here and ${yours:-nothing} there"
    done
    [[ -n $wrong ]] || return 0
    # the site or a submit plugin has changed it, and the chain has come this far with it
    if ((KP_LINK > 0)); then
        kp_log "warning: job $KP_SUCCESSOR, which is to continue this one, has another" \
            "request: $wrong"
        return 0
    fi
    kp_chain_cancel "it would not have the request of this job"
    kp_die "KEMPNER_CHAIN: the next job would not have the request of this one ($wrong):" \
        "give what is missing to sbatch as an SBATCH_ variable, which the job can see," \
        "not on its command line; or unset KEMPNER_CHAIN"
}

# --- the end --------------------------------------------------------------------------------------

kp_chain_cancel() { # <why>: cancels the successor
    [[ -n $KP_SUCCESSOR ]] || return 0
    kp_chain_write cancelled "$KP_SUCCESSOR" $((KP_LINK + 1)) "$1"
    kp_ask scancel "$KP_SUCCESSOR" ||
        kp_log "job $KP_SUCCESSOR, which was to continue this one, could not be cancelled:" \
            "it will end by itself"
    kp_log "job $KP_SUCCESSOR, which was to continue this one, is cancelled"
    KP_SUCCESSOR=''
}

kp_chain_survives() { # succeeds if Slurm itself is ending this job, not a user's scancel
    # After scancel both fields are None; if Slurm ends the job, one of them gives the reason.
    [[ -n $KP_SUCCESSOR ]] &&
        [[ ! $(kp_field PreemptTime) =~ ^(None)?$ || ! $(kp_field Reason) =~ ^(None)?$ ]]
}

kp_chain_on() { # <what happened>: records whether the successor continues the run
    local last
    [[ -n $KP_SUCCESSOR ]] || ((KP_LINK >= KEMPNER_CHAIN)) || kp_chain_submit || true
    if ((KP_LINK >= KEMPNER_CHAIN)); then
        last="it was the last job of its chain (KEMPNER_CHAIN=$KEMPNER_CHAIN)"
        kp_record end "$1; $last: submit it again to go on"
    elif [[ -z $KP_SUCCESSOR ]]; then
        kp_record end "$1; sbatch has refused the job that was to continue it"
    elif ! kp_chain_queued "$KP_SUCCESSOR"; then
        kp_record end "$1; job $KP_SUCCESSOR, which was to continue it, was cancelled"
    else
        kp_exclude_decided "$KP_SUCCESSOR"
        kp_put_off_decided "$KP_SUCCESSOR"
        kp_record chain "$1; job $KP_SUCCESSOR continues it"
    fi
}
