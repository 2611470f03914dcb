# shellcheck shell=bash
# Reads a bash file of settings: site.env, a profile, KEMPNER_SECRETS. If bash cannot read it to the
# end, the script exits before anything starts: a job must not run with half of its settings.

# file: the file being read; hidden: not empty if its lines must not be shown; place, exit: this
# script's directory and EXIT trap; line, command, status: those of the last command in the file
declare -A KP_READING=()
# the command that reads the file, as in BASH_COMMAND
readonly KP_READ="source \"\${KP_READING[file]}\""

kp_can_source() { # <file> [secrets]: exits unless it is text that bash can parse
    local file=$1 line mark=$'\xef\xbb\xbf'
    [[ ! -d $file ]] || kp_die "$file is a directory: give a file of NAME=value lines"
    [[ -r $file ]] || kp_die "$file cannot be read: correct its permissions, or name another file"
    [[ -f $file ]] || return 0 # /dev/null
    ((0 == $(LC_ALL=C tr -dc '\0' <"$file" | head -c 1 | wc -c))) ||
        kp_die "$file is a binary file: give a text file of NAME=value lines"
    [[ $(head -c 3 -- "$file") != "$mark" ]] ||
        kp_die "$file, line 1: begins with a byte order mark: remove it by: sed -i" \
            "'1s/^\\xef\\xbb\\xbf//' ${file@Q}"
    line=$(grep -nm 1 $'\r$' -- "$file") &&
        kp_die "$file, line ${line%%:*}: ends with a carriage return, as" \
            "Windows writes lines: remove them by: sed -i 's/\\r\$//' ${file@Q}"
    # extglob: a line of the file may enable it, which the parser alone does not see
    line=$(BASH_ENV='' LC_ALL=C bash -O extglob -n -- "$file" 2>&1) &&
        [[ $line != *"here-document at line "* ]] && return # bash only warns if its end is missing
    # "FILE: line 5: syntax error: unexpected end of file"; it may quote a secret
    line=${line%%$'\n'*} line=${line#"$file: line "}
    [[ -z ${2:-} ]] || line="${line%%:*}: it is not shown here"
    kp_die "$file, line ${line%%:*}: bash cannot parse it:${line#*:}; look for a quote," \
        "a bracket, an if or a here-document that is not closed"
}

kp_source() { # <file> [secrets]: sources it and exports its variables; exits if one of its lines
    # ends this script
    # No local variables: if ${NAME:?} ends the script, they are gone before its EXIT trap.
    KP_READING=([file]="$1" [hidden]="${2:-}" [place]="$PWD" [exit]="$(trap -p EXIT)"
    [line]='' [command]='' [status]='')
    command_not_found_handle() { return 127; } # kp_source_failed reports it
    trap 'kp_source_left "$?"' EXIT
    trap 'kp_source_failed "$?" "$LINENO" "${BASH_SOURCE[0]}"' ERR
    # Modules and the like do not expect errexit. -T: the file inherits the DEBUG trap.
    set +eu +o pipefail
    set -aT
    trap 'kp_source_at "$LINENO" "$BASH_COMMAND" "${BASH_SOURCE[0]}"' DEBUG
    # shellcheck source=/dev/null
    source "${KP_READING[file]}"
    KP_READING[status]=$?
    trap - DEBUG ERR
    set +aT
    set -eu -o pipefail
    kp_plain_words
    # the script's own path and its arguments may be relative
    [[ $PWD == "${KP_READING[place]}" ]] || cd -- "${KP_READING[place]}"
    [[ ${KP_READING[command]} != "return "* || ${KP_READING[status]} == 0 ]] ||
        kp_source_wrong "${KP_READING[line]}" \
            "skips the rest of the file: if that is intended, write 'return' alone"
    trap - EXIT
    eval "${KP_READING[exit]}"
    unset -f command_not_found_handle
}

kp_source_at() { # <line> <command> <file>: DEBUG trap: records each command
    [[ $3 != "${KP_READING[file]}" || $2 == "$KP_READ" ]] ||
        KP_READING[line]=$1 KP_READING[command]=$2
}

kp_source_failed() { # <exit code> <line> <file>: reports the failed line; exits if its command
    # does not exist
    local why="ended with exit code $1" text
    local assignment='^[[:space:]]*(export[[:space:]]+)?[A-Za-z_][A-Za-z0-9_]*='
    [[ $3 == "${KP_READING[file]}" && $BASH_COMMAND != "$KP_READ" ]] || return 0
    text=$(sed -n "$2p" -- "${KP_READING[file]}")
    # not X=$(command), which may be empty on purpose
    if (($1 == 127)) && [[ ! $text =~ $assignment ]]; then
        why="there is no such command here: correct the line"
        [[ ! $text =~ ^[[:space:]]*[A-Za-z0-9_]+[[:space:]]+= ]] ||
            why="write NAME=VALUE, without blanks around '='"
        kp_source_wrong "$2" "$why"
    fi
    # The code copy would repeat it. Not to standard output, which others may parse.
    [[ ${KP_ROOT:-} != "${KP_ORIGIN:-}" ]] || kp_log "warning: $(kp_source_place "$2"): $why" >&2
}

kp_source_left() { # <exit code>: the EXIT trap while a file is read; silent after Ctrl-C
    (($1 <= 128)) || exit "$1"
    kp_source_wrong "${KP_READING[line]}" \
        "ends the script that reads the file: remove it; 'return' leaves the file"
}

kp_source_wrong() { # <line> <what is wrong; what to do>: ends the script like kp_die
    trap - DEBUG ERR EXIT
    set +T
    printf 'kempner: error: %s: %s\n' "$(kp_source_place "$1")" "$2" >&2
    [[ ${KP_READING[exit]} != *kp_stay_ended* ]] || kp_stay_ended 2 || true
    exit 2
}

kp_source_place() { # <line>: prints file, line number and, unless it may be a secret, the line
    local text
    text=$(sed -n "$1{s/^[[:space:]]*//; s/[[:space:]]*\$//; p}" -- "${KP_READING[file]}")
    if [[ -n ${KP_READING[hidden]} ]]; then text="(not shown)"; else text=": '$text'"; fi
    echo "${KP_READING[file]}, line $1${KP_READING[hidden]:+ }$text"
}
