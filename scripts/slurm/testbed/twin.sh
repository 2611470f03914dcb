# shellcheck shell=bash
# Boots another cluster on the same file system, with the same host names and job numbers.
# $STATE/twin has its number, for KEMPNER_TESTBED.

twin_up() {
    local tries number
    for ((tries = 1; tries <= 5; tries++)); do # another cluster may have the number
        number=$(((ID + 60 * tries) % 250 + 1))
        if KEMPNER_TESTBED=$number KEMPNER_TESTBED_SITE='' \
            KEMPNER_TESTBED_CONF="${KEMPNER_TESTBED_CONF:-} FirstJobId=$FIRST_JOB" \
            bash "$SELF" up 2 "$GPUS" >/dev/null 2>"$STATE/log/twin"; then
            echo "$number" >"$STATE/twin"
            return
        fi
    done
    die "the other cluster does not boot: $(tail -n 1 "$STATE/log/twin")"
}

twin_down() {
    [[ ! -s $STATE/twin ]] ||
        KEMPNER_TESTBED=$(<"$STATE/twin") KEMPNER_TESTBED_SITE='' bash "$SELF" down
}
