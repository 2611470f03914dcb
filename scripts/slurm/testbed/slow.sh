# shellcheck shell=bash
# Makes one call in ten of Slurm's clients on the hosts fail or lag: slow_client.sh.
# KEMPNER_TESTBED_SEED selects which ones.

readonly CLIENTS=(scontrol squeue sbatch sinfo srun scancel)

slow_files() {
    local client
    mkdir -p "$STATE/slow/real"
    for client in "${CLIENTS[@]}"; do cp -L "$(type -P "$client")" "$STATE/slow/real"; done
    cp "${SELF%/*}/testbed/slow_client.sh" "$STATE/slow"
    cat >"$STATE/slow/client" <<CLIENT
#!/bin/bash
exec bash "$STATE/slow/slow_client.sh" "$STATE/slow" "${KEMPNER_TESTBED_SEED:-1}" "\${0##*/}" "\$@"
CLIENT
    chmod 755 "$STATE/slow/client"
    (umask 0 && : >"$STATE/slow/calls")
}

slow_host() { # <host>: mounts the wrapper over the programs themselves, so that no PATH of a
    # user bypasses it
    local client
    [[ $1 != head ]] || return 0
    for client in "${CLIENTS[@]}"; do mount --bind "$STATE/slow/client" "$(type -P "$client")"; done
}
