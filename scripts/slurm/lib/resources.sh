# shellcheck shell=bash
# Nodes, tasks, GPUs and CPUs of this run, from the request. One task drives one GPU or, under
# run.sh, all GPUs of its node.

kp_set_size() { # <nodes> <tasks per node> <GPUs per node> [CPUs per task]: sets the size of the run
    KP_NODES=$1 KP_TASKS=$2 KP_GPUS=$3
    [[ -z ${4:-} ]] || KP_CPUS=$4
}

kp_tasks() { # sets KP_NODES, KP_TASKS and KP_GPUS (per node) and KP_CPUS (per task); one task
    # drives one GPU
    local asked cpus one="--ntasks-per-node=1 for one process that drives all GPUs of its node"
    kp_chain_check
    if ! kp_in_job; then
        KP_NODES=1 KP_GPUS=$(kp_gpus_here)
        KP_TASKS=${KEMPNER_NPROC:-$((KP_GPUS > 0 ? KP_GPUS : 1))}
        [[ -z $KP_LAUNCHER ]] || { export PET_NPROC_PER_NODE=$KP_TASKS && KP_TASKS=1; }
        return
    fi
    [[ -z $(kp_field HetJobId) ]] ||
        kp_die "a heterogeneous job (its parts are separated by ':' on sbatch's command" \
            "line): a run needs one kind of node: give one request, without ':'"
    KP_NODES=$(kp_field NumNodes)
    kp_gpus
    asked=$(kp_tasks_asked)
    if [[ -n $KP_LAUNCHER ]]; then
        ((${asked:-1} == 1)) ||
            kp_die "$asked task(s) per node, each a torchrun of its own: leave --ntasks-per-node" \
                "out: torchrun starts a process for each GPU, or as many as --nproc-per-node says"
        asked=1
    fi
    KP_TASKS=${asked:-$((KP_GPUS > 0 ? KP_GPUS : 1))}
    if [[ $KP_GPUS_ASKED == --gpus-per-task=* ]]; then # a whole node may have more GPUs
        KP_GPUS=$((KP_TASKS * ${KP_GPUS_ASKED#*=}))
    fi

    if ((KP_GPUS > 0 && KP_TASKS != KP_GPUS)) && [[ $KP_TASKS != "${KP_DRIVES_ALL:-none}" ]]; then
        [[ -z $KP_GPUS_ASKED && $KP_TASKS -lt $KP_GPUS ]] ||
            kp_die "$KP_TASKS task(s) per node, but $KP_GPUS" \
                "GPU(s)${KP_GPUS_ASKED:+ ($KP_GPUS_ASKED)}: one task drives one GPU;" \
                "give --ntasks-per-node=$KP_GPUS, or" \
                "--gpus-per-node=$KP_TASKS${KP_DRIVES_ALL:+, or} ${KP_DRIVES_ALL:+$one}"
        kp_log "note: $KP_TASKS of the $KP_GPUS GPUs of a node are used; without" \
            "--ntasks-per-node all are"
        KP_GPUS=$KP_TASKS
    fi

    kp_cpus "$KP_NODES"
    ((cpus >= KP_TASKS)) ||
        kp_die "$KP_TASKS task(s) per node, but $cpus CPU(s): give --ntasks-per-node=$KP_TASKS" \
            "--cpus-per-task=N"
    KP_CPUS=$((cpus / KP_TASKS))
    # As for the tasks. Slurm also writes 1 if nothing was requested.
    asked=$(kp_field CPUs/Task)
    [[ $asked == 1 || ${SLURM_CPUS_PER_TASK:-} != "$asked" ]] || KP_CPUS=$asked
    kp_places # from here on KP_NODES are the training nodes
}

kp_cpus() { # <nodes>: sets the caller's cpus to the CPUs per node, the smallest number
    # if nodes differ
    # srun takes one number for all nodes, and fails if a node has fewer.
    local line part count least=0 most=0
    while read -r line; do
        [[ $line =~ ^Nodes=.*\ CPU_IDs=([0-9,-]+) ]] || continue
        count=0
        for part in ${BASH_REMATCH[1]//,/ }; do
            count=$((count + ${part#*-} - ${part%-*} + 1))
        done
        least=$((least == 0 || count < least ? count : least))
        most=$((count > most ? count : most))
    done <<<"$KP_JOB"
    cpus=$(($(kp_field NumCPUs) / $1))
    ((least == most || least >= cpus)) || cpus=$least
}

kp_tasks_asked() { # prints the requested tasks per node, if any
    # In a shell of salloc or of another job, sbatch passes on that job's request.
    local pattern='NtasksPerN:B:S:C=([1-9][0-9]*)' tasks=${SLURM_NTASKS:-0}
    [[ $tasks == "$(kp_field NumTasks)" ]] || tasks=0
    if [[ $KP_JOB =~ $pattern ]]; then
        echo "${BASH_REMATCH[1]}"
    elif [[ $KP_GPUS_ASKED == --gpus-per-socket=* ]]; then
        # Slurm has set the number of tasks to that of the sockets.
        return 0
    elif ((tasks > KP_NODES)) || { ((tasks > 0)) && kp_is_batch; }; then # salloc always sets it
        ((tasks % KP_NODES == 0)) ||
            kp_die "--ntasks=$tasks on $KP_NODES nodes: give --ntasks-per-node=N instead"
        echo $((tasks / KP_NODES))
    fi
}

kp_gpus() { # sets KP_GPUS (per node) and KP_GPUS_ASKED, the request (empty: GPUs come
    # with whole nodes)
    local line counts=() asked count
    while read -r line; do
        [[ $line == Nodes=*GRES=* ]] || continue
        kp_count_gpus "${line##*GRES=}"
        counts+=("$count")
    done <<<"$KP_JOB"
    KP_GPUS=${counts[0]:-0} KP_GPUS_ASKED=''
    ((${#KP_DETAILS[@]} > 0)) || KP_GPUS=${SLURM_GPUS_ON_NODE:-0} # see kp_show_job

    asked=$(kp_field TresPerNode)
    if [[ $asked == *gpu* ]]; then
        kp_count_gpus "$asked"
        KP_GPUS=$count
        KP_GPUS_ASKED=--gpus-per-node=$KP_GPUS
        return
    fi

    asked=$(kp_field TresPerSocket)
    if [[ $asked == *gpu* ]]; then
        kp_count_gpus "$asked"
        asked=$count
        KP_GPUS=$((asked * $(kp_field Socks/Node))) # without --sockets-per-node sbatch refuses it
        KP_GPUS_ASKED=--gpus-per-socket=$asked
        return
    fi

    asked=$(kp_field TresPerJob)
    if [[ $asked == *gpu* ]]; then
        kp_count_gpus "$asked"
        asked=$count
        ((asked % KP_NODES == 0)) ||
            kp_die "--gpus=$asked on $KP_NODES nodes: give --gpus-per-node=N instead"
        KP_GPUS_ASKED=--gpus=$asked
    fi

    # srun takes one number for all nodes.
    for line in "${counts[@]}"; do
        [[ $line == "$KP_GPUS" ]] ||
            kp_die "the nodes have different numbers of GPUs (${counts[*]}):" \
                "give --gpus-per-node=N${KP_GPUS_ASKED:+ instead of $KP_GPUS_ASKED}"
    done
    [[ -z $KP_GPUS_ASKED ]] || KP_GPUS=$((asked / KP_NODES))
    asked=$(kp_field TresPerTask)
    [[ $asked != *gpu* ]] || { kp_count_gpus "$asked" && KP_GPUS_ASKED=--gpus-per-task=$count; }
}

kp_same_size() { # exits if a restart of the job has fewer tasks or GPUs per node than the first
    # Slurm 22.05 can lose a requeued job's GPUs: it would continue with fewer ranks, on the CPU.
    local file tasks='' gpus='' nodes='' now="$KP_TASKS $KP_GPUS $KP_NODES"
    kp_is_batch || return 0
    file=$KP_RUN_DIR/.size-$(kp_job_id)
    [[ $(kp_field Restarts) == 0 ]] || { read -r tasks gpus nodes <"$file"; } 2>/dev/null || true
    if [[ ! $tasks.$gpus =~ ^[0-9]+\.[0-9]+$ ]]; then
        printf '%s\n' "$now" >"$file"
        return
    fi
    # The request allows fewer nodes (--nodes=1-2), or somebody has changed NumNodes.
    [[ ! $nodes =~ ^[0-9]+$ ]] || ((KP_NODES >= nodes)) ||
        kp_log "note: restart with $((KP_NODES * KP_TASKS)) of $((nodes * tasks)) tasks:" \
            "this job's first start had $nodes nodes"
    ((KP_TASKS < tasks || KP_GPUS < gpus)) || return 0
    kp_log "error: this start has $KP_TASKS task(s) and $KP_GPUS GPU(s) on each node," \
        "the first one of job $(kp_job_id) had $tasks and $gpus: nothing runs. Look at GRES in" \
        "'scontrol show job -d $(kp_job_id)' and at the nodes; with --gpus-per-node=$gpus on" \
        "sbatch's command line, Slurm waits for them"
    kp_set_code 1
    kp_no_restart
    kp_decide "fewer GPUs or tasks than at the first start" || true
    kp_finish
}

kp_count_gpus() { # <GRES or TRES>: sets the caller's count to its number of GPUs: gpu,
    # gpu:h100:4(IDX:0-3), gres/gpu=4, several types
    # A type, as in gpu:1g.10gb:4, may start with digits but is not a number. No subshell: a job of
    # 2,000 nodes may have as many lines.
    local text=$1 pattern='gpu([:=/][^:=,(]*[^:=,(0-9][^:=,(]*)?([:=]([0-9]+))?(.*)'
    count=0
    while [[ $text =~ $pattern ]]; do
        count=$((count + ${BASH_REMATCH[3]:-1}))
        text=${BASH_REMATCH[4]}
    done
}

kp_gpus_here() { # prints the number of GPUs that a process may use on this machine
    local list
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        IFS=, read -ra list <<<"${CUDA_VISIBLE_DEVICES/#-1*/}"
        echo "${#list[@]}"
    else
        nvidia-smi -L 2>/dev/null | grep -c ^GPU || true
    fi
}

kp_need_one_node() { # exits if the job has several nodes
    ((KP_NODES == 1)) ||
        kp_die "singlenode.sh on $KP_NODES nodes: give --nodes=1, or submit multinode.sh"
}
