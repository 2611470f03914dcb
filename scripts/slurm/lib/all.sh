# shellcheck shell=bash
# The shared parts of the launch scripts; source this file. docs/reference/slurm.md has the
# facts about Slurm behind it.

# The user's shell may export functions that shadow commands; others, such as
# module, belong to the site.
unset -f cd echo exec export kill printf pwd read source trap wait declare type unset mapfile

# Without a trap, bash continues after Ctrl-C if the command that it waits for succeeds; see
# kp_listen. So the trap precedes the first such command.
trap 'exit 130' INT

kp_forget_functions() { # removes functions that shadow a command
    local name
    while read -r _ _ name; do
        [[ $name =~ ^(module|ml|scl|spack|conda|mamba|micromamba|_.*)$ ]] ||
            ! type -P "$name" >/dev/null ||
            unset -f "$name"
    done <<<"$(declare -Fx)"
}
kp_forget_functions

kp_plain_words() { # restores bash's default word splitting and globbing: a user's file may change
    # them, or the user may export SHELLOPTS and BASHOPTS
    IFS=$' \t\n'
    unset -v GLOBIGNORE
    set +f
    shopt -u nullglob failglob dotglob nocasematch nocaseglob
}
kp_plain_words

KP_NO_ROOM='' # where the batch log has moved; see kp_move_log
KP_LIB=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
KP_MODULE=${KP_LIB%/scripts/slurm/lib}/src/kempner_module.py # in place of "python -m"
# Prefix for "python -c", which, like "python -m", would import from the current directory first.
KP_NOT_HERE='import sys; sys.path[:] = filter(None, sys.path)'

kp_log() { # <message>: logs it; ignores errors, because a log line must never end a run
    # The run directory may be known by now.
    [[ $KP_NO_ROOM != /dev/null || -z ${KP_RUN_DIR:-} ]] || kp_move_log
    # If the reader has left, SIGPIPE must fail only this line, not end the script.
    (trap '' PIPE && printf '[%(%F %T)T] kempner: %s\n' -1 "$*") 2>/dev/null && return
    kp_move_log
    printf '[%(%F %T)T] kempner: %s\n' -1 "$*" 2>/dev/null || true
}

kp_move_log() { # continues the batch log in the run directory when it cannot be
    # written, as in a full home
    local file=/dev/null
    if [[ -p /dev/fd/1 || -S /dev/fd/1 || -t 1 ]]; then # the reader has left
        KP_NO_ROOM=unread
        exec >/dev/null
        return
    fi
    [[ $KP_NO_ROOM == */logs/* || -z ${KP_RUN_DIR:-} ]] ||
        ! { mkdir -p -- "$KP_RUN_DIR/logs" &&
            : >>"$KP_RUN_DIR/logs/batch-no-room.log"; } 2>/dev/null ||
        file=$KP_RUN_DIR/logs/batch-no-room.log
    KP_NO_ROOM=$file
    exec >>"$file" 2>&1
}

kp_die() { # <what is wrong; what to do>: exits with 2, the code for bad input
    printf 'kempner: error: %s\n' "$*" >&2 || true
    exit 2
}

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) ||
    kp_die "bash $BASH_VERSION is too old: 4.4 is needed"

# shellcheck source-path=SCRIPTDIR source=lib/inherited.sh
source "$KP_LIB/inherited.sh"
# shellcheck source-path=SCRIPTDIR source=lib/help.sh
source "$KP_LIB/help.sh"
kp_help "$@"
# shellcheck source-path=SCRIPTDIR source=lib/words.sh
source "$KP_LIB/words.sh"
# shellcheck source-path=SCRIPTDIR source=lib/variables.sh
source "$KP_LIB/variables.sh"
# shellcheck source-path=SCRIPTDIR source=lib/source.sh
source "$KP_LIB/source.sh"
# shellcheck source-path=SCRIPTDIR source=lib/site.sh
source "$KP_LIB/site.sh"
# shellcheck source-path=SCRIPTDIR source=lib/code.sh
source "$KP_LIB/code.sh"
# shellcheck source-path=SCRIPTDIR source=lib/profile.sh
source "$KP_LIB/profile.sh"
# shellcheck source-path=SCRIPTDIR source=lib/container.sh
source "$KP_LIB/container.sh"
# shellcheck source-path=SCRIPTDIR source=lib/records.sh
source "$KP_LIB/records.sh"
# shellcheck source-path=SCRIPTDIR source=lib/job.sh
source "$KP_LIB/job.sh"
# shellcheck source-path=SCRIPTDIR source=lib/resources.sh
source "$KP_LIB/resources.sh"
# shellcheck source-path=SCRIPTDIR source=lib/launch.sh
source "$KP_LIB/launch.sh"
# shellcheck source-path=SCRIPTDIR source=lib/check_nodes.sh
source "$KP_LIB/check_nodes.sh"
# shellcheck source-path=SCRIPTDIR source=lib/stage.sh
source "$KP_LIB/stage.sh"
# shellcheck source-path=SCRIPTDIR source=lib/chain.sh
source "$KP_LIB/chain.sh"
# shellcheck source-path=SCRIPTDIR source=lib/signals.sh
source "$KP_LIB/signals.sh"
# shellcheck source-path=SCRIPTDIR source=lib/notify.sh
source "$KP_LIB/notify.sh"
# shellcheck source-path=SCRIPTDIR source=lib/requeue.sh
source "$KP_LIB/requeue.sh"
# shellcheck source-path=SCRIPTDIR source=lib/restart.sh
source "$KP_LIB/restart.sh"
