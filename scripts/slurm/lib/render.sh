# shellcheck shell=bash
# --dry-run --script FILE: writes the whole job as one script, for sites that require one.
# Sourced by dry_run.sh.

# starts the last line of such a script, before the digest of the other lines
readonly KP_SEAL="# as it was written: "

kp_render_check() { # <file>: exits if it exists, unless it is unchanged since an earlier --script
    local file
    file=$(realpath -m -- "$1")
    [[ ! -d $file ]] || kp_die "--script=$1: is a directory: name a file"
    [[ -d ${file%/*} && -w ${file%/*}/ ]] ||
        kp_die "--script=$1 cannot be written: give another name"
    [[ -e $file || -L $1 ]] || return 0
    [[ -f $file && $(tail -n 1 -- "$file") == "$KP_SEAL$(kp_render_digest "$file")" ]] ||
        kp_die "--script=$1: exists, and was not written by --script," \
            "or was changed since: remove it, or give another name"
}

kp_render_digest() { # <file>: prints the digest of all lines but the last
    head -n -1 -- "$1" | sha256sum | cut -d' ' -f1
}

kp_render() { # <file>: writes the request, the variables, the kit's scripts and the arguments
    local line fresh file
    kp_render_check "$1"
    file=$(realpath -m -- "$1")
    fresh=$(mktemp -- "$file.XXXXXX") || kp_die "--script=$1 cannot be written: give another name"
    {
        echo '#!/usr/bin/env bash'
        echo "# $(basename "$0") with its parts, this request and these arguments:" \
            "sbatch $(basename "$1")"
        echo "# It starts the programs of $KP_ROOT"
        kp_render_request
        echo 'set -euo pipefail'
        kp_render_variables
        printf 'set --'
        printf ' %q' "${KP_ARGUMENTS[@]}"
        printf '\n\n'
        while IFS= read -r line; do
            case $line in
                KP_LIB=*) # in the code copy, use the copy's own lib
                    echo "[[ -e \${KP_LIB:=\${0%/*}/lib}/all.sh ]] || KP_LIB=${KP_LIB@Q}"
                    ;;
                source\ *) kp_render_part "$line" ;;
                '# shellcheck '*) ;;
                *) printf '%s\n' "$line" ;;
            esac
        done <"$KP_LIB/all.sh"
        while IFS= read -r line; do
            [[ $line != "source \"\$KP_LIB/"* ]] || kp_render_part "$line"
        done <"$0"
        printf '\n# ---- %s ----\n' "$(basename "$0")"
        sed -n '/^# --- the kit/q; /^kp_take/,$p' "$0"
        echo "$KP_SEAL"
    } >"$fresh" || kp_die "--script=$1 cannot be written: give another name"
    line=$KP_SEAL$(kp_render_digest "$fresh")
    sed -i "\$s/.*/$line/" "$fresh" || kp_die "--script=$1 cannot be written: give another name"
    mv -- "$fresh" "$file"
    echo "written: $1, to be submitted by 'sbatch $1' without any other option"
}

kp_render_part() { # <source "$KP_LIB/FILE">: prints the file
    local file=${1#*/}
    file=${file%\"}
    printf '\n# ---- %s ----\n' "$file"
    cat "$KP_LIB/$file"
}

kp_render_request() { # prints #SBATCH lines from the header, the variables and the command line
    local name value
    while read -r name; do
        value=${KP_ASKED[$name]}
        [[ $value != *[[:space:]]* ]] || value="\"$value\""
        printf '#SBATCH --%s\n' "${name//_/-}${value:+=$value}"
    done < <(printf '%s\n' "${!KP_ASKED[@]}" | sort)
}

kp_render_variables() { # prints the kit's variables that the user has set, except secrets
    local name
    for name in "${!KP_BEFORE[@]}"; do
        [[ $name != KEMPNER_* ]] || kp_is_secret "$name" ||
            printf 'export %s=%q\n' "$name" "${KP_BEFORE[$name]}"
    done
}
