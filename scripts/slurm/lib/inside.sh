#!/bin/sh
# The first process in a container of any runtime; executes the command. Any image has a sh.
#
#   inside.sh [--task] COMMAND...     --task: a task of a step, whose signals wait (see task.sh)
#
# If job and image both set a variable, runtimes prefer the image's value. KP_KEPT holds the job's
# values that must win, as lines NAME=VALUE (container.sh); PYTHONPATH keeps the image's entries
# after the job's. With KP_MARK, prints it as a line first: any output before it comes from a
# TaskProlog or an entrypoint.
set -eu

IFS='
'
set -f
for line in ${KP_KEPT:-}; do
    case $line in
        PYTHONPATH=*)
            line=${line#*=}
            case ":${PYTHONPATH:-}:" in
                ":$line:"*) ;;
                *) PYTHONPATH=$line${PYTHONPATH:+:$PYTHONPATH} ;;
            esac
            export PYTHONPATH
            ;;
        *) export "${line?}" ;;
    esac
done
unset IFS line
set +f

if [ "${1:-}" = --task ]; then
    shift
    # It depends on the image's env: coreutils before 8.31 and busybox cannot block signals.
    blocked=--block-signal=TERM,INT,USR1,USR2
    ! env "$blocked" true 2>/dev/null || set -- env "$blocked" KEMPNER_SIGNALS_WAIT=1 "$@"
fi
if [ -n "${KEMPNER_STARTUP+set}" ]; then # see src/kempner/jobs/ranks/startup.py
    now=$(date +%s.%N)
    case $now in *[!0-9.]*) now=$(date +%s) ;; esac # busybox has no %N
    export KEMPNER_STARTUP="$KEMPNER_STARTUP container=$now"
fi
[ -z "${KP_MARK:-}" ] || printf '\n%s\n' "$KP_MARK"
unset KP_MARK KP_KEPT KP_KEEP
exec "$@"
