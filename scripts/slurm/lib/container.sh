# shellcheck shell=bash
# The Python that trains, in a container if the site configures one: docs/guide/containers.md.

KP_INSIDE=() KP_CONTAINER_FLAGS=() # command prefixes that run Python in a container
KP_PYTHON=python3                  # the Python that trains
KP_MOUNTS=()                       # host directories mounted in the container, each FROM:TO
KP_STAGED_IMAGE=''                 # for pyxis: the image's copy on the nodes' own disks
# with a container: a Python 3.10 or later on this host, or "none"
KP_HOST_PYTHON=''

kp_choose_python() { # sets KP_PYTHON, and KP_INSIDE, its prefix if it runs in a container
    KP_PYTHON=${KEMPNER_PYTHON:-}
    if [[ ${KEMPNER_CONTAINER:-none} != none ]]; then
        KP_PYTHON=${KP_PYTHON:-python3} # the image's own
        kp_choose_container
    elif [[ -z $KP_PYTHON ]]; then
        KP_PYTHON=${KP_ORIGIN:-$KP_ROOT}/.venv/bin/python
        [[ -x $KP_PYTHON ]] || KP_PYTHON=python3
    fi
    kp_unwrap_python
    [[ ${KEMPNER_CONTAINER:-none} != none ]] || command -v "$KP_PYTHON" >/dev/null ||
        kp_die "no Python at '$KP_PYTHON': run make .venv/train, or set KEMPNER_PYTHON"
}

kp_unwrap_python() { # with KEMPNER_PYTHON="uv run python": sets KP_PYTHON to the
    # interpreter that this starts
    # A wrapper in each task would intercept Slurm's signals, and thousands of
    # them would lock one cache.
    local words KP_VALUES=()
    read -ra words <<<"$KP_PYTHON"
    ((${#words[@]} > 1)) && ! command -v "$KP_PYTHON" >/dev/null || return 0
    [[ ${KP_INSIDE[0]:-} != kp_outside ]] || return 0
    command -v "${words[0]}" >/dev/null || [[ ${KEMPNER_CONTAINER:-none} != none ]] ||
        kp_die "KEMPNER_PYTHON=$KP_PYTHON: there is no '${words[0]}' on $(uname -n):" \
            "load its module in site.env"
    KP_PYTHON=${words[0]} kp_values kp_python "${words[@]:1}" -c '
import sys
print("kempner-answer", sys.executable, sep="\0", end="\0")' || KP_VALUES=()
    [[ -n ${KP_VALUES[0]:-} ]] ||
        kp_die "KEMPNER_PYTHON=$KP_PYTHON does not start Python: try it in a shell," \
            "or give the path of a Python"
    KP_PYTHON=${KP_VALUES[0]}
}

kp_need_packages() { # exits if KP_PYTHON lacks a package that the kit imports; does not
    # start a container for this
    local missing KP_VALUES=()
    [[ ${KEMPNER_CONTAINER:-none} == none ]] || return 0
    kp_values kp_apart "$KP_PYTHON" -c "$KP_NOT_HERE"'
from importlib.util import find_spec
needed = [("torch",), ("numpy",), ("tomllib", "tomli")]
missing = (names[-1] for names in needed if not any(map(find_spec, names)))
print("kempner-answer", " ".join(missing), sep="\0", end="\0")' || KP_VALUES=()
    ((${#KP_VALUES[@]} == 1)) ||
        kp_die "'$KP_PYTHON' does not work: run make .venv/train, or set KEMPNER_PYTHON"
    missing=${KP_VALUES[0]}
    [[ -z $missing ]] ||
        kp_die "'$KP_PYTHON' lacks ${missing// /, }: run make .venv/train in" \
            "${KP_ORIGIN:-$KP_ROOT}, or set" \
            KEMPNER_PYTHON
}

# --- the container --------------------------------------------------------------------------------

kp_choose_container() { # sets KP_RUNTIME, KP_MOUNTS, KP_INSIDE and, for pyxis,
    # KP_CONTAINER_FLAGS (srun's options)
    local program root
    KP_RUNTIME=$(kp_container_runtime)
    case $KP_RUNTIME in
        apptainer | singularity | charliecloud)
            program=${KP_RUNTIME/charliecloud/ch-run}
            command -v "$program" >/dev/null ||
                kp_die "KEMPNER_CONTAINER=$KEMPNER_CONTAINER: no $program here;" \
                    "load its module in site.env"
            ;;
        pyxis) ;;
        *)
            kp_die "KEMPNER_CONTAINER_RUNTIME=$KP_RUNTIME: must be apptainer, singularity," \
                "charliecloud or pyxis"
            ;;
    esac
    # Variables that the image's own values must not override; see inside.sh.
    export KP_KEEP='^(PYTHONPATH|OMP_NUM_THREADS|(NCCL|GLOO|TP|FI|UCX|TORCH|PYTORCH)_[A-Z0-9_]*)='
    IFS=, read -ra KP_MOUNTS <<<"${KEMPNER_MOUNTS:-}"
    root=$KP_ROOT
    # the run, which holds the copy
    [[ ${KP_ORIGIN:=$KP_ROOT} == "$KP_ROOT" ]] || root=${KP_ROOT%/code/*}
    kp_mount "$KP_ORIGIN" "$root" "$PWD"
}

kp_container_runtime() { # prints KEMPNER_CONTAINER_RUNTIME, else pyxis if srun has it,
    # else the installed runtime
    if [[ -n ${KEMPNER_CONTAINER_RUNTIME:-} ]]; then
        echo "$KEMPNER_CONTAINER_RUNTIME"
    elif [[ $KEMPNER_CONTAINER != *.sif &&
        $(srun --help 2>/dev/null) == *--container-image* ]]; then
        echo pyxis
    elif command -v apptainer >/dev/null; then
        echo apptainer
    elif command -v singularity >/dev/null; then
        echo singularity
    elif [[ -d $KEMPNER_CONTAINER ]] && command -v ch-run >/dev/null; then
        echo charliecloud
    else
        echo apptainer
    fi
}

kp_mount() { # <directory>...: mounts each at its host path; files written elsewhere
    # are lost with the container
    local directory real name
    [[ ${KEMPNER_CONTAINER:-none} != none ]] || return 0
    for directory; do
        real=$(realpath -m -- "$directory")
        directory=$(realpath -ms -- "$directory")
        for name in "$real" "$directory"; do # also through a symbolic link
            kp_is_mounted "$name" || kp_mount_as "$real" "$name"
        done
    done
    kp_container_words
}

kp_is_mounted() { # <path>: succeeds if it, or a parent directory, is mounted at its host path
    local mount from
    for mount in "${KP_MOUNTS[@]}"; do
        from=${mount%%:*} mount=${mount#*:}
        [[ $mount != "$from" || $1/ != "${from%/}"/* ]] || return 0
    done
    return 1
}

kp_mount_as() { # <directory> <path in the container>: adds it to KP_MOUNTS; exits if
    # the runtime cannot mount it
    local wrong='[,:]' what="commas and colons"
    case $KP_RUNTIME in
        pyxis) wrong='[,:[:space:]]' what="blanks, commas and colons" ;;
        charliecloud) wrong=':' what="colons" ;;
    esac
    [[ ! $1$2 =~ $wrong ]] ||
        kp_die "$2 cannot be mounted into the container, and what is written there would be lost" \
            "with it: $KP_RUNTIME accepts no $what in a path; give a directory without them"
    if [[ $KP_RUNTIME == charliecloud &&
        -d $KEMPNER_CONTAINER && ! -d $KEMPNER_CONTAINER$2 && $2/ != /tmp/* ]] &&
        ! kp_in_a_mount "$2"; then
        kp_die "the image $KEMPNER_CONTAINER has no directory $2, and ch-run mounts only on" \
            "existing directories: mkdir -p $KEMPNER_CONTAINER$2, or mount a directory" \
            "above it (KEMPNER_MOUNTS)"
    fi
    KP_MOUNTS+=("$1:$2")
}

kp_in_a_mount() { # <path in the container>: succeeds if it lies in a mounted host directory
    local mount
    for mount in "${KP_MOUNTS[@]}"; do
        mount=${mount#*:}
        [[ $1/ != "${mount%/}"/* ]] || return 0
    done
    return 1
}

kp_mount_run() { # <directory>...: creates the run's directories on the host, and mounts them
    local path
    [[ ${KEMPNER_CONTAINER:-none} != none ]] || return 0
    for path; do
        kp_mount "$path"
        [[ -n $KP_DRY ]] || mkdir -p -- "$path" ||
            kp_die "$path cannot be written: give another directory"
    done
}

kp_container_words() { # sets KP_INSIDE and, for pyxis, KP_CONTAINER_FLAGS
    local mount name forget=(env)
    KP_CONTAINER_FLAGS=()
    # Unset what kp_forget_request removes, and memory requests that conflict with --mem=0.
    for name in "${!SLURM_GPUS@}" SLURM_GPU_BIND "${!SLURM_NTASKS@}" "${!SLURM_TRES_PER_TASK@}" \
        "${!SLURM_MEM_PER@}"; do
        forget+=(-u "$name")
    done
    case $KP_RUNTIME in
        pyxis)
            KP_CONTAINER_FLAGS=(--container-image="${KP_STAGED_IMAGE:-$KEMPNER_CONTAINER}"
                --container-mounts="$(kp_comma "${KP_MOUNTS[@]}")" --container-workdir="$PWD"
                --no-container-mount-home)
            # Outside a job, srun would allocate one. --jobid is for interactive.sh, which runs
            # outside the job; --export is the same as for the tasks.
            KP_INSIDE=(kp_outside)
            [[ ! ${SLURM_JOB_ID:-} =~ ^[0-9]+$ ]] ||
                KP_INSIDE=("${forget[@]}" srun --jobid="$SLURM_JOB_ID"
                    --job-name=kempner-ask --nodes=1 --ntasks=1 --overlap --mem=0 --export=ALL
                    "${KP_CONTAINER_FLAGS[@]}")
            ;;
        charliecloud)
            export USER=${USER:-$(id -un)} # ch-run requires it
            KP_INSIDE=(ch-run --cd="$PWD")
            for mount in "${KP_MOUNTS[@]}"; do KP_INSIDE+=(--bind="$mount"); done
            [[ ! -e $KEMPNER_CONTAINER/ch/environment ]] || KP_INSIDE+=(--set-env) # the image's own
            KP_INSIDE+=("$KEMPNER_CONTAINER" --)
            ;;
        *)
            KP_INSIDE=("$KP_RUNTIME" exec --bind "$(kp_comma "${KP_MOUNTS[@]}")" --pwd "$PWD")
            [[ ! -e /dev/nvidiactl ]] || KP_INSIDE+=(--nv)
            KP_INSIDE+=("$KEMPNER_CONTAINER")
            ;;
    esac
    KP_INSIDE+=(sh "$KP_LIB/inside.sh")
}

kp_keep() { # exports KP_KEPT, the job's values that an image must not override
    [[ -n ${KP_KEEP:-} ]] || return 0
    KP_KEPT=$(env | grep -E "$KP_KEEP") || true
    export KP_KEPT
}

kp_outside() { # <anything>: exits; stands in for the pyxis prefix outside a job
    kp_die "pyxis starts containers only in jobs: use sbatch, or salloc; or set" \
        "KEMPNER_CONTAINER=none"
}

# --- questions to Python --------------------------------------------------------------------------

kp_python() { # <arguments>...: runs one Python process on this host, in the container if any
    local KP_MARK=kempner-answer-$$
    [[ ${KP_INSIDE[0]:-} != kp_outside ]] || kp_outside
    if ((${#KP_INSIDE[@]} == 0)); then
        kp_apart "$KP_PYTHON" "$@"
    else
        kp_keep
        export KP_MARK
        # Output before the mark comes from the image or a TaskProlog; see inside.sh.
        kp_apart "${KP_INSIDE[@]}" "$KP_PYTHON" "$@" | sed -u "1,/^$KP_MARK\$/d"
    fi
}

kp_host_can() { # <module>: succeeds if a host Python, KP_HOST_PYTHON, imports it: a
    # container may take minutes
    local python
    ((${#KP_INSIDE[@]} > 0)) || ! type -P -- "$KP_PYTHON" >/dev/null || return 1
    for python in "${KP_ORIGIN:-$KP_ROOT}/.venv/bin/python" python3; do
        [[ -z $KP_HOST_PYTHON ]] || break
        ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
            KP_HOST_PYTHON=$python
    done
    KP_HOST_PYTHON=${KP_HOST_PYTHON:-none}
    "$KP_HOST_PYTHON" -c "$KP_NOT_HERE; import $1" 2>/dev/null
}

kp_python_of() { # <required module> <arguments>...: runs the host's Python if it has
    # the module, else kp_python
    if kp_host_can "$1"; then
        kp_apart "$KP_HOST_PYTHON" "${@:2}"
    else
        kp_python "${@:2}"
    fi
}

kp_checked() { # <required module> <arguments>...: sets KP_VALUES to a check's output, split at NULs
    # The host may lack what the image has: unless no container can run, only its success counts.
    # Its failure sets doubt, a variable of kp_check_run.
    if kp_host_can "$1"; then
        if [[ ${KP_INSIDE[0]} == kp_outside ]]; then
            kp_values kp_apart "$KP_HOST_PYTHON" "${@:2}"
            return
        fi
        ! kp_values kp_apart "$KP_HOST_PYTHON" "${@:2}" 2>/dev/null || return 0
        doubt=1
    fi
    if ((${#KP_INSIDE[@]} == 0)); then
        kp_values kp_python "${@:2}"
    else # kp_mount_run creates unmounted paths on the host
        KP_UNMOUNTED=1 kp_values kp_python "${@:2}"
    fi
}

kp_check_run() { # <arguments of kempner.jobs.check>...: runs kp_checked; if the host's Python
    # failed, again with the run mounted
    local doubt=''
    kp_checked numpy "$KP_MODULE" kempner.jobs.check "$@" || return
    [[ -n $doubt && -e ${KP_VALUES[2]:-${KP_VALUES[1]:-}/checkpoints}/latest ]] || return 0
    kp_mount "${KP_VALUES[1]}" ${KP_VALUES[2]:+"${KP_VALUES[2]}"}
    kp_values kp_python "$KP_MODULE" kempner.jobs.check "$@"
}

kp_values() { # <command>...: sets KP_VALUES to its answer, split at NULs; returns its exit code
    # The answer begins after this word and ends with the last NUL: other output (of a wrapper, a
    # TaskProlog, an image) is ignored.
    local i code=0 answers
    mapfile -d '' -t answers < <(
        code=0
        "$@" || code=$?
        printf 'end\0'
        exit "$code"
    )
    # From bash 4.4 on, $! is also set by a process substitution.
    wait "$!" || code=$?
    KP_VALUES=()
    for i in "${!answers[@]}"; do
        [[ ${answers[i]} != *kempner-answer ]] || KP_VALUES=("${answers[@]:i+1:${#answers[@]}-i-2}")
    done
    return "$code"
}

kp_set_values() { # <value>...: sets KP_VALUES to an answer that an earlier process got
    KP_VALUES=("$@")
}

kp_use_image() { # <file>: makes the following tasks run in this copy of the image
    KP_STAGED_IMAGE=$1
    kp_container_words
}
