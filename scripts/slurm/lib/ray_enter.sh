#!/usr/bin/env bash
# Execute a command or a shell on a node of ray.sh's cluster, in the environment of
# its live process.
#
#   srun ... ray_enter.sh PID JOB DIRECTORY [WORDS_INTO_THE_CONTAINER...] -- [COMMAND...]
#
# PID: kempner.jobs.ray.node on this host. SLURM_* are those of this step: a single task, not a
# rank of the job.
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
    # Read it outside: another container's environment is unreadable, because its
    # user namespace differs.
    [[ ${words[0]} != enroot ]] || words+=("$pid") # enters the running container of pyxis
    KEMPNER_ENVIRON=$(base64 -w 0 "/proc/$pid/environ") exec "${words[@]}" bash "$0" "$pid" "$job" \
        "$directory" -- "$@"
fi
if [[ -n ${KEMPNER_ENVIRON:-} ]]; then
    mapfile -d '' -t kp_variables < <(base64 -d <<<"$KEMPNER_ENVIRON")
else
    mapfile -d '' -t kp_variables <"/proc/$pid/environ"
fi
mapfile -d '' -t step < <(env -0 | grep -z '^SLURM')
kp_variables+=("${step[@]}")
cd -- "$directory"

become() { # <command>...: executes it with only kp_variables; keeps values off command lines, which
    # others can read
    local entry functions=()
    while IFS= read -r entry; do unset -v "$entry" 2>/dev/null || true; done < <(compgen -e)
    for entry in "${kp_variables[@]}"; do
        if [[ $entry == BASH_FUNC_* ]]; then
            functions+=("$entry") # only env can export functions
        else
            export "${entry?}" 2>/dev/null || true # some are read-only, such as SHELLOPTS
        fi
    done
    ((${#functions[@]} == 0)) || set -- env "${functions[@]}" "$@"
    exec "$@"
}

(($# == 0)) || become "$@"

# ~/.bashrc often replaces PATH: set the job's variables again after it.
kp_variables+=("TERM=${TERM:-dumb}")
become bash --rcfile <(
    cat <<RC
[[ ! -r ~/.bashrc ]] || . ~/.bashrc
$(declare -p kp_variables)
for kp_variable in "\${kp_variables[@]}"; do export "\$kp_variable"; done 2>/dev/null
unset kp_variables kp_variable PROMPT_COMMAND
cd $(printf %q "$directory")
PS1='(ray $job \h) \w\\$ '
RC
) -i
