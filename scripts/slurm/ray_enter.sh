#!/usr/bin/env bash
# Become a command, or a shell, in the environment of a node of ray.sh's cluster: as it is there, not as it was written down.
#
#   srun ... ray_enter.sh PID JOB [COMMAND...]      PID: that of kempner.ray.node on this host
#
# SLURM_* are those of this step, which is one task: it is no rank of anything.
set -euo pipefail

pid=$1 job=$2
shift 2
if [[ ! -r /proc/$pid/environ ]]; then
    echo "kempner: error: the Ray of job $job on $(uname -n) has ended" >&2
    exit 70
fi
mapfile -d '' -t variables <"/proc/$pid/environ"
mapfile -d '' -t step < <(env -0 | grep -z '^SLURM')
variables+=("${step[@]}")
(($# == 0)) || exec env -i "${variables[@]}" "$@"

# ~/.bashrc comes first: what it makes of PATH must not win.
exec env -i "${variables[@]}" TERM="${TERM:-dumb}" bash --rcfile <(
    cat <<RC
[[ ! -r ~/.bashrc ]] || . ~/.bashrc
mapfile -d '' -t kp_variables </proc/$pid/environ
for kp_variable in "\${kp_variables[@]}"; do export "\$kp_variable"; done 2>/dev/null
unset kp_variables kp_variable PROMPT_COMMAND
cd $(printf %q "$PWD")
PS1='(ray $job \h) \w\\$ '
RC
) -i
