# shellcheck shell=bash
# Broken hosts that Slurm considers healthy: of the last three of at least four, one lacks the
# shared directory ($STATE/project), one gets EIO from it, and one has a Python that cannot import
# torch. `testbed.sh break` breaks a running host in the same ways.

readonly FAULTS=(unmounted eio python)

nodes_lacks() { # <nodes>
    if (($1 < 4)); then
        echo "it breaks the last three of at least 4 hosts: up 4"
    elif [[ ! -c /dev/fuse ]]; then
        echo "no /dev/fuse, for the directory that answers EIO"
    fi
}

nodes_files() {
    echo "$NODES" >"$STATE/nodes"
}

nodes_host() { # <host>
    local at=$((${1//[!0-9]/} - $(<"$STATE/nodes") + 2))
    [[ $1 == head || at -lt 0 ]] || break_host "${FAULTS[at]}"
}

break_host() { # <fault>: breaks this host until it boots again
    local paths path
    case $1 in
        unmounted) mount -t tmpfs -o ro,mode=755 none "$STATE/project" ;;
        eio)
            "$(type -P python3)" "${SELF%/*}/testbed/eio.py" "$STATE/project" </dev/null \
                >"$STATE/log/eio" 2>&1 &
            wait_for "directory that fails" fails_with_eio
            ;;
        python)
            echo 'raise ImportError("libcudart.so.13: cannot open shared object file:' \
                'No such file or directory")' \
                >"$STATE/broken.py"
            mapfile -t paths <"$STATE/kit.paths"
            # the first one is hidden if it is the repository's
            for path in "${paths[2]}" "$STATE/packages"; do
                [[ ! -e $path/torch/__init__.py ]] ||
                    mount --bind "$STATE/broken.py" "$path/torch/__init__.py"
            done
            ;;
        *) die "break NODE FAULT: one of ${FAULTS[*]}, not '$1'" ;;
    esac
}

fails_with_eio() {
    [[ $(LC_ALL=C ls "$STATE/project" 2>&1) == *"Input/output error"* ]]
}
