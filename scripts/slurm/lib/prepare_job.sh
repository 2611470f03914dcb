# shellcheck shell=bash
# The parts of prepare.sh. The job is requeued like a run; its run directory is OUT/units, which is
# removed at the end.

kp_prepare_in() { # <arguments of prepare_data.py>...: sets KP_OUT and what other parts of
    # the library need
    local word before='' there nodes cpus
    kp_in_job ||
        kp_die "prepare.sh runs in a job: sbatch --nodes=N scripts/slurm/prepare.sh;" \
            "here it is scripts/prepare_data.py"
    KP_OUT=''
    for word; do
        [[ $word != --out=* ]] || KP_OUT=${word#*=}
        [[ $before != --out ]] || KP_OUT=$word
        before=$word
    done
    [[ -n $KP_OUT ]] ||
        kp_die "no --out DIR given: the arguments are those of scripts/prepare_data.py"
    KP_OUT=$(realpath -m -- "${KP_OUT/#\~\//$HOME/}")
    there=$KP_OUT
    until [[ -d $there ]]; do there=$(dirname -- "$there"); done
    kp_mount "$there"
    kp_use_run "$KP_OUT/units"
    kp_note_progress
    nodes=$(kp_field NumNodes)
    kp_cpus "$nodes"
    kp_set_size "$nodes" 1 0 "$cpus"
    kp_log "job $(kp_job_id), restart count ${SLURM_RESTART_COUNT:-0}: prepares $KP_OUT on" \
        "$(kp_field NodeList), $KP_CPUS CPU(s) each"
}

kp_committed_step() { # in place of requeue.sh's: prints one point per encoded unit, two once
    # it is in a shard
    local units KP_VALUES=() assembled
    kp_values kp_records values "$KP_OUT/dataset.partial.json" units || true
    assembled=${KP_VALUES[0]:-0}
    units=("$KP_RUN_DIR"/[0-9]*.npz) # units already in shards are deleted
    [[ -e ${units[0]} ]] || units=()
    echo $((${#units[@]} + 2 * assembled))
}

kp_measure() { # in place of requeue.sh's: prints what is counted
    echo "work done:"
}

kp_begin_data() { # <arguments of prepare_data.py>...: begins the data set; exits on bad input
    kp_alone "$KP_ROOT/scripts/prepare_data.py" "$@" --only begin
    if [[ $KP_CODE == 2 ]]; then
        kp_log "not started: prepare_data.py ended with exit code 2"
        exit 2
    fi
    mkdir -p -- "$KP_RUN_DIR/logs" || kp_die "$KP_OUT cannot be written: give another --out"
    kp_end_unless_done
}

kp_encode() { # <arguments of prepare_data.py>...: encodes on all nodes; exits unless all
    # units are encoded
    # A finished task waits for those with the last units.
    KEMPNER_SRUN+=" --wait=0"
    kp_srun "$KP_ROOT/scripts/prepare_data.py" "$@" --only units
    kp_pass_pending
    kp_wait
    kp_end_unless_done
}

kp_make_shards() { # <arguments of prepare_data.py>...: makes shards of the encoded units; exits
    # unless all are complete
    kp_alone "$KP_ROOT/scripts/prepare_data.py" "$@"
    kp_end_unless_done
}

kp_end_unless_done() { # ends the script, requeueing if appropriate, unless all has succeeded so far
    [[ -z $KP_DECIDED ]] || kp_finish
    kp_verdict
    [[ $KP_CODE == 0 && -z $KP_STATE ]] || kp_finish
}
