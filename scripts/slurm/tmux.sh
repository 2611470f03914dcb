#!/usr/bin/env bash
# Open a tmux session for a run: live figures, rank 0's log, warnings of all ranks, and a shell.
#
#   bash scripts/slurm/tmux.sh RUN                opens or reattaches to it; for rl.sh also shows
#                                                 the orchestrator and engine 0
#   bash scripts/slurm/tmux.sh JOBID              the same, for the run of this job
#   bash scripts/slurm/tmux.sh RUN --detached     only creates it (no terminal needed), and prints
#                                                 how to attach
#   bash scripts/slurm/tmux.sh RUN --figures      only the live figures, in this terminal (no tmux)
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "${0%"${0##*/}"}lib/all.sh"
# shellcheck source-path=SCRIPTDIR source=lib/find_run.sh
source "$KP_LIB/find_run.sh"

readonly USAGE="usage: bash scripts/slurm/tmux.sh RUN|JOBID [--detached | --figures]"
readonly FIGURES_S=5
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
KP_ASKED_RUN='' KP_MODE='' KP_SESSION=''

kp_options() { # <arguments>...: sets KP_ASKED_RUN, the user's name for the run, and KP_MODE
    local word
    for word; do
        case $word in
            --detached | --figures) KP_MODE=${word#--} ;;
            -* | '') kp_die "unknown option '$word'; $USAGE" ;;
            *)
                [[ -z $KP_ASKED_RUN ]] ||
                    kp_die "give one run, not both '$KP_ASKED_RUN' and '$word'; $USAGE"
                KP_ASKED_RUN=$word
                ;;
        esac
    done
    [[ -n $KP_ASKED_RUN ]] || kp_die "$USAGE"
}

kp_figures() { # shows status.sh of the run every few seconds, until Ctrl-C
    local text size
    kp_begin
    while true; do
        [[ -n ${KP_RUN_DIR:-} ]] || kp_find_run "$KP_ASKED_RUN"
        size=$(stty size 2>/dev/null) || size='0 160'
        text="job $KP_ASKED_RUN has no run directory yet"
        [[ -z $KP_RUN_DIR ]] ||
            text=$(COLUMNS=${size#* } bash "$HERE/status.sh" "$KP_RUN_DIR" 2>&1) || true
        printf '\033[H\033[2J%s' "$text"
        sleep "$FIGURES_S"
    done
}

kp_identity() { # prints one line that is the same however the run was named: the full path of its
    # directory, or the job if it has none yet
    kp_begin
    kp_find_run "$KP_ASKED_RUN"
    if [[ -n $KP_RUN_DIR ]]; then realpath -- "$KP_RUN_DIR"; else echo "job-$KP_ASKED_RUN"; fi
}

kp_choose_session() { # <identity>: sets KP_SESSION to the run's session; succeeds if it exists
    local name=${1##*/} number=1 owner
    KP_SESSION=kempner-job-$KP_ASKED_RUN # created before the job had a run directory
    ! tmux has-session -t "=$KP_SESSION" 2>/dev/null || return 0
    name=kempner-${name//[^A-Za-z0-9_-]/_}
    KP_SESSION=$name
    while tmux has-session -t "=$KP_SESSION" 2>/dev/null; do
        owner=$(tmux show-options -qv -t "=$KP_SESSION:" @kempner_run)
        [[ $owner != "$1" ]] || return 0
        number=$((number + 1)) # another run has that name
        KP_SESSION=$name-$number
    done
    return 1
}

kp_pane_command() { # <command>...: sets KP_PANE_COMMAND, the command with this shell's
    # settings, as words for tmux
    # Everybody on the host can read the words, and the tmux server outlives this script. They
    # contain neither secrets nor notification settings: no pane needs them.
    local name number
    KP_PANE_COMMAND=(env "PATH=$PATH") # a running server has its own PATH
    for name in "${!KEMPNER_@}" SLURM_CONF; do
        [[ -z ${!name+set} || $name =~ ^KEMPNER_(NOTIFY|MAIL)$ ]] || kp_is_secret "$name" ||
            KP_PANE_COMMAND+=("$name=${!name}")
    done
    KP_PANE_COMMAND+=("$@")
    for ((number = 0; number < ${#KP_PANE_COMMAND[@]}; number++)); do
        KP_PANE_COMMAND[number]=$(kp_word "${KP_PANE_COMMAND[number]}")
    done
}

kp_word() { # <word>: quotes it for tmux: a bare ; at the end of a word would end tmux's command
    printf '%s' "${1/%;/\\;}"
}

kp_add() { # <title> <lines> <pane> <command>...: adds a pane above the given one
    local pane
    kp_pane_command "${@:4}"
    pane=$(tmux split-window -d -v -b -l "$2" -t "$3" -P -F '#{pane_id}' "${KP_PANE_COMMAND[@]}")
    tmux select-pane -t "$pane" -T "$1"
}

kp_make_session() { # <identity>: creates panes, from top to bottom: figures, rank 0, warnings,
    # shell; for rl.sh also the orchestrator and the first engine
    local rows columns shell parts='' part
    read -r rows columns < <(stty size 2>/dev/null || echo 45 160)
    # minus tmux's status line
    rows=$((rows < 24 ? 23 : rows - 1)) columns=$((columns < 80 ? 80 : columns))
    kp_pane_command "${SHELL:-bash}"
    shell=$(tmux new-session -d -x "$columns" -y "$rows" -s "$KP_SESSION" -P -F '#{pane_id}' \
        "${KP_PANE_COMMAND[@]}")
    tmux set-option -t "=$KP_SESSION:" @kempner_run "$(kp_word "$1")"
    tmux set-option -q -t "=$KP_SESSION:" status-left-length 40
    tmux set-option -q -w -t "$shell" pane-border-status top
    tmux set-option -q -w -t "$shell" pane-border-format ' #{pane_title} '
    tmux select-pane -t "$shell" -T shell
    kp_add figures 4 "$shell" bash "$HERE/tmux.sh" --figures "$KP_ASKED_RUN"
    [[ ! -L $1/logs/latest/orchestrator.log ]] || parts="orchestrator engine-0"
    kp_add "rank 0" $((rows * 2 / (${#parts} > 0 ? 9 : 5))) "$shell" bash "$HERE/logs.sh" --rank 0 \
        "$KP_ASKED_RUN"
    for part in $parts; do
        kp_add "$part" $((rows / 6)) "$shell" bash "$HERE/logs.sh" --part "$part" "$KP_ASKED_RUN"
    done
    kp_add "warnings of all ranks" $((rows / (${#parts} > 0 ? 6 : 4))) "$shell" \
        bash "$HERE/logs.sh" --warnings "$KP_ASKED_RUN"
}

kp_options "$@"
[[ $KP_MODE != figures ]] || kp_figures
command -v tmux >/dev/null ||
    kp_die "no tmux here: install it or load its module; without it: bash" \
        "scripts/slurm/logs.sh $KP_ASKED_RUN"
# In a subshell: the tmux server keeps the environment that it is started in.
identity=$(kp_identity)
if kp_choose_session "$identity"; then
    said="session $KP_SESSION already exists"
else
    kp_make_session "$identity"
    said="session $KP_SESSION is made"
fi
if [[ $KP_MODE == detached || ! -t 0 || ! -t 1 ]]; then
    echo "$said; attach to it: tmux attach -t $KP_SESSION"
elif [[ -n ${TMUX:-} ]]; then
    tmux switch-client -t "=$KP_SESSION"
else
    exec tmux attach-session -t "=$KP_SESSION"
fi
