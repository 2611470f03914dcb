# shellcheck shell=bash
# Sets the clocks of two hosts 90 s apart: a sitecustomize moves Python's clock ahead in tasks on
# node2. Not libfaketime: 0.9.10 makes every time.sleep of Python 3.11 fail with "Invalid argument".

clock_files() {
    mkdir "$STATE/clock"
    cat >"$STATE/clock/sitecustomize.py" <<'PYTHON'
import time

AHEAD_S = 90


def ahead(name, unit=1):
    real = getattr(time, name)
    setattr(time, name, lambda: real() + AHEAD_S * unit)


def now(name, place, default):  # where no time is given, it is that of this clock
    real = getattr(time, name)
    setattr(time, name, lambda *x: real(*x) if len(x) > place else real(*x, default()))


ahead("time")
ahead("time_ns", 10**9)
for name in ("gmtime", "localtime", "ctime"):
    now(name, 0, time.time)
now("asctime", 0, time.localtime)
now("strftime", 1, time.localtime)
PYTHON
    cat >>"$STATE/task_prolog" <<PROLOG
[ "\$(uname -n)" != node2 ] || echo "export PYTHONPATH=$STATE/clock:\$PYTHONPATH"
PROLOG
}
