# shellcheck shell=bash
# The Python that trains, in a container if the site names one.

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
