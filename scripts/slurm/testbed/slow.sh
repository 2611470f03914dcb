# shellcheck shell=bash
# Slurm's clients on the hosts fail one call in ten: slow_client.sh. KEMPNER_TESTBED_SEED draws
# which ones.

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

slow_host() { # <host>: in place of the programs themselves: no PATH that a user brings leads past
    # them
    local client
    [[ $1 != head ]] || return 0
    for client in "${CLIENTS[@]}"; do mount --bind "$STATE/slow/client" "$(type -P "$client")"; done
}
