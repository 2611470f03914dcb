#!/usr/bin/env bash
# Stand in for one of Slurm's clients, and disturb one call in ten. The seed and the number of the
# call select how:
#
#   timeout   fails with Slurm's message: Socket timed out on send/recv operation
#   away      fails with Slurm's message: Unable to contact slurm controller (connect failure)
#   late      answers after 8 s
#   lost      carries out the call, but fails as if it had timed out; not for srun, whose step
#             would end
#
# slow_client.sh DIR SEED CLIENT [ARGUMENT]...    DIR: the clients are in real/; `calls` gets one
#                                                 line per call
set -euo pipefail

dir=$1 seed=$2 client=$3
shift 3

asks_nobody() { # <argument>...: succeeds if the call needs no controller
    case ${1:-} in -V | --version | --help | --usage) return 0 ;; esac
    [[ $client == scontrol && ${1:-} == show && ${2:-} == host* ]]
}
! asks_nobody "$@" || exec "$dir/real/$client" "$@"

exec {calls}<>"$dir/calls"
flock "$calls"
number=$(($(wc -l <"$dir/calls") + 1))
# Not $RANDOM: the same seed fails the same calls.
draw=$(cksum <<<"$seed $number")
draw=${draw%% *} how=''
if ((draw % 10 == 0)); then
    kinds=(timeout away late lost)
    how=${kinds[draw / 10 % 4]}
    [[ $client,$how != srun,lost ]] || how=timeout
fi
printf '%s %s %s %s %s\n' "$number" "$(uname -n)" "${how:-ok}" "$client" "$*" >>"$dir/calls"
exec {calls}>&-

timeout='Socket timed out on send/recv operation'
away='Unable to contact slurm controller (connect failure)'
fail() { # <Slurm's words>
    case $client in
        squeue) echo "slurm_load_jobs error: $1" ;;
        sinfo) echo "slurm_load_partitions: $1" ;;
        sbatch) echo "sbatch: error: Batch job submission failed: $1" ;;
        srun) echo "srun: error: Unable to create step for job ${SLURM_JOB_ID:-0}: $1" ;;
        scancel) echo "scancel: error: Kill job error on job id ${*: -1}: $1" ;;
        *) echo "slurm_load_jobs error: $1" ;;
    esac >&2
    exit 1
}
case $how in
    timeout) fail "$timeout" ;;
    away) fail "$away" ;;
    late) sleep 8 ;;
    lost)
        "$dir/real/$client" "$@" >/dev/null 2>&1 || true
        fail "$timeout"
        ;;
esac
exec "$dir/real/$client" "$@"
