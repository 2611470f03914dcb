# shellcheck shell=bash
# The test bed with the problems of real sites: KEMPNER_TESTBED_SITE=hostile, or some of its
# parts by name.
#
# Each part is a file of this directory. It may define these hooks, called for all parts
# in this order:
#   PART_lacks <nodes> prints why it cannot run here, or nothing
#   PART_files         before the first host boots, with NODES and GPUS: slurm.conf and files in
#                      $STATE
#   PART_host <host>   on a host, before its daemons: what it mounts, only that host sees
#   PART_head          on the head, before its controller
#   PART_up            when all hosts are up
#   PART_exports       prints the variables of users' shells: NAME=VALUE lines
#   PART_down          when all hosts are gone

readonly PARTS=(slow noise accounting home nodes twin clock memory)
SITE=()

read_site() { # sets SITE to the parts of this cluster's site
    SITE=()
    [[ ! -s $STATE/site ]] || mapfile -t SITE <"$STATE/site"
}

choose_site() { # <nodes>: sets SITE from KEMPNER_TESTBED_SITE; leaves out parts that cannot run
    # here, with a message
    local part why given
    SITE=()
    [[ -n ${KEMPNER_TESTBED_SITE:-} ]] || return 0
    IFS=, read -r -a given <<<"$KEMPNER_TESTBED_SITE"
    [[ $KEMPNER_TESTBED_SITE != hostile ]] || given=("${PARTS[@]}")
    for part in "${given[@]}"; do
        [[ " ${PARTS[*]} " == *" $part "* ]] ||
            die "KEMPNER_TESTBED_SITE=$KEMPNER_TESTBED_SITE: no part '$part': give hostile," \
                "or some of $(IFS=, && echo "${PARTS[*]}")"
        why=$(! has_function "${part}_lacks" || "${part}_lacks" "$1")
        if [[ -z $why ]]; then
            SITE+=("$part")
        else
            echo "testbed: without the part $part: $why" >&2
        fi
    done
    SITE=(users "${SITE[@]}")
}

has_function() { # <name>
    declare -F "$1" >/dev/null
}

site() { # <hook> [argument]...: calls it for each part of this cluster's site
    local part
    for part in "${SITE[@]}"; do
        ! has_function "${part}_$1" || "${part}_$1" "${@:2}"
    done
}

set_conf() { # NAME=VALUE...: changes these lines of slurm.conf
    local line
    for line; do
        sed -i "/^${line%%=*}=/d" "$SLURM_CONF"
        echo "$line" >>"$SLURM_CONF"
    done
}
