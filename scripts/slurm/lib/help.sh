# shellcheck shell=bash
# --help of the scripts, and their standard streams.

# A file that is opened takes the number of a stream that is closed, and gets what is meant for the
# screen.
[[ -e /proc/$$/fd/0 ]] || exec </dev/null
[[ -e /proc/$$/fd/1 ]] || exec >/dev/null
[[ -e /proc/$$/fd/2 ]] || exec 2>/dev/null

kp_header() { # prints the comment at the top of the script
    sed -n '2,${/^#\( \|$\)/!q; s/^# \{0,1\}//; p}' "$0"
}

kp_help() { # <arguments of the script>...: with -h or --help before any "--", prints its header and
    # ends it
    local word
    for word; do
        case $word in
            --) return ;;
            -h | --help) kp_header && exit ;;
        esac
    done
}
