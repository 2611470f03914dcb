#!/usr/bin/env bash
# One node of ray.sh's cluster: runs the setup command, finds the Python that has Ray, then becomes kempner.ray.node.
#
#   srun ... ray_node.sh LOG_DIR SETUP_COMMAND OPTIONS_OF_KEMPNER.RAY.NODE...
#
# The environment that is left here is that of Ray, of its workers, of the driver and of the attach shells.
set -euo pipefail

kp_logs=$1 kp_setup=$2 kp_root=${BASH_SOURCE[0]%/scripts/*}
shift 2
kp_options=("--index=$SLURM_NODEID" "$@")
set -- # `source activate` of conda takes the arguments for its own
kp_name=${SLURMD_NODENAME:-$(uname -n)}
kp_log=$kp_logs/ray-worker-$SLURM_NODEID.log
((SLURM_NODEID > 0)) || kp_log=$kp_logs/ray-head.log
exec 3>&1 >>"$kp_log" 2>&1 # srun's output is for what ray.sh has to know: see kempner.ray.node

fault() { # <what is wrong; what to do>: tells ray.sh that this node cannot come up, and ends
    trap - EXIT
    echo "FAULT 75 $kp_name: $*" >&3
    echo "fault: $*"
    sleep 1 # srun loses the last words of a task when the first that fails ends the step
    exit 75
}

has_ray() { # <Python>: true when Ray is installed for it; a directory that is called ray, in front of it, is not Ray
    "$1" -c 'import importlib.util as u, sys; s = u.find_spec("ray"); sys.exit(not (s and s.origin))' 2>/dev/null
}

find_python() { # prints the Python to take: KEMPNER_PYTHON, else that of PATH, else that of the kit
    local python
    for python in ${KEMPNER_PYTHON:+"$KEMPNER_PYTHON"} python python3 "$kp_root/.venv/bin/python"; do
        if has_ray "$python"; then
            command -v "$python"
            return 0
        fi
        [[ $python != "${KEMPNER_PYTHON:-}" ]] || return 1
    done
    return 1
}

strip_variables() { # removes what would make a program in an actor believe that it is a rank of ours: srun's, MPI's, torchrun's
    unset "${!SLURM@}" "${!SRUN_@}" "${!SBATCH_@}" "${!PMI@}" "${!OMPI_@}" KEMPNER_ATTEMPT_ID KEMPNER_BATCH_BEGAN KEMPNER_SIGNALS_WAIT
    unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT # pyxis sets them for an image that has PyTorch
}

[[ -z ${UV_CACHE_DIR:-} ]] || mkdir -p -- "$UV_CACHE_DIR" || fault "UV_CACHE_DIR_OVERRIDE=$UV_CACHE_DIR cannot be made"
if [[ -n $kp_setup ]]; then
    trap 'fault "SETUP_COMMAND has ended this node with exit code $?: $kp_log"' EXIT
    kp_code=0
    set +eu
    eval "$kp_setup"
    kp_code=$?
    set -eu
    trap - EXIT
    ((kp_code == 0)) || fault "SETUP_COMMAND has failed with exit code $kp_code: $kp_log"
fi
kp_python=$(find_python) || fault "no Python with Ray: pip install 'ray[default]', or set KEMPNER_PYTHON to the Python that has it"
[[ $(command -v "${kp_python##*/}") == "$kp_python" ]] || PATH=${kp_python%/*}:$PATH # the command's, too, is the one with Ray
[[ :${PYTHONPATH:-}: == *:"$kp_root/src":* ]] || export PYTHONPATH=$kp_root/src${PYTHONPATH:+:$PYTHONPATH}
strip_variables
exec "$kp_python" -m kempner.ray.node "${kp_options[@]}"
