# shellcheck shell=bash
# --dry-run --script FILE: the whole job as one script, for people who must hand one in. Sourced by dry_run.sh.

kp_render() { # <file>: the request, the variables, all parts of the kit's script, and the arguments
    local line fresh=$1.new
    [[ ! -e $1 ]] || kp_die "--script=$1: is there already: remove it, or give another name"
    {
        echo '#!/usr/bin/env bash'
        echo "# $(basename "$0") with its parts, this request and these arguments: sbatch $(basename "$1")"
        echo "# It starts the programs of $KP_ROOT"
        kp_render_request
        echo 'set -euo pipefail'
        kp_render_variables
        printf 'set --'
        printf ' %q' "${KP_ARGUMENTS[@]}"
        printf '\n\n'
        while IFS= read -r line; do
            case $line in
                KP_LIB=*) printf 'KP_LIB=%q\n' "$KP_LIB" ;;
                source\ *) kp_render_part "$line" ;;
                '# shellcheck '*) ;;
                *) printf '%s\n' "$line" ;;
            esac
        done <"$KP_LIB/all.sh"
        while IFS= read -r line; do
            [[ $line != "source \"\$KP_LIB/"* ]] || kp_render_part "$line"
        done <"$0"
        printf '\n# ---- %s ----\n' "$(basename "$0")"
        sed -n '/^kp_take/,$p' "$0"
    } >"$fresh" || kp_die "--script=$1 cannot be written: give another name"
    mv -- "$fresh" "$1"
    echo "written: $1, to be submitted by 'sbatch $1' without any other option"
}

kp_render_part() { # <source "$KP_LIB/FILE">
    local file=${1#*/}
    file=${file%\"}
    printf '\n# ---- %s ----\n' "$file"
    cat "$KP_LIB/$file"
}

kp_render_request() { # the #SBATCH lines, of the header, the variables and the command line
    local name value
    while read -r name; do
        value=${KP_ASKED[$name]}
        [[ $value != *[[:space:]]* ]] || value="\"$value\""
        printf '#SBATCH --%s\n' "${name//_/-}${value:+=$value}"
    done < <(printf '%s\n' "${!KP_ASKED[@]}" | sort)
}

kp_render_variables() { # those of the kit that the user has set, but for secrets
    local name
    for name in "${!KP_BEFORE[@]}"; do
        [[ $name != KEMPNER_* ]] || kp_is_secret "$name" || printf 'export %s=%q\n' "$name" "${KP_BEFORE[$name]}"
    done
}
