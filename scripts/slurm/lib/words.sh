# shellcheck shell=bash
# Words of a command line: sbatch's options, and guesses for unknown words.

# The options of Slurm 22.05 to 26.05, from sbatch's manual. A site's plugins may add more.
KP_SBATCH_OPTIONS=(account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters
    comment consolidate-segments constraint container container-id contiguous core-spec
    cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution
    error exclude exclusive export export-file extra extra-node-info get-user-env gid gpu-bind
    gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs
    input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind
    mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks
    ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode output
    overcommit oversubscribe parsable partition power prefer priority profile propagate qos quiet
    reboot requeue reservation resv-ports segment share signal sockets-per-node spread-job
    spread-segments stepmgr switches test-only thread-spec threads-per-core time time-min tmp
    tres-bind tres-per-task uid umask use-min-nodes verbose wait wait-all-nodes wckey wrap)

kp_is_sbatch_option() { # <word>: succeeds if it is one of them, or a short option
    local name=${1%%=*}
    [[ $name == -[!-]* && ${name:1:1} == [AaBbCcDdeFGHIiJkLMmNnOopQqSstuvWwx] ]] ||
        [[ $name == --?* && " ${KP_SBATCH_OPTIONS[*]} " == *" ${name#--} "* ]]
}

# LC_ALL=C: in Turkish, I and i have other counterparts.
kp_lower() { (LC_ALL=C && printf '%s\n' "${1,,}"); } # <word>: prints it in lower case
kp_upper() { (LC_ALL=C && printf '%s\n' "${1^^}"); } # <word>: prints it in upper case

kp_nearest() { # <word> <name>...: prints the name that shares the most letters at both ends with
    # the word, if over half
    local name head tail best='' most=$((${#1} / 2))
    for name in "${@:2}"; do
        for ((head = 0; head < ${#1} && head < ${#name}; head++)); do
            [[ ${1:head:1} == "${name:head:1}" ]] || break
        done
        for ((tail = 0; tail < ${#1} - head && tail < ${#name} - head; tail++)); do
            [[ ${1:${#1}-tail-1:1} == "${name:${#name}-tail-1:1}" ]] || break
        done
        if ((head + tail > most || (head + tail == most && ${#best} > ${#name}))); then
            best=$name most=$((head + tail))
        fi
    done
    echo "$best"
}

kp_own_option() { # <word>: exits if it is a misspelled --dry-run
    local letters=${1//[-_]/}
    [[ $1 != -* || $1 == --dry-run || ${letters,,} != dryrun ]] ||
        kp_die "$1: no such option; did you mean --dry-run?"
}
