#!/usr/bin/env bash
# Become a command, or a shell, in the environment of a node of ray.sh's cluster, taken from the live process.
#
#   srun ... ray_enter.sh PID JOB DIRECTORY [WORDS_INTO_THE_CONTAINER...] -- [COMMAND...]
#
# PID: that of kempner.ray.node on this host. SLURM_* are those of this step: a single task, not a rank of the job.
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
    # Read outside: inside, another container's environment is unreadable, because its user namespace differs.
    [[ ${words[0]} != enroot ]] || words+=("$pid") # enters the running container of pyxis
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

# ~/.bashrc runs first, and often replaces PATH: set the job's variables again after it.
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
