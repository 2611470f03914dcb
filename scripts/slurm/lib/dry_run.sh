# shellcheck shell=bash
# --dry-run: prints the sbatch request, the variables that the tasks would see, and the
# srun command. It starts and writes nothing; if no controller answers, it prints what it
# can. Sourced by kp_take.

# shellcheck source-path=SCRIPTDIR source=lib/render.sh
source "$KP_LIB/render.sh"

kp_dry_take() { # <arguments of the script>...: sets KP_ARGUMENTS, KP_REQUEST
    # (sbatch's options) and KP_SCRIPT
    local word own arguments=()
    own=$(kp_own_options)
    KP_REQUEST=() KP_DRY_AWAY='' KP_SCRIPT=''
    declare -gA KP_BEFORE=() KP_ASKED=() KP_FROM=()
    for word; do
        if [[ $KP_SCRIPT == next ]]; then
            KP_SCRIPT=$word
            continue
        fi
        case ${word%%=*} in
            --dry-run | --submit) ;;
            --script) [[ $word == *=* ]] && KP_SCRIPT=${word#*=} || KP_SCRIPT=next ;;
            # options of train.py contain a dot: --train.max_steps=20
            --*.* | [^-]* | '') arguments+=("$word") ;;
            *) [[ ${word%%=*} =~ ^--($own)$ ]] && arguments+=("$word") ||
                KP_REQUEST+=("$word") ;;
        esac
    done
    kp_set_arguments "${arguments[@]}"
    [[ $KP_SCRIPT != next ]] || kp_die "--script: a file is missing; write --script=FILE"
    [[ -z $KP_SCRIPT ]] || ! kp_in_job ||
        kp_die "--script: render it outside the job, where the request is known"
    [[ -z $KP_SCRIPT || $KP_DRY != submit ]] ||
        kp_die "--script: goes with --dry-run, which renders the script"
    [[ -z $KP_SCRIPT ]] || kp_render_check "$KP_SCRIPT"
    while IFS= read -r -d '' word; do KP_BEFORE[${word%%=*}]=${word#*=}; done < <(env -0)
}

kp_dry_ask() { # <source> <option>: records an sbatch option, which replaces earlier ones of that
    # name; adds one that sbatch may not know to the caller's strange
    local name=${2%%=*} value=''
    local full='^(nodes|ntasks|partition|time|gpus|ntasks-per-node|gpus-per-.*|cpus-per-task)$'
    [[ $2 != *=* ]] || value=${2#*=}
    case $name in # short options with the value in the same word
        -[NnpAqtcGJowx]?*) value=${2:2} name=${2:0:2} ;;
    esac
    name=${name#-} name=${name#-}
    case $name in
        N) name=nodes ;; n) name=ntasks ;; p) name=partition ;;
        A) name=account ;; q) name=qos ;; t) name='time' ;;
        c) name='cpus-per-task' ;; G) name=gpus ;; J) name='job-name' ;; o) name=output ;;
        w) name=nodelist ;; x) name=exclude ;;
    esac
    [[ -n $value || ! $name =~ $full ]] ||
        kp_die "--$name: write --$name=VALUE as one word"
    kp_is_sbatch_option "$2" || [[ $1 != "the command line" ]] || strange+=("$2")
    kp_dry_check "$name" "$value"
    name=${name//-/_}
    if [[ ${KP_FROM[$name]:-} == site.d/* ]]; then
        KP_FROM[$name]="$1 (${KP_FROM[$name]} has ${KP_ASKED[$name]})"
    else
        KP_FROM[$name]=$1
    fi
    KP_ASKED[$name]=$value
}

kp_dry_check() { # <option> <value>: exits if a number is malformed; sbatch
    # itself reports other errors
    local number='[1-9][0-9]{0,5}'
    case $1 in
        nodes) [[ $2 =~ ^$number(-$number)?$ ]] ||
            kp_die "--nodes=$2: must be a number of nodes, such as 4 or 2-4" ;;
        ntasks | ntasks-per-node | sockets-per-node | cpus-per-task)
            [[ $2 =~ ^$number$ ]] || kp_die "--$1=$2: must be a whole number from 1"
            ;;
        time)
            [[ $2 =~ ^([0-9]+-)?[0-9]+(:[0-9]+){0,2}$|^(UNLIMITED|INFINITE)$ ]] ||
                kp_die "--time=$2: must be minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS"
            ;;
        gpus | gpus-per-node | gpus-per-socket | gpus-per-task)
            [[ $2 =~ ^([A-Za-z][^:,=]*:)?(0|$number)$ ]] ||
                kp_die "--$1=$2: must be a whole number, with or without a type: 8 or h100:8"
            ;;
    esac
}

kp_dry_request() { # sets KP_ASKED from the script's header, the SBATCH_* variables and the command
    # line
    local line name
    while read -r line; do
        [[ $line != '#SBATCH '* ]] || kp_dry_ask "the header" "${line#'#SBATCH '}"
    done <"$0"
    for name in "${!SBATCH_@}"; do
        line=$(kp_lower "${name#SBATCH_}") line=${line//_/-}
        case $line in
            timelimit) line='time' ;;
            array-inx) line=array ;;
            mem-per-node) line=mem ;;
        esac
        kp_dry_ask "$(kp_profile_from "$name")" "--$line=${!name}"
    done
    for line in "${KP_REQUEST[@]}"; do kp_dry_ask "the command line" "$line"; done
}

kp_dry_strange() { # exits if sbatch does not know an option
    local word=${strange[0]:-} near
    [[ -n $word ]] || return 0
    # A site's plugins may add options, which sbatch knows.
    if [[ -z $KP_DRY_AWAY ]]; then
        near=$(sbatch --test-only "${strange[@]}" --wrap=: 2>&1) || true
        [[ $near =~ (unrecognized|invalid|ambiguous)" option" ]] || return 0
    fi
    near=$(kp_nearest "${word%%=*}" "${KP_SBATCH_OPTIONS[@]/#/--}")
    kp_die "$word: sbatch has no such option; ${near:+did you mean $near? }sbatch --help lists them"
}

kp_dry_node() { # sets KP_DRY_NODE, a sentence about a node, and the caller's partition, cpus and
    # all; or KP_DRY_AWAY. sinfo may retry for a minute.
    local KP_DEADLINE=$((SECONDS + 10)) partitions
    partition=${KP_ASKED[partition]:-} cpus='' all='' KP_DRY_AWAY=''
    if ! kp_ask sinfo -h -o %P; then
        KP_DRY_AWAY=1
        KP_DRY_NODE="no Slurm controller answers here: what the nodes have is unknown. One CPU"
        KP_DRY_NODE+=" per task is assumed, and only the GPUs that you request (--gpus-per-node=N)."
        return
    fi
    partitions=$KP_ANSWER
    [[ -n $partition ]] || partition=$(sed -n 's/\*$//p' <<<"$partitions" | head -n 1)
    [[ $partition == *,* || $'\n'${partitions//\*/}$'\n' == *$'\n'"$partition"$'\n'* ]] ||
        kp_die "--partition=$partition: there is no such partition; choose from" \
            "$(paste -sd' ' <<<"${partitions//\*/}")"
    kp_ask sinfo -h -p "$partition" -o '%c %G' || true
    cpus=${KP_ANSWER%%[ +]*}
    all=${KP_ANSWER%%$'\n'*} all=${all#* }
    KP_DRY_NODE="a node of partition $partition: $cpus CPUs, $all"
}

kp_dry_job() { # sets KP_JOB to what scontrol would report for this request, as far
    # as it is known in advance
    local nodes gpus gres tasks names='' count job
    local partition cpus all # per node: CPUs and all GRES
    local strange=()         # options missing from sbatch's manual
    kp_dry_request
    kp_dry_node
    kp_dry_strange
    nodes=${KP_ASKED[nodes]:-1} nodes=${nodes%%-*}
    [[ -n $KP_DRY_AWAY ]] ||
        names=$(sinfo -h -N -p "$partition" -o %N 2>/dev/null | sort -u | head -n "$nodes" |
            paste -sd,) || true

    gpus=${KP_ASKED[gpus_per_node]:-}
    [[ -z ${KP_ASKED[gpus_per_socket]:-} ]] ||
        gpus=$((${KP_ASKED[gpus_per_socket]##*:} * ${KP_ASKED[sockets_per_node]:-1}))
    gres=${gpus:+gres:gpu:${gpus##*:}}
    gres=${gres:-${KP_ASKED[gres]:-}}
    kp_count_gpus "${gres:-$all}"
    tasks=${KP_ASKED[ntasks_per_node]:-$count}
    cpus=${cpus:-$(((tasks > 0 ? tasks : 1) * ${KP_ASKED[cpus_per_task]:-1}))}
    job="JobId=JOBID NodeList=$names JobName=${KP_ASKED[job_name]:-kempner} NumNodes=$nodes"
    job+=" NumCPUs=$((cpus * nodes)) Requeue=1 BatchFlag=0"
    job+="${gres:+ TresPerNode=$gres}"
    job+="${KP_ASKED[gpus]:+ TresPerJob=gres:gpu:${KP_ASKED[gpus]##*:}}"
    job+="${KP_ASKED[gpus_per_task]:+ TresPerTask=gres:gpu:${KP_ASKED[gpus_per_task]##*:}}"
    job+="${KP_ASKED[ntasks_per_node]:+ NtasksPerN:B:S:C=${KP_ASKED[ntasks_per_node]}:0:*:*}"

    # Without a request, the whole node's GPUs are allocated.
    if [[ -z $gres && -n ${KP_ASKED[gpus]:-} ]]; then
        all=gpu:$((${KP_ASKED[gpus]##*:} / nodes))
    fi
    gres=${gres:-$all}
    [[ $gres != *gpu* ]] || job+=$'\n'"  Nodes=node GRES=$gres"

    SLURM_JOB_ID=JOBID
    SLURM_NTASKS=${KP_ASKED[ntasks]:-$((nodes * ${KP_ASKED[ntasks_per_node]:-1}))}
    [[ -n ${KP_ASKED[ntasks]:-}${KP_ASKED[ntasks_per_node]:-} ]] || SLURM_NTASKS=0
    [[ -z ${KP_ASKED[cpus_per_task]:-} ]] || SLURM_CPUS_PER_TASK=${KP_ASKED[cpus_per_task]}
    job="NumTasks=$SLURM_NTASKS CPUs/Task=${KP_ASKED[cpus_per_task]:-1} $job"
    kp_set_job "$job"
    kp_name_attempt JOBID.0.0
}

kp_dry_variables() { # prints the variables that the script has changed
    local line name
    while IFS= read -r -d '' line; do
        name=${line%%=*}
        [[ ! $name =~ ^(_|SHLVL|KP_.*)$ && ${KP_BEFORE[$name]-$'\1'} != "${line#*=}" ]] || continue
        if kp_is_secret "$name"; then
            printf '  %s=***\n' "$name"
        else
            printf '  %s=%q\n' "$name" "${line#*=}"
        fi
    done < <(env -0 | sort -z)
}

[[ $(type -t kp_dry_commands) == function ]] || kp_dry_commands() { # prints the command
    echo "the command:"
    printf ' '
    printf ' %q' "${KP_SRUN[@]}"
    echo
}

kp_dry_settings() { # prints the kit's variables that the user has set, including in site.env
    local name
    while read -r name; do
        kp_is_setting "$name" || continue
        if kp_is_secret "$name"; then
            printf '  %s=***\n' "$name"
        else
            printf '  %s=%q\n' "$name" "${!name}"
        fi
    done < <(compgen -A export KEMPNER_)
}

kp_dry_tell_request() { # prints what the job requests
    local name
    if ((${#KP_ASKED[@]} > 0)); then
        echo "options for sbatch, and where each comes from:"
        while read -r name; do
            printf '  %-40s %s\n' "--${name//_/-}${KP_ASKED[$name]:+=${KP_ASKED[$name]}}" \
                "${KP_FROM[$name]}"
        done < <(printf '%s\n' "${!KP_ASKED[@]}" | sort)
        echo "$KP_DRY_NODE"
    else
        echo "inside job $(kp_job_id), as Slurm has it: nodes $(kp_field NodeList)," \
            "time limit $(kp_field TimeLimit)"
    fi
}

kp_dry_tell() { # prints everything and ends the script
    local line settings code=0
    settings=$(kp_dry_settings) # before this function sets some
    [[ -n $KP_DRY_AWAY ]] || KEMPNER_PEERS=$(kp_peers 2>/dev/null | paste -sd' ') || true
    KEMPNER_SIGNAL_LEAD=${KEMPNER_SIGNAL_LEAD:-$(kp_signal_lead "$0")}
    export KEMPNER_PEERS=${KEMPNER_PEERS:-} KEMPNER_SIGNAL_LEAD
    kp_srun_command -- "$KP_TRAIN" "${KP_ARGUMENTS[@]}"

    echo "dry run: nothing is started, nothing is written"
    echo
    kp_dry_tell_request

    echo
    echo "the configuration fits: $KP_NODES node(s) x $KP_TASKS task(s) = world size" \
        "$((KP_NODES * KP_TASKS)), $KP_GPUS GPU(s) a node, $KP_CPUS CPU(s) a task;" \
        "device $KP_DEVICE"
    line="a requeue"
    ((${KEMPNER_CHAIN:-0} == 0)) || line="the next job of the chain"
    echo "after a crash: up to $KP_RESTARTS restart(s) in place, then $line; spare nodes:" \
        "${KEMPNER_SPARES:-0}"
    line=$(kp_committed_step)
    if ((line < 0)); then line="no checkpoint yet"; else line="newest checkpoint: step $line"; fi
    echo "run directory $KP_RUN_DIR ($line)"
    kp_chain_tell
    [[ -z ${KP_CODE_NOTE:-} ]] || echo "$KP_CODE_NOTE"

    [[ -z $settings ]] ||
        printf '\nvariables of the kit that you have set (docs/reference/slurm.md):\n%s\n' \
            "$settings"
    echo
    echo "variables that the script would set, in addition to your own, which go to every task" \
        "(secrets as ***):"
    kp_dry_variables
    echo "each node chooses its network by itself; this host would take:"
    if line=$(KEMPNER_SAID='' bash "$KP_LIB/task.sh" env); then
        printf '%s\n' "$line" | sed -n '1s/^/  /p'
        printf '%s\n' "$line" | sed -nE '2,$s/^((NCCL|GLOO|TP|FI)_[A-Z_]*=)/  \1/p'
    fi

    echo
    kp_dry_commands
    ((${#KP_ASKED[@]} > 0)) || exit 0
    echo
    if [[ -z $KP_DRY_AWAY ]]; then
        echo "sbatch --test-only says:"
        line=$(sbatch --test-only "${KP_REQUEST[@]}" "$0" "${KP_ARGUMENTS[@]}" 2>&1) || code=2
        printf '%s\n' "$line" | sed 's/^/  /'
        ((code == 0)) || kp_die "sbatch would refuse this request: see its message above"
    else
        echo "sbatch --test-only: not asked, because no Slurm controller answers here"
    fi
    [[ -z $KP_SCRIPT ]] || kp_render "$KP_SCRIPT"
    exit 0
}
