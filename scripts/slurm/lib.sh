# shellcheck shell=bash
# What the launch scripts share: the job as Slurm sees it, srun, signals; requeue.sh is the end of it. To be sourced.
# The facts about Slurm behind it are in docs/slurm.md; the network of a node is task.sh's.

KP_BESIDE=${KP_BESIDE:-}                # not empty: the job is another one's, interactive.sh runs beside it
KP_DRY=''                               # not empty: --dry-run
KP_INSIDE=() KP_CONTAINER_FLAGS=()      # what puts Python into a container
KP_CHILD='' KP_PENDING='' KP_SIGNAL=''  # the running srun; a signal that came before it; the last signal
KP_DECIDED='' KP_PREFLIGHT='' KP_BAD='' # the decision; "failed", and the nodes that it has found faulty
KP_SRUN_LOG='' KP_SECRET_NAMES=''

# shellcheck source-path=SCRIPTDIR source=requeue.sh
source "$(dirname "${BASH_SOURCE[0]}")/requeue.sh"

kp_log() { # <message>
    printf '[%(%T)T] kempner: %s\n' -1 "$*"
}

kp_die() { # <what is wrong; what to do>: ends with 2, the exit code of bad input
    printf 'kempner: error: %s\n' "$*" >&2
    exit 2
}

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || kp_die "bash $BASH_VERSION is too old: 4.4 is needed"

# --- the place ---------------------------------------------------------------------------------------------

kp_take() { # <arguments of the script>...: sets KP_ARGUMENTS, those for train.py; --dry-run: see dry_run.sh
    local word
    KP_ARGUMENTS=("$@")
    for word; do
        [[ $word != --dry-run ]] || KP_DRY=1
    done
    [[ -n $KP_DRY ]] || return 0
    # shellcheck source-path=SCRIPTDIR source=dry_run.sh
    source "$(dirname "${BASH_SOURCE[0]}")/dry_run.sh"
    kp_dry_take "$@"
}

kp_setup() { # sets KP_ROOT, KP_PYTHON, KP_TRAIN and, in a job, KP_JOB; reads site.env; traps the signals
    # "|| true": a command that fails in there must not end this shell, as errexit would have it
    trap 'kp_on_signal TERM || true' TERM USR1 HUP
    trap 'kp_on_signal INT || true' INT
    trap 'kp_on_signal USR2 || true' USR2
    kp_begin
    kp_enter
}

kp_begin() { # sets KP_ROOT and the names of this start; reads site.env
    KP_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    printf -v KEMPNER_BATCH_BEGAN '%(%s)T' -1
    KEMPNER_ATTEMPT_ID=${SLURM_JOB_ID:-$(uname -n)}.${SLURM_RESTART_COUNT:-0}.$$
    export KEMPNER_BATCH_BEGAN KEMPNER_ATTEMPT_ID
    KP_STEP_NAME=kempner-$KEMPNER_ATTEMPT_ID
    kp_read_site
}

kp_enter() { # sets KP_PYTHON, KP_TRAIN and, in a job, KP_JOB; reads the secrets
    kp_read_secrets
    KP_TRAIN=${KEMPNER_TRAIN:-$KP_ROOT/scripts/train.py}
    kp_choose_python
    export PYTHONUNBUFFERED=1 PYTHONPATH=$KP_ROOT/src${PYTHONPATH:+:$PYTHONPATH}
    if kp_in_job; then
        kp_show_job || kp_die "scontrol knows no job $(kp_job_id)"
    elif [[ -n $KP_DRY ]]; then
        kp_dry_job
    fi
}

kp_read_site() { # reads the site file, KEMPNER_SITE or the repository's site.env; what it sets is exported
    local file=${KEMPNER_SITE:-$KP_ROOT/site.env}
    if [[ ! -r $file ]]; then
        [[ -z ${KEMPNER_SITE:-} ]] || kp_die "KEMPNER_SITE=$file cannot be read: correct or unset it"
        return 0
    fi
    kp_source "$file"
}

kp_source() {  # <file>: sources it; what it sets is exported
    set +eu -a # modules and the like are not written for errexit and nounset
    # shellcheck source=/dev/null
    source "$1"
    set -eu +a
}

kp_read_secrets() { # reads KEMPNER_SECRETS, a file of NAME=value lines that nobody else may read
    local file=${KEMPNER_SECRETS:-} mode
    [[ -n $file ]] || return 0
    mode=$(stat -L -c %a -- "$file" 2>/dev/null) || kp_die "KEMPNER_SECRETS=$file cannot be read: correct or unset it"
    [[ $mode =~ ^[0-7]00$ ]] || kp_die "KEMPNER_SECRETS=$file may be read by others (mode $mode): chmod 600 '$file'"
    kp_source "$file"
    KP_SECRET_NAMES=$(sed -nE 's/^[[:space:]]*(export[[:space:]]+)?([A-Za-z_][A-Za-z0-9_]*)=.*/\2/p' "$file" | paste -sd' ')
}

# --- Python, perhaps in a container -----------------------------------------------------------------------------

kp_choose_python() { # sets KP_PYTHON, and KP_INSIDE, the words before it where it is in a container
    if [[ ${KEMPNER_CONTAINER:-none} == none ]]; then
        KP_PYTHON=${KEMPNER_PYTHON:-$KP_ROOT/.venv/bin/python}
        [[ -n ${KEMPNER_PYTHON:-} || -x $KP_PYTHON ]] || KP_PYTHON=python3
        command -v "$KP_PYTHON" >/dev/null || kp_die "no Python at '$KP_PYTHON': run make .venv/train, or set KEMPNER_PYTHON"
        return
    fi
    KP_PYTHON=${KEMPNER_PYTHON:-python3} # the image's own
    local mounts=$KP_ROOT:$KP_ROOT,$PWD:$PWD${KEMPNER_MOUNTS:+,$KEMPNER_MOUNTS} runtime
    runtime=$(kp_container_runtime)
    case $runtime in
        apptainer | singularity)
            command -v "$runtime" >/dev/null || kp_die "KEMPNER_CONTAINER=$KEMPNER_CONTAINER: no $runtime here; load its module in site.env"
            KP_INSIDE=("$runtime" exec --bind "$mounts" --pwd "$PWD")
            [[ ! -e /dev/nvidiactl ]] || KP_INSIDE+=(--nv)
            KP_INSIDE+=("$KEMPNER_CONTAINER")
            ;;
        pyxis)
            KP_CONTAINER_FLAGS=(--container-image="$KEMPNER_CONTAINER" --container-mounts="$mounts" --container-workdir="$PWD" --no-container-mount-home)
            KP_INSIDE=(srun --nodes=1 --ntasks=1 --overlap "${KP_CONTAINER_FLAGS[@]}")
            ;;
        *) kp_die "KEMPNER_CONTAINER_RUNTIME=$runtime: apptainer, singularity or pyxis" ;;
    esac
}

kp_container_runtime() { # what runs KEMPNER_CONTAINER: KEMPNER_CONTAINER_RUNTIME, else pyxis where srun has it, else apptainer
    if [[ -n ${KEMPNER_CONTAINER_RUNTIME:-} ]]; then
        echo "$KEMPNER_CONTAINER_RUNTIME"
    elif [[ $KEMPNER_CONTAINER != *.sif && $(srun --help 2>/dev/null) == *--container-image* ]]; then
        echo pyxis
    elif command -v apptainer >/dev/null || ! command -v singularity >/dev/null; then
        echo apptainer
    else
        echo singularity
    fi
}

kp_python() { # <arguments>...: one Python process on this host, in the container if there is one
    "${KP_INSIDE[@]}" "$KP_PYTHON" "$@"
}

# --- the job as Slurm sees it ------------------------------------------------------------------------------

kp_use_job() { # <job>: makes this shell speak for a running job, whatever job it is in itself
    local name
    for name in "${!SLURM_@}"; do [[ $name == SLURM_CONF ]] || unset "$name"; done
    SLURM_JOB_ID=$1 KP_BESIDE=1
    kp_show_job || kp_die "no job '$1': squeue --me lists yours"
    [[ $(kp_field JobState) == RUNNING ]] || kp_die "job $1 is $(kp_field JobState), not RUNNING: wait until it runs"
    SLURM_JOB_ID=$(kp_field JobId) # srun wants the number, also for a task of an array
}

kp_in_job() { # true inside an allocation: a batch script, salloc's shell, or KP_BESIDE a running job
    [[ -n ${SLURM_JOB_ID:-} ]]
}

kp_is_batch() { # true in the batch script, the one place that may requeue
    kp_in_job && [[ -z $KP_BESIDE && -z ${SLURM_STEP_NUM_TASKS:-} && $(kp_field BatchFlag) == 1 ]]
}

kp_job_id() { # the job; of an array the one task, because the number alone may mean the whole array
    if [[ -n ${SLURM_ARRAY_JOB_ID:-} && -z $KP_BESIDE ]]; then
        echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    else
        echo "$SLURM_JOB_ID"
    fi
}

kp_shielded() { # <command>...: runs it so that the signals that end a job do not end it first
    (trap '' TERM INT HUP USR1 USR2 && exec "$@")
}

kp_show_job() { # sets KP_JOB to what scontrol says about the job now; fails when it says nothing
    local tries
    for ((tries = 0; tries < 5; tries++)); do
        KP_JOB=$(kp_shielded scontrol show job -d "$(kp_job_id)" 2>/dev/null) || KP_JOB=''
        [[ -z $KP_JOB ]] || return 0
        kp_shielded sleep 0.2
    done
    return 1
}

kp_field() { # <name>: that field of KP_JOB, or nothing
    [[ ! $KP_JOB =~ (^|[[:space:]])"$1"=([^[:space:]]*) ]] || echo "${BASH_REMATCH[2]}"
}

kp_count_gpus() { # <GRES or TRES>: the GPUs in it: gpu, gpu:4, gpu:h100:4(IDX:0-3), gres/gpu=4, several types
    local text=$1 count=0 pattern='gpu([:=/][A-Za-z][^:=,(]*)?([:=]([0-9]+))?(.*)'
    while [[ $text =~ $pattern ]]; do
        count=$((count + ${BASH_REMATCH[3]:-1}))
        text=${BASH_REMATCH[4]}
    done
    echo "$count"
}

kp_gpus() { # sets KP_GPUS, those of each node, and KP_GPUS_ASKED, the request (empty: they came with a whole node)
    local line counts=() asked
    while read -r line; do
        [[ $line != Nodes=*GRES=* ]] || counts+=("$(kp_count_gpus "${line##*GRES=}")")
    done <<<"$KP_JOB"
    KP_GPUS=${counts[0]:-0} KP_GPUS_ASKED=''
    asked=$(kp_field TresPerNode)
    if [[ $asked == *gpu* ]]; then
        KP_GPUS=$(kp_count_gpus "$asked")
        KP_GPUS_ASKED=--gpus-per-node=$KP_GPUS
        return
    fi
    asked=$(kp_field TresPerJob)
    if [[ $asked == *gpu* ]]; then
        asked=$(kp_count_gpus "$asked")
        ((asked % KP_NODES == 0)) || kp_die "--gpus=$asked on $KP_NODES nodes: give --gpus-per-node=N instead"
        KP_GPUS_ASKED=--gpus=$asked
    fi
    for line in "${counts[@]}"; do
        [[ $line == "$KP_GPUS" ]] ||
            kp_die "the nodes have different numbers of GPUs (${counts[*]}): give --gpus-per-node=N${KP_GPUS_ASKED:+ instead of $KP_GPUS_ASKED}"
    done
    [[ -z $KP_GPUS_ASKED ]] || KP_GPUS=$((asked / KP_NODES))
    asked=$(kp_field TresPerTask)
    [[ $asked != *gpu* ]] || KP_GPUS_ASKED=--gpus-per-task=$(kp_count_gpus "$asked")
}

kp_tasks_asked() { # the tasks per node that the user asked for, or nothing
    local pattern='NtasksPerN:B:S:C=([1-9][0-9]*)' tasks=${SLURM_NTASKS:-0}
    if [[ $KP_JOB =~ $pattern ]]; then
        echo "${BASH_REMATCH[1]}"
    elif ((tasks > KP_NODES)) || { ((tasks > 0)) && kp_is_batch; }; then # salloc sets it unasked
        ((tasks % KP_NODES == 0)) || kp_die "--ntasks=$tasks on $KP_NODES nodes: give --ntasks-per-node=N instead"
        echo $((tasks / KP_NODES))
    fi
}

kp_tasks() { # sets KP_NODES, KP_TASKS and KP_GPUS (of a node), KP_CPUS (of a task); one task drives one GPU
    local asked cpus
    if ! kp_in_job; then
        KP_NODES=1 KP_GPUS=$(kp_gpus_here)
        KP_TASKS=${KEMPNER_NPROC:-$((KP_GPUS > 0 ? KP_GPUS : 1))}
        return
    fi
    KP_NODES=$(kp_field NumNodes)
    kp_gpus
    asked=$(kp_tasks_asked)
    KP_TASKS=${asked:-$((KP_GPUS > 0 ? KP_GPUS : 1))}
    if ((KP_GPUS > 0 && KP_TASKS != KP_GPUS)); then
        [[ -z $KP_GPUS_ASKED && $KP_TASKS -lt $KP_GPUS ]] ||
            kp_die "$KP_TASKS task(s) per node, but $KP_GPUS GPU(s)${KP_GPUS_ASKED:+ ($KP_GPUS_ASKED)}: one task drives" \
                "one GPU; give --ntasks-per-node=$KP_GPUS, or --gpus-per-node=$KP_TASKS"
        kp_log "note: $KP_TASKS of the $KP_GPUS GPUs of a node are used; without --ntasks-per-node all are"
        KP_GPUS=$KP_TASKS
    fi
    cpus=$(($(kp_field NumCPUs) / KP_NODES))
    ((cpus >= KP_TASKS)) ||
        kp_die "$KP_TASKS task(s) per node, but $cpus CPU(s): give --ntasks-per-node=$KP_TASKS --cpus-per-task=N"
    KP_CPUS=${SLURM_CPUS_PER_TASK:-$((cpus / KP_TASKS))}
}

kp_gpus_here() { # the GPUs of this machine that a process may see
    local list
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        IFS=, read -ra list <<<"${CUDA_VISIBLE_DEVICES/#-1*/}"
        echo "${#list[@]}"
    else
        nvidia-smi -L 2>/dev/null | grep -c ^GPU || true
    fi
}

kp_need_one_node() { # stops when the job has several
    ((KP_NODES == 1)) || kp_die "singlenode.sh on $KP_NODES nodes: give --nodes=1, or submit multinode.sh"
}

# --- before the start --------------------------------------------------------------------------------------

kp_check() { # <train.py arguments>...: checks them in one process before any GPU works; sets KP_RUN_DIR, KP_CHECKPOINTS, KP_DEVICE
    local toml code=0 values
    toml=$(kp_python "$KP_TRAIN" "$@" --check --nodes "$KP_NODES" --gpus-per-node "$KP_TASKS") || code=$?
    if ((code != 0)); then
        kp_log "not started: the check of the configuration ended with exit code $code"
        exit "$code"
    fi
    mapfile -d '' -t values < <(
        kp_python -c 'import sys, tomli
cfg = tomli.load(sys.stdin.buffer)
found = (cfg["run"]["dir"], cfg.get("checkpoint", {}).get("dir", ""), cfg.get("distributed", {}).get("device", "auto"), "")
sys.stdout.write("\0".join(found))' <<<"$toml"
    )
    [[ -n ${values[0]:-} ]] || kp_die "the checked configuration has no run.dir: leave --help and --check out"
    KP_RUN_DIR=$(realpath -m -- "${values[0]}")
    KP_CHECKPOINTS=$(realpath -m -- "${values[1]:-$KP_RUN_DIR/checkpoints}")
    KP_DEVICE=${values[2]:-auto}
    [[ -z $KP_DRY ]] || kp_dry_tell # ends here
    mkdir -p -- "$KP_RUN_DIR/logs" || kp_die "run.dir $KP_RUN_DIR cannot be written: give another --run.dir"
    KP_STEP_BEFORE=$(kp_committed_step)
}

kp_peers() { # the addresses of the first two nodes of the job: from any node, one of them is another host
    local node pattern='NodeAddr=([^[:space:]]+)'
    while read -r node; do
        [[ ! $(scontrol show node "$node") =~ $pattern ]] || node=${BASH_REMATCH[1]}
        getent ahosts "$node" | awk 'NR == 1 { print $1 }' || true
    done < <(scontrol show hostnames "$(kp_field NodeList)" | head -n 2)
}

kp_banner() { # says what is about to run, and where; stops when the network that the user named is not there
    local nodes what='no GPU'
    ((KP_GPUS == 0)) || what='one GPU each'
    if ! kp_in_job; then
        kp_log "$(uname -n), outside Slurm: world size $KP_TASKS, $what"
        kp_log "run directory $KP_RUN_DIR"
        return
    fi
    mapfile -t nodes < <(scontrol show hostnames "$(kp_field NodeList)")
    KEMPNER_PEERS=$(kp_peers | paste -sd' ')
    export KEMPNER_PEERS
    kp_log "job $(kp_job_id) ($(kp_field JobName)), restart count ${SLURM_RESTART_COUNT:-0}, time limit $(kp_field TimeLimit)"
    kp_log "nodes ${nodes[*]}: $KP_NODES x $KP_TASKS = world size $((KP_NODES * KP_TASKS)), $what, $KP_CPUS CPU(s) each"
    kp_log "master ${nodes[0]} (${KEMPNER_PEERS%% *})"
    if kp_is_batch; then # this is the first node
        bash "$KP_ROOT/scripts/slurm/task.sh"
        KEMPNER_SAID=$(uname -n)
        KEMPNER_SIGNAL_LEAD=${KEMPNER_SIGNAL_LEAD:-$(kp_signal_lead "$0")}
        export KEMPNER_SAID KEMPNER_SIGNAL_LEAD
        kp_keep_log
    fi
    kp_log "run directory $KP_RUN_DIR"
}

kp_signal_lead() { # <script>: seconds from the warning to the end, by SBATCH_SIGNAL or the header: Slurm does not say
    local line given='' pattern='@([0-9]+)'
    while read -r line; do
        [[ $line != '#SBATCH --signal='* ]] || given=$line
    done <"$1"
    given=${SBATCH_SIGNAL:-$given}
    [[ ! $given =~ $pattern ]] || echo "${BASH_REMATCH[1]}"
}

kp_keep_log() { # makes the batch log appear in the run directory too, as logs/batch-JOB.log
    local file target
    file=$(readlink "/proc/$$/fd/1") && [[ -f $file ]] || return 0
    target=$KP_RUN_DIR/logs/batch-$(kp_job_id).log
    [[ $file -ef $target ]] || ln -f -- "$file" "$target" 2>/dev/null || ln -sf -- "$file" "$target"
}

kp_preflight() { # with KEMPNER_PREFLIGHT=1: proves the nodes; when some are faulty, requeues without them, or ends
    [[ ${KEMPNER_PREFLIGHT:-0} != 0 ]] && kp_in_job || return 0
    kp_prove_nodes "$KP_RUN_DIR/logs/preflight-$KEMPNER_ATTEMPT_ID.json" --dir "$KP_RUN_DIR" --device "$KP_DEVICE"
    ((KP_CODE != 0)) || return 0
    if ((KP_CODE != 1)); then
        kp_log "preflight itself has failed (exit code $KP_CODE): the run starts all the same"
        return 0
    fi
    KP_PREFLIGHT=failed
    kp_decide "preflight: ${KP_BAD:-the network} is not well"
    kp_finish
}

kp_prove_nodes() { # <JSON file> <options of kempner.preflight>...: sets KP_CODE, 0 when all are well, and KP_BAD, the faulty ones
    local json=$1 meet=${1%.json}.meet name=$KP_STEP_NAME driver step='' tries text='' pattern='"bad": "([^"]*)"'
    KP_STEP_NAME=preflight-$KEMPNER_ATTEMPT_ID
    kp_srun_command -m kempner.preflight.task
    KP_SRUN=("${KP_SRUN[@]/#--kill-on-bad-exit=1/--kill-on-bad-exit=0}") # the others have to say what they see
    KP_STEP_NAME=$name KP_CODE=0
    mkdir -p -- "$meet" || kp_die "$meet cannot be made: submit from a directory that can be written"
    kp_python -m kempner.preflight --meet "$meet" --json "$json" \
        --nodes "$(scontrol show hostnames "$(kp_field NodeList)" | paste -sd,)" --tasks "$KP_TASKS" --gpus "$KP_GPUS" \
        ${KEMPNER_PREFLIGHT_LEAST:+--least "$KEMPNER_PREFLIGHT_LEAST"} "${@:2}" &
    driver=$!
    # The driver may be in a container, where there is no srun: it says its port, and is told when srun has ended.
    while kill -0 "$driver" 2>/dev/null; do
        if [[ -z $step && -s $meet/port ]]; then
            KEMPNER_PREFLIGHT_PORT=$(<"$meet/port") "${KP_SRUN[@]}" </dev/null &
            step=$!
        elif [[ -n $step ]] && ! kill -0 "$step" 2>/dev/null; then
            : >"$meet/ended"
        fi
        kp_shielded sleep 0.1
    done
    wait "$driver" || KP_CODE=$?
    if [[ -n $step ]]; then # a task that does not come back must not keep the job
        for ((tries = 0; tries < 100; tries++)); do
            kill -0 "$step" 2>/dev/null || break
            ((tries != 50)) || kill -TERM "$step" || true # srun then kills its tasks
            kp_shielded sleep 0.1
        done
        kill -KILL "$step" 2>/dev/null || true
        wait "$step" || true
    fi
    rm -rf -- "$meet"
    ((KP_CODE != 2)) || exit 2
    { read -r -d '' text <"$json"; } 2>/dev/null || true
    [[ ! $text =~ $pattern ]] || KP_BAD=${BASH_REMATCH[1]}
}

# --- the run -----------------------------------------------------------------------------------------------

kp_run() { # <train.py arguments>...: trains until every rank has left; sets KP_CODE, the exit code of srun or torchrun
    if kp_in_job; then
        kp_srun "$KP_TRAIN" "$@"
    elif ((KP_TASKS == 1)); then
        kp_start "${KP_INSIDE[@]}" "$KP_PYTHON" "$KP_TRAIN" "$@"
    else
        kp_start "${KP_INSIDE[@]}" "$KP_PYTHON" -m torch.distributed.run --standalone --nproc-per-node="$KP_TASKS" "$KP_TRAIN" "$@"
    fi
    [[ -z $KP_PENDING ]] || kp_on_signal "$KP_PENDING"
    kp_wait
}

kp_srun_command() { # <Python arguments>...: sets KP_SRUN, the step: one task per GPU on all nodes of the job; exports its variables
    KP_SRUN=(
        srun --job-name="$KP_STEP_NAME" --nodes="$KP_NODES" --ntasks=$((KP_NODES * KP_TASKS)) --ntasks-per-node="$KP_TASKS"
        --cpus-per-task="$KP_CPUS" --kill-on-bad-exit=1 --wait=300 --mpi=none
        --immediate=300 # seconds: a host that dies and comes back at once can leave a step waiting until the time limit
        --export=ALL    # sbatch --export=NONE would reach the tasks too
    )
    # No --gpu-bind=none: CUDA_VISIBLE_DEVICES would stay unset, and another job's GPUs on a shared node be taken.
    ((KP_GPUS == 0)) || KP_SRUN+=(--gpus-per-node="$KP_GPUS")
    [[ -z $KP_BESIDE ]] || KP_SRUN+=(--jobid="$SLURM_JOB_ID" --overlap)
    local more
    read -ra more <<<"${KEMPNER_SRUN:-}"
    KP_SRUN+=("${more[@]}" "${KP_CONTAINER_FLAGS[@]}")
    export SRUN_CPUS_PER_TASK=$KP_CPUS OMP_NUM_THREADS=${OMP_NUM_THREADS:-$KP_CPUS}
    unset "${!SLURM_GPUS@}" SLURM_GPU_BIND "${!SLURM_NTASKS@}" # the request in other words; the flags above say it all
    # See task.sh. A program in place of train.py unblocks them when it is ready.
    local blocked=(env "--block-signal=TERM,INT,USR1,USR2" KEMPNER_SIGNALS_WAIT=1)
    ! "${blocked[@]}" true 2>/dev/null || KP_SRUN+=("${blocked[@]}")
    KP_SRUN+=(bash "$KP_ROOT/scripts/slurm/task.sh")
    ((${#KP_CONTAINER_FLAGS[@]} > 0)) || KP_SRUN+=("${KP_INSIDE[@]}") # pyxis: the whole task is inside
    KP_SRUN+=("$KP_PYTHON" "$@")
}

kp_srun() { # <Python arguments>...: starts the step
    kp_srun_command "$@"
    KP_SRUN_LOG=$KP_RUN_DIR/logs/srun-$KEMPNER_ATTEMPT_ID.log
    # What srun says of a task that dies is looked at afterwards. The signals that end a job must not end tee: srun
    # would die of the broken pipe.
    kp_start "${KP_SRUN[@]}" 2> >(trap '' TERM INT HUP USR1 USR2 && exec tee -a -- "$KP_SRUN_LOG" >&2)
}

kp_start() { # <command>...: in the background, and in a session of its own: Ctrl-C reaches this shell alone
    setsid "$@" </dev/null &
    KP_CHILD=$!
}

kp_wait() { # waits for KP_CHILD, however many signals end a wait early; sets KP_CODE
    while kill -0 "$KP_CHILD" 2>/dev/null; do wait "$KP_CHILD" || true; done
    KP_CODE=0
    wait "$KP_CHILD" || KP_CODE=$?
    KP_CHILD=''
}

# --- signals -----------------------------------------------------------------------------------------------

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
        step=$(kp_shielded squeue -h -s -j "$(kp_job_id)" -o '%i %j' 2>/dev/null | sed -n "s/ $KP_STEP_NAME\$//p")
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
