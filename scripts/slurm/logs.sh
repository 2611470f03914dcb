#!/usr/bin/env bash
# Follow the logs of a run: the batch log and every rank's, each line behind the name of its source.
#
#   bash scripts/slurm/logs.sh RUN                the last 20 lines of each, and what comes; Ctrl-C
#                                                 ends it
#   bash scripts/slurm/logs.sh JOBID              the same, of the run of this job
#   bash scripts/slurm/logs.sh RUN --rank 3       this rank alone
#   bash scripts/slurm/logs.sh RUN --part engine-1    of rl.sh: this part alone; engine-K,
#                                                     orchestrator, or trainer-0
#   bash scripts/slurm/logs.sh RUN --warnings     only lines about errors, stragglers, faults,
#                                                 requeues and the like
#   bash scripts/slurm/logs.sh RUN --no-follow    what is there, and no more
#
# When the run starts again, the logs of the new attempt are followed by themselves.
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "${0%"${0##*/}"}lib/all.sh"
# shellcheck source-path=SCRIPTDIR source=lib/find_run.sh
source "$KP_LIB/find_run.sh"

USAGE="usage: bash scripts/slurm/logs.sh RUN|JOBID"
USAGE+=" [--rank R | --part NAME] [--warnings] [--no-follow]"
WARNINGS='error|warning|traceback|straggler|slow collectives|watchdog|not finite|non-finite'
WARNINGS+='|is a spike'
WARNINGS+='|killed|cancelled|failed|timed out|out of memory|corrupt|no step for'
WARNINGS+='|kempner: (requeue|end|leave):'
WARNINGS+='|(^|[^a-z])(faults?|hangs?|hung|oom)([^a-z]|$)'
readonly USAGE WARNINGS
rank='' part='' only_warnings='' follow=1 line_count=20
fresh=() attempt_logs=''
declare -A followed=() # files

kp_options() { # <arguments>...: sets rank, part, only_warnings, follow, line_count, and by what is
    # left the run
    local run=''
    while (($# > 0)); do
        case $1 in
            --rank=?*) rank=${1#*=} ;;
            --part=?*) part=${1#*=} ;;
            --rank | --part | --rank= | --part=)
                [[ $1 != *= && -n ${2:-} ]] || kp_die "${1%=}: a value is missing; $USAGE"
                set -- "$1=$2" "${@:3}"
                continue
                ;;
            --warnings) only_warnings=1 line_count=1000 ;; # lines that are looked at
            --no-follow) follow='' ;;
            -* | '') kp_die "no option '$1'; $USAGE" ;;
            *)
                [[ -z $run ]] || kp_die "give one run, not both '$run' and '$1'; $USAGE"
                run=$1
                ;;
        esac
        shift
    done
    [[ -z $rank || $rank =~ ^[0-9]+$ ]] || kp_die "--rank $rank: must be an integer >= 0"
    [[ -z $part || $part =~ ^(orchestrator|(engine|trainer)-[0-9]+)$ ]] ||
        kp_die "--part $part: must be trainer-0, orchestrator or engine-K"
    [[ -z $part || -z $rank ]] || kp_die "give --rank or --part, not both; $USAGE"
    [[ -n $run ]] || kp_die "$USAGE"
    kp_find_run "$run"
    kp_check_rank
}

kp_check_rank() { # stops when the run is known to have no rank rank
    local ranks KP_VALUES=()
    [[ -n $rank && -n $KP_RUN_DIR && -e $KP_RUN_DIR/attempts.jsonl ]] || return 0
    kp_find_records "$KP_RUN_DIR/attempts.jsonl" "world_size=*" -- world_size || true
    ((${#KP_VALUES[@]} == 0)) || ranks=${KP_VALUES[-1]}
    ((10#$rank < ${ranks:-10#$rank + 1})) ||
        kp_die "--rank $rank: the run has $ranks rank(s), 0 to $((ranks - 1))"
    rank=$((10#$rank))
}

# --- which files ----------------------------------------------------------------------------------

kp_newest() { # <file>...: the newest of those that there are, or nothing
    local file newest=''
    for file; do
        [[ ! -r $file || (-n $newest && ! $file -nt $newest) ]] || newest=$file
    done
    echo "$newest"
}

kp_look_for_files() { # sets fresh, those that are not followed yet, and attempt_logs, the
    # directory of the latest
    local file files=()
    fresh=()
    [[ -n $KP_RUN_DIR ]] || kp_use_run "$(kp_named_run)"
    [[ -n $rank$part ]] || files+=("$(kp_batch_log)")
    if [[ -n $KP_RUN_DIR && -e $KP_RUN_DIR/logs/latest ]]; then
        attempt_logs=$KP_RUN_DIR/logs/$(readlink -- "$KP_RUN_DIR/logs/latest")
        if [[ -n $part ]]; then
            files+=("$attempt_logs/$part.log")
        elif [[ -n $rank ]]; then
            files+=("$attempt_logs/rank-$rank.log" "$attempt_logs"/*/"rank-$rank.log")
        else
            files+=("$attempt_logs"/rank-?.log "$attempt_logs"/rank-??.log
                "$attempt_logs"/rank-???*.log)
            files+=("$attempt_logs"/*/rank-*.log) # a large world: in a directory for each host
            files+=("$attempt_logs"/orchestrator.log "$attempt_logs"/engine-*.log)
        fi
    fi
    for file in "${files[@]}"; do
        [[ -r $file && ! -p $file && -z ${followed[$file]:-} ]] || continue
        followed[$file]=1
        fresh+=("$file")
    done
}

kp_batch_log() { # the newest batch log; what srun says is in it too, so srun's own is taken only
    # where there is none
    local file
    if [[ -n $KP_RUN_DIR ]]; then
        file=$(kp_newest "$KP_RUN_DIR"/logs/batch-*.log)
        [[ -n $file ]] || file=$(kp_newest "$KP_RUN_DIR"/logs/srun-*.log)
    fi
    # The run directory holds a link to the batch log.
    [[ -z ${file:-} || $file -ef $KP_BATCH_LOG ]] || { echo "$file" && return; }
    echo "$KP_BATCH_LOG"
}

# --- what is shown --------------------------------------------------------------------------------

kp_name_lines() { # stdin: what tail says of several files; puts the name of the file before each
    # line, drops empty ones
    local only=${only_warnings:+"/$WARNINGS/I!d"}
    # In this locale a dot matches any byte: logs may have some that are no UTF-8.
    LC_ALL=C sed -uE '/^$/d
        /^==> .* <==$/{
            s#^==> .*/((rank|trainer|engine)-[0-9]+|orchestrator)\.log <==$#\1#; t name
            s#^==> .*/srun-[^/]* <==$#srun#; t name
            s/.*/batch/
            :name
            h; d
        }
        '"$only"'
        G; s/(.*)\n(.*)/\2 \1/'
}

kp_once() { # stdin: named lines; with --warnings, leaves out what another source has said within 10
    # s: ranks echo
    local line words source before
    local -A said=() by=()
    [[ -n $only_warnings ]] || exec cat
    while IFS= read -r line; do
        source=${line%% *} words=${line#* }
        [[ ! $words =~ ^[0-9]{4}-[0-9-]{5}' '[0-9:]{8}' '(.+) ]] || words=${BASH_REMATCH[1]}
        before=${said[$words]:--10}
        if ((SECONDS - before >= 10)) || [[ ${by[$words]} == "$source" ]]; then
            said[$words]=$SECONDS by[$words]=$source
            printf '%s\n' "$line"
        fi
    done
}

kp_start_tail() { # <lines>: follows fresh from there on; its lines go to out
    local label=$attempt_logs file
    for file in "${fresh[@]}"; do
        [[ -n $attempt_logs && $file == "$attempt_logs"/* ]] || label=keep
    done
    # --pid: it ends with this shell even when that is killed
    tail -v -n "$1" -F --pid=$$ -- "${fresh[@]}" 2>/dev/null > >(kp_name_lines >&"$out") &
    tails[$!]=$label
}

kp_end_tails() { # ends those of earlier attempts, 5 rounds after the new one: their last lines have
    # come by then
    local pid
    for pid in "${!tails[@]}"; do
        [[ ${tails[$pid]} != keep && ${tails[$pid]} != "$attempt_logs" ]] || continue
        grace[$pid]=$((${grace[$pid]:-5} - 1))
        if ((grace[$pid] == 0)); then
            kill "$pid" 2>/dev/null || true
            unset "tails[$pid]" "grace[$pid]"
        fi
    done
}

kp_leave() { # leaves no process behind
    local tries
    trap '' INT TERM HUP
    kill "${!tails[@]}" 2>/dev/null || true
    exec {out}>&-
    for ((tries = 0; tries < 50; tries++)); do
        kill -0 "$last" 2>/dev/null || return 0
        sleep 0.02
    done
}

kp_follow() { # shows what is there, then what comes, until Ctrl-C; ends the script
    local lines=$line_count last
    # pid -> its attempt, or "keep"; pid -> rounds that are left
    local -A tails=() grace=()
    exec {out}> >(kp_once)
    last=$!
    trap kp_leave EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    trap - USR1 USR2
    while kill -0 "$last" 2>/dev/null; do # nobody reads it any more: | head
        kp_look_for_files
        ((${#fresh[@]} == 0)) || kp_start_tail "$lines"
        [[ $lines == +1 || ${#followed[@]} -gt 0 ]] ||
            echo "logs: no log yet, waiting for the first" >&2
        lines=+1 # a file that comes later is new
        kp_end_tails
        sleep 1
    done
    exit
}

kp_begin
kp_options "$@"
ulimit -S -n hard 2>/dev/null || true # one open file per rank
[[ -z $follow ]] || kp_follow
kp_look_for_files
if ((${#fresh[@]} == 0)); then
    echo "logs: no log yet" >&2
else
    tail -v -n "$line_count" -- "${fresh[@]}" | kp_name_lines | kp_once
fi
