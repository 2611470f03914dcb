#!/bin/sh
# The first process in a container, of any runtime; it becomes the command. Any image has a sh.
#
#   inside.sh [--task] COMMAND...     --task: a task of a step, whose signals wait (see task.sh)
#
# Where both have a variable, runtimes let the image win. KP_KEPT has the job's values of those that
# must be the job's, as lines NAME=VALUE (container.sh); PYTHONPATH keeps the image's entries behind
# the job's. With KP_MARK, a line with it is printed first: what comes before is not the command's,
# but a TaskProlog's or an entrypoint's.
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
    # The image's env decides: coreutils before 8.31 and busybox cannot.
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
