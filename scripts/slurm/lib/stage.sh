# shellcheck shell=bash
# KEMPNER_STAGE=DIR: copies the run's data and environment to each node's own disk for the
# duration of the job.

kp_on_each_node() { # <name> <command>...: runs it in a step with one task per node; fails
    # if a task fails
    local KP_TASKS=1 KP_GPUS=0 KP_SRUN_NAME=$1-$KEMPNER_ATTEMPT_ID
    # including spares
    local KP_NODES=$((KP_NODES + ${#KP_SPARES[@]})) KP_PLACES=("${KP_PLACES[@]}" "${KP_SPARES[@]}")
    # A full disk affects only its own node.
    kp_srun_command --kill-on-bad-exit=0 --wait=0 -- "${@:2}"
    "${KP_SRUN[@]}" </dev/null
}

kp_stage() { # copies the data sets (KP_DATA) and environment to DIR/kempner-JOB on each
    # node; exports KEMPNER_STAGED
    local jobs=''
    [[ -n ${KEMPNER_STAGE:-} ]] && kp_in_job || return 0
    ((${#KP_DATA[@]} > 0 || ${KEMPNER_STAGE_ENVIRONMENT:=0})) || return 0
    export KEMPNER_STAGED=$KEMPNER_STAGE/kempner-$SLURM_JOB_ID
    kp_stage_mount || {
        unset KEMPNER_STAGED
        kp_log "KEMPNER_STAGE=$KEMPNER_STAGE cannot be created on every node: nothing is staged"
        return 0
    }
    ! kp_ask squeue --me -h -o %A || jobs=$(paste -sd, <<<"$KP_ANSWER")
    # Run it even without data: it removes what killed jobs have left.
    kp_on_each_node stage "$KP_MODULE" kempner.data.prepare.stage --jobs "$jobs" "$KEMPNER_STAGED" \
        "${KP_DATA[@]}" ||
        kp_log "staging has failed (exit code $?): what was not copied is read from where it is"
    ((KEMPNER_STAGE_ENVIRONMENT == 0)) || kp_stage_environment
    kp_mark stage
}

kp_stage_mount() { # with a container: creates the directory on each node, and mounts it
    [[ ${KEMPNER_CONTAINER:-none} != none ]] || return 0
    kp_on_each_host bash "$KP_LIB/stage_node.sh" "$KEMPNER_STAGED" || return 1
    kp_mount "$KEMPNER_STAGE"
}

kp_stage_environment() { # copies the container's image, or the virtual environment as one file, to
    # each node: see task.sh
    local file sum='' packed=''
    if [[ ${KEMPNER_CONTAINER:-none} != none ]]; then
        file=$KEMPNER_CONTAINER
        if [[ ! -f $file ]]; then
            kp_log "KEMPNER_CONTAINER=$file is not a file: it is not copied to the nodes"
            return
        fi
        ((${#KP_CONTAINER_FLAGS[@]} > 0)) || export KEMPNER_STAGED_IMAGE=$file
    else
        kp_pack_environment || {
            kp_log "the environment of $KP_PYTHON is not copied to the nodes: it is not a virtual" \
                "environment, or there is no room for its archive in $KP_RUN_DIR"
            return
        }
        file=$packed sum=$(<"$packed.sum")
        export KEMPNER_STAGED_PYTHON=$KP_PYTHON KEMPNER_STAGED_SUM=$sum
    fi
    kp_on_each_host bash "$KP_LIB/stage_node.sh" "$KEMPNER_STAGED" || true
    # The nodes broadcast the file in a tree. If one disk is full, this fails for all; then each
    # reads the file itself.
    ((KP_NODES == 1)) ||
        sbcast --jobid="$SLURM_JOB_ID" --force --preserve "$file" \
            "$KEMPNER_STAGED/sent" 2>/dev/null ||
        kp_log "sbcast of $file has failed: the nodes read it from where it is"
    kp_on_each_host bash "$KP_LIB/stage_node.sh" "$KEMPNER_STAGED" "$file" ${sum:+"$sum"} ||
        kp_log "staging has failed (exit code $?): what was not copied is used where it is"
    ((${#KP_CONTAINER_FLAGS[@]} > 0)) || return 0
    # With pyxis, srun takes one image for all nodes.
    if kp_on_each_host bash "$KP_LIB/stage_node.sh" --has "$KEMPNER_STAGED" image.sif; then
        kp_use_image "$KEMPNER_STAGED/image.sif"
    else
        kp_log "not every node has a copy of $file: all use it where it is"
    fi
}

kp_on_each_host() { # <command>...: runs it on each node, outside the container
    local KP_INSIDE=() KP_CONTAINER_FLAGS=() KP_PYTHON=$1
    kp_on_each_node stage "${@:2}"
}

kp_pack_environment() { # sets the caller's packed: the virtual environment as a file, made once per
    # state of its packages
    local prefix state fresh KP_VALUES=()
    kp_values "$KP_PYTHON" -c '
import sys
print("kempner-answer", sys.prefix * (sys.prefix != sys.base_prefix), sep="\0", end="\0")' ||
        return 1
    prefix=${KP_VALUES[0]:-}
    [[ -n $prefix ]] || return 1
    state=$(stat -c '%n %Y' -- "$prefix"/lib/python*/site-packages/* | sha256sum)
    packed=$KP_RUN_DIR/.environment-${state:0:12}.tar fresh=$KP_RUN_DIR/.environment-new.$$
    # It gets its name last: if it exists, so does its checksum.
    [[ ! -e $packed ]] || return 0
    rm -f -- "$KP_RUN_DIR"/.environment-*
    if ! { tar -C "$prefix" -cf - . | tee -- "$fresh" | sha256sum |
        cut -d' ' -f1 >"$packed.sum"; }; then
        rm -f -- "$KP_RUN_DIR"/.environment-*
        return 1
    fi
    mv -- "$fresh" "$packed"
}

kp_unstage() { # removes the copies after the job has ended for good
    [[ -n ${KEMPNER_STAGED:-} ]] || return 0
    unset KEMPNER_STAGED_PYTHON KEMPNER_STAGED_SUM KEMPNER_STAGED_IMAGE
    [[ -z ${KP_RUN_DIR:-} || $KP_DECIDED == chain ]] || rm -f -- "$KP_RUN_DIR"/.environment-*
    kp_on_each_host bash "$KP_LIB/stage_node.sh" --remove "$KEMPNER_STAGED" ||
        kp_log "the copies in $KEMPNER_STAGED could not be removed (exit code $?):" \
            "your next job there removes them"
}
