#!/usr/bin/env bash
# Follow the logs of a run: the batch log and every rank's, each line prefixed with its source.
#
#   bash scripts/slurm/logs.sh RUN                the last 20 lines of each, then new lines as they
#                                                 come, until Ctrl-C
#   bash scripts/slurm/logs.sh JOBID              the same, for the run of this job
#   bash scripts/slurm/logs.sh RUN --rank 3       only this rank
#   bash scripts/slurm/logs.sh RUN --part engine-1    only this part of rl.sh: engine-K,
#                                                     orchestrator or trainer-0
#   bash scripts/slurm/logs.sh RUN --warnings     only lines about errors, stragglers, faults,
#                                                 requeues and the like
#   bash scripts/slurm/logs.sh RUN --no-follow    only the existing lines
#
# When the run restarts, the logs of the new attempt are followed automatically.
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
WARNINGS+='|kempner: (restart|requeue|chain|end|leave):'
WARNINGS+='|(^|[^a-z])(faults?|hangs?|hung|oom)([^a-z]|$)'
readonly USAGE WARNINGS
KP_RANK='' KP_PART='' KP_WARN='' KP_FOLLOW=1 KP_LINES=20
KP_FRESH=() KP_ATTEMPT_LOGS=''
declare -A KP_FOLLOWED=() # file -> 1

kp_options() { # <arguments>...: sets KP_RANK, KP_PART, KP_WARN, KP_FOLLOW and KP_LINES; the
    # remaining argument names the run
    local run=''
    while (($# > 0)); do
        case $1 in
            --rank=?*) KP_RANK=${1#*=} ;;
            --part=?*) KP_PART=${1#*=} ;;
            --rank | --part | --rank= | --part=)
                [[ $1 != *= && -n ${2:-} ]] || kp_die "${1%=}: a value is missing; $USAGE"
                set -- "$1=$2" "${@:3}"
                continue
                ;;
            --warnings) KP_WARN=1 KP_LINES=1000 ;; # lines to search
            --no-follow) KP_FOLLOW='' ;;
            -* | '') kp_die "unknown option '$1'; $USAGE" ;;
            *)
                [[ -z $run ]] || kp_die "give one run, not both '$run' and '$1'; $USAGE"
                run=$1
                ;;
        esac
        shift
    done
    [[ -z $KP_RANK || $KP_RANK =~ ^[0-9]{1,9}$ ]] ||
        kp_die "--rank $KP_RANK: must be the number of a rank"
    [[ -z $KP_PART || $KP_PART =~ ^(orchestrator|(engine|trainer)-[0-9]+)$ ]] ||
        kp_die "--part $KP_PART: must be trainer-0, orchestrator or engine-K"
    [[ -z $KP_PART || -z $KP_RANK ]] || kp_die "give --rank or --part, not both; $USAGE"
    [[ -n $run ]] || kp_die "$USAGE"
    kp_find_run "$run"
    kp_check_rank
}

kp_check_rank() { # exits if the run is known to have no rank KP_RANK
    local ranks KP_VALUES=()
    [[ -n $KP_RANK && -n $KP_RUN_DIR && -e $KP_RUN_DIR/attempts.jsonl ]] || return 0
    kp_find_records "$KP_RUN_DIR/attempts.jsonl" "world_size=*" -- world_size || true
    ((${#KP_VALUES[@]} == 0)) || ranks=${KP_VALUES[-1]}
    ((10#$KP_RANK < ${ranks:-10#$KP_RANK + 1})) ||
        kp_die "--rank $KP_RANK: the run has $ranks rank(s), 0 to $((ranks - 1))"
    KP_RANK=$((10#$KP_RANK))
}

# --- which files ----------------------------------------------------------------------------------

kp_newest() { # <file>...: prints the newest existing file, if any
    local file newest=''
    for file; do
        [[ ! -r $file || (-n $newest && ! $file -nt $newest) ]] || newest=$file
    done
    echo "$newest"
}

kp_look_for_files() { # sets KP_FRESH to the files not yet followed, and KP_ATTEMPT_LOGS to the
    # directory of the latest attempt
    local file files=() run
    KP_FRESH=()
    if [[ -z $KP_RUN_DIR ]]; then
        run=$(kp_named_run)
        kp_use_run "$run"
    fi
    [[ -n $KP_RANK$KP_PART ]] || files+=("$(kp_batch_log)")
    if [[ -n $KP_RUN_DIR && -e $KP_RUN_DIR/logs/latest ]]; then
        KP_ATTEMPT_LOGS=$KP_RUN_DIR/logs/$(readlink -- "$KP_RUN_DIR/logs/latest")
        if [[ -n $KP_PART ]]; then
            files+=("$KP_ATTEMPT_LOGS/$KP_PART.log")
        elif [[ -n $KP_RANK ]]; then
            files+=("$KP_ATTEMPT_LOGS/rank-$KP_RANK.log" "$KP_ATTEMPT_LOGS"/*/"rank-$KP_RANK.log")
        else
            files+=("$KP_ATTEMPT_LOGS"/rank-?.log "$KP_ATTEMPT_LOGS"/rank-??.log
                "$KP_ATTEMPT_LOGS"/rank-???*.log)
            files+=("$KP_ATTEMPT_LOGS"/*/rank-*.log) # a large world has a directory for each host
            files+=("$KP_ATTEMPT_LOGS"/orchestrator.log "$KP_ATTEMPT_LOGS"/engine-*.log)
        fi
    fi
    for file in "${files[@]}"; do
        [[ -r $file && ! -p $file && -z ${KP_FOLLOWED[$file]:-} ]] || continue
        KP_FOLLOWED[$file]=1
        KP_FRESH+=("$file")
    done
}

kp_batch_log() { # prints the newest batch log, which includes srun's, or else srun's own
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

kp_name_lines() { # stdin: tail's output for several files; prefixes each line with the name of
    # its file, drops empty lines
    local only=${KP_WARN:+"/$WARNINGS/I!d"}
    # In this locale a dot matches any byte: logs may contain invalid UTF-8. Not sed -u, which also
    # reads byte by byte and takes seconds for each MB.
    LC_ALL=C stdbuf -oL sed -E '/^$/d
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

kp_once() { # stdin: prefixed lines; with --warnings, drops those that another source has printed
    # within 10 s, as ranks repeat each other
    local line words source before
    local -A said=() by=()
    [[ -n $KP_WARN ]] || exec cat
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

kp_start_tail() { # <lines>: follows KP_FRESH with tail -n <lines>; writes to KP_OUT
    local label=$KP_ATTEMPT_LOGS file
    for file in "${KP_FRESH[@]}"; do
        [[ -n $KP_ATTEMPT_LOGS && $file == "$KP_ATTEMPT_LOGS"/* ]] || label=keep
    done
    # --pid: tail ends with this shell even if the shell is killed
    tail -v -n "$1" -F --pid=$$ -- "${KP_FRESH[@]}" 2>/dev/null > >(kp_name_lines >&"$KP_OUT") &
    tails[$!]=$label
}

kp_end_tails() { # ends the tails of earlier attempts 5 rounds after a new attempt, when
    # their last lines have arrived
    local pid
    for pid in "${!tails[@]}"; do
        [[ ${tails[$pid]} != keep && ${tails[$pid]} != "$KP_ATTEMPT_LOGS" ]] || continue
        grace[$pid]=$((${grace[$pid]:-5} - 1))
        if ((grace[$pid] == 0)); then
            kill "$pid" 2>/dev/null || true
            unset "tails[$pid]" "grace[$pid]"
        fi
    done
}

kp_leave() { # EXIT trap: ends all child processes
    local tries
    trap '' INT TERM HUP
    kill "${!tails[@]}" 2>/dev/null || true
    exec {KP_OUT}>&-
    for ((tries = 0; tries < 50; tries++)); do
        kill -0 "$last" 2>/dev/null || return 0
        sleep 0.02
    done
}

kp_follow() { # shows the existing lines, then new ones until Ctrl-C; ends the script
    local lines=$KP_LINES last
    # pid -> its attempt, or "keep"; pid -> rounds left
    local -A tails=() grace=()
    exec {KP_OUT}> >(kp_once)
    last=$!
    trap kp_leave EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    trap - USR1 USR2
    while kill -0 "$last" 2>/dev/null; do # fails once the reader has left, as with | head
        kp_look_for_files
        ((${#KP_FRESH[@]} == 0)) || kp_start_tail "$lines"
        [[ $lines == +1 || ${#KP_FOLLOWED[@]} -gt 0 ]] ||
            echo "logs: no log yet, waiting for the first" >&2
        lines=+1 # show later files from their first line
        kp_end_tails
        sleep 1
    done
    exit
}

kp_begin
kp_options "$@"
ulimit -S -n hard 2>/dev/null || true # one open file per rank
[[ -z $KP_FOLLOW ]] || kp_follow
kp_look_for_files
if ((${#KP_FRESH[@]} == 0)); then
    echo "logs: no log yet" >&2
else
    tail -v -n "$KP_LINES" -- "${KP_FRESH[@]}" | kp_name_lines | kp_once
fi
