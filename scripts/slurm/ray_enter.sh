#!/usr/bin/env bash
# Become a command, or a shell, in the environment of a node of ray.sh's cluster: as it is there, not as it was written down.
#
#   srun ... ray_enter.sh PID JOB DIRECTORY [WORDS_INTO_THE_CONTAINER...] -- [COMMAND...]
#
# PID: that of kempner.ray.node on this host. SLURM_* are those of this step, which is one task: it is no rank of anything.
set -euo pipefail

pid=$1 job=$2 directory=$3 words=()
shift 3
while [[ $1 != -- ]]; do
    words+=("$1")
    shift
done
shift
if [[ ! -e /proc/$pid ]]; then
    echo "kempner: error: the Ray of job $job on $(uname -n) has ended" >&2
    exit 70
fi
if ((${#words[@]} > 0)); then
    # Inside, the other container's environment cannot be read: its user namespace is another one.
    [[ ${words[0]} != enroot ]] || words+=("$pid") # that of pyxis is entered as it is
    KEMPNER_ENVIRON=$(base64 -w 0 "/proc/$pid/environ") exec "${words[@]}" bash "$0" "$pid" "$job" "$directory" -- "$@"
fi
if [[ -n ${KEMPNER_ENVIRON:-} ]]; then
    mapfile -d '' -t kp_variables < <(base64 -d <<<"$KEMPNER_ENVIRON")
else
    mapfile -d '' -t kp_variables <"/proc/$pid/environ"
fi
mapfile -d '' -t step < <(env -0 | grep -z '^SLURM')
kp_variables+=("${step[@]}")
cd -- "$directory"
(($# == 0)) || exec env -i "${kp_variables[@]}" "$@"

# ~/.bashrc comes first: what it makes of PATH must not win.
exec env -i "${kp_variables[@]}" TERM="${TERM:-dumb}" bash --rcfile <(
    cat <<RC
[[ ! -r ~/.bashrc ]] || . ~/.bashrc
$(declare -p kp_variables)
for kp_variable in "\${kp_variables[@]}"; do export "\$kp_variable"; done 2>/dev/null
unset kp_variables kp_variable PROMPT_COMMAND
cd $(printf %q "$directory")
PS1='(ray $job \h) \w\\$ '
RC
) -i
