# shellcheck shell=bash
# The clocks of two hosts are 90 s apart: what runs in a step on node2 sees a clock that is ahead. libfaketime does it; a
# monotonic clock stays right, as it would on a real host.

clock_library() {
    compgen -G '/usr/lib/*/faketime/libfaketimeMT.so.1'
}

clock_lacks() {
    clock_library >/dev/null || echo "not installed: libfaketime; run: $SELF install"
}

clock_files() {
    cat >>"$STATE/task_prolog" <<PROLOG
[ "\$(uname -n)" != node2 ] || printf 'export %s\n' LD_PRELOAD=$(clock_library) FAKETIME=+90s \
    FAKETIME_DONT_FAKE_MONOTONIC=1
PROLOG
}

clock_host() { # <host>: libfaketime leaves files there when a process is killed
    [[ $1 != node2 ]] || mount -t tmpfs -o mode=1777 none /dev/shm
}
