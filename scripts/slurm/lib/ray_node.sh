#!/usr/bin/env bash
# One node of ray.sh's cluster: run the setup command, find a Python with Ray,
# and execute kempner.jobs.ray.node.
#
#   srun ... ray_node.sh LOG_DIR SETUP_COMMAND OPTIONS_OF_KEMPNER.RAY.NODE...
#
# Ray, its workers, the driver and attached shells inherit the resulting environment.
set -euo pipefail

kp_logs=$1 kp_setup=$2 kp_root=${BASH_SOURCE[0]%/scripts/*}
shift 2
kp_options=("--index=$SLURM_NODEID" "$@")
set -- # conda's `source activate` would read the arguments as its own
kp_name=${SLURMD_NODENAME:-$(uname -n)}
kp_log=$kp_logs/ray-worker-$SLURM_NODEID.log
((SLURM_NODEID > 0)) || kp_log=$kp_logs/ray-head.log
exec 3>&1 >>"$kp_log" 2>&1 # ray.sh reads reports from srun's output: see kempner.jobs.ray.node

fault() { # <what is wrong; what to do>: reports to ray.sh that this node cannot start, and exits
    trap - EXIT
    echo "FAULT 75 $kp_name: $*" >&3
    echo "fault: $*"
    sleep 1 # srun loses the last lines of a failing task that ends the step
    exit 75
}

print_python() { # <Python>...: prints its path if it has Ray, not just a directory called
    # ray; else fails
    "$@" -c 'import sys
sys.path[:] = filter(None, sys.path) # not of the current directory
import importlib.util
found = importlib.util.find_spec("ray")
if not (found and found.origin):
    sys.exit(1)
print(sys.executable)' 2>/dev/null
}

version() { # <Python>: prints its Ray version, 0.0 if unknown; avoids importing Ray,
    # which takes seconds
    "$1" -c 'import sys
sys.path[:] = filter(None, sys.path)
import importlib.metadata, importlib.util, pathlib, re
text = ""
try:
    text = "version = \"%s\"" % importlib.metadata.version("ray")
except importlib.metadata.PackageNotFoundError: # of a vendor, with a name of its own
    file = pathlib.Path(importlib.util.find_spec("ray").origin).with_name("_version.py")
    text = file.read_text() if file.exists() else ""
found = re.search(r"""version = ["\x27](\d+)\.(\d+)""", text)
print("\n%s.%s" % found.groups() if found else "\n0.0")' 2>/dev/null | tail -n 1
}

need_authentication() { # reports a Ray that takes commands from all users of the network
    local found major minor
    [[ ${RAY_AUTH_MODE:-token} != disabled ]] || return 0
    found=$(version "$kp_python") major=${found%%.*} minor=${found#*.}
    [[ $found =~ ^[0-9]+\.[0-9]+$ ]] || major=0 minor=0
    ((major * 1000 + minor >= 2052)) ||
        fault "Ray $found of $kp_python takes commands from every user of the network:" \
            "tokens came with Ray 2.52. Install a newer one, or export RAY_AUTH_MODE=disabled" \
            "if nobody else can reach these nodes"
}

find_python() { # prints the Python to use: KEMPNER_PYTHON's, else one in PATH,
    # else the repository's
    local python words
    if [[ -n ${KEMPNER_PYTHON:-} ]]; then
        read -ra words <<<"$KEMPNER_PYTHON"                                    # "uv run python"
        ! command -v "$KEMPNER_PYTHON" >/dev/null || words=("$KEMPNER_PYTHON") # a path with spaces
        print_python "${words[@]}"
        return
    fi
    for python in python python3 "$kp_root/.venv/bin/python"; do
        ! print_python "$python" || return 0
    done
    return 1
}

strip_variables() { # unsets variables of srun, MPI and torchrun that would make a program in an
    # actor act as a rank
    unset "${!SLURM@}" "${!SRUN_@}" "${!SBATCH_@}" "${!PMI@}" "${!OMPI_@}"
    unset KEMPNER_ATTEMPT_ID KEMPNER_BATCH_BEGAN KEMPNER_SIGNALS_WAIT KEMPNER_PEER_KEY
    # pyxis sets them for PyTorch images
    unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
}

[[ -z ${UV_CACHE_DIR:-} ]] || mkdir -p -- "$UV_CACHE_DIR" ||
    fault "UV_CACHE_DIR_OVERRIDE=$UV_CACHE_DIR cannot be created: give another"
if [[ -n $kp_setup ]]; then
    trap 'fault "SETUP_COMMAND has ended this node with exit code $?: see $kp_log"' EXIT
    kp_code=0
    set +eu # modules and the like do not expect errexit and nounset
    eval "$kp_setup"
    kp_code=$?
    set -eu
    trap - EXIT
    ((kp_code == 0)) || fault "SETUP_COMMAND has failed with exit code $kp_code: see $kp_log"
fi
kp_python=$(find_python) ||
    fault "no Python with Ray${KEMPNER_PYTHON:+ (KEMPNER_PYTHON=$KEMPNER_PYTHON)}:" \
        "in $kp_root run .venv/bin/pip install -c constraints.txt -e '.[ray]'," \
        "or set KEMPNER_PYTHON to one that has it"
kp_python=${kp_python##*$'\n'} # a wrapper may have printed something first
need_authentication
# Make the command's `python` the one with Ray, too.
[[ $(command -v "${kp_python##*/}") == "$kp_python" ]] || PATH=${kp_python%/*}:$PATH
[[ :${PYTHONPATH:-}: == *:"$kp_root/src":* ]] ||
    export PYTHONPATH=$kp_root/src${PYTHONPATH:+:$PYTHONPATH}
strip_variables
exec "$kp_python" "$kp_root/src/kempner_module.py" kempner.jobs.ray.node "${kp_options[@]}"
