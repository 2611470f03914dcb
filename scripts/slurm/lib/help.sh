# shellcheck shell=bash
# The scripts' --help and standard streams.

# If a standard stream is closed, the next opened file takes its number and receives its output.
[[ -e /proc/$$/fd/0 ]] || exec </dev/null
[[ -e /proc/$$/fd/1 ]] || exec >/dev/null
[[ -e /proc/$$/fd/2 ]] || exec 2>/dev/null

kp_header() { # prints the comment at the top of the script
    sed -n '2,${/^#\( \|$\)/!q; s/^# \{0,1\}//; p}' "$0"
}

kp_help() { # <arguments of the script>...: with -h or --help before any "--", prints the
    # script's header and exits
    local word
    for word; do
        case $word in
            --) return ;;
            -h | --help) kp_header && exit ;;
        esac
    done
}
