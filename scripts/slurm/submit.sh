#!/usr/bin/env bash
# Submit a run with a snapshot of the code, so that later edits of the repository reach neither this
# job nor its restarts.
#
#   bash scripts/slurm/submit.sh [SBATCH OPTIONS] scripts/slurm/multinode.sh CONFIG [OVERRIDES]
#   bash scripts/slurm/submit.sh [SBATCH OPTIONS] scripts/slurm/run.sh --code=DIR [OPTIONS] \
#       -- COMMAND
#   bash scripts/slurm/submit.sh [SBATCH OPTIONS] /path/to/a/changed/copy.sh CONFIG [OVERRIDES]
#   bash scripts/slurm/submit.sh --refresh JOB    gives the job the current code from its next
#                                                 start on
#
# It works like sbatch, but the job runs RUN/code/HASH, a copy of the repository, or of the
# program's repository: docs/guide/startup.md
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "${0%"${0##*/}"}lib/all.sh"

kp_options() { # <words>...: sets KP_SBATCH (sbatch's options), KP_NAME (the launch script),
    # KP_OWN_LAUNCHER (the same, if it is not the kit's) and KP_ARGUMENTS (the words after it)
    KP_SBATCH=() KP_NAME='' KP_OWN_LAUNCHER=''
    while (($# > 0)); do
        if [[ $1 == *.sh && -f $1 ]]; then
            KP_NAME=$1
            [[ $1 -ef $KP_LIB/../${1##*/} ]] || KP_OWN_LAUNCHER=$1
            shift
            kp_set_arguments "$@"
            break
        fi
        KP_SBATCH+=("$1")
        shift
    done
    [[ -n $KP_NAME ]] ||
        kp_die "${KP_SBATCH[*]:-no word} names no launch script: give one of the kit's after" \
            "sbatch's options: bash scripts/slurm/submit.sh [SBATCH OPTIONS]" \
            "scripts/slurm/multinode.sh CONFIG"
    if grep -q '^kp_take_program ' "$KP_NAME"; then
        KP_PROGRAM=program.py
        return
    fi
    KP_PROGRAM=$(sed -nE 's/^kp_code( +([a-z]+\.py))?( *#.*)?$/\2 found/p' "$KP_NAME")
    if [[ -z $KP_PROGRAM ]]; then
        grep -q '^#SBATCH ' "$KP_NAME" ||
            kp_die "$KP_NAME is not a job: give a launch script, such as scripts/slurm/multinode.sh"
        kp_die "$KP_NAME runs the repository itself, without a copy: sbatch $KP_NAME"
    fi
    KP_PROGRAM=${KP_PROGRAM% found} KP_PROGRAM=${KP_PROGRAM:-train.py}
    ((${#KP_ARGUMENTS[@]} > 0)) || kp_die "no configuration given: name one after $KP_NAME"
    [[ ${KP_ARGUMENTS[0]} != @* ]] ||
        kp_die "${KP_ARGUMENTS[0]}: the tasks of an array copy the code at their starts: use sbatch"
}

kp_copy_now() { # makes RUN/code/HASH and prints its path; runs in a subshell, so that sbatch does
    # not pass on what the kit exports
    kp_begin >&2
    [[ $KP_ROOT == "$KP_ORIGIN" ]] || kp_die "$KP_ROOT is a copy: submit from $KP_ORIGIN"
    kp_enter >&2
    if [[ $KP_PROGRAM == program.py ]]; then
        kp_copy_program
        return
    fi
    kp_need_packages
    kp_code_find "${KEMPNER_TRAIN:-$KP_ROOT/scripts/$KP_PROGRAM}" "${KP_ARGUMENTS[@]}" || exit 2
    kp_code_copy "$KP_RUN_DIR/code" "$KP_OWN_LAUNCHER" "${KP_INPUTS[@]}" >&2 ||
        kp_die "the code could not be copied to $KP_RUN_DIR/code"
    echo "$KP_COPY"
}

kp_copy_program() { # does the same for the directory of run.sh's --code
    local run directory
    # shellcheck source-path=SCRIPTDIR source=lib/program.sh
    source "$KP_LIB/program.sh"
    directory=$(kp_program_directory)
    [[ -n $directory ]] ||
        kp_die "run.sh: nothing to copy; give --code=DIR, the program's repository, or use sbatch"
    # The job checks the words again, for its nodes.
    kp_checked kempner.config.toml "$KP_ROOT/scripts/$KP_PROGRAM" --check 1 "${KP_ARGUMENTS[@]}" ||
        exit 2
    run=${KP_VALUES[0]}
    local KP_ROOT=$directory # kp_code_copy takes KP_ROOT
    kp_code_copy "$run/code" '' >&2 || kp_die "the code could not be copied to $run/code"
    echo "$KP_COPY"
}

kp_comment() { # <copy>: adds a comment to KP_SBATCH that names the copy, after the user's comment
    local i value=${SBATCH_COMMENT:-} left=()
    for ((i = 0; i < ${#KP_SBATCH[@]}; i++)); do
        case ${KP_SBATCH[i]} in
            --comment=*) value=${KP_SBATCH[i]#*=} ;;
            --comment) value=${KP_SBATCH[++i]:-} ;;
            *) left+=("${KP_SBATCH[i]}") ;;
        esac
    done
    KP_SBATCH=("${left[@]}" "--comment=$(kp_comment_with "$value" "kempner-code=$1")")
}

kp_refresh() { # <job>: gives it a copy of the current code
    local old words script KP_ROOT
    [[ $1 =~ ^[0-9]+(_[0-9]+)?$ ]] ||
        kp_die "'$1' is not the number of a job: squeue --me lists yours"
    kp_need_slurm
    SLURM_JOB_ID=$1
    kp_show_job || kp_die "no job '$1': squeue --me lists yours"
    old=$(kp_code_of_job)
    [[ -n $old || ! $KP_JOB =~ Command=([^$'\n']*/code/[0-9a-f]{12})/scripts/slurm/ ]] ||
        old=${BASH_REMATCH[1]}
    [[ -n $old ]] ||
        kp_die "job $1 has no copy of the code: it is not a job of this kit, or has not started"
    mapfile -t words < <(cd "$old/.inputs" 2>/dev/null && find . -type f -printf '/%P\n')
    kp_begin
    # a program's, not the kit's
    [[ -e $old/scripts/slurm/submit.sh ]] || KP_ROOT=$(<"$old/.kempner-origin")
    script=$old/scripts/slurm/own.sh
    [[ -e $script ]] || script=''
    kp_code_copy "$(dirname "$old")" "$script" "${words[@]}" ||
        kp_die "the code could not be copied"
    kp_code_note "$KP_COPY" "$1" || kp_die "scontrol does not set the Comment of job $1"
    kp_log "job $1: its next start has the code $KP_COPY (before: $old)"
}

if [[ ${1:-} == --refresh ]]; then
    (($# == 2)) || kp_die "usage: submit.sh --refresh JOB"
    kp_refresh "$2"
    exit 0
fi
! kp_in_job || kp_die "already inside job $(kp_job_id): submit from a login node"
kp_options "$@"
for word in "${KP_SBATCH[@]}"; do kp_own_option "$word"; done
kp_need_slurm
copy=$(kp_copy_now) || exit
kp_log "code: $copy" >&2
kp_find_root
kp_read_site
if [[ $KP_PROGRAM == program.py ]]; then
    kp_comment "$copy"
    exec sbatch "${KP_SBATCH[@]}" "$KP_NAME" "${KP_ARGUMENTS[@]}"
fi
[[ -z $KP_OWN_LAUNCHER ]] || KP_NAME=own.sh
exec sbatch "${KP_SBATCH[@]}" "$copy/scripts/slurm/${KP_NAME##*/}" "${KP_ARGUMENTS[@]}"
