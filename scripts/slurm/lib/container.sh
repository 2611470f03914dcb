# shellcheck shell=bash
# The Python that trains, in a container if the site names one.

kp_choose_python() { # sets KP_PYTHON, and KP_INSIDE, the words before it where it is in a container
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

kp_unwrap_python() { # KEMPNER_PYTHON="uv run python": sets KP_PYTHON to the interpreter that these words start
    # A wrapper in each task would stand between Slurm's signals and the trainer, and thousands would lock one cache.
    local words python
    read -ra words <<<"$KP_PYTHON"
    ((${#words[@]} > 1)) && ! command -v "$KP_PYTHON" >/dev/null || return 0
    command -v "${words[0]}" >/dev/null || [[ ${KEMPNER_CONTAINER:-none} != none ]] ||
        kp_die "KEMPNER_PYTHON=$KP_PYTHON: there is no '${words[0]}' on $(uname -n): load its module in site.env"
    python=$("${KP_INSIDE[@]}" "${words[@]}" -c 'import sys; print(sys.executable)') ||
        kp_die "KEMPNER_PYTHON=$KP_PYTHON does not start Python: try it in a shell, or give the path of a Python"
    KP_PYTHON=$python
}

kp_need_packages() { # stops when KP_PYTHON lacks what the kit imports; a container is not started only for that
    local missing
    [[ ${KEMPNER_CONTAINER:-none} == none ]] || return 0
    missing=$("$KP_PYTHON" -c '
from importlib.util import find_spec
needed = [("torch",), ("numpy",), ("tomllib", "tomli")]
print(*(names[-1] for names in needed if not any(map(find_spec, names))))') ||
        kp_die "'$KP_PYTHON' does not work: run make .venv/train, or set KEMPNER_PYTHON"
    [[ -z $missing ]] ||
        kp_die "'$KP_PYTHON' lacks ${missing// /, }: run make .venv/train in ${KP_ORIGIN:-$KP_ROOT}, or set" \
            KEMPNER_PYTHON
}

kp_choose_container() { # sets KP_INSIDE and, for pyxis, KP_CONTAINER_FLAGS, srun's options
    local mounts=$KP_ROOT:$KP_ROOT,$PWD:$PWD${KEMPNER_MOUNTS:+,$KEMPNER_MOUNTS} runtime
    [[ ${KP_ORIGIN:-$KP_ROOT} == "$KP_ROOT" ]] || mounts=$KP_ORIGIN:$KP_ORIGIN,$mounts
    runtime=$(kp_container_runtime)
    case $runtime in
        apptainer | singularity)
            command -v "$runtime" >/dev/null ||
                kp_die "KEMPNER_CONTAINER=$KEMPNER_CONTAINER: no $runtime here; load its module in site.env"
            KP_INSIDE=("$runtime" exec --bind "$mounts" --pwd "$PWD")
            [[ ! -e /dev/nvidiactl ]] || KP_INSIDE+=(--nv)
            KP_INSIDE+=("$KEMPNER_CONTAINER")
            ;;
        pyxis)
            KP_CONTAINER_FLAGS=(--container-image="$KEMPNER_CONTAINER" --container-mounts="$mounts"
                --container-workdir="$PWD" --no-container-mount-home)
            KP_INSIDE=(srun --nodes=1 --ntasks=1 --overlap "${KP_CONTAINER_FLAGS[@]}")
            ;;
        *) kp_die "KEMPNER_CONTAINER_RUNTIME=$runtime: must be apptainer, singularity or pyxis" ;;
    esac
}

kp_container_runtime() { # KEMPNER_CONTAINER_RUNTIME, else pyxis where srun has it, else apptainer or singularity
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
